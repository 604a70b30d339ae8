"""Formats the state of a sweep as tables for a terminal and as JSON."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence

from rich.console import Group as Stack
from rich.table import Column, Table
from rich.text import Text

from jaxrl_llm.app.sweeps.ledger import LedgerEntry, TrialReport, TrialState, values
from jaxrl_llm.app.sweeps.ranking import SeedGroup, measured, ranked
from jaxrl_llm.app.sweeps.trials import describe
from jaxrl_llm.core.types import Json

_ROWS = 30
"""Maximum number of trials in the table. Running trials take precedence over other trials."""
_STYLES = {
  TrialState.RUNNING: 'bold',
  TrialState.STOPPING: 'bold',
  TrialState.FINISHED: 'green',
  TrialState.FAILED: 'red',
  TrialState.STOPPED: 'yellow',
}


def state_json(
  entries: Sequence[LedgerEntry], reports: Sequence[TrialReport], meta: Mapping[str, Json]
) -> dict[str, Json]:
  """Returns the state of a sweep as JSON."""
  value_of = values(entries, reports, meta)
  return {
    'objective': meta['objective'],
    'direction': meta['direction'],
    'trials': [entry_json(entry, value_of.get(entry.number)) for entry in entries],
    'points': [
      {
        'point': dict(group.point),
        'trials': [entry.number for entry in group.entries],
        'mean': group.mean,
        'stderr': group.stderr,
      }
      for group in ranked(entries, value_of, meta['direction'])
    ],
  }


def entry_json(entry: LedgerEntry, value: float | None) -> dict[str, Json]:
  """Returns a trial as JSON. Times are in UTC, in ISO 8601 format.

  Args:
    value: value of the objective; None if the trial has not measured it.
  """
  return {
    'number': entry.number,
    'id': entry.id,
    'overrides': dict(entry.trial.overrides),
    'state': str(entry.state),
    'attempts': entry.attempts,
    'failures': entry.failures,
    'step': entry.step,
    'objective': value,
    'exit_code': entry.exit_code,
    'error': entry.error,
    'started': _time(entry.started),
    'ended': _time(entry.ended),
  }


def state_table(
  entries: Sequence[LedgerEntry],
  reports: Sequence[TrialReport],
  meta: Mapping[str, Json],
  *,
  rows: int = _ROWS,
) -> Stack:
  """Returns a table of the trials, and a line with the number of trials in each state.

  Args:
    rows: maximum number of trials to show. If the sweep has more, running trials are chosen first,
      then failed ones.
  """
  value_of = values(entries, reports, meta)
  order = {TrialState.RUNNING: 0, TrialState.STOPPING: 0, TrialState.FAILED: 1}
  shown = sorted(entries, key=lambda entry: (order.get(entry.state, 2), entry.number))[:rows]
  table = Table('trial', 'state', *_right('step', 'objective', 'starts', 'minutes'), expand=False)
  for entry in sorted(shown, key=lambda entry: entry.number):
    value = value_of.get(entry.number)
    table.add_row(
      Text(
        f'{entry.number:03d} {"start, " if entry.trial.is_start else ""}'
        f'{describe(entry.trial.overrides)}'
      ),
      Text(str(entry.state), style=_STYLES.get(entry.state, '')),
      f'{entry.step:,}',
      '–' if value is None else f'{value:.4g}',
      str(entry.attempts),
      _minutes(entry),
    )
  counts = ', '.join(
    f'{count} {state}' for state in TrialState if (count := sum(e.state == state for e in entries))
  )
  more = f'{len(entries) - len(shown)} more trials; ' if len(shown) < len(entries) else ''
  return Stack(table, Text(f'{more}{counts}; objective: {meta["objective"]}'))


def ranking_table(groups: Sequence[SeedGroup]) -> Table:
  """Returns a table of the points, in the order of `groups`."""
  table = Table('', 'point', *_right('mean ± standard error', 'seeds'))
  for place, group in enumerate(groups, 1):
    table.add_row(
      str(place),
      Text(group.label),
      measured(group.mean, group.stderr),
      f'{len(group.values)} of {len(group.entries)}',
    )
  return table


def trials_table(entries: Sequence[LedgerEntry]) -> Table:
  """Returns a table of the trials with their run directories and overrides, for a dry run."""
  table = Table('trial', 'run directory', 'overrides')
  for entry in entries:
    overrides = ', '.join(f'{key}={value}' for key, value in entry.trial.overrides.items())
    table.add_row(f'{entry.number:03d}', Text(entry.id), Text(overrides))
  return table


def _right(*names: str) -> list[Column]:
  return [Column(name, justify='right') for name in names]


def _minutes(entry: LedgerEntry) -> str:
  if entry.started is None:
    return '–'
  live = (
    entry.state in (TrialState.RUNNING, TrialState.STOPPING) or (entry.ended or 0) < entry.started
  )
  end = time.time() if live else entry.ended
  return f'{(end - entry.started) / 60:.1f}'


def _time(seconds: float | None) -> str | None:
  if seconds is None:
    return None
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec='seconds')
