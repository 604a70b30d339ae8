"""Plan of a run: the numbers that follow from its configuration and data without compiling
anything.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.app.composition.automatic import (
  ATTENTION,
  open_fields,
  with_named,
  with_sized,
  with_values,
)
from jaxrl_llm.app.composition.chosen import settle
from jaxrl_llm.app.composition.engines import engine_setting
from jaxrl_llm.app.composition.loop_parts import image_dtype
from jaxrl_llm.app.composition.prepare import Prepared, prepare
from jaxrl_llm.app.composition.reward_role import TrainerRewardModel, build_reward_model
from jaxrl_llm.app.composition.scorers import build_scorers
from jaxrl_llm.app.composition.shapes import chunk_length
from jaxrl_llm.app.composition.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.composition.state import critic_model
from jaxrl_llm.app.composition.workdir import has_commits
from jaxrl_llm.app.dry_run.compiled import Compilation
from jaxrl_llm.app.dry_run.memory_plan import Fit, Plan, Search, Target, measure, memory_limit
from jaxrl_llm.app.dry_run.phases import planned
from jaxrl_llm.app.dry_run.programs import Held, held
from jaxrl_llm.app.planning import attention_here
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.sources import Rollouts
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core import disk
from jaxrl_llm.core.process.xla_flags import in_force
from jaxrl_llm.core.types import Json
from jaxrl_llm.master.phases import Phase
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.attention import chosen
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.mesh import build_mesh, leading_devices
from jaxrl_llm.parallel.topology import CHIPS, parse_topology, topology_devices
from jaxrl_llm.rollout.engine import EngineSetting
from jaxrl_llm.tasks.taskset import taskset_loader


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
  """A validated configuration with the numbers that follow from it, such as memory and shapes."""

  config: Config
  """The configuration with values for the options that it leaves open. `plan` leaves 'auto' in the
  fields that need a memory plan; `with_memory_plan` fills them in.
  """
  workdir: pathlib.Path
  chip: str | None
  """Kind of the target devices (a key of `CHIPS`) if a topology is given; None for the devices of
  this process.
  """
  mesh: Mesh
  prepared: Prepared
  stages: tuple[Stage, ...]
  model: Model
  critic: Model
  setting: EngineSetting
  reward_model: TrainerRewardModel | None = None
  """Reward model of the trainer; None if the trainer has none."""

  @property
  def held(self) -> list[Held]:
    """Memory of each role (`programs.held`)."""
    return held(
      self.stages, self.model, self.critic, self.mesh, self.reward_model, image_dtype(self.config)
    )

  @property
  def phases(self) -> dict[Phase, dict[str, int]] | None:
    """Bytes of each role on a device, in each memory phase. None if the configuration has no memory
    phases.
    """
    if self.config.phases is None:
      return None
    return planned(self.config.phases, self.held, self.engine_bytes)

  @property
  def engine_bytes(self) -> int:
    """Memory of the engine on one of the trainer's devices."""
    if not self.config.generates:
      return 0
    devices = leading_devices(self.mesh)
    return self.config.rollout.engine_spec().device_bytes(self.setting, devices)

  @property
  def commands(self) -> Mapping[str, str]:
    """Shell commands of the servers that the run starts, keyed by server name. Empty if a topology
    is given, because its devices may be absent.
    """
    return self.config.rollout.engine_spec().commands(self.setting) if self.chip is None else {}

  @property
  def parameters(self) -> tuple[int, int]:
    """Number of the policy's parameters, and number of its trained parameters."""
    shapes = jax.eval_shape(self.model.init, jax.random.key(0))
    trained, _ = lora.split(shapes, self.model.spec, self.model.options)
    return _count(shapes), _count(trained)

  @property
  def reward_model_json(self) -> dict[str, Json] | None:
    """Description of the trainer's reward model; None if it has none."""
    if self.reward_model is None:
      return None
    model, scoring = self.reward_model.model, self.reward_model.scoring
    return {
      'family': model.spec.family,
      'parameters': _count(jax.eval_shape(model.init, jax.random.key(0))),
      'max_length': scoring.max_length,
      'sequences_per_pass': scoring.sequences,
    }

  @property
  def attention(self) -> tuple[str, str]:
    """Attention implementation for chunks of the first stage, and the reason for the choice."""
    time = self.stages[0].shape.chunk_len
    choice = chosen(self.model.options, self.mesh, time=time, keys=time, same_tokens=True)
    return choice.implementation, choice.reason

  def lines(self) -> list[str]:
    """Returns the derived numbers as lines of text."""
    spec, (count, trained) = self.prepared.spec, self.parameters
    adapters = f', of which {trained:,} are trained' if self.config.policy.lora is not None else ''
    implementation, reason = self.attention
    lines = [
      f'run directory: {self.workdir}',
      f'policy: {spec.family}, {count:,} parameters{adapters}, vocabulary {spec.vocab_size}',
      f'attention in training: {implementation} ({reason})',
      f'compiler flags: {" ".join(in_force()) or "none"}',
    ]
    if (of := self.reward_model_json) is not None:
      lines.append(
        f'reward model: {of["family"]}, {of["parameters"]:,} parameters, up to {of["max_length"]} '
        f'tokens, {of["sequences_per_pass"]} sequences per pass'
      )
    for taskset in self.prepared.tasksets.values():
      lines.append(f'taskset {taskset.name}: {dict(taskset.counts)}')
    for stage in self.stages:
      lines.append(
        f'stage {stage.name}: steps {stage.start}–{stage.end}, {stage.updates} updates, '
        f'{_sequences(self.config, stage)} sequences a batch, arrays {_arrays(stage)} sized for '
        f'{_known(self.prepared.lengths.get(stage.name))}, logits for {stage.token_chunk} of '
        f'{stage.shape.chunk_len} tokens at a time'
      )
    return [*lines, *(f'engine {name}: {line}' for name, line in self.commands.items())]

  def to_json(self) -> dict[str, Json]:
    """Returns the configuration and derived numbers as JSON; memory in bytes, lengths in tokens."""
    spec, (count, trained) = self.prepared.spec, self.parameters
    implementation, reason = self.attention
    return {
      'config': to_json(self.config),
      'run_directory': str(self.workdir),
      'policy': {
        'family': spec.family,
        'parameters': count,
        'trained_parameters': trained,
        'vocabulary': spec.vocab_size,
      },
      'reward_model': self.reward_model_json,
      'attention': {'implementation': implementation, 'reason': reason},
      'compiler_flags': list(in_force()),
      'tasksets': {name: dict(taskset.counts) for name, taskset in self.prepared.tasksets.items()},
      'stages': [self._stage_json(stage) for stage in self.stages],
      'servers': dict(self.commands),
      'mesh': {
        'device_kind': self.mesh.devices.flat[0].device_kind,
        'devices': self.mesh.devices.size,
        'axes': dict(self.mesh.shape),
      },
      'memory': [
        {'role': role.role, 'bytes': role.whole, 'bytes_per_device': role.per_device}
        for role in self.held
      ],
      'phases': self.phases,
    }

  def _stage_json(self, stage: Stage) -> dict[str, Json]:
    configured = next(s for s in self.config.stages if s.name == stage.name)
    return {
      'name': stage.name,
      'first_step': stage.start,
      'end_step': stage.end,
      'updates': stage.updates,
      'sequences_per_batch': sum(self.config.sequences(configured)),
      'token_chunk': stage.token_chunk,
      **dataclasses.asdict(stage.shape),
    }


def plan(
  config: Config,
  workdir: pathlib.Path,
  tell: Callable[[str], None],
  topology: str | None = None,
  *,
  scored_as: pathlib.Path | None = None,
) -> RunPlan:
  """Validates a configuration and its data, tokenizer, lengths, stages and mesh.

  Compiles nothing and writes nothing to the run directory.

  Args:
    tell: called with a line of text for each scorer whose options were chosen.
    topology: target devices, such as 'v5e:4x4', which may be absent; None for the devices of this
      process.
    scored_as: run whose chosen scorer options apply. If None, it is the run in `workdir`, if that
      run has commits.

  Raises:
    UserError: the configuration or its data cannot be used.
  """
  devices = jax.devices() if topology is None else topology_devices(topology)
  mesh = build_mesh(config.learner.mesh, devices)
  load = taskset_loader(config.tasksets)
  if scored_as is None and has_commits(workdir):
    scored_as = workdir
  config = settle(config, scored_as, tell, load)
  platform = mesh.devices.flat[0].platform
  config = with_sized(config, platform=platform, spec=None)
  config.logging.check()
  build_scorers(config.rewards)
  with disk.scratch('jaxrl_llm-plan-') as scratch:
    prepared = prepare(config, scratch, load)
  config = with_sized(config, platform=platform, spec=prepared.spec)
  chip = None if topology is None else parse_topology(topology).chip
  made = _run_plan(config, workdir, chip, mesh, prepared)
  if config.generates:
    config.rollout.engine_spec().check_devices(made.setting, leading_devices(mesh))
  return made


def _run_plan(
  config: Config, workdir: pathlib.Path, chip: str | None, mesh: Mesh, prepared: Prepared
) -> RunPlan:
  stages = build_stages(config, mesh, prepared.spec.vocab_size, prepared.lengths)
  model = build_model(model_spec(config, prepared.spec), options_for(config, chip), mesh)
  return RunPlan(
    config=config,
    workdir=workdir,
    chip=chip,
    mesh=mesh,
    prepared=prepared,
    stages=stages,
    model=model,
    critic=critic_model(model),
    setting=engine_setting(config, workdir, prepared),
    reward_model=build_reward_model(config, mesh, model),
  )


def with_proven_attention(found: RunPlan) -> tuple[RunPlan, str]:
  """Chooses the attention implementation on GPUs of this process, as a run does when it starts.

  Returns:
    The run with this implementation, and a line of text about it. On other devices, and if the
    devices are absent, the run is returned unchanged, and the text is empty.

  Raises:
    UserError: the configured implementation cannot be used.
  """
  if found.chip is not None:
    return found, ''
  config, mesh = found.config, found.mesh
  attention, reason = attention_here(config, mesh, found.prepared.spec, chunk_length(config, mesh))
  if not reason:
    return found, ''
  config = with_values(config, {ATTENTION: attention})
  checked = _run_plan(config, found.workdir, found.chip, mesh, found.prepared)
  return checked, f'attention: {attention}, {reason}'


def with_memory_plan(
  found: RunPlan,
) -> tuple[RunPlan, Search | None, Mapping[str, Compilation]]:
  """Chooses the memory plan of a run.

  Returns:
    The run with values for all open fields; the search, or None if nothing was open; and the
    programs that were compiled for the chosen plan, keyed as in `memory_plan.measure`.

  Raises:
    UserError: no plan fits.
  """
  config, mesh, chip = found.config, found.mesh, found.chip
  if not open_fields(config):
    return found, None, {}
  rest = (found.workdir, chip, mesh, found.prepared)
  limit = memory_limit(config, mesh, chip)
  if limit is None:
    platform = mesh.devices.flat[0].platform
    config = with_sized(config, platform=platform, spec=found.prepared.spec, plans=False)
    return _run_plan(config, *rest), None, {}
  target = Target(mesh, chip, found.prepared.spec, found.prepared.lengths, found.engine_bytes)
  search, compiled = Search(config, target, limit), {}

  def measured(plan: Plan) -> Fit:
    nonlocal compiled
    fit, programs = measure(
      with_named(config, plan.values), target, limit, lambda config: options_for(config, chip)
    )
    compiled = programs if search.chosen is None else compiled
    return fit

  while (plan := search.next()) is not None:
    search.report(plan, measured(plan))
  for plan in search.others():
    search.report(plan, measured(plan))
  return _run_plan(with_named(config, search.chosen.values), *rest), search, compiled


def resolved(config: Config) -> str:
  """Returns the configuration as JSON text."""
  return json.dumps(to_json(config))


def _count(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def options_for(config: Config, chip: str | None) -> ModelOptions:
  """Returns the model options of training. If the target is a GPU that is not present, 'blockwise'
  replaces 'auto', because the kernel is chosen on the GPU itself. It also replaces 'cudnn' and
  'tokamax', which need a GPU when they are traced.
  """
  options = policy_options(config)
  absent = chip is not None and CHIPS[chip].platform == 'cuda'
  return (
    dataclasses.replace(options, attention='blockwise')
    if absent and options.attention in ('auto', 'cudnn', 'tokamax')
    else options
  )


def _sequences(config: Config, stage: Stage) -> str:
  source = next(s for s in config.stages if s.name == stage.name).source
  if not isinstance(source, Rollouts):
    return str(source.sequences)
  usual = source.groups_per_batch * source.selection.most(source.group_size)
  experts = f' + {source.expert_rows} expert rows' if source.experts is not None else ''
  most = '' if source.selection.kind == 'all' else f', of which at most {usual} are learned from,'
  samples, steps = source.groups_per_batch * source.group_size, config.rollout.max_steps
  of = f' of up to {steps} steps: at most {samples * steps}' if steps > 1 else ''
  return f'{source.groups_per_batch} tasks × {source.group_size} = {samples}{of}{most}{experts}'


def _known(lengths: Sequence[int] | None) -> str:
  if not lengths:
    return 'the longest sequence'
  return (
    f'{len(lengths):,} lengths (median {statistics.median(lengths):.0f}, at most {max(lengths)})'
  )


def _arrays(stage: Stage) -> str:
  shape = stage.shape
  return (
    f'[≤{shape.micro_batches} micro-batches, {shape.ranks} ranks × {shape.chunks} chunks, '
    f'{shape.chunk_len} tokens]' + (' of shared prefixes' if shape.shares_prefixes else '')
  )
