"""Loads a sweep file, checks the configurations of its trials, and opens the sweep's ledger."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.sweeps.ledger import FILE, Ledger, LedgerEntry, TrialState
from jaxrl_llm.app.sweeps.search import check_installed
from jaxrl_llm.app.sweeps.sweep import (
  Sweep,
  base_config,
  load_sweep,
  start_config,
  trial_config,
)
from jaxrl_llm.app.sweeps.trials import Trial, planned, trial_id
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.types import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepPlan:
  """A loaded sweep. The configurations of all its `trials` are valid."""

  path: pathlib.Path
  """Path of the sweep file."""
  sweep: Sweep
  base: Config
  start: Config | None
  trials: Sequence[Trial]
  """Trials that are known before any trial has run. For a 'tpe' search, these are only the runs
  from which the other trials start.
  """

  @property
  def drawn_later(self) -> int:
    """Number of trials that the search draws only after earlier trials have run."""
    if self.sweep.search != 'tpe':
      return 0
    return self.sweep.count * max(1, len(self.sweep.seeds))


def load_plan(spec: str, overrides: Mapping[str, Json]) -> SweepPlan:
  """Loads a sweep file and checks the configuration of every trial that is already known. For a
  'tpe' search, also checks the configuration of one point.

  Args:
    spec: path of a sweep file, or the name of a shipped sweep.
    overrides: overrides from the command line, which apply to all trials, keyed by dotted key.

  Raises:
    UserError: if the file or the configuration of a trial is invalid, or if the sweep needs Optuna
      but Optuna is not installed.
  """
  path, sweep = load_sweep(spec)
  both = sorted(set(overrides) & set(sweep.axes))
  if both:
    raise UserError(
      f'--config.{both[0]}: is an axis of {path}, which sets it in each trial; leave it out'
    )
  sweep = dataclasses.replace(sweep, overrides={**sweep.overrides, **overrides})
  check_installed(sweep)
  base = base_config(path, sweep)
  start = None
  if sweep.start is not None:
    if 'policy.init_from' in {*sweep.overrides, *sweep.axes}:
      raise UserError(f"{path}: both start and 'policy.init_from' are set; remove one of them")
    start = start_config(path, sweep.start)
  trials = _planned(path, sweep)
  for trial in trials:
    trial_config(path, start if trial.is_start else base, trial.overrides)
  if sweep.search == 'tpe':
    # The points of this search are not known yet. In their place, one point is checked, which takes
    # the first value or the lower end of each axis.
    first = {
      k: axis[0] if isinstance(axis, tuple | list) else axis.low for k, axis in sweep.axes.items()
    }
    trial_config(path, base, first)
  return SweepPlan(path=path, sweep=sweep, base=base, start=start, trials=trials)


def _planned(path: pathlib.Path, sweep: Sweep) -> list[Trial]:
  try:
    return planned(sweep)
  except UserError as error:
    raise UserError(f'{path}: {error}') from error
  except Exception as error:  # The generator of trials in the sweep file can raise anything.
    reason = one_line(f'{type(error).__name__}: {error}')
    raise UserError(f'{path}: trials: the generator raised {reason}') from error


def open_ledger(plan: SweepPlan, sweepdir: pathlib.Path) -> Ledger:
  """Opens the sweep's ledger, or creates it, and adds the trials that it lacks.

  The caller must hold the lock of the sweep.

  Raises:
    UserError: if the ledger belongs to another sweep. The ledger is then left unchanged.
  """
  ledger = Ledger(sweepdir, create=True)
  missing = lost(plan, ledger.entries())
  if missing:
    raise UserError(
      f'{sweepdir / FILE}: {len(missing)} of its trials are no longer in {plan.path}, first '
      f'{missing[0].id}; put them back, or sweep into another --sweepdir'
    )
  meta: dict[str, Json] = {
    'base': plan.sweep.base,
    'config': to_json(plan.base),
    'start': plan.start and to_json(plan.start),
    **plan.sweep.identity(),
  }
  comparing = () if plan.sweep.decides_by_objective() else ('objective', 'direction', 'at')
  changed = ledger.adopt(meta, may_change=('base', *comparing))
  if 'objective' in changed:
    ledger.forget_reports()
  ledger.add(plan.trials)
  return ledger


def lost(plan: SweepPlan, entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
  """Returns the ledger's entries for trials that are no longer in the sweep file."""
  in_file = {trial.key for trial in plan.trials}
  drawn = plan.sweep.search == 'tpe'
  return [e for e in entries if e.trial.key not in in_file and (e.trial.is_start or not drawn)]


def preview(plan: SweepPlan, sweepdir: pathlib.Path) -> list[LedgerEntry]:
  """Returns the entries that the ledger would have after `open_ledger`, without changing it."""
  entries = []
  if (sweepdir / FILE).is_file():
    ledger = Ledger(sweepdir)
    entries = ledger.entries()
    ledger.close()
  in_ledger = {entry.trial.key for entry in entries}
  for trial in plan.trials:
    if trial.key not in in_ledger:
      number = len(entries)
      entries.append(
        LedgerEntry(
          number=number,
          id=trial_id(number, trial),
          trial=trial,
          state=TrialState.WAITING,
          **dict(attempts=0, failures=0, step=0, exit_code=None, error=None),
          **dict(started=None, ended=None),
        )
      )
  return entries
