"""What a person can know before the first step: `--dry_run` and `--list`."""

from __future__ import annotations

import json
import math
import pathlib
import shlex
import tempfile

import jax
import numpy as np
from rich.console import Console

from jaxrl_llm.app.build import SCORERS, build_scorers
from jaxrl_llm.app.engines import ENGINES, owned_commands
from jaxrl_llm.app.prepare import prepare
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.stages import build_stages, mesh_of, model_spec, policy_options
from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.config.values import to_json
from jaxrl_llm.learner.catalogue import ALGORITHMS
from jaxrl_llm.learner.state import abstract_base, abstract_state
from jaxrl_llm.learner.update import build_update
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.parallel.rules import sharding_of_batch
from jaxrl_llm.tasks.sources import SOURCES


def print_list() -> None:
  """Everything a configuration can name, a line each."""
  console = Console(markup=False, highlight=False, soft_wrap=True)
  first = lambda value: (value.__doc__ or '').strip().splitlines()[0]
  lines = [('family', name, family.description) for name, family in FAMILIES.items()]
  lines += [('algorithm', name, first(options)) for name, (options, _) in ALGORITHMS.items()]
  lines += [('engine', name, description) for name, description in ENGINES.items()]
  lines += [('tasks', name, description) for name, description in SOURCES.items()]
  lines += [('scorer', name, first(make)) for name, make in SCORERS.items()]
  for kind, name, description in lines:
    console.print(f'{kind:10} {name:40} {description}')


def print_plan(config: Config, workdir: pathlib.Path) -> None:
  """Resolved configuration, derived numbers, parameters, memory by role, compiled shapes. Trains and leaves nothing."""
  console = Console(markup=False, highlight=False, soft_wrap=True)
  console.print_json(json.dumps(to_json(config)))
  build_scorers(config)
  with tempfile.TemporaryDirectory() as scratch:
    prepared = prepare(config, pathlib.Path(scratch))
  mesh = mesh_of(config)
  stages = build_stages(config, mesh, prepared.spec.vocab_size)
  model = build_model(model_spec(config, prepared.spec), policy_options(config), mesh)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  trained, _ = lora.split(shapes, model.spec, model.options)
  count = lambda tree: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
  adapters = f', of which {count(trained):,} are trained' if config.policy.lora is not None else ''
  console.print(f'run directory: {workdir}')
  console.print(f'mesh: {dict(mesh.shape)} over {mesh.devices.size} {mesh.devices.flat[0].platform} device(s)')
  console.print(
    f'policy: {prepared.spec.family}, {count(shapes):,} parameters{adapters}, vocabulary {prepared.spec.vocab_size}'
  )
  for taskset in prepared.tasksets.values():
    console.print(f'taskset {taskset.name}: {dict(taskset.counts)}')
  for stage in stages:
    optimizer = _megabytes(abstract_state(model, stage.optimizer, mesh).opt_state)
    console.print(
      f'stage {stage.name}: steps {stage.start}–{stage.end}, {stage.updates} updates, {_sequences(config, stage)} '
      f'sequences a batch, arrays {_arrays(stage)}, logits for {stage.token_chunk} of {stage.shape.chunk_len} tokens '
      f'at a time, optimizer state {optimizer:.1f} MB'
    )
  _print_servers(config, console, workdir)
  _print_memory(config, console, stages, model, mesh, _megabytes(shapes), _megabytes(trained))


def _print_servers(config: Config, console: Console, workdir: pathlib.Path) -> None:
  """The command line of each server that the trainer would start."""
  if config.rollout.engine != 'vllm' or config.rollout.vllm.addresses:
    return
  for i, command in enumerate(owned_commands(config, workdir)):
    variables = [f'{name}={value}' for name, value in command.variables(pathlib.Path('MODULES')).items()]
    line = shlex.join(['env', *variables, *command.argv(pathlib.Path('SOCKET'))])
    console.print(f'engine vllm-{i}: {line}')


def _sequences(config: Config, stage: Stage) -> str:
  plan = next(s for s in config.stages if s.name == stage.name)
  if not stage.explores:
    return str(plan.sequences)
  usual = plan.groups_per_batch * plan.selection.most(plan.group_size)
  experts = f' + {plan.sequences - usual} of experts' if plan.experts is not None else ''
  most = '' if plan.selection.kind == 'all' else f', of which at most {usual} are learned from,'
  return f'{plan.groups_per_batch} tasks × {plan.group_size} = {plan.groups_per_batch * plan.group_size}{most}{experts}'


def _arrays(stage: Stage) -> str:
  shape = stage.shape
  return (
    f'[≤{shape.micro_batches} micro-batches, {shape.ranks} ranks × {shape.chunks} chunks, {shape.chunk_len} tokens]'
  )


def _megabytes(tree) -> float:
  return sum(np.dtype(x.dtype).itemsize * math.prod(x.shape) for x in jax.tree.leaves(tree)) / 1e6


def _print_memory(
  config: Config, console: Console, stages: tuple[Stage, ...], model, mesh, params_mb: float, trained_mb: float
) -> None:
  """Compiles each stage's update and says what it needs on each device."""
  rollout = config.rollout
  length = rollout.max_prompt_length + rollout.max_response_length
  engine = ''
  if rollout.engine == 'embedded':
    cache = jax.eval_shape(lambda: model.init_cache(rollout.embedded.slots, length))
    engine = f', engine weights {params_mb:.1f}, engine cache {_megabytes(cache):.1f}'
  keeps = lambda algorithm: 'reference' in algorithm.reads and algorithm.reference.every != 1
  reference = trained_mb if any(keeps(stage.algorithm) for stage in stages) else 0.0
  critic = params_mb if any(stage.algorithm.critic_loss is not None for stage in stages) else 0.0
  console.print(
    f'memory (MB, whole): policy {params_mb:.1f}, gradients {trained_mb:.1f}, reference {reference:.1f}, '
    f'critic {critic:.1f}{engine}'
  )
  base = abstract_base(model, mesh)
  for stage in stages:
    state = abstract_state(model, stage.optimizer, mesh)
    update = build_update(
      model,
      stage.algorithm.loss,
      stage.optimizer,
      stage.optimizer_config,
      mesh,
      state,
      updates=stage.updates,
      token_chunk=stage.token_chunk,
    )
    used = jax.ShapeDtypeStruct((), np.int32)
    constants = {name: jax.ShapeDtypeStruct((), np.float32) for name in stage.algorithm.constants}
    compiled = update.lower(state, _batch_shapes(stage, mesh), used, constants, base).compile()
    memory = compiled.memory_analysis()
    console.print(
      f'update of {stage.name}, per device: arguments {memory.argument_size_in_bytes / 1e6:.1f} MB, '
      f'temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB'
    )


def _batch_shapes(stage: Stage, mesh) -> Chunks:
  shape = stage.shape
  rows = (shape.micro_batches, shape.ranks * shape.chunks)
  kinds = {'tokens': np.int32, 'positions': np.int32, 'segment_ids': np.int32, 'loss_mask': bool, 'is_expert': bool}
  per_segment = {'temperature': np.float32, 'pair': np.int32, 'label': np.float32}
  names = [field for field in Chunks.__dataclass_fields__ if field not in per_segment]
  of = lambda columns, kind: jax.ShapeDtypeStruct((*rows, columns), kind, sharding=sharding_of_batch(mesh))
  arrays = {name: of(shape.chunk_len, kinds.get(name, np.float32)) for name in names}
  return Chunks(**arrays, **{name: of(shape.segments, kind) for name, kind in per_segment.items()})
