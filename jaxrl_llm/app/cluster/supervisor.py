"""Starts N processes of one job on this machine and supervises them.

  python launch/cluster/local.py --processes=2 [--grace_s=10] [--restarts=3] [--service=COMMAND ...]
      -- COMMAND [ARGUMENT ...]

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

Each --service is a command beside them, in the shell's quoting, but run without a shell. Services
end with the processes: they get SIGTERM once these have ended. When a service ends before, the job
ends as it does when a process fails.

With --restarts, the job is started again up to that many times when it ended because of something
that may pass: a signal, exit code 75, or a service's end with another code than 2.
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
  'How many processes to start.',
  lower_bound=1,
  required=True,
  flag_values=FLAGS,
)
flags.DEFINE_float(
  'grace_s',
  10.0,
  'Seconds between SIGTERM and SIGKILL for those that are left.',
  lower_bound=0,
  flag_values=FLAGS,
)
flags.DEFINE_float(
  'linger_s',
  600.0,
  'Seconds that may pass between the first end and the last.',
  lower_bound=0,
  flag_values=FLAGS,
)
flags.DEFINE_integer(
  'restarts',
  0,
  'How many times the job is started again after a signal or exit code 75.',
  lower_bound=0,
  flag_values=FLAGS,
)
flags.DEFINE_integer(
  'gpus',
  0,
  'GPUs of each process: the first has 0 … N - 1, the second the next ones; 0: all see all.',
  lower_bound=0,
  flag_values=FLAGS,
)
flags.DEFINE_multi_string(
  'service', [], 'Command that runs beside the processes; may be repeated.', flag_values=FLAGS
)

_PR_SET_PDEATHSIG = 1
_DRAIN_S = 5.0
"""Seconds for processes to vanish after SIGKILL, and for the last lines of output after that."""
_CAUSE_S = 1.0
"""Seconds to look for the cause of an end that is a consequence."""
_CONSEQUENCES = (-signal.SIGABRT, os.EX_TEMPFAIL)
"""How a process ends because another one is gone: JAX aborts it, or the trainer leaves with 75."""
_OF_JOB = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
"""Variables by which a process finds its job; services have none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessEnd:
  """How a process ended."""

  label: str
  """Number of a process; 's' and the number of a service."""
  code: int
  """As subprocess has it: an exit code, or minus the signal."""

  @property
  def of_service(self) -> bool:
    return self.label.startswith('s')

  @property
  def is_bad(self) -> bool:
    """Whether it ends the job: a service has to outlive the processes."""
    return self.of_service or self.code != 0

  @property
  def exit_code(self) -> int:
    if self.of_service and self.code == 0:
      return os.EX_TEMPFAIL
    return self.code if self.code >= 0 else 128 - self.code

  @property
  def may_pass(self) -> bool:
    """Whether the job may do better when it is started again."""
    return self.code < 0 or self.exit_code == os.EX_TEMPFAIL or (self.of_service and self.code != 2)

  @property
  def name(self) -> str:
    return f'service {self.label[1:]}' if self.of_service else f'process {self.label}'

  def __str__(self) -> str:
    if self.code >= 0:
      return f'with exit code {self.code}'
    return f'by signal {signal.Signals(-self.code).name}'


class Unstartable(Exception):
  """A command of the job is no program; the message is one line."""


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


def _start(
  command: Sequence[str], count: int, services: Sequence[Sequence[str]], gpus: int
) -> dict[str, subprocess.Popen]:
  """Returns the started processes by label, services first."""
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
    own = {'JAX_PROCESS_ID': str(i)}
    if gpus:
      own['CUDA_VISIBLE_DEVICES'] = ','.join(map(str, range(i * gpus, (i + 1) * gpus)))
    members.append((str(i), command, {**shared, **job, **own}))
  processes: dict[str, subprocess.Popen] = {}
  for label, argv, env in members:
    try:
      processes[label] = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A terminal's Ctrl-C then reaches them once, through the supervisor.
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
    # Nobody reads any more; a process must not block on a full pipe for that.
    except BrokenPipeError:
      wanted = False


class JobSupervisor:
  """Runs a job: starts its processes, and watches them from the first end to the last."""

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
    """Prepares for another start."""
    self._processes: dict[str, subprocess.Popen] = {}
    self._ends: queue.SimpleQueue[ProcessEnd] = queue.SimpleQueue()
    self._ended: dict[str, ProcessEnd] = {}
    self._readers: list[threading.Thread] = []

  def run(self) -> int:
    """Returns the job's exit code. Raises Unstartable."""
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
    """Runs the job from start to end; returns the end that is to blame, None if all ended well."""
    self._processes = _start(self._command, self._count, self._services, self._gpus)
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._forward)
    if self._asked is not None:  # While they were being started.
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
    """One thread waits for each process and one for each of its outputs; they start after the last
    fork.
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
    """The next process to end; None when the deadline has passed."""
    try:
      end = self._ends.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
      return None
    self._ended[end.label] = end
    return end

  def _first_bad_end(self) -> ProcessEnd | None:
    """Waits until all have ended well, or one has not; which one that was."""
    while self._trainers_left():
      # Short looks, because a signal's handler sets the deadline meanwhile.
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
    """The first to end, unless its end is a consequence and its cause is seen ending just after
    it.
    """
    deadline = time.monotonic() + _CAUSE_S
    end: ProcessEnd | None = first
    while end is not None:
      if end.is_bad and end.code not in _CONSEQUENCES:
        return end
      end = self._next_end(deadline) if self._left() else None
    return first

  def _stop(self, left: Callable[[], list[str]]) -> None:
    """Ends those that `left` lists: SIGTERM, and after the grace time SIGKILL."""
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
    else:  # The services are needed until the processes have ended.
      self._signal(self._trainers_left(), self._asked)

  def _left(self) -> list[str]:
    return [label for label in self._processes if label not in self._ended]

  def _trainers_left(self) -> list[str]:
    return [label for label in self._left() if not label.startswith('s')]

  def _signal(self, labels: Iterable[str], number: signal.Signals) -> None:
    for label in labels:
      # Does nothing for one that has been waited for.
      self._processes[label].send_signal(number)

  def _clean_up(self) -> None:
    for process in self._processes.values():
      try:
        os.killpg(process.pid, signal.SIGKILL)
      except ProcessLookupError:
        continue  # It left nothing behind.
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
  # wait process: none, its life is the job's; the supervisor's deadlines end it
  ends.put(ProcessEnd(label=label, code=process.wait()))


def _listed(labels: Sequence[str]) -> str:
  return ', '.join(labels)


def main(argv: Sequence[str]) -> int:
  """Returns the job's exit code; 2 for a command line that cannot be used."""
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
