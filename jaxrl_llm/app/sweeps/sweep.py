"""A sweep as a value: a base configuration, the axes along which trials differ, and an objective.

A sweep file defines `get_sweep() -> Sweep`. A point assigns a value to each axis, and has one trial
for each seed. Trials are identified by their overrides, not by their order, so that a sweep file
may be reordered or extended after its sweep has started.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import (
  SHIPPED,
  apply_overrides,
  call_file,
  load_file,
  override_text,
)
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json

SEED = 'seed'
"""Key of the configuration that `Sweep.seeds` sets."""
MAX_TRIALS = 10_000
"""Maximum number of trials of a sweep."""
Direction = Literal['maximize', 'minimize']
Search = Literal['grid', 'random', 'tpe']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
  """An interval, including its ends, from which values are drawn uniformly.

  If both ends are integers, the values are integers.
  """

  low: float
  high: float
  log: bool = False
  """Whether the logarithm of the values is drawn uniformly, rather than the values themselves."""
  step: float | None = None
  """Spacing of the values: only `low` plus multiples of `step` are drawn. If None, any value of the
  interval can be drawn. It cannot be combined with `log`.
  """

  def __post_init__(self):
    ends = (self.low, self.high)
    if not all(type(end) in (int, float) and math.isfinite(end) for end in ends):
      raise UserError(f'Uniform: low={self.low!r}, high={self.high!r}, wanted finite numbers')
    if self.low > self.high or (self.log and self.low <= 0):
      wanted = 'low above 0, at most high' if self.log else 'low at most high'
      raise UserError(f'Uniform: low={self.low!r}, high={self.high!r}, wanted {wanted}')
    if self.step is not None and (self.log or self.step <= 0):
      raise UserError(
        f'Uniform: step={self.step!r}, log={self.log}; wanted a step above 0 and log=False'
      )
    if self.is_integer() and self.step is not None and type(self.step) is not int:
      raise UserError(f'Uniform: step={self.step!r} between integers, wanted an integer')

  def is_integer(self) -> bool:
    return type(self.low) is int and type(self.high) is int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedianRule:
  """Stops a trial if its best value of the objective so far is worse than the median, over the
  finished trials, of the values at the same step.

  This is Vizier's median stopping rule (Golovin et al., 2017), as computed by Optuna's
  `MedianPruner`.
  """

  after_trials: int = 2
  """Number of trials that must have finished before any trial is stopped."""
  after_step: int = 0
  """Step before which no trial is stopped."""

  def __post_init__(self):
    _check_count('MedianRule', 'after_trials', self.after_trials, 1)
    _check_count('MedianRule', 'after_step', self.after_step, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuccessiveHalving:
  """Stops trials at certain steps, the rungs. Only the best 1/factor of the trials continue.

  This is asynchronous successive halving (Li et al., arXiv:1810.05934), as computed by Optuna's
  `SuccessiveHalvingPruner`. A trial that reaches a rung is compared with the trials that reached
  this rung earlier. If it is among the best, its run continues, and no step is repeated.
  """

  first_step: int
  """Step of the first rung. With k counted from 0, rung k is at step first_step * factor**k."""
  factor: int = 3
  """Reduction at each rung: only the best 1/factor of the trials continue."""

  def __post_init__(self):
    _check_count('SuccessiveHalving', 'first_step', self.first_step, 1)
    _check_count('SuccessiveHalving', 'factor', self.factor, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseRun:
  """A run from whose final weights the trials start.

  It runs once for each seed of the sweep. The trials with that seed start from its final weights.
  """

  base: str
  """Configuration of the run: a file or a shipped name, with an optional :VARIANT."""
  overrides: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  """Overrides of the configuration `base`, keyed by dotted key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
  """Definition of a sweep: trials that vary one configuration and are compared by an objective."""

  base: str
  """Configuration that the trials share: a file or a shipped name, with an optional :VARIANT."""
  objective: str
  """Key of the metric by which trials are compared, as in metrics.jsonl, such as
  'val-core/eval/acc/greedy'.
  """
  direction: Direction = 'maximize'
  at: Literal['last', 'best'] = 'last'
  """Whether the last or the best measurement of the objective counts as a trial's value."""
  axes: Mapping[str, Sequence[Json] | Uniform] = dataclasses.field(default_factory=dict)
  """For each field that varies, its values or an interval (`Uniform`), keyed by dotted key of the
  configuration.
  """
  trials: Iterable[Mapping[str, Json]] | None = None
  """Explicit list or generator of points, in place of `axes`. Each point consists of overrides,
  keyed by dotted key.
  """
  search: Search = 'grid'
  """'grid' runs every combination of the values in `axes`. 'random' draws `count` random points.
  'tpe' also draws `count` points, each depending on the results of the earlier ones (Optuna's
  tree-structured Parzen estimator).
  """
  count: int | None = None
  """Number of points that 'random' and 'tpe' draw."""
  search_seed: int = 0
  """Seed for the random draws of 'random' and 'tpe'."""
  seeds: tuple[int, ...] = ()
  """Seeds of the runs. Each point has one trial for each seed. If empty, each point has one trial,
  with the seed of the configuration.
  """
  overrides: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  """Overrides that all trials share, keyed by dotted key."""
  early_stopping: MedianRule | SuccessiveHalving | None = None
  """Rule by which unpromising trials are stopped early. A stopped trial commits first, so that its
  run can be resumed.
  """
  retries: int = 2
  """Maximum number of times that a failed trial is started again."""
  start: BaseRun | None = None
  """Run from whose final weights all trials start. If None, the base configuration determines the
  initial weights.
  """

  def __post_init__(self):
    for name in ('base', 'objective'):
      if not isinstance(getattr(self, name), str) or not getattr(self, name):
        raise UserError(f'Sweep: {name}={getattr(self, name)!r}, wanted text')
    for name, wanted in (('direction', get_args(Direction)), ('search', get_args(Search))):
      _check_choice(name, getattr(self, name), wanted)
    _check_choice('at', self.at, ('last', 'best'))
    _check_count('Sweep', 'retries', self.retries, 0)
    for name in ('axes', 'overrides'):
      _check_overrides(f'Sweep: {name}', getattr(self, name))
    if not isinstance(self.early_stopping, MedianRule | SuccessiveHalving | None):
      raise UserError(
        f'Sweep: early_stopping={self.early_stopping!r}, wanted MedianRule(…), '
        'SuccessiveHalving(…) or None'
      )
    if self.start is not None and not isinstance(self.start, BaseRun):
      raise UserError(f'Sweep: start={self.start!r}, wanted BaseRun(…) or None')
    self._check_seeds()
    self._check_points()

  def _check_seeds(self) -> None:
    seeds = self.seeds
    if not isinstance(seeds, tuple | list) or any(type(seed) is not int for seed in seeds):
      raise UserError(f'Sweep: seeds={seeds!r}, wanted integers, such as (1, 2)')
    if len(set(seeds)) < len(seeds):
      raise UserError(f'Sweep: seeds={seeds!r} repeats a seed; both trials would be the same run')
    if seeds and (SEED in self.axes or SEED in self.overrides):
      raise UserError(
        "Sweep: seeds is set, and 'seed' is an axis or override, too; wanted only one of them"
      )

  def _check_points(self) -> None:
    if (self.trials is None) == (not self.axes):
      raise UserError('Sweep: wanted either axes or trials')
    drawn = self.search != 'grid'
    if self.trials is not None and drawn:
      raise UserError(
        f'Sweep: search={self.search!r} cannot be combined with trials; wanted axes to draw from, '
        "or search='grid'"
      )
    if drawn != (self.count is not None):
      raise UserError(
        f"Sweep: search={self.search!r}, count={self.count}; wanted a count for 'random' and 'tpe'"
      )
    if self.count is not None:
      _check_count('Sweep', 'count', self.count, 1)
    for key, axis in self.axes.items():
      if isinstance(axis, Uniform):
        if not drawn:
          raise UserError(f"Sweep: axis {key!r} is Uniform; wanted values, or search='random'")
      elif not isinstance(axis, tuple | list) or not axis:
        raise UserError(f'Sweep: axis {key!r} is {axis!r}, wanted values such as (1e-4, 3e-4)')
      elif len({json_text(key, value) for value in axis}) < len(axis):
        raise UserError(f'Sweep: axis {key!r} repeats a value: {list(axis)!r}')
      elif drawn and any(isinstance(value, list | tuple | dict) for value in axis):
        raise UserError(
          f'Sweep: axis {key!r} has lists or mappings, which {self.search!r} cannot draw; use a '
          'grid or trials'
        )

  def identity(self) -> dict[str, Json]:
    """Returns, as JSON, the settings that determine how trials are compared and which steps run.

    The ledger stores these settings, in order to recognise a sweep file that has changed.
    """
    rule = self.early_stopping
    shared: dict[str, Json] = {
      'objective': self.objective,
      'direction': self.direction,
      'at': self.at,
      'early_stopping': rule and {'rule': type(rule).__name__, **dataclasses.asdict(rule)},
      'search': None,
    }
    if self.search == 'tpe':
      axes = {
        key: dataclasses.asdict(axis) if isinstance(axis, Uniform) else list(axis)
        for key, axis in self.axes.items()
      }
      shared['search'] = {'axes': axes, 'search_seed': self.search_seed, 'seeds': list(self.seeds)}
    return shared

  def decides_by_objective(self) -> bool:
    """Returns whether the objective determines which trials or steps run.

    If it does, the objective cannot be changed after the sweep has started.
    """
    return self.early_stopping is not None or self.search == 'tpe'


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
  if value not in choices:
    raise UserError(f'Sweep: {name}={value!r}, wanted one of {", ".join(choices)}')


def _check_count(where: str, name: str, value: Any, least: int) -> None:
  if type(value) is not int or value < least:
    raise UserError(f'{where}: {name}={value!r}, wanted an integer of at least {least}')


def _check_overrides(where: str, overrides: Any) -> None:
  if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
    raise UserError(f'{where}: {overrides!r}, wanted a mapping from dotted keys')


def json_text(key: str, value: Json) -> str:
  """Returns a value as JSON, with equal text for equal values.

  Raises:
    UserError: if the value cannot be represented in JSON. The message names `key`.
  """
  try:
    return json.dumps(value, sort_keys=True, allow_nan=False)
  except (TypeError, ValueError):
    raise UserError(
      f'{key}: {value!r} ({type(value).__name__}), wanted text, a finite number, a list or a '
      'mapping'
    ) from None


def load_sweep(spec: str) -> tuple[pathlib.Path, Sweep]:
  """Loads a sweep by executing its file. Returns the file's path and the sweep.

  Args:
    spec: path of the file, or the name of a shipped sweep.
  """
  return call_file(
    spec, Sweep, function='get_sweep', what='sweep', flag='--sweep', shipped=SHIPPED / 'sweeps'
  )


def points(sweep: Sweep) -> list[dict[str, Json]]:
  """Returns the overrides of each point, without seeds.

  For a 'tpe' search, the result is empty, because its points are drawn while the sweep runs.

  Raises:
    UserError: if a point is invalid or occurs twice, if there are no points, or if there are more
      than `MAX_TRIALS` trials.
  """
  if sweep.search == 'tpe':
    return []
  if sweep.search == 'random':
    # Imported here, because `search` itself imports this module.
    from jaxrl_llm.app.sweeps.search import drawn_points

    return drawn_points(sweep)
  if sweep.trials is None:
    combinations = math.prod(len(axis) for axis in sweep.axes.values())
    _check_total(sweep, combinations)
    return [dict(zip(sweep.axes, values)) for values in itertools.product(*sweep.axes.values())]
  listed: list[dict[str, Json]] = []
  seen: dict[str, int] = {}
  for i, point in enumerate(itertools.islice(sweep.trials, MAX_TRIALS + 1)):
    _check_overrides(f'Sweep: trials[{i}]', point)
    first = seen.setdefault(json_text(f'trials[{i}]', dict(point)), i)
    if first != i:
      raise UserError(f'Sweep: trials[{i}] repeats trials[{first}]: {dict(point)!r}')
    if sweep.seeds and SEED in point:
      raise UserError(
        f"Sweep: seeds is set, and trials[{i}] sets 'seed', too; wanted only one of them"
      )
    listed.append(dict(point))
  if not listed:
    raise UserError('Sweep: trials is empty, wanted at least one mapping from dotted keys')
  _check_total(sweep, len(listed))
  return listed


def _check_total(sweep: Sweep, count: int) -> None:
  total = count * max(1, len(sweep.seeds))
  if total > MAX_TRIALS:
    raise UserError(f'Sweep: {total:,} trials or more, wanted at most {MAX_TRIALS:,}')


def base_config(path: pathlib.Path, sweep: Sweep) -> Config:
  """Returns the configuration that all trials share, with `sweep.overrides` applied.

  Args:
    path: path of the sweep file, for error messages.

  Raises:
    UserError: if an override is invalid.
  """
  base = _overridden(path, load_file(sweep.base, Config), sweep.overrides)
  if base.archive is not None:
    raise UserError(
      f'{path}: archive.location: {base.archive.location!r} belongs to one run, but every trial '
      'would use it; leave archive out of the base, and train the best trial again with it'
    )
  return base


def start_config(path: pathlib.Path, start: BaseRun) -> Config:
  """Returns the configuration of the run from whose final weights the trials start."""
  return _overridden(path, load_file(start.base, Config), start.overrides)


def trial_config(path: pathlib.Path, base: Config, overrides: Mapping[str, Json]) -> Config:
  """Returns the configuration of a trial.

  Args:
    path: path of the sweep file, for error messages.
    base: configuration to which the trial's overrides apply.
    overrides: overrides of the trial, keyed by dotted key.

  Raises:
    UserError: if a key does not name a field, or if a value is invalid.
  """
  return _overridden(path, base, overrides)


def _overridden(path: pathlib.Path, base: Config, overrides: Mapping[str, Json]) -> Config:
  texts = {key: override_text(key, value) for key, value in overrides.items()}
  try:
    return apply_overrides(base, texts)
  except UserError as error:
    wrong = next((key for key, text in texts.items() if not _fits(base, key, text)), None)
    where = f'axis or override {wrong!r}' if wrong else f'trial {dict(overrides)!r}'
    raise UserError(f'{path}: {where}: {str(error).removeprefix("--")}') from error


def _fits(base: Config, key: str, text: str) -> bool:
  try:
    to_json(apply_overrides(base, {key: text}))
  except UserError:
    return False
  return True
