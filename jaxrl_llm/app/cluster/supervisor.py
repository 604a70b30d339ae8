"""Starts N processes of one job on this machine and supervises them.

  python launch/cluster/local.py --processes=2 [--grace_s=10] [--restarts=3] [--service=COMMAND ...]
      -- COMMAND [ARGUMENT ...]

Each process gets JAX_COORDINATOR_ADDRESS (a free port of 127.0.0.1), JAX_NUM_PROCESSES and
JAX_PROCESS_ID. It also gets NPROC, the number of threads of XLA's CPU pool, on which the last bits
of results may depend. Unless NPROC is already set, it is the number of cores that the supervisor
may use, divided by N (1 on systems other than Linux). The supervisor passes on each line that a
process prints, with a prefix: `[0]` for process 0, `[s0]` for service 0.

Invariant: the job ends as a whole. A process fails if a signal ends it or its exit code is not 0.
When a process fails, the supervisor reports which process it was and how it ended. It then sends
SIGTERM to the other processes, and SIGKILL to the processes that are left `grace_s` seconds later.
It exits with the exit code of the failed process, or with 128 + the signal's number. With default
flags, the job has ended less than 40 seconds after the failure, and usually much sooner. When a
process finishes successfully, the other processes may run for `linger_s` seconds more.

The supervisor forwards SIGINT and SIGTERM to every process. The processes then have `linger_s`
seconds to commit their progress; a second signal kills them. The supervisor exits with their exit
code (130 or 143). If the supervisor itself is killed, the kernel kills its processes (on Linux
only). Anything that a process has left running in its session is killed at the end.

Each --service is a command that runs alongside the processes. It is split as a shell would split
it, but run without a shell. When all processes have ended, the services get SIGTERM. A service that
ends earlier counts as a failed process; an exit code of 0 is then replaced with 75.

With --restarts=R, the supervisor starts the job again up to R times after a failure that may be
transient: a signal, exit code 75, or the end of a service with an exit code other than 2.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import BinaryIO

from absl import flags

FLAGS = flags.FlagValues()
flags.DEFINE_integer(
  'processes',
  None,
  'Number of processes to start.',
  lower_bound=1,
  required=True,
  flag_values=FLAGS,
)
flags.DEFINE_float(
  'grace_s',
  10.0,
  'Seconds between SIGTERM and SIGKILL for processes that have not ended.',
  lower_bound=0,
  flag_values=FLAGS,
)
flags.DEFINE_float(
  'linger_s',
  600.0,
  'Maximum seconds between the end of the first process and the end of the last.',
  lower_bound=0,
  flag_values=FLAGS,
)
flags.DEFINE_integer(
  'restarts',
  0,
  'Maximum number of times that the job is started again after a failure that may be transient.',
  lower_bound=0,
  flag_values=FLAGS,
)
flags.DEFINE_integer(
  'gpus',
  0,
  'Number N of GPUs of each process: the first process gets GPUs 0 to N - 1, the second the next '
  'N, and so on. If 0, each process sees all GPUs.',
  lower_bound=0,
  flag_values=FLAGS,
)
flags.DEFINE_multi_string(
  'service', [], 'Command to run alongside the processes; may be repeated.', flag_values=FLAGS
)

_PR_SET_PDEATHSIG = 1
_DRAIN_S = 5.0
"""Maximum time in seconds for processes to disappear after SIGKILL. The threads that read their
output then have the same time to finish.
"""
_CAUSE_S = 1.0
"""Seconds to wait, after a process has ended with a code in `_CONSEQUENCES`, for the end of the
process that may be the cause.
"""
_CONSEQUENCES = (-signal.SIGABRT, os.EX_TEMPFAIL)
"""Values of `ProcessEnd.code` for a process that ends because another process has ended: JAX aborts
the process, or the trainer exits with code 75.
"""
_OF_JOB = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
"""Environment variables with which a process joins its job. Services do not get them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessEnd:
  """The end of a process."""

  label: str
  """The number of a process, or 's' followed by the number of a service."""
  code: int
  """Return code as in `subprocess`: an exit code, or the negated number of a signal."""

  @property
  def of_service(self) -> bool:
    return self.label.startswith('s')

  @property
  def is_bad(self) -> bool:
    """Whether this end counts as a failure, which ends the job.

    The end of a service always counts as a failure, because services must run until the processes
    have ended.
    """
    return self.of_service or self.code != 0

  @property
  def exit_code(self) -> int:
    if self.of_service and self.code == 0:
      return os.EX_TEMPFAIL
    return self.code if self.code >= 0 else 128 - self.code

  @property
  def may_pass(self) -> bool:
    """Whether the cause of this end may be transient, so that a restart of the job may succeed."""
    return self.code < 0 or self.exit_code == os.EX_TEMPFAIL or (self.of_service and self.code != 2)

  @property
  def name(self) -> str:
    return f'service {self.label[1:]}' if self.of_service else f'process {self.label}'

  def __str__(self) -> str:
    if self.code >= 0:
      return f'with exit code {self.code}'
    return f'by signal {signal.Signals(-self.code).name}'


class Unstartable(Exception):
  """Raised if a command of the job cannot be started. The message is one line."""


def _say(text: str) -> None:
  sys.stderr.write(f'local: {text}\n')
  sys.stderr.flush()


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def _die_with_parent() -> Callable[[], None] | None:
  """Returns a function that a child process calls before it executes its command.

  The function asks the kernel to send SIGKILL to the child when the supervisor dies. Returns None
  on systems other than Linux, which lack this feature.
  """
  if not sys.platform.startswith('linux'):
    return None
  prctl = ctypes.CDLL(None, use_errno=True).prctl
  parent = os.getpid()

  def before_exec() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The supervisor died before the request was made.
      os._exit(128 + signal.SIGKILL)

  return before_exec


def _start(
  command: Sequence[str], count: int, services: Sequence[Sequence[str]], gpus: int
) -> dict[str, subprocess.Popen]:
  """Starts the services, then the processes. Returns all, keyed by label (`ProcessEnd.label`)."""
  address = f'127.0.0.1:{_free_port()}'
  threads = max(1, len(os.sched_getaffinity(0)) // count) if sys.platform.startswith('linux') else 1
  before_exec = _die_with_parent()
  outside = {name: value for name, value in os.environ.items() if name not in _OF_JOB}
  shared = {'NPROC': str(threads), 'PYTHONUNBUFFERED': '1', **outside}
  job = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(count)}
  members: list[tuple[str, Sequence[str], Mapping[str, str]]] = [
    (f's{i}', service, shared) for i, service in enumerate(services)
  ]
  for i in range(count):
    numbered = {'JAX_PROCESS_ID': str(i)}
    if gpus:
      numbered['CUDA_VISIBLE_DEVICES'] = ','.join(map(str, range(i * gpus, (i + 1) * gpus)))
    members.append((str(i), command, {**shared, **job, **numbered}))
  processes: dict[str, subprocess.Popen] = {}
  for label, argv, env in members:
    try:
      processes[label] = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # In a separate session, a process gets a terminal's Ctrl-C only from the supervisor.
        start_new_session=True,
        preexec_fn=before_exec,
      )
    except OSError as error:
      for process in processes.values():
        process.kill()
      raise Unstartable(f'{argv[0]}: cannot be started: {error.strerror}') from error
  return processes


def _pass_on(source: BinaryIO, target: BinaryIO, prefix: bytes, lock: threading.Lock) -> None:
  wanted = True
  for line in source:
    try:
      if wanted:
        with lock:
          target.write(prefix + line.rstrip(b'\n') + b'\n')
          target.flush()
    # The reader of `target` has exited. The loop keeps reading `source`, because the process would
    # otherwise block on a full pipe.
    except BrokenPipeError:
      wanted = False


class JobSupervisor:
  """Runs a job: starts its processes, waits until all have ended, and restarts them if allowed."""

  def __init__(
    self,
    command: Sequence[str],
    count: int,
    *,
    services: Sequence[Sequence[str]] = (),
    restarts: int = 0,
    gpus: int = 0,
    grace_s: float,
    linger_s: float,
  ):
    self._command, self._count, self._services = command, count, services
    self._restarts, self._gpus = restarts, gpus
    self._grace_s = grace_s
    self._linger_s = linger_s
    self._asked: signal.Signals | None = None
    self._deadline: float | None = None
    self._forget()

  def _forget(self) -> None:
    """Clears the state of the processes, so that the job can be started again."""
    self._processes: dict[str, subprocess.Popen] = {}
    self._ends: queue.SimpleQueue[ProcessEnd] = queue.SimpleQueue()
    self._ended: dict[str, ProcessEnd] = {}
    self._readers: list[threading.Thread] = []

  def run(self) -> int:
    """Runs the job, restarts included, and returns its exit code.

    Raises:
      Unstartable: if a command cannot be started.
    """
    started = 0
    while True:
      culprit = self._run_once()
      code = self._exit_code(culprit)
      if culprit is None or self._asked is not None or not culprit.may_pass:
        return code
      if started == self._restarts:
        if started:
          _say(f'started again {started} times; giving up')
        return code
      started += 1
      _say(f'starting the job again ({started} of {self._restarts})')
      self._forget()
      self._deadline = None

  def _run_once(self) -> ProcessEnd | None:
    """Runs the job once.

    Returns the end of the process that caused a failure, or None if all processes ended
    successfully.
    """
    self._processes = _start(self._command, self._count, self._services, self._gpus)
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._forward)
    if self._asked is not None:  # A signal arrived while the processes were being started.
      self._signal(self._trainers_left(), self._asked)
    self._watch()
    culprit = self._first_bad_end()
    if culprit is not None and self._asked is None:
      _say(
        f'{culprit.name} ended first, {culprit}; stopping the other {len(self._trainers_left())} '
        f'within {self._grace_s:g} s'
      )
      self._stop(self._trainers_left)
    self._stop(self._left)
    self._clean_up()
    return culprit

  def _watch(self) -> None:
    """Starts three threads per process: one waits for its end, the others read stdout and stderr.

    This happens after all processes have been started, because forking is unsafe with threads.
    """
    lock = threading.Lock()
    for label, process in self._processes.items():
      prefix = f'[{label}] '.encode()
      for source, target in (
        (process.stdout, sys.stdout.buffer),
        (process.stderr, sys.stderr.buffer),
      ):
        reader = threading.Thread(target=_pass_on, args=(source, target, prefix, lock), daemon=True)
        reader.start()
        self._readers.append(reader)
      waiter = threading.Thread(target=_wait_for, args=(label, process, self._ends), daemon=True)
      waiter.start()

  def _next_end(self, deadline: float) -> ProcessEnd | None:
    """Waits for the next process to end and returns its end; None if the deadline passes first."""
    try:
      end = self._ends.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
      return None
    self._ended[end.label] = end
    return end

  def _first_bad_end(self) -> ProcessEnd | None:
    """Waits until all processes have ended or one has failed. Kills the processes that are left at
    the deadline, if there is one.

    Returns the end that caused the failure, or None if all processes ended successfully.
    """
    while self._trainers_left():
      # Each wait is short, because a signal handler may set the deadline during the wait.
      look = time.monotonic() + 0.5
      end = self._next_end(look if self._deadline is None else min(look, self._deadline))
      if end is None and self._deadline is not None and time.monotonic() >= self._deadline:
        _say(
          f'processes {_listed(self._trainers_left())} have not ended within {self._linger_s:g} s; '
          'killing them'
        )
        self._kill(self._trainers_left)
        break
      elif end is not None and end.is_bad and self._asked is None:
        return self._likeliest(end)
      elif end is not None and not end.of_service and self._deadline is None:
        self._deadline = time.monotonic() + self._linger_s
    bad = [end for end in self._ended.values() if end.code != 0 and not end.of_service]
    expected = () if self._asked is None else (-self._asked, 128 + self._asked)
    return next((end for end in bad if end.code not in expected), bad[0] if bad else None)

  def _likeliest(self, first: ProcessEnd) -> ProcessEnd:
    """Returns the end that probably caused the failure.

    That is `first`, unless its exit code indicates a consequence of another failure and such a
    failure is reported within `_CAUSE_S` seconds.
    """
    deadline = time.monotonic() + _CAUSE_S
    end: ProcessEnd | None = first
    while end is not None:
      if end.is_bad and end.code not in _CONSEQUENCES:
        return end
      end = self._next_end(deadline) if self._left() else None
    return first

  def _stop(self, left: Callable[[], list[str]]) -> None:
    """Stops the processes that `left` lists: sends SIGTERM, and SIGKILL after the grace period."""
    self._signal(left(), signal.SIGTERM)
    if not self._all_ended(left, time.monotonic() + self._grace_s):
      _say(f'killing processes {_listed(left())}, which SIGTERM did not end')
      self._kill(left)

  def _kill(self, left: Callable[[], list[str]]) -> None:
    self._signal(left(), signal.SIGKILL)
    if not self._all_ended(left, time.monotonic() + _DRAIN_S):
      _say(f'processes {_listed(left())} do not vanish even after SIGKILL; leaving them')

  def _all_ended(self, left: Callable[[], list[str]], deadline: float) -> bool:
    while left():
      if self._next_end(deadline) is None:
        return False
    return True

  def _forward(self, number: int, frame: object) -> None:
    again = self._asked is not None
    self._asked = signal.Signals(number)
    self._deadline = time.monotonic() + self._linger_s
    if again:
      self._signal(self._processes, signal.SIGKILL)
    else:  # Services get no signal yet, because the trainer processes still need them.
      self._signal(self._trainers_left(), self._asked)

  def _left(self) -> list[str]:
    return [label for label in self._processes if label not in self._ended]

  def _trainers_left(self) -> list[str]:
    return [label for label in self._left() if not label.startswith('s')]

  def _signal(self, labels: Iterable[str], number: signal.Signals) -> None:
    for label in labels:
      # `send_signal` does nothing for a process whose end has already been collected.
      self._processes[label].send_signal(number)

  def _clean_up(self) -> None:
    for process in self._processes.values():
      try:
        os.killpg(process.pid, signal.SIGKILL)
      except ProcessLookupError:
        continue  # No process of the process group is left.
    deadline = time.monotonic() + _DRAIN_S
    for reader in self._readers:
      reader.join(max(0.0, deadline - time.monotonic()))

  def _exit_code(self, culprit: ProcessEnd | None) -> int:
    if culprit is None:
      return 0
    for end in self._ended.values():
      if end.label != culprit.label:
        _say(f'{end.name} ended {end}')
    if self._asked is not None:
      _say(f'stopped by {self._asked.name}; {culprit.name} ended {culprit}')
    else:
      _say(f'culprit: {culprit.name}, ended {culprit}')
    return culprit.exit_code


def _wait_for(label: str, process: subprocess.Popen, ends: queue.SimpleQueue[ProcessEnd]) -> None:
  # Wait 'process': unbounded: a process runs as long as the job.
  ends.put(ProcessEnd(label=label, code=process.wait()))


def _listed(labels: Sequence[str]) -> str:
  return ', '.join(labels)


def main(argv: Sequence[str]) -> int:
  """Runs the job that the command line describes, and returns the job's exit code; 2 if the command
  line is invalid or a command cannot be started.
  """
  try:
    command = FLAGS(list(argv))[1:]
    services = [shlex.split(service) for service in FLAGS.service]
  except (flags.Error, ValueError) as error:
    _say(' '.join(str(error).split()))
    return 2
  if not command:
    _say('no command given; wanted local.py --processes=N -- COMMAND [ARGUMENT ...]')
    return 2
  if not all(services):
    _say('--service: empty, wanted a command')
    return 2
  supervisor = JobSupervisor(
    command,
    FLAGS.processes,
    services=services,
    restarts=FLAGS.restarts,
    gpus=FLAGS.gpus,
    grace_s=FLAGS.grace_s,
    linger_s=FLAGS.linger_s,
  )
  try:
    return supervisor.run()
  except Unstartable as error:
    _say(str(error))
    return 2


if __name__ == '__main__':
  sys.exit(main(sys.argv))
