"""Starts N processes of one job on this machine and supervises them.

  python launch/cluster/local.py --processes=2 [--grace_s=10] -- COMMAND [ARGUMENT ...]

Each process gets JAX_COORDINATOR_ADDRESS (a free port of 127.0.0.1), JAX_NUM_PROCESSES and
JAX_PROCESS_ID, and NPROC (threads of XLA's CPU pool, on which bits may depend): this machine's
cores divided by N, unless it is set already. Its output is passed on line by line behind `[process
id]`.

Invariant: the job ends as a whole. When a process ends badly (a signal, or an exit code that is not
0), the supervisor names it and how it ended, sends SIGTERM to the others and after `grace_s`
seconds SIGKILL, and exits with its code (128 + the number for a signal): within 30 seconds by
default, and normally at once. When a process has finished, the others may take `linger_s` longer.
SIGINT and SIGTERM go to every process, which then have `linger_s` to commit what they have (a
second one kills); the exit code is then theirs (130, 143). If the supervisor itself is killed, the
kernel kills its processes (Linux). What a process leaves running in its own session is killed at
the end.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

from absl import flags

_PROCESSES = flags.DEFINE_integer(
  'processes', None, 'How many processes to start.', lower_bound=1, required=True
)
_GRACE = flags.DEFINE_float(
  'grace_s', 10.0, 'Seconds between SIGTERM and SIGKILL for those that are left.', lower_bound=0
)
_LINGER = flags.DEFINE_float(
  'linger_s', 600.0, 'Seconds that may pass between the first end and the last.', lower_bound=0
)

_PR_SET_PDEATHSIG = 1
_DRAIN_S = 5.0
"""Seconds for processes to vanish after SIGKILL, and for the last lines of output after that."""
_CAUSE_S = 1.0
"""Seconds to look for the cause of an end that is a consequence."""
_CONSEQUENCES = (-signal.SIGABRT, os.EX_TEMPFAIL)
"""How a process ends because another one is gone: JAX aborts it, or the trainer leaves with 75."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
  """How a process ended."""

  process_id: int
  code: int
  """As subprocess has it: an exit code, or minus the signal."""

  @property
  def exit_code(self) -> int:
    return self.code if self.code >= 0 else 128 - self.code

  def __str__(self) -> str:
    if self.code >= 0:
      return f'with exit code {self.code}'
    return f'by signal {signal.Signals(-self.code).name}'


def _say(text: str) -> None:
  sys.stderr.write(f'local: {text}\n')
  sys.stderr.flush()


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def _die_with_parent() -> Callable[[], None] | None:
  """What a child runs before COMMAND: asks the kernel for SIGKILL when the supervisor is gone."""
  if not sys.platform.startswith('linux'):
    return None
  prctl = ctypes.CDLL(None, use_errno=True).prctl
  parent = os.getpid()

  def before_exec() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It went before the request was made.
      os._exit(128 + signal.SIGKILL)

  return before_exec


def _start(command: Sequence[str], count: int) -> list[subprocess.Popen]:
  address = f'127.0.0.1:{_free_port()}'
  threads = max(1, len(os.sched_getaffinity(0)) // count) if sys.platform.startswith('linux') else 1
  before_exec = _die_with_parent()
  job = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(count)}
  shared = {'NPROC': str(threads), 'PYTHONUNBUFFERED': '1', **os.environ, **job}
  processes = []
  for process_id in range(count):
    processes.append(
      subprocess.Popen(
        command,
        env={**shared, 'JAX_PROCESS_ID': str(process_id)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A terminal's Ctrl-C then reaches them once, through the supervisor.
        start_new_session=True,
        preexec_fn=before_exec,
      )
    )
  return processes


def _pass_on(source: BinaryIO, target: BinaryIO, prefix: bytes, lock: threading.Lock) -> None:
  wanted = True
  for line in source:
    try:
      if wanted:
        with lock:
          target.write(prefix + line.rstrip(b'\n') + b'\n')
          target.flush()
    # Nobody reads any more; a process must not block on a full pipe for that.
    except BrokenPipeError:
      wanted = False


class Supervisor:
  """Watches the processes of one job from the first end to the last."""

  def __init__(self, processes: Sequence[subprocess.Popen], *, grace_s: float, linger_s: float):
    self._processes = processes
    self._grace_s = grace_s
    self._linger_s = linger_s
    self._ends: queue.SimpleQueue[End] = queue.SimpleQueue()
    self._ended: dict[int, End] = {}
    self._asked: signal.Signals | None = None
    self._deadline: float | None = None
    self._readers: list[threading.Thread] = []

  def run(self) -> int:
    """Returns the job's exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._forward)
    self._watch()
    culprit = self._first_bad_end()
    if culprit is not None and self._asked is None:
      left = len(self._processes) - len(self._ended)
      _say(
        f'process {culprit.process_id} ended first, {culprit}; stopping the other {left} within '
        f'{self._grace_s:g} s'
      )
      self._stop_others()
    self._clean_up()
    return self._exit_code(culprit)

  def _watch(self) -> None:
    """One thread waits for each process and one for each of its outputs; they start after the last
    fork.
    """
    lock = threading.Lock()
    for process_id, process in enumerate(self._processes):
      prefix = f'[{process_id}] '.encode()
      for source, target in (
        (process.stdout, sys.stdout.buffer),
        (process.stderr, sys.stderr.buffer),
      ):
        reader = threading.Thread(target=_pass_on, args=(source, target, prefix, lock), daemon=True)
        reader.start()
        self._readers.append(reader)
      threading.Thread(target=self._wait_for, args=(process_id, process), daemon=True).start()

  def _wait_for(self, process_id: int, process: subprocess.Popen) -> None:
    # wait process: none, its life is the job's; the supervisor's deadlines end it
    code = process.wait()
    self._ends.put(End(process_id=process_id, code=code))

  def _next_end(self, deadline: float) -> End | None:
    """The next process to end; None when the deadline has passed."""
    try:
      end = self._ends.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
      return None
    self._ended[end.process_id] = end
    return end

  def _first_bad_end(self) -> End | None:
    """Waits until all have ended well, or one has not; which one that was."""
    while len(self._ended) < len(self._processes):
      # Short looks, because a signal's handler sets the deadline meanwhile.
      look = time.monotonic() + 0.5
      end = self._next_end(look if self._deadline is None else min(look, self._deadline))
      if end is None and self._deadline is not None and time.monotonic() >= self._deadline:
        _say(f'processes {self._left()} have not ended within {self._linger_s:g} s; killing them')
        self._kill_rest()
        break
      elif end is not None and end.code != 0 and self._asked is None:
        return self._likeliest(end)
      elif end is not None and self._deadline is None:
        self._deadline = time.monotonic() + self._linger_s
    bad = [end for end in self._ended.values() if end.code != 0]
    expected = () if self._asked is None else (-self._asked, 128 + self._asked)
    return next((end for end in bad if end.code not in expected), bad[0] if bad else None)

  def _likeliest(self, first: End) -> End:
    """The first to end, unless its end is a consequence and its cause is seen ending just after
    it.
    """
    deadline = time.monotonic() + _CAUSE_S
    end: End | None = first
    while end is not None:
      if end.code != 0 and end.code not in _CONSEQUENCES:
        return end
      end = self._next_end(deadline) if len(self._ended) < len(self._processes) else None
    return first

  def _stop_others(self) -> None:
    self._signal_all(signal.SIGTERM)
    if not self._all_ended_by(time.monotonic() + self._grace_s):
      _say(f'killing processes {self._left()}, which SIGTERM did not end')
      self._kill_rest()

  def _kill_rest(self) -> None:
    self._signal_all(signal.SIGKILL)
    if not self._all_ended_by(time.monotonic() + _DRAIN_S):
      _say(f'processes {self._left()} do not vanish even after SIGKILL; leaving them')

  def _all_ended_by(self, deadline: float) -> bool:
    while len(self._ended) < len(self._processes):
      if self._next_end(deadline) is None:
        return False
    return True

  def _forward(self, number: int, frame: object) -> None:
    again = self._asked is not None
    self._asked = signal.Signals(number)
    self._deadline = time.monotonic() + self._linger_s
    self._signal_all(signal.SIGKILL if again else self._asked)

  def _left(self) -> str:
    return ', '.join(str(i) for i in range(len(self._processes)) if i not in self._ended)

  def _signal_all(self, number: signal.Signals) -> None:
    for process in self._processes:
      process.send_signal(number)  # Does nothing for one that has been waited for.

  def _clean_up(self) -> None:
    for process in self._processes:
      try:
        os.killpg(process.pid, signal.SIGKILL)
      except ProcessLookupError:
        continue  # It left nothing behind.
    deadline = time.monotonic() + _DRAIN_S
    for reader in self._readers:
      reader.join(max(0.0, deadline - time.monotonic()))

  def _exit_code(self, culprit: End | None) -> int:
    if culprit is None:
      return 0
    for end in self._ended.values():
      if end.process_id != culprit.process_id:
        _say(f'process {end.process_id} ended {end}')
    if self._asked is not None:
      _say(f'stopped by {self._asked.name}; process {culprit.process_id} ended {culprit}')
    else:
      _say(f'culprit: process {culprit.process_id}, ended {culprit}')
    return culprit.exit_code


def main(argv: Sequence[str]) -> int:
  """Returns the job's exit code; 2 for a command line that cannot be used."""
  try:
    command = flags.FLAGS(list(argv))[1:]
  except flags.Error as error:
    _say(' '.join(str(error).split()))
    return 2
  if not command:
    _say('no command given; wanted local.py --processes=N -- COMMAND [ARGUMENT ...]')
    return 2
  try:
    processes = _start(command, _PROCESSES.value)
  except OSError as error:
    _say(f'{command[0]}: cannot be started: {error.strerror}')
    return 2
  return Supervisor(processes, grace_s=_GRACE.value, linger_s=_LINGER.value).run()


if __name__ == '__main__':
  sys.exit(main(sys.argv))
