"""Runs a sweep's trials on this machine, several at a time, and updates the ledger.

Invariant: if this process dies, the processes of its trials end within the grace period
(`core.process.child`), and a trial is started only when no earlier process of that trial is left.
When a signal stops the sweep, every running trial commits, and its state becomes waiting. The same
command continues the sweep.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from jaxrl_llm.app.sweeps.ledger import ENDED, LOGS, Ledger, LedgerEntry, TrialState, in_use
from jaxrl_llm.app.sweeps.measured import Measurements
from jaxrl_llm.app.sweeps.search import next_point, should_stop
from jaxrl_llm.app.sweeps.sweep import Sweep
from jaxrl_llm.app.sweeps.task import StepChild
from jaxrl_llm.app.sweeps.trials import arguments, with_seeds
from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.process.child import Child

_POLL_S = 0.2
"""Interval in seconds at which the trials' processes and metrics are checked."""
_HELD_S = 60.0
"""Maximum time in seconds, in addition to the grace period, to wait for a trial's process to
end.
"""
_INVALID = 2
"""Exit code of a run whose input is invalid. Such a run is not retried, as it would fail again."""
_JOB_VARIABLES = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """Settings that determine how the trials of a sweep share this machine."""

  parallel: int = 1
  """Number of trials that run at the same time."""
  gpus_per_trial: int = 0
  """Number of GPUs that each trial uses. If 0, every trial sees all GPUs."""
  grace_s: float = 600.0
  """Seconds between SIGTERM and SIGKILL when a run is stopped. In this time, the run commits."""

  in_step: bool = False
  """Whether this process runs in a job step of Slurm, whose signals also reach its children."""

  def environment(self, slot: int) -> dict[str, str]:
    """Returns the environment variables of a trial.

    Args:
      slot: number of the trial's slot, from 0 to `parallel` - 1.
    """
    env = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith('linux') else os.cpu_count()
    env.setdefault('NPROC', str(max(1, cores // self.parallel)))
    if self.gpus_per_trial:
      env['CUDA_VISIBLE_DEVICES'] = ','.join(self.gpus(slot))
    return env

  def gpus(self, slot: int) -> Sequence[str]:
    """Returns the GPUs of a slot. They are taken from CUDA_VISIBLE_DEVICES if that is set."""
    first = slot * self.gpus_per_trial
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = visible.split(',') if visible else [str(i) for i in range(first + self.gpus_per_trial)]
    return names[first : first + self.gpus_per_trial]


@dataclasses.dataclass(kw_only=True)
class _Live:
  """A trial whose process has been started, and whose end has not been recorded yet."""

  entry: LedgerEntry
  child: Child | StepChild
  slot: int
  measurements: Measurements
  stopping: bool = False
  """Whether the process has been asked to stop (SIGTERM)."""


class Runner:
  """Runs the trials of a ledger. The caller must hold the ledger's lock."""

  def __init__(
    self,
    ledger: Ledger,
    sweep: Sweep,
    train: Sequence[str],
    machine: Machine,
    *,
    numbers: Collection[int],
    note: Callable[[str], None],
    show: Callable[[], None],
  ):
    """
    Args:
      train: command that runs `jaxrl train`, without flags.
      numbers: ledger numbers of the trials to run. A 'tpe' search adds the numbers of the trials
        that it draws.
      note: called with one line of text about an event of a trial, such as its start or failure.
      show: called a few times a second, to update the display.
    """
    self._ledger, self._sweep, self._train, self._machine = ledger, sweep, list(train), machine
    self._numbers = set(numbers)
    self._note, self._show = note, show
    self._live: dict[int, _Live] = {}
    self._held_since: dict[int, float] = {}
    self._signal: signal.Signals | None = None
    self._wake = threading.Event()
    self._lacking: str | None = None

  def run(self) -> int:
    """Runs the trials until all have ended or a signal stops the sweep.

    Returns the exit code: 0 if no trial has failed, otherwise 1; after a signal, 128 + its number.

    Raises:
      RunError: if the objective is not among the metrics of a finished trial, or if a process that
        an earlier sweep has left behind does not end.
      UserError: if a trial starts from the weights of a run that has not finished and is not among
        the trials to run.
    """
    previous = {
      number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
      self._settle()
      while self._step():
        self._wake.wait(_POLL_S)
        self._wake.clear()
    finally:
      self._end_all()
      for number, handler in previous.items():
        signal.signal(number, handler)
    if self._lacking:
      raise RunError(self._lacking)
    if self._signal is not None:
      return 128 + self._signal
    failed = [entry for entry in self._entries() if entry.state == TrialState.FAILED]
    return 1 if failed else 0

  # Methods that perform one round of checks: `_step` and the methods that it calls.

  def _step(self) -> bool:
    """Checks the running trials and starts new ones.

    Returns whether a trial is running, or is waiting for its earlier process to end.
    """
    for live in list(self._live.values()):
      code = live.child.exit_code
      self._measure(live)
      if code is not None:
        del self._live[live.entry.number]
        self._ended(live, code)
    stopping = self._signal is not None or self._lacking is not None
    if stopping:
      for live in self._live.values():
        self._tell(live, passed_on=self._signal is not None and self._machine.in_step)
    held = False if stopping else self._fill()
    self._show()
    return bool(self._live) or held

  def _settle(self) -> None:
    """Brings the ledger up to date after an earlier run of the sweep.

    Trials that were running become waiting. Measurements that are not in the ledger yet are added.
    Waiting trials that early stopping ends become stopped.
    """
    self._ledger.recover(sorted(self._numbers))
    for entry in self._entries():
      if entry.attempts:
        self._report(entry, Measurements(self._ledger.workdir(entry), self._sweep.objective))
      if entry.state == TrialState.WAITING and self._decided(entry):
        self._ledger.end(entry.number, TrialState.STOPPED)

  def _entries(self) -> list[LedgerEntry]:
    return [entry for entry in self._ledger.entries() if entry.number in self._numbers]

  def _fill(self) -> bool:
    """Starts trials while slots are free.

    Returns whether a trial could not be started because its earlier process is still running.
    """
    held = False
    for entry in self._startable():
      if len(self._live) >= self._machine.parallel:
        break
      if in_use(self._ledger.workdir(entry)):
        held = True
        self._check_held(entry)
      else:
        self._start(entry)
    return held

  def _startable(self) -> Iterator[LedgerEntry]:
    """Yields the trials that can be started: waiting ones by number, then newly drawn ones.

    A trial is recorded as failed if the run from which it starts has ended without finishing.
    """
    for entry in self._entries():
      if entry.state == TrialState.WAITING and entry.number not in self._live:
        start = self._start_of(entry)
        if start is None or start.state == TrialState.FINISHED:
          yield entry
        elif start.number not in self._numbers:
          raise UserError(
            f'--trial={entry.number}: starts from {start.id}, which has not finished; run it first'
          )
        elif start.state in ENDED:
          self._ledger.fail(
            entry.number, TrialState.FAILED, exit_code=None, error=f'{start.id}: {start.state}'
          )
          self._note(f'{entry.id}: failed, because the run that it starts from has {start.state}')
    while self._sweep.search == 'tpe' and len(self._live) < self._machine.parallel:
      point = next_point(self._sweep, self._ledger.entries(), self._ledger.reports())
      if point is None:
        return
      drawn = self._ledger.add(with_seeds(self._sweep, point))
      self._numbers |= {entry.number for entry in drawn}
      yield from drawn

  def _start_of(self, entry: LedgerEntry) -> LedgerEntry | None:
    """Returns the run from whose final weights a trial starts; None if there is no such run."""
    if self._sweep.start is None or entry.trial.is_start:
      return None
    return next(
      other
      for other in self._ledger.entries()
      if other.trial.is_start and other.trial.seed == entry.trial.seed
    )

  def _check_held(self, entry: LedgerEntry) -> None:
    if entry.number not in self._held_since:
      self._note(f'{entry.id}: waits for its earlier process to end')
    since = self._held_since.setdefault(entry.number, time.monotonic())
    limit = self._machine.grace_s + _HELD_S
    if time.monotonic() - since > limit:
      raise RunError(
        f'{self._ledger.workdir(entry)}: in use by another process for {limit:g} s; end it, and '
        'start the same command again'
      )

  def _start(self, entry: LedgerEntry) -> None:
    number, workdir = entry.number, self._ledger.workdir(entry)
    self._held_since.pop(number, None)
    log = self._ledger.sweepdir / LOGS / f'{entry.id}.log'
    child = self._child(f'trial {entry.id}', log)
    used = {live.slot for live in self._live.values()}
    slot = next(i for i in range(self._machine.parallel) if i not in used)
    flags = self.arguments(entry)
    self._ledger.start(number)
    child.start(
      [*self._train, *flags],
      self._machine.environment(slot),
      first_line=f'sweep: {" ".join(flags)}',
    )
    self._live[number] = _Live(
      entry=entry,
      child=child,
      slot=slot,
      measurements=Measurements(workdir, self._sweep.objective),
    )
    again = f', start {entry.attempts + 1}' if entry.attempts else ''
    self._note(f'{entry.id}: runs{again}')

  def _child(self, name: str, log: pathlib.Path) -> Child | StepChild:
    if self._machine.in_step:
      return StepChild(name, log=log)
    return Child(name, log=log, grace_s=self._machine.grace_s)

  def arguments(self, entry: LedgerEntry) -> list[str]:
    """Returns the arguments of `jaxrl train` for a trial."""
    workdir, sweep = self._ledger.workdir(entry), self._sweep
    if entry.trial.is_start:
      overrides = {**sweep.start.overrides, **entry.trial.overrides}
      return arguments(sweep.start.base, overrides, workdir, None)
    start = self._start_of(entry)
    init_from = start and self._ledger.workdir(start)
    return arguments(sweep.base, {**sweep.overrides, **entry.trial.overrides}, workdir, init_from)

  def _measure(self, live: _Live) -> None:
    """Records a trial's new measurements, and then stops the trial if the early-stopping rule
    requires it.
    """
    new = self._report(live.entry, live.measurements)
    if new and not live.stopping and self._decided(live.entry):
      self._ledger.stopping(live.entry.number)
      self._note(f'{live.entry.id}: stopped early')
      self._tell(live)

  def _report(self, entry: LedgerEntry, measurements: Measurements) -> int:
    step, measured = measurements.read()
    if not measured and step is None:
      return 0
    return self._ledger.report(entry.number, step or 0, measured)

  def _decided(self, entry: LedgerEntry) -> bool:
    if self._sweep.early_stopping is None or entry.trial.is_start:
      return False
    return should_stop(self._sweep, self._ledger.entries(), self._ledger.reports(), entry.number)

  def _ended(self, live: _Live, code: int) -> None:
    """Records in the ledger how a trial's process ended."""
    ledger, entry = self._ledger, live.entry
    # All rows are read again. Between two checks, a resumed run may have truncated its metrics and
    # then written past their former length, so that rows before that length have been missed.
    live.measurements = Measurements(ledger.workdir(entry), self._sweep.objective)
    self._report(entry, live.measurements)
    now = next(other for other in ledger.entries() if other.number == entry.number)
    if now.state == TrialState.STOPPING:
      ledger.end(entry.number, TrialState.STOPPED)
    elif live.stopping:
      ledger.end(entry.number, TrialState.WAITING)
    elif code == 0:
      ledger.end(entry.number, TrialState.FINISHED, exit_code=0)
      self._note(f'{entry.id}: finished at step {now.step:,}')
      self._check_objective(now, live.measurements)
    else:
      error = _reason(live.child.lines()) or f'exit code {code}'
      retried = code != _INVALID and now.failures < self._sweep.retries
      ledger.fail(
        entry.number,
        TrialState.WAITING if retried else TrialState.FAILED,
        exit_code=code,
        error=error,
      )
      then = 'starts again' if retried else f'failed; see {live.child.log}'
      self._note(f'{entry.id}: exit code {code}: {error}; {then}')

  def _check_objective(self, entry: LedgerEntry, measurements: Measurements) -> None:
    if entry.trial.is_start or any(r.trial == entry.number for r in self._ledger.reports()):
      return
    known = nearest(self._sweep.objective, sorted(measurements.keys))
    self._lacking = (
      f'objective {self._sweep.objective!r}: not among the metrics of trial {entry.id}, which has '
      f'finished; {one_line(known)}; correct it in the sweep file, and start the same command again'
    )

  def _tell(self, live: _Live, *, passed_on: bool = False) -> None:
    """Asks a trial's process to stop. Further calls for the same process have no effect.

    Args:
      passed_on: whether the process has already received a signal from Slurm. It then gets no
        second signal.
    """
    if not live.stopping:
      live.stopping = True
      if not passed_on:
        live.child.terminate()

  def _on_signal(self, number: int, frame: object) -> None:
    if self._signal is not None:
      sys.stderr.write('second signal: leaving; the trials end by themselves\n')
      script.leave_at_once(128 + number)
    self._signal = signal.Signals(number)
    sys.stderr.write(
      f'{self._signal.name}: the trials commit their finished steps, then the sweep exits '
      '(after a second signal, at once)\n'
    )
    self._wake.set()

  def _end_all(self) -> None:
    """Asks all processes that are left to stop, and waits until they have ended.

    The wait is limited to the grace period plus `_HELD_S`. Processes are left only after an error.
    """
    deadline = time.monotonic() + self._machine.grace_s + _HELD_S
    for live in self._live.values():
      self._tell(live)
    for live in self._live.values():
      while live.child.is_running() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _reason(lines: Sequence[str]) -> str:
  """Returns the last line of a run's output that states why the run ended.

  If no line states it, returns the last line, or an empty text if there is no output.
  """
  said = [line for line in lines if line.startswith(('error: ', 'run stopped: '))]
  return one_line((said or list(lines) or [''])[-1], 300)
