"""Rules for changes to the configuration of a run that is resumed or branched.

A resumed run may change every setting that does not alter the meaning of stored state: weights,
optimizer state, position in the data, rollouts and their rewards. A branch may also change settings
that affect only later steps, and settings of the parts that it resets.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Set
from typing import Any, Literal, NamedTuple

from jaxrl_llm.app.composition.saved import with_sources
from jaxrl_llm.app.composition.stages import origins
from jaxrl_llm.app.schema import (
  BASE,
  Config,
  RewardModelConfig,
  StageConfig,
  trained_tasksets,
)
from jaxrl_llm.app.sources import Examples, Pairs, Stored
from jaxrl_llm.config.load import difference
from jaxrl_llm.config.values import TAG, from_json, to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.remote import DiscoveringOptions
from jaxrl_llm.learner.optimizer import MAY_CHANGE as OF_OPTIMIZERS
from jaxrl_llm.runtime.history import Change
from jaxrl_llm.tasks.processors import COMPARING, in_order

Reset = Literal['data', 'store']
"""Part that a branch must reset in order to make a change, as with --reset_data."""

MAY_CHANGE = (
  *(
    'evaluation',
    'logging',
    'checkpoint',
    'archive',
    'compilation_cache',
    'coordination',
    'registry',
  ),
  'learner.mesh',
  'phases',
  # The directory of the reward model may change, but must contain the same model, which
  # `TrainerRewardModel.check` ensures.
  *('reward_model.init_from', 'reward_model.max_rounds'),
  *('rewards.workers', 'rewards.scorers.*.options.cache_file'),
  *('rollout.explorers', 'rollout.mismatch', 'rollout.collect_deadline_s'),
  # `request_deadline_s` may not change, because the limits of sandboxed programs depend on it.
  *(
    f'rewards.scorers.*.options.{field.name}'
    for field in dataclasses.fields(DiscoveringOptions)
    if field.name != 'request_deadline_s'
  ),
  *(f'rollout.auxiliary.*.{field.name}' for field in dataclasses.fields(DiscoveringOptions)),
)
"""Keys that a resumed run may change, including all keys below them. `*` matches one name. Not
listed here, because other rules apply to them: optimizers, numbers of steps, the engine's servers,
and tasksets that are used only for evaluation.
"""
_STAGES = "it determines the stage's batches and committed state"
_WHY = {
  'name': 'it names the run',
  'seed': 'it determines all random draws',
  'policy': 'the committed weights are those of this model',
  'tasksets': 'the run counts its position in this data',
  'preferences': 'the run counts its position in this data',
  'examples': 'the run counts its position in this data',
  'rewards': 'stored rollouts were scored with it',
  'reward_model': 'stored rollouts were scored with it',
  'rollout': 'stored rollouts were sampled with it',
  'learner': 'it determines how batches are packed',
  'stages': 'a run keeps its stages and their order',
}
"""Reason why a part of the configuration may not change, keyed by the first name of its key."""


_OF_BRANCHES = (
  *('name', 'learner', 'rollout', 'policy.remat', 'policy.attention', 'policy.dtype'),
  *('policy.reduce_dtype', 'policy.sequence_shards'),
  *(f'stages.*.{name}' for name in ('algorithm', 'minibatches', 'epochs', 'keep_optimizer')),
  *(f'stages.*.{name}' for name in ('optimizer', 'critic', 'evaluate_every')),
  'stages.*.overlap_evaluation',
  *(f'stages.*.source.{name}' for name in ('temperature', 'limits', 'max_dropped_groups')),
  *(f'stages.*.source.{name}' for name in ('processors', 'selection', 'publish_every', 'past')),
)
"""Additional keys that a branch may change, regardless of the commit from which it starts."""


class Refused(NamedTuple):
  """A change of the configuration that a resumed run, or a branch, cannot make."""

  change: Change
  why: str
  newest: int | None = None
  """Newest step from which a branch could make the change. None if a branch could make the change
  from any step.
  """

  def __str__(self) -> str:
    key, before, after = self.change
    return f'{key}: {before!r:.200} in the run, {after!r:.200} now ({self.why})'


def changes(old: Mapping[str, Any], new: Config) -> tuple[Change, ...]:
  """Returns the differences between a run's saved configuration (as JSON) and a new
  configuration.
  """
  return tuple(Change(*change) for change in difference(current(old), new))


def current(saved: Mapping[str, Any]) -> Any:
  """Converts a saved configuration to the form that `to_json` writes now. Fields that it lacks,
  because an earlier version wrote it, get their defaults. A configuration that this version cannot
  parse is returned unchanged.
  """
  try:
    return to_json(from_json(with_sources(saved), Config))
  except UserError:
    # Even without conversion, the fields that both versions have can be compared.
    return saved


def refused(old: Mapping[str, Any], new: Config, step: int) -> list[Refused]:
  """Returns the changes that prevent a run from being resumed from its commit at `step`.

  Args:
    old: configuration in force at the commit, as JSON.
    new: configuration to resume with.
    step: number of batches that the run has completed; above 0.
  """
  old, differences = current(old), changes(old, new)
  try:
    rules = _Rules(old, new, step)
    return [reason for change in differences if (reason := rules.refusal(change)) is not None]
  except (KeyError, TypeError):
    # An earlier version, whose stages had other fields, saved `old`.
    return [Refused(change, _WHY['stages']) for change in differences]


def misfits(old: Mapping[str, Any], new: Config, step: int) -> list[tuple[Refused, Reset | None]]:
  """Returns the changes that a branch from a commit cannot make without a reset.

  Each change comes with the part that the branch must reset to make it, or None if the branch
  cannot make it at all.

  Args:
    old: the parent's configuration in force at the commit, as JSON.
    new: the branch's configuration.
    step: step of the commit.
  """
  old, differences = current(old), changes(old, new)
  try:
    rules = _Rules(old, new, step)
    pairs = [(change, rules.misfit(change)) for change in differences]
  except (KeyError, TypeError):
    return [(Refused(change, _WHY['stages']), None) for change in differences]
  return [(Refused(change, why), reset) for change, (why, reset) in pairs if why]


def reset_flags(problems: Iterable[tuple[Refused, Reset | None]]) -> list[str] | None:
  """Returns the flags, such as `--reset_data`, with which a branch of the run can make all refused
  changes. Returns None if no branch can make all of them.

  Args:
    problems: refused changes, each with the part that a branch must reset to make it, as returned
      by `misfits`.
  """
  needed = {reset for _, reset in problems}
  return None if None in needed else [f'--reset_{reset}' for reset in sorted(needed)]


def is_below(key: str, others: Iterable[str]) -> bool:
  """Returns whether a dotted key equals one of `others` or lies below it. `*` in `others` matches
  one name.
  """
  names = key.split('.')
  return any(
    len(names) >= len(parts) and all(map(fnmatch.fnmatchcase, names, parts))
    for parts in (other.split('.') for other in others)
  )


class _Rules:
  """Rules that decide which changes of the configuration a resumed run or a branch may make."""

  def __init__(self, old: Mapping[str, Any], new: Config, step: int):
    self._sides, self._new, self._step = (old, to_json(new)), new, step
    ends = list(itertools.accumulate(stage['steps'] for stage in old['stages']))
    self._spans = {
      stage['name']: (end - stage['steps'], end)
      for stage, end in zip(old['stages'], ends, strict=True)
    }
    self._begun = {
      name
      for stage in new.stages
      if self._spans.get(stage.name, (step, step))[0] < step
      for name in (*trained_tasksets(stage), *_static(stage))
    }
    """Names of the tasksets, preferences and examples of the stages that began before `step`."""
    self._free = (*MAY_CHANGE, *new.rollout.engine_may_change())
    self._trained = {name for stage in new.stages for name in trained_tasksets(stage)} | {
      source.source.removeprefix('taskset:') for source in new.preferences
    }

  def refusal(self, change: Change) -> Refused | None:
    """Returns the reason why a resumed run may not make a change; None if it may."""
    part, _, rest = change.key.partition('.')
    name, _, field = rest.partition('.')
    if part == 'stages' and name in self._spans and field:
      return self._of_stage(change, name, field)
    if affected := self._compared(part, name, self._trained):
      return Refused(change, affected)
    if _is_of_stage(change):
      return Refused(change, _WHY[part])
    if (
      is_below(change.key, self._free)
      or (part == 'tasksets' and name and name not in self._trained)
      or (part == 'learner' and self._of_optimizer(change, rest, [None, None]))
    ):
      return None
    return Refused(change, _WHY.get(part, 'the run was started with it'))

  def misfit(self, change: Change) -> tuple[str, Reset | None]:
    """Returns the reason why a branch cannot make a change, and the part to reset that would permit
    it.

    The reason is empty if the branch can make the change. The part is None if no reset helps.
    """
    part, _, rest = change.key.partition('.')
    name, _, field = rest.partition('.')
    if part == 'stages':
      return self._misfit_of_stage(change, name, field)
    policy = self._sides[1]['policy']
    if change.key.startswith('rollout.max_'):
      return 'it determines which tasks and rows are kept', 'data'
    if affected := self._compared(part, name, self._begun):
      return affected, 'data'
    if _is_of_stage(change):
      return _WHY[part], None
    if is_below(change.key, (*self._free, *_OF_BRANCHES)):
      return '', None
    if part in ('tasksets', 'preferences', 'examples'):
      return (_WHY[part], 'data') if not name or name in self._begun else ('', None)
    if change.key in ('seed', 'policy.init_from') and (stage := self._beginning_anew()):
      return f'stage {stage} begins with the initial weights of the run', None
    if part == 'seed' and (policy['lora'] is None or policy['init_from'] is not None):
      return _WHY[part], 'data'
    if change.key == 'policy.init_from' and policy['lora'] is None:
      return '', None  # The branch uses the weights of the commit, so only their shapes must agree.
    return _WHY.get(part, 'the run was started with it'), 'store' if part == 'rewards' else None

  def _beginning_anew(self) -> str:
    """Returns the name of a stage that has not begun at the commit and will start from the run's
    initial weights; empty if there is none.
    """
    stages = self._new.stages
    names = [stage.name for stage in stages if BASE in origins(stage.name, self._new)]
    later = (self._step, self._step)
    return next((name for name in names if self._spans.get(name, later)[0] >= self._step), '')

  def _compared(self, part: str, name: str, trained: Set[str]) -> str:
    """Returns the reason why a change may affect the tasks of a taskset that is trained on.

    A processor of that taskset may drop tasks that also occur in evaluations or in other tasksets.
    If the evaluations or the other tasksets change, the processor may drop different tasks than
    before. The result is empty if no processor compares the taskset with what has changed.

    Args:
      part: first name of the changed key, such as 'tasksets'.
      name: second name of the changed key, such as the name of a taskset.
      trained: names of the tasksets whose tasks may not change.
    """
    if part not in ('evaluation', 'tasksets'):
      return ''
    for taskset in self._sides[1]['tasksets']:
      comparing = [
        processor['name'] for processor in taskset['processors'] if processor['name'] in COMPARING
      ]
      before, after = (_processed_before(taskset['name'], side) for side in self._sides)
      altered = (
        [*before] != [*after]
        if part == 'evaluation'
        else name in before.keys() | after.keys() and before != after
      )
      if comparing and altered and taskset['name'] in trained - {name}:
        return (
          f'processor {comparing[0]} compares {taskset["name"]}, which is trained on, with '
          'evaluations and earlier tasksets'
        )
    return ''

  def _misfit_of_stage(self, change: Change, name: str, field: str) -> tuple[str, Reset | None]:
    if name not in self._spans or not field:
      begun = [name for name, (start, _) in self._spans.items() if start < self._step]
      kept = [stage['name'] for stage in self._sides[1]['stages'][: len(begun)]]
      return (
        '' if kept == begun else f'up to the commit, the run began these stages: {begun}'
      ), None
    start, end = self._spans[name]
    if field == 'steps' and start < self._step:
      done = min(end, self._step) - start
      right = change.after == done if end < self._step else change.after >= done
      return ('' if right else f'the commit comes after {done} steps of the stage'), None
    is_selected = field.startswith('source.selection') and self._has_rows(name)
    free = is_below(change.key, _OF_BRANCHES) and not is_selected
    if not start < self._step <= end or free or field == 'steps':
      return '', None
    return 'the commit has a position in these batches', 'data'

  def _has_rows(self, name: str) -> bool:
    """Returns whether the rows of a stage are selected from a store (`Stored`), so that positions
    in them depend on the selection.
    """
    source = next(stage['source'] for stage in self._sides[0]['stages'] if stage['name'] == name)
    return source[TAG] == Stored.__name__

  def _of_stage(self, change: Change, name: str, field: str) -> Refused | None:
    start, end = self._spans[name]
    if end < self._step:
      return Refused(change, f'the run completed this stage at step {end}', newest=end)
    if field == 'steps':
      done = self._step - start
      return (
        Refused(change, f'{done} steps of the stage are completed', newest=start + change.after)
        if change.after < done
        else None
      )
    stages = [next(s for s in side['stages'] if s['name'] == name) for side in self._sides]
    of_run = [side['learner']['optimizer'] for side in self._sides]
    of_policy = [stage['optimizer'] or shared for stage, shared in zip(stages, of_run)]
    if (
      field in ('evaluate_every', 'overlap_evaluation')
      or self._of_optimizer(change, field, of_run)
      or self._of_optimizer(change, field.removeprefix('critic.'), of_policy)
    ):
      return None
    return Refused(change, _STAGES)

  def _of_optimizer(self, change: Change, field: str, inherited: list[Any]) -> bool:
    """Returns whether a change concerns only optimizer settings that do not affect the meaning of
    stored optimizer state, such as the learning rate.

    Args:
      field: path of the changed field, such as 'optimizer.peak_lr', within the configuration (for
        example of a stage) that has the field `optimizer`.
      inherited: two elements, the optimizer settings that apply before and after the change if
        `optimizer` is None.
    """
    if field != 'optimizer':
      return field.removeprefix('optimizer.') in OF_OPTIMIZERS
    sides = [value or other for value, other in zip(change[1:], inherited)]
    if None in sides:
      # In one of the two configurations, no stage inherits the optimizer.
      return True
    before, after = sides
    return all(key in OF_OPTIMIZERS for key, *_ in difference(before, after))


def _is_of_stage(change: Change) -> bool:
  """Returns whether a change of `reward_model.init_from` has a stage of the run ('stage:NAME') as
  its old or new value.
  """
  return change.key == 'reward_model.init_from' and any(
    RewardModelConfig(init_from=source).stage is not None for source in change[1:]
  )


def _processed_before(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the configurations of the tasksets that are processed before the taskset `name`, keyed
  by name.
  """
  tasksets = {taskset['name']: taskset for taskset in config['tasksets']}
  order = in_order(tasksets, {suite['taskset'] for suite in config['evaluation']})
  return {other: tasksets[other] for other in itertools.takewhile(name.__ne__, order)}


def _static(stage: StageConfig) -> tuple[str, ...]:
  """Returns the configured names of the preferences or examples that a stage reads, if any."""
  source = stage.source
  if not isinstance(source, Pairs | Examples):
    return ()
  return (source.train, source.held_out or source.train)
