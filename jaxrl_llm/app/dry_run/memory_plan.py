"""Memory plans: the values of `remat`, `chunks_per_rank`, `optimizer.offload` and
`logits_budget_bytes` with which the programs of a run fit a device, according to the compiler.

Plans are tried in the order of their cost (`costs`), and the first one that fits is taken. A plan
needs more memory if it keeps more activations, has larger micro-batches, keeps the moments on the
device or computes more logits at a time. If a plan does not fit, plans that need at least as much
memory in each of these respects are skipped, and also plans with smaller logits if these would save
too little.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.sharding import Mesh

from jaxrl_llm.app.composition.automatic import PLANNED, logits_budgets, open_fields, with_named
from jaxrl_llm.app.composition.loop_parts import image_dtype
from jaxrl_llm.app.composition.reward_role import build_reward_model
from jaxrl_llm.app.composition.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.composition.state import critic_model
from jaxrl_llm.app.dry_run.compiled import Compilation, compile_program
from jaxrl_llm.app.dry_run.costs import Cost, update_cost
from jaxrl_llm.app.dry_run.phases import planned
from jaxrl_llm.app.dry_run.programs import held, stage_programs
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json
from jaxrl_llm.master.phases import Phase
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.parallel.topology import CHIPS, chip_of

_REMAT = ('offload', 'full', 'dots', 'none')
"""Values of `remat`, by increasing device memory."""
_CHUNKS = (1, 2, 4, 8, 16)
_LOGITS_ARRAYS = 4
"""Upper bound on the number of arrays with the size of the logits that a program holds at a time.
Smaller logits save at most this many times the difference of their sizes.
"""
_ARGUMENTS = {
  'update': ('policy', 'base', 'gradients', 'optimizer'),
  'logprobs': ('policy', 'base', 'gradients'),
  'critic update': ('critic', 'critic optimizer', 'gradients'),
  'values': ('critic', 'gradients'),
}
"""Roles whose memory is not added to the memory of a program, keyed by program. These roles are
arguments or temporaries of the program, or do not exist while it runs. Every other role takes
additional memory.
"""


class Plan(NamedTuple):
  """A memory plan: values for the fields that a configuration leaves open."""

  values: Mapping[str, Json]
  """Values, keyed by the names in `PLANNED`. Fields that are not open are missing."""
  cost: Cost
  """Cost of an update."""

  @property
  def levels(self) -> tuple[int, ...]:
    """Memory levels of `remat`, `chunks_per_rank`, `offload` and `logits_budget_bytes`, in this
    order. A value with a higher level needs more memory.
    """
    remat, offload = self.values.get('remat', 'none'), self.values.get('offload', False)
    chunks, logits = (
      int(self.values.get(n, 1)) for n in ('chunks_per_rank', 'logits_budget_bytes')
    )
    return _REMAT.index(remat), chunks, not offload, logits

  def __str__(self) -> str:
    texts = {
      'remat': f'remat {self.values.get("remat")}',
      'chunks_per_rank': f'{self.values.get("chunks_per_rank")} chunks per rank',
      'offload': f'moments {"in host memory" if self.values.get("offload") else "on the devices"}',
      'logits_budget_bytes': (
        f'at most {self.values.get("logits_budget_bytes", 0) / 1e6:,.1f} MB of logits'
      ),
    }
    return ', '.join(texts[name] for name in self.values)


class Fit(NamedTuple):
  """Memory of the programs of a plan."""

  needed: int
  """Bytes that the largest program needs on a device, including arrays of other roles that exist
  while it runs; 0 if the compiler gave no number.
  """
  excess: str = ''
  """Program that does not fit, and the reason; empty if all fit."""

  def line(self, limit: int) -> str:
    """Describes the memory in a line of text."""
    size = f'{self.needed / 1e6:,.1f} MB a device of {limit / 1e6:,.1f}' if self.needed else ''
    return ': '.join(
      part for part in (self.excess and f'does not fit, {self.excess}', size) if part
    )


class Target(NamedTuple):
  """Devices, model and data for which memory plans are made."""

  mesh: Mesh
  chip: str | None
  """Kind of the target devices, a key of `CHIPS`; None for the devices of the mesh."""
  spec: ModelSpec
  lengths: Mapping[str, Sequence[int]]
  """Sequence lengths in tokens, keyed by stage name, as in `build_stages`."""
  engine_bytes: int = 0
  """Memory of the engine on one of the trainer's devices."""


class Built(NamedTuple):
  """Stages and model of a run, built from a configuration without open fields."""

  stages: tuple[Stage, ...]
  model: Model


def memory_limit(config: Config, mesh: Mesh, chip: str | None) -> int | None:
  """Returns the memory of a device in bytes that plans may use; None if there is no limit, as on
  CPUs.
  """
  device = mesh.devices.flat[0]
  limit = config.learner.memory_bytes
  if chip is not None:
    memory = CHIPS[chip].memory_bytes
  elif device.process_index != jax.process_index():
    memory = None
  else:
    known = chip_of(device.device_kind)
    stats = device.memory_stats() or {}
    memory = stats.get('bytes_limit') or (known and known.memory_bytes)
  return min((size for size in (limit, memory) if size is not None), default=None)


class Search:
  """Search for the fastest plan that fits. The caller measures the plans, so that the processes of
  a job can agree on each result before the next plan is tried.
  """

  def __init__(self, config: Config, target: Target, limit: int):
    """
    Args:
      limit: memory of a device in bytes.
    """
    self.target, self.limit = target, limit
    self.plans = _plans(config, target, limit)
    """All plans, from the fastest to the slowest."""
    self.tried: list[tuple[Plan, Fit]] = []
    self.chosen: Plan | None = None

  def next(self) -> Plan | None:
    """Returns the next plan to measure; None if a plan that fits has been found.

    Raises:
      UserError: no plan fits.
    """
    if self.chosen is not None:
      return None
    for plan in self.plans:
      if not any(self._is_too_large(plan, failed, fit.needed) for failed, fit in self.tried):
        return plan
    plan, fit = min(self.tried, key=lambda tried: (tried[1].needed or 2**63, tried[0].levels))
    raise UserError(
      f'no memory plan fits a device: more memory than it has with the smallest one ({plan}): '
      f'{fit.line(self.limit)}; use more devices, a smaller model, shorter '
      'sequences or fewer learner.logits_budget_bytes'
    )

  def _is_too_large(self, plan: Plan, failed: Plan, needed: int) -> bool:
    """Returns whether a plan cannot fit, since another plan failed.

    Args:
      needed: bytes that the failed plan needs on a device; 0 if unknown.
    """
    *levels, logits = plan.levels
    *failed_levels, failed_logits = failed.levels
    saved = _LOGITS_ARRAYS * max(0, failed_logits - logits)
    return _is_within(failed_levels, levels) and (saved == 0 or needed - saved > self.limit)

  def others(self) -> list[Plan]:
    """Returns the plans that were not measured and differ from the chosen one only in `remat`."""
    tried = [plan for plan, _ in self.tried]
    return [
      plan for plan in self.plans if plan not in tried and plan.levels[1:] == self.chosen.levels[1:]
    ]

  def report(self, plan: Plan, fit: Fit) -> None:
    """Records the measured memory of a plan. The first plan that fits is chosen."""
    self.tried.append((plan, fit))
    if not fit.excess and self.chosen is None:
      self.chosen = plan

  def to_json(self) -> list[dict[str, Json]]:
    """Returns all plans, from the fastest to the slowest, with the bytes on a device (None if not
    compiled) and the seconds of an update according to the cost model.
    """
    needed = {id(plan): fit.needed or None for plan, fit in self.tried}
    return [
      {
        **plan.values,
        'seconds': plan.cost.seconds,
        'bytes': needed.get(id(plan)),
        'chosen': plan is self.chosen,
      }
      for plan in self.plans
    ]

  def lines(self) -> list[str]:
    """Describes the compiled plans, from the fastest to the slowest, and states the number of plans
    that were not compiled.
    """
    sizes = {id(plan): fit.line(self.limit) for plan, fit in self.tried}
    lines = [
      f'memory plan {plan}: {"chosen, " if plan is self.chosen else ""}'
      f'{plan.cost.seconds:,.3g} s an update, {sizes[id(plan)]}'
      for plan in self.plans
      if id(plan) in sizes
    ]
    if rest := len(self.plans) - len(self.tried):
      lines.append(
        f'{rest} other memory plans, not compiled: slower, or larger than one that does not fit'
      )
    return lines


def build(config: Config, target: Target, options: Callable[[Config], ModelOptions]) -> Built:
  """Builds stages and model of a configuration.

  Args:
    options: function that returns the compute options of the model.
  """
  stages = build_stages(config, target.mesh, target.spec.vocab_size, target.lengths)
  return Built(stages, build_model(model_spec(config, target.spec), options(config), target.mesh))


def measure(
  config: Config,
  target: Target,
  limit: int,
  options: Callable[[Config], ModelOptions] = policy_options,
) -> tuple[Fit, dict[str, Compilation]]:
  """Compiles the programs of all stages, until one does not fit.

  Args:
    config: a configuration without open fields.
    limit: memory of a device in bytes.

  Returns:
    (memory of the programs; statistics of the compiled programs, keyed by '<program> of <stage>').
  """
  stages, model = build(config, target, options)
  critic = critic_model(model)
  reward_model = build_reward_model(config, target.mesh, model)
  roles = held(stages, model, critic, target.mesh, reward_model, image_dtype(config))
  sizes = {role.role: role.per_device for role in roles} | {'engine': target.engine_bytes}
  if config.phases is not None:
    sizes = planned(config.phases, roles, target.engine_bytes)[Phase.TRAIN]
  needed, compilations = 0, {}
  for stage in stages:
    for program in stage_programs(stage, model, critic, target.mesh):
      name = f'{program.name} of {stage.name}'
      compiled = compile_program(program, target.mesh, target.chip)
      compilations[name] = compiled
      beside = sum(size for role, size in sizes.items() if role not in _ARGUMENTS[program.name])
      if compiled.refusal:
        size = compiled.needed or compiled.refused_bytes
        return Fit(size, f'{name}: {compiled.refusal}'), compilations
      needed = max(needed, compiled.needed + beside)
      if needed > limit:
        return Fit(needed, f'{name}: by {(needed - limit) / 1e6:,.1f} MB'), compilations
  return Fit(needed), compilations


def _plans(config: Config, target: Target, limit: int) -> list[Plan]:
  """Returns the plans for the open fields, sorted by their cost. Of plans with equal costs, the
  plans that need more memory come first.

  Of plans that differ only in `chunks_per_rank` and `logits_budget_bytes`, and have batches of the
  same shapes and logits of as many tokens at a time, only one is returned, with the smallest
  `chunks_per_rank` and the largest `logits_budget_bytes`. A plan is also left out if another plan
  is faster and needs no more memory, for example if its micro-batches are larger than a batch.

  Args:
    limit: memory of a device in bytes.
  """
  is_open = {key.rpartition('.')[2] for key in open_fields(config)}
  on_cpu = target.chip is None and target.mesh.devices.flat[0].platform == 'cpu'
  # On a CPU, the host's memory is the device's memory, so offloading would save nothing.
  ranges: dict[str, tuple[Any, ...]] = {
    'remat': tuple(kind for kind in _REMAT if not (on_cpu and kind == 'offload')),
    'chunks_per_rank': _CHUNKS,
    'offload': (False,) if on_cpu else (False, True),
    'logits_budget_bytes': logits_budgets(limit),
  }
  names = [name for name in PLANNED if name in is_open]
  found: dict[Any, Plan] = {}
  refusal: UserError | None = None
  for chosen in itertools.product(*(ranges[name] for name in names)):
    values = dict(zip(names, chosen, strict=True))
    try:
      with _quiet():
        stages, model = build(with_named(config, values), target, policy_options)
    except UserError as error:  # For example, the chunks cannot hold a pair.
      refusal = error
      continue
    trained = [stage for stage in stages if stage.trains]
    plan = Plan(values, update_cost(trained or stages, model, target.mesh, target.chip))
    rest = tuple(values.get(name) for name in ('remat', 'offload'))
    shapes = tuple((stage.shape, stage.token_chunk) for stage in stages)
    found.setdefault((rest, shapes), plan)
  if not found and refusal is not None:
    raise refusal
  plans = [
    plan for plan in found.values() if not any(_is_better(other, plan) for other in found.values())
  ]
  return sorted(plans, key=lambda plan: (plan.cost.seconds, [-n for n in plan.levels]))


def _is_better(plan: Plan, than: Plan) -> bool:
  """Returns whether a plan is faster than another one and needs no more memory."""
  return plan.cost.seconds < than.cost.seconds and _is_within(plan.levels, than.levels)


def _is_within(levels: Sequence[int], others: Sequence[int]) -> bool:
  return all(level <= other for level, other in zip(levels, others, strict=True))


@contextlib.contextmanager
def _quiet():
  """Suppresses warnings about the configuration, which would be repeated for each plan."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    yield
  finally:
    logging.set_verbosity(before)
