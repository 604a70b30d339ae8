"""Decides with Optuna's samplers and pruners which points to try and which trials to stop.

No state is kept between decisions. For each decision, a new Optuna study is built in memory, and
the measurements in the ledger are replayed into it in the order in which they were recorded. A
decision therefore depends only on the ledger and the sweep, and a restarted sweep makes the same
decisions as an uninterrupted one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.app.sweeps.ledger import LedgerEntry, TrialReport, TrialState, values
from jaxrl_llm.app.sweeps.sweep import (
  MAX_TRIALS,
  MedianRule,
  SuccessiveHalving,
  Sweep,
  Uniform,
  json_text,
)
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json

try:
  import optuna
except ImportError:
  optuna = None

_REDRAWS = 20
"""Number of draws per wanted point. If the draws do not yield enough different points, the axes
count as exhausted.
"""


def check_installed(sweep: Sweep) -> None:
  """Raises UserError if the sweep needs Optuna but Optuna is not installed."""
  if optuna is not None or (sweep.search == 'grid' and sweep.early_stopping is None):
    return
  part = f'search={sweep.search!r}' if sweep.search != 'grid' else 'early_stopping'
  raise UserError(f"{part}: needs Optuna, which is not installed; pip install 'jaxrl_llm[sweep]'")


def drawn_points(sweep: Sweep) -> list[dict[str, Json]]:
  """Returns the points of a random search.

  With a larger `sweep.count`, the same points come first, followed by new ones. Raises UserError if
  Optuna is not installed, or if the axes yield fewer than `sweep.count` points.
  """
  check_installed(sweep)
  study = _study(optuna.samplers.RandomSampler(seed=sweep.search_seed), None, sweep.direction)
  distributions = _distributions(sweep.axes)
  drawn: dict[str, dict[str, Json]] = {}
  for _ in range(_REDRAWS * min(sweep.count, MAX_TRIALS)):
    if len(drawn) < sweep.count:
      point = study.ask(distributions).params
      drawn.setdefault(json_text('point', point), point)
  if len(drawn) < sweep.count:
    raise UserError(
      f'Sweep: count={sweep.count}, but the axes gave only {len(drawn)} points; lower count, '
      "or use search='grid'"
    )
  return [{key: point[key] for key in sweep.axes} for point in drawn.values()]


def next_point(
  sweep: Sweep, entries: Sequence[LedgerEntry], reports: Sequence[TrialReport]
) -> dict[str, Json] | None:
  """Returns the next point of a 'tpe' search.

  Returns None if the ledger contains `sweep.count` points, or if no new point was found.
  """
  # The ledger identifies trials by their overrides, so no point may occur twice.
  tried = {json_text('point', entry.trial.point) for entry in entries if not entry.trial.is_start}
  if len(tried) >= sweep.count:
    return None
  # Each call creates a new sampler. With a constant seed, every call would make the same draws.
  sampler = optuna.samplers.TPESampler(seed=sweep.search_seed + len(tried))
  study, _ = _replayed(sweep, entries, reports, sampler)
  for _ in range(_REDRAWS):
    point = study.ask(_distributions(sweep.axes)).params
    if json_text('point', point) not in tried:
      return {key: point[key] for key in sweep.axes}
  return None


def should_stop(
  sweep: Sweep, entries: Sequence[LedgerEntry], reports: Sequence[TrialReport], number: int
) -> bool:
  """Returns whether early stopping should end trial `number`, given the measurements recorded so
  far.
  """
  if sweep.early_stopping is None:
    return False
  _, stop = _replayed(sweep, entries, reports, optuna.samplers.RandomSampler(seed=0))
  return stop.get(number, False)


def _replayed(
  sweep: Sweep, entries: Sequence[LedgerEntry], reports: Sequence[TrialReport], sampler: Any
) -> tuple[Any, dict[int, bool]]:
  """Replays the contents of the ledger into a new Optuna study.

  Returns the study, and a mapping from trial number to whether early stopping ends the trial.
  """
  study = _study(sampler, _pruner(sweep), sweep.direction)
  distributions = _distributions(sweep.axes) if sweep.search == 'tpe' else {}
  halving = isinstance(sweep.early_stopping, SuccessiveHalving)
  trials, stop = {}, {}
  last = {report.trial: i for i, report in enumerate(reports)}
  final = values(entries, reports, {'direction': sweep.direction, 'at': sweep.at})
  for entry in entries:
    if not entry.trial.is_start:
      study.enqueue_trial(entry.trial.point if distributions else {})
      trials[entry.number] = study.ask(distributions)
  states = {entry.number: entry.state for entry in entries}
  for i, report in enumerate(reports):
    trial = trials.get(report.trial)
    if trial is None:
      continue
    trial.report(report.value, report.step)
    # Optuna's halving decides to stop a trial only at a rung, so the decision is remembered here.
    decided = halving and stop.get(report.trial, False)
    stop[report.trial] = trial.should_prune() or decided
    if last[report.trial] == i:
      _tell(study, trial, states[report.trial], final.get(report.trial))
  for number, trial in trials.items():
    if number not in last and states[number] == TrialState.FAILED:
      study.tell(trial, state=optuna.trial.TrialState.FAIL)
  return study, stop


def _tell(study: Any, trial: Any, state: TrialState, value: float | None) -> None:
  if state == TrialState.FINISHED and value is not None:
    study.tell(trial, value)
  elif state in (TrialState.STOPPING, TrialState.STOPPED):
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
  elif state == TrialState.FAILED:
    study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _study(sampler: Any, pruner: Any, direction: str) -> Any:
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  return optuna.create_study(
    sampler=sampler, pruner=pruner or optuna.pruners.NopPruner(), direction=direction
  )


def _pruner(sweep: Sweep) -> Any:
  rule = sweep.early_stopping
  if rule is None:
    return None
  if isinstance(rule, MedianRule):
    return optuna.pruners.MedianPruner(
      n_startup_trials=rule.after_trials, n_warmup_steps=rule.after_step
    )
  return optuna.pruners.SuccessiveHalvingPruner(
    min_resource=rule.first_step, reduction_factor=rule.factor
  )


def _distributions(axes: Mapping[str, Sequence[Json] | Uniform]) -> dict[str, Any]:
  distributions = {}
  with warnings.catch_warnings():
    # If the interval is not a multiple of the step, Optuna lowers the upper end and warns.
    warnings.simplefilter('ignore')
    for key, axis in axes.items():
      if not isinstance(axis, Uniform):
        distributions[key] = optuna.distributions.CategoricalDistribution(list(axis))
      elif axis.is_integer():
        distributions[key] = optuna.distributions.IntDistribution(
          axis.low, axis.high, log=axis.log, step=axis.step or 1
        )
      else:
        distributions[key] = optuna.distributions.FloatDistribution(
          axis.low, axis.high, log=axis.log, step=axis.step
        )
  return distributions
