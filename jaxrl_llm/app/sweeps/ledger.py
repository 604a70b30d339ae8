"""The ledger of a sweep: its trials, the progress of each, and their measurements of the objective.

Invariant: every change is one durable transaction. A sweep that is killed at any moment can
therefore continue from its ledger. A trial's number, id and overrides never change. A process that
runs trials holds the lock of the sweep. The lock is exclusive for `jaxrl sweep` on one machine; the
tasks of a job array share it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import json
import math
import pathlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.sweeps.trials import Trial, trial_id
from jaxrl_llm.config.load import difference
from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.types import Json

FILE = 'ledger.sqlite'
LOCK = 'lock'
TRIALS, LOGS = 'trials', 'logs'
"""Folders in the sweep directory: one for the trials' run directories, and one for the output that
the trials' processes print.
"""
_BUSY_S = 60.0
"""Maximum time in seconds to wait until the transaction of another process has ended."""
_REPAIR = 'restore the file, or sweep into another --sweepdir'
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE trials (
  number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL UNIQUE,
  is_start INTEGER NOT NULL, overrides TEXT NOT NULL, state TEXT NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0,
  step INTEGER NOT NULL DEFAULT 0, exit_code INTEGER, error TEXT, started REAL, ended REAL
);
CREATE TABLE reports (
  id INTEGER PRIMARY KEY, trial INTEGER NOT NULL REFERENCES trials, step INTEGER NOT NULL,
  value REAL, UNIQUE (trial, step)
);
"""


class TrialState(enum.StrEnum):
  """State of a trial in a sweep."""

  WAITING = 'waiting'
  RUNNING = 'running'
  STOPPING = 'stopping'
  """Early stopping has decided to stop the trial, and the trial's run is writing its commit."""
  STOPPED = 'stopped'
  """Early stopping has ended the trial. Its run can be resumed, or another run can start with its
  weights.
  """
  FINISHED = 'finished'
  FAILED = 'failed'


ENDED = (TrialState.STOPPED, TrialState.FINISHED, TrialState.FAILED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerEntry:
  """A trial and its progress."""

  number: int
  id: str
  trial: Trial
  state: TrialState
  attempts: int
  """Number of times that the trial's process has been started."""
  failures: int
  """Number of times that the trial has failed, counted from 0 again after `Ledger.retry`. Processes
  that the sweep itself stopped do not count.
  """
  step: int
  """Largest step in the metrics of the trial."""
  exit_code: int | None
  """Exit code with which the trial's process last ended. None if the process has never ended, or if
  the sweep stopped it.
  """
  error: str | None
  """Reason why the trial failed, as one line. None if it has not failed since its last start."""
  started: float | None
  """Time of the last start of the trial's process, in seconds since 1970. None if the process has
  never been started.
  """
  ended: float | None
  """Time of the last end of the trial's process, in seconds since 1970. None if the process has
  never ended.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialReport:
  """One measurement of the objective by a trial."""

  trial: int
  """Number of the trial in the sweep's ledger."""
  step: int
  value: float
  """Value of the objective; NaN if it was not finite."""


@contextlib.contextmanager
def locked(sweepdir: pathlib.Path, *, shared: bool) -> Iterator[None]:
  """Holds the lock of a sweep during the block. The lock is released if the process is killed.

  Args:
    shared: whether other processes may hold the lock at the same time, as tasks of a job array do.

  Raises:
    UserError: if the sweep directory cannot be written or locked, or if another process holds the
      lock and either process needs it exclusively.
  """
  try:
    sweepdir.mkdir(parents=True, exist_ok=True)
    lock = (sweepdir / LOCK).open('a+')
  except OSError as error:
    raise UserError(
      f'--sweepdir={sweepdir}: {error.strerror}; choose a directory that can be written'
    ) from error
  with lock:
    try:
      fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
      raise UserError(
        f'--sweepdir={sweepdir}: in use by another sweep; wait for it, stop it, or choose another '
        '--sweepdir'
      ) from None
    except OSError as error:
      raise UserError(
        f'--sweepdir={sweepdir}: cannot be locked ({error.strerror}); choose a directory on a '
        'file system with locks'
      ) from error
    yield


def in_use(workdir: pathlib.Path) -> bool:
  """Returns whether a running process holds the lock of a run directory."""
  try:
    lock = (workdir / 'lock').open('r')
  except FileNotFoundError:
    return False
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
  return False


class Ledger:
  """The SQLite file of a sweep's ledger. Methods raise RunError if they cannot write a change."""

  def __init__(self, sweepdir: pathlib.Path, *, create: bool = False):
    """Opens the ledger of a sweep.

    Args:
      create: whether to create the ledger if it does not exist.

    Raises:
      UserError: if the ledger is missing and `create` is false, or if the file is not a ledger.
    """
    self.sweepdir = sweepdir
    self._path = sweepdir / FILE
    if not create and not self._path.is_file():
      raise UserError(f'--sweepdir={sweepdir}: has no {FILE}; give the directory of a sweep')
    try:
      self._db = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
      # A write-ahead log would need memory that all writers share, but the tasks of a job array
      # write from several machines.
      self._db.execute('PRAGMA journal_mode = DELETE')
      self._db.execute('PRAGMA synchronous = FULL')
      with self._transaction():
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'trials'").fetchone():
          for statement in filter(str.strip, _SCHEMA.split(';')):
            self._db.execute(statement)
      self.entries()
    except (sqlite3.DatabaseError, RunError, ValueError, KeyError) as error:
      raise UserError(f'{self._path}: not the ledger of a sweep ({error}); {_REPAIR}') from None

  def close(self) -> None:
    self._db.close()

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    try:
      self._db.execute('BEGIN IMMEDIATE')
      yield
      self._db.execute('COMMIT')
    except sqlite3.DatabaseError as error:
      raise RunError(
        f'{self._path}: {error}; free disk space, end other processes that write to it, and start '
        'again with the same command'
      ) from error
    finally:
      if self._db.in_transaction:
        self._db.execute('ROLLBACK')

  # Methods for the definition of the sweep.

  def meta(self) -> dict[str, Json]:
    """Returns the properties that all trials share, keyed by name. A new ledger has none."""
    return {key: json.loads(text) for key, text in self._db.execute('SELECT key, json FROM meta')}

  def adopt(self, meta: Mapping[str, Json], *, may_change: Sequence[str] = ()) -> set[str]:
    """Stores `meta`, the properties that all trials share.

    Returns the names of the properties whose stored values have changed; none for a new ledger.

    Args:
      may_change: names of properties whose values may differ from the stored ones.

    Raises:
      UserError: if the value of any other property differs from the stored one.
    """
    stored = self.meta()
    current = {key: _current(value) for key, value in stored.items()}
    changes = difference(current, dict(meta)) if stored else []
    fixed = [change for change in changes if change[0].partition('.')[0] not in may_change]
    if fixed:
      listed = '; '.join(
        f'{key}: {one_line(repr(old), 80)} in the ledger, {one_line(repr(new), 80)} now'
        for key, old, new in fixed[:3]
      )
      more = f' and {len(fixed) - 3} more' if len(fixed) > 3 else ''
      raise UserError(
        f'{self._path}: the sweep has changed ({listed}{more}); undo the change, or sweep into '
        'another --sweepdir'
      )
    with self._transaction():
      for key, value in meta.items():
        self._db.execute('INSERT OR REPLACE INTO meta VALUES (?, ?)', (key, json.dumps(value)))
    return {change[0].partition('.')[0] for change in changes}

  def add(self, trials: Sequence[Trial]) -> list[LedgerEntry]:
    """Appends the trials that the ledger lacks. Returns the ledger's entries for all `trials`."""
    with self._transaction():
      known = {key for (key,) in self._db.execute('SELECT key FROM trials')}
      (count,) = self._db.execute('SELECT count(*) FROM trials').fetchone()
      for trial in trials:
        if trial.key not in known:
          known.add(trial.key)
          self._db.execute(
            'INSERT INTO trials (number, id, key, is_start, overrides, state) VALUES (?, ?, ?, ?, '
            '?, ?)',
            (
              *(count, trial_id(count, trial), trial.key, trial.is_start),
              *(json.dumps(dict(trial.overrides)), TrialState.WAITING),
            ),
          )
          count += 1
    wanted = {trial.key for trial in trials}
    return [entry for entry in self.entries() if entry.trial.key in wanted]

  # Methods for the progress of the trials.

  def entries(self) -> list[LedgerEntry]:
    """Returns the entries of all trials, ordered by number."""
    rows = self._db.execute(
      'SELECT number, id, overrides, is_start, state, attempts, failures, step, exit_code, error, '
      'started, ended FROM trials ORDER BY number'
    )
    return [
      LedgerEntry(
        number=number,
        id=name,
        trial=Trial(overrides=json.loads(overrides), is_start=bool(is_start)),
        state=TrialState(state),
        **dict(zip(('attempts', 'failures', 'step', 'exit_code', 'error'), rest[:5], strict=True)),
        started=rest[5],
        ended=rest[6],
      )
      for number, name, overrides, is_start, state, *rest in rows
    ]

  def workdir(self, entry: LedgerEntry) -> pathlib.Path:
    """Returns the run directory of a trial."""
    return self.sweepdir / TRIALS / entry.id

  def recover(self, numbers: Sequence[int] | None = None) -> None:
    """Corrects the states of trials that were running when an earlier sweep was killed.

    A running trial becomes waiting. A trial that early stopping was ending becomes stopped.

    Args:
      numbers: numbers of the trials to correct. If None, all trials are corrected.
    """
    chosen = range(1 << 31) if numbers is None else numbers
    with self._transaction():
      for entry in self.entries():
        if entry.number not in chosen:
          continue
        if entry.state == TrialState.RUNNING:
          self._set(entry.number, state=TrialState.WAITING)
        elif entry.state == TrialState.STOPPING:
          self._set(entry.number, state=TrialState.STOPPED)

  def start(self, number: int) -> None:
    """Records that a trial's process is about to start."""
    with self._transaction():
      self._db.execute('UPDATE trials SET attempts = attempts + 1 WHERE number = ?', (number,))
      self._set(number, state=TrialState.RUNNING, started=time.time(), error=None)

  def report(self, number: int, step: int, measured: Sequence[tuple[int, float]]) -> int:
    """Records a trial's last step and its measurements of the objective.

    Returns the number of measurements that the ledger did not contain yet.

    Args:
      measured: pairs (step, objective).
    """
    with self._transaction():
      self._db.execute('UPDATE trials SET step = max(step, ?) WHERE number = ?', (step, number))
      before = self._db.total_changes
      self._db.executemany(
        'INSERT OR IGNORE INTO reports (trial, step, value) VALUES (?, ?, ?)',
        [(number, at, None if math.isnan(value) else value) for at, value in measured],
      )
      return self._db.total_changes - before

  def forget_reports(self) -> None:
    """Deletes all measurements, so that the sweep reads them from the runs' metrics again."""
    with self._transaction():
      self._db.execute('DELETE FROM reports')

  def reports(self) -> list[TrialReport]:
    """Returns all measurements, in the order in which they were recorded."""
    rows = self._db.execute('SELECT trial, step, value FROM reports ORDER BY id')
    return [
      TrialReport(trial=trial, step=step, value=math.nan if value is None else value)
      for trial, step, value in rows
    ]

  def stopping(self, number: int) -> None:
    """Records that early stopping is ending a trial. Call this before its process gets SIGTERM."""
    with self._transaction():
      self._set(number, state=TrialState.STOPPING)

  def end(
    self, number: int, state: TrialState, *, exit_code: int | None = None, error: str | None = None
  ) -> None:
    """Records the end of a trial's process.

    Args:
      state: new state of the trial. With WAITING, the trial starts again later.
    """
    with self._transaction():
      self._set(number, state=state, exit_code=exit_code, error=error, ended=time.time())

  def fail(self, number: int, state: TrialState, *, exit_code: int | None, error: str) -> None:
    """Records that a trial has failed.

    Args:
      state: WAITING if the trial is to be tried again, otherwise FAILED.
    """
    with self._transaction():
      self._db.execute('UPDATE trials SET failures = failures + 1 WHERE number = ?', (number,))
      self._set(number, state=state, exit_code=exit_code, error=error, ended=time.time())

  def retry(self) -> int:
    """Makes all failed trials waiting again and resets their counts of failures.

    Returns the number of these trials.
    """
    with self._transaction():
      failed = self._db.execute(
        'UPDATE trials SET state = ?, failures = 0 WHERE state = ?',
        (TrialState.WAITING, TrialState.FAILED),
      )
      return failed.rowcount

  def _set(self, number: int, **values: Any) -> None:
    names = ', '.join(f'{name} = ?' for name in values)
    self._db.execute(f'UPDATE trials SET {names} WHERE number = ?', (*values.values(), number))


def values(
  entries: Sequence[LedgerEntry], reports: Sequence[TrialReport], meta: Mapping[str, Json]
) -> dict[int, float]:
  """Returns each trial's value of the objective, keyed by the trial's number.

  The value is the last or the best finite measurement, as `meta['at']` says. Trials without a
  finite measurement are left out.

  Args:
    meta: properties that all trials share, as in `Ledger.meta`.
  """
  better = max if meta['direction'] == 'maximize' else min
  measured: dict[int, float] = {}
  for report in sorted(reports, key=lambda report: report.step):
    if math.isfinite(report.value):
      best = meta['at'] == 'best' and report.trial in measured
      measured[report.trial] = (
        better(measured[report.trial], report.value) if best else report.value
      )
  return {entry.number: measured[entry.number] for entry in entries if entry.number in measured}


def _current(value: Json) -> Json:
  """Returns a stored value, brought up to date if it is a configuration.

  Fields that did not exist in the release that stored the configuration get their defaults.
  """
  with contextlib.suppress(UserError, TypeError):
    if isinstance(value, dict) and 'stages' in value:
      return to_json(from_json(value, Config))
  return value
