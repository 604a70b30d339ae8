"""Code of the supervisor: the first process of a sandbox, which runs one program under limits and
reports how the program ended.

Invariants: the supervisor runs no untrusted code itself, and no process of the sandbox outlives the
supervisor, which ends when the host closes the control socket. The program's process is forked
before the tests arrive. Its only descriptors are its input, its output and the socket to the tests'
process, and it cannot inspect its parent or the tests' process. Expected outputs never enter the
program's sandbox, because outputs are compared on the host, or by a checker in another sandbox.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from . import kernel
from .candidate import Candidate, lines_of, run_program
from .channel import Channel, ChannelClosed
from .examiner import Examiner
from .usage import Usage

_RAISED, _NO_MEMORY = 101, 102
"""Exit codes of a program's process that raised an exception or ran out of memory. A program gains
nothing by faking them.
"""
_LOOK_S = 0.02
"""Maximum seconds between checks of the limits on all processes together."""
_LAST_WORDS_S = 1.0
"""Maximum seconds for a program's process to end after it has closed its connection to the
tests.
"""
_REPORT_BYTES = 64 << 20
_TAIL = 2000
"""Number of characters that are reported from the end of standard error."""
_PAGE = os.sysconf('SC_PAGE_SIZE')
_SOCKET = 1 << 18
"""Estimated memory of a socket in bytes. Linux buffers up to 212,992 unread bytes by default."""


@dataclasses.dataclass(frozen=True)
class LimitsMessage:
  """Resource limits in the form that `sandbox.Limits.message` returns."""

  wall_s: float
  cpu_s: float
  memory_bytes: int
  processes: int
  files: int
  file_bytes: int
  output_bytes: int


class _Pipe:
  """A pipe and the output that was read from it, up to a limit in bytes."""

  def __init__(self, limit: int):
    self.reader, self.writer = os.pipe()
    os.set_blocking(self.reader, False)
    self.data, self.open, self._limit = bytearray(), True, limit

  @property
  def full(self) -> bool:
    return len(self.data) > self._limit

  def read(self) -> None:
    """Reads the output that is available, without waiting."""
    with contextlib.suppress(BlockingIOError):
      while self.open and not self.full:
        part = os.read(self.reader, 1 << 16)
        self.data += part
        self.open = bool(part)

  def text(self) -> str:
    return self.data[: self._limit].decode(errors='replace')


class Supervisor:
  def __init__(self, control: Channel, *, alone: bool, proc: str):
    """
    Args:
      control: channel to the host.
      alone: whether this is the first process of its own PID namespace.
      proc: procfs directory. If it is not /proc, it belongs to another PID namespace.
    """
    self._control, self._alone, self._proc = control, alone, _Proc(proc, alone=alone)
    self._deadline = 0.0
    self._usage = Usage(proc)

  def run(self) -> None:
    """Serves one program. Raises ChannelClosed when the host closes the control channel."""
    self._control.send({'ready': True})
    task = self._control.receive()
    self._limits = LimitsMessage(**task['limits'])
    self._deadline = time.monotonic() + self._limits.wall_s
    if task['form'] == 'tests':
      self._control.send(self._run_tests(task['program']))
    while True:
      given = self._control.receive()
      self._control.send(self._run_once(task['program'], given['stdin'], given.get('limits', {})))

  def _open_run(self, pipes: list[_Pipe], limits: LimitsMessage | None = None) -> _Run:
    return _Run(
      limits or self._limits,
      self._deadline,
      pipes,
      usage=self._usage,
      control=self._control,
      alone=self._alone,
      proc=self._proc,
    )

  def _run_once(self, program: str, stdin: str, lower: dict[str, float]) -> dict[str, Any]:
    """Runs the program once. Returns a message that describes how it ended; its entry `spent` is
    True if no time is left for further runs.

    Args:
      lower: limits of this run, keyed by name. A limit has no effect if it is above the limit for
        the whole program.
    """
    cpu_s = self._usage.used_s + lower.get('cpu_s', math.inf)
    limits = dataclasses.replace(
      self._limits,
      cpu_s=min(self._limits.cpu_s, cpu_s),
      memory_bytes=min(self._limits.memory_bytes, lower.get('memory_bytes', math.inf)),
    )
    given = os.memfd_create('stdin', os.MFD_ALLOW_SEALING)
    with open(given, 'wb', closefd=False) as file:
      file.write(stdin.encode('utf-8', 'surrogatepass'))
    # The file must not grow, because no limit counts its memory.
    fcntl.fcntl(given, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.lseek(given, 0, os.SEEK_SET)
    output, error = (_Pipe(self._limits.output_bytes) for _ in range(2))
    pid = self._fork(
      lambda: run_program(program, '__main__'),
      stdin=given,
      stdout=output,
      stderr=error,
      limits=limits,
    )
    os.close(given)
    run = self._open_run([output, error], limits)
    run.wait_for(pid)
    run.finish()
    ended = run.ended[pid]
    # A run that reaches only its own lower limit leaves time for further runs. A run that reaches
    # the limit for the whole program leaves none.
    lowered = limits.cpu_s < self._limits.cpu_s and self._usage.used_s < self._limits.cpu_s
    spent = ended['ended'] == 'wall' or (ended['ended'] == 'cpu' and not lowered)
    return {
      **ended,
      'stdout': output.text(),
      'stderr': error.text()[-_TAIL:],
      'spent': spent,
    }

  def _run_tests(self, program: str) -> dict[str, Any]:
    output, errors = (_Pipe(self._limits.output_bytes) for _ in range(2))
    theirs, ours = socket.socketpair()

    def serve() -> None:
      namespace = run_program(program, 'program')
      with contextlib.suppress(ChannelClosed):
        Candidate(Channel(theirs), namespace).serve()

    candidate = self._fork(serve, stdout=output, stderr=errors, keep=(theirs.fileno(),))
    theirs.close()
    # The program's process begins as a copy of this one, so the tests are received only after the
    # fork.
    tests = self._control.receive()
    report = _Pipe(_REPORT_BYTES)

    def examine() -> None:
      examiner = Examiner(Channel(ours), tests['entry_point'])
      with open(report.writer, 'w', closefd=False) as file:
        for passed in examiner.run(tests['tests']):
          print(json.dumps([passed, examiner.error]), file=file, flush=True)

    examining = self._fork(
      examine, stdout=report, keep=(ours.fileno(), report.writer), untrusted=False
    )
    ours.close()
    run = self._open_run([output, errors, report])
    run.wait_for(examining)
    lines = [
      json.loads(line) for line in report.data.splitlines(keepends=True) if line.endswith(b'\n')
    ]
    error = lines[-1][1] if lines else None
    finished = run.ended[examining]['ended'] == 'ok'
    if finished and error and error['gone']:
      run.wait_for(candidate, _LAST_WORDS_S)
    run.finish()
    # If the tests did not finish (killed, or over a limit), the report describes how the tests' own
    # process ended.
    ended = run.ended.get(candidate, {'ended': 'ok'}) if finished else run.ended[examining]
    return {
      **ended,
      'passed': [passed for passed, _ in lines],
      'error': error,
      'stderr': errors.text()[-_TAIL:],
    }

  def _fork(
    self,
    work: Callable[[], Any],
    *,
    stdout: _Pipe,
    stderr: _Pipe | None = None,
    stdin: int | None = None,
    keep: tuple[int, ...] = (),
    untrusted: bool = True,
    limits: LimitsMessage | None = None,
  ) -> int:
    pid = os.fork()
    if pid:
      for pipe in (stdout, stderr):
        if pipe:
          os.close(pipe.writer)
      return pid
    code = 1
    try:
      null = os.open('/dev/null', os.O_RDWR)
      os.dup2(null if stdin is None else stdin, 0)
      os.dup2(stdout.writer if untrusted else null, 1)
      os.dup2(stderr.writer if stderr else null, 2)
      _close_all_but({0, 1, 2, *keep})
      if self._alone:
        os.chdir('/tmp')
      if untrusted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
      self._confine(untrusted, limits or self._limits)
      code = _exit_code(work)
    finally:
      os._exit(code)

  def _confine(self, untrusted: bool, limits: LimitsMessage) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    os.setsid()
    # Each process has its own limit, in addition to the limit on all processes together.
    cpu_s = max(1, math.ceil(limits.cpu_s - self._usage.used_s))
    for name, soft, hard in (
      ('CPU', cpu_s, cpu_s + 1),
      ('AS', limits.memory_bytes, limits.memory_bytes),
      ('NOFILE', limits.files, limits.files),
      ('FSIZE', limits.file_bytes, limits.file_bytes),
      ('CORE', 0, 0),
      ('MSGQUEUE', 0, 0),
      ('MEMLOCK', 0, 0),
    ):
      _limit(name, soft, hard)
    if self._alone:  # Outside a PID namespace, the user's other processes would also count.
      _limit('NPROC', limits.processes, limits.processes)
    kernel.gain_nothing()
    kernel.set_inspectable(untrusted)
    kernel.deny_calls()


class _Proc:
  """Reads kernel data on a sandbox's processes from the procfs directory `path`.

  PIDs are those of the PID namespace to which the directory belongs.
  """

  def __init__(self, path: str, *, alone: bool):
    self._path, self._alone, self._pid = path, alone, 0
    with contextlib.suppress(OSError):
      self._pid = int(os.readlink(f'{path}/self'))

  def processes(self) -> list[int]:
    """Returns the PIDs of all processes of the sandbox except this one."""
    if self._alone and self._pid == os.getpid():
      return [
        int(name) for name in os.listdir(self._path) if name.isdecimal() and int(name) != self._pid
      ]
    return self._descendants(self._pid)

  def _descendants(self, pid: int) -> list[int]:
    descendants = []
    with contextlib.suppress(OSError), open(f'{self._path}/{pid}/task/{pid}/children') as file:
      for child in map(int, file.read().split()):
        descendants += [child, *self._descendants(child)]
    return descendants

  def resident_bytes(self, pid: int) -> int:
    with contextlib.suppress(OSError, IndexError), open(f'{self._path}/{pid}/statm') as file:
      return int(file.read().split()[1]) * _PAGE
    return 0

  def buffer_bytes(self) -> int:
    """Returns the number of bytes that the sandbox's sockets can buffer. This memory belongs to no
    process.

    Returns 0 if the sandbox shares the host's namespaces.
    """
    with (
      contextlib.suppress(OSError, IndexError, ValueError),
      open(f'{self._path}/net/sockstat') as file,
    ):
      return int(file.readline().split()[2]) * _SOCKET if self._alone else 0
    return 0


class _Run:
  """The processes of one run: waits for them, enforces their limits and kills those that remain."""

  def __init__(
    self,
    limits: LimitsMessage,
    deadline: float,
    pipes: list[_Pipe],
    *,
    usage: Usage,
    control: Channel,
    alone: bool,
    proc: _Proc,
  ):
    self.ended: dict[int, dict[str, Any]] = {}
    """Ending of each process that has ended, keyed by PID."""
    self._limits, self._deadline, self._control, self._alone = limits, deadline, control, alone
    self._usage, self._proc = usage, proc
    self._pipes = {pipe.reader: pipe for pipe in pipes}
    self._reason: str | None = None
    """Name of the first limit that was exceeded, after which all processes were killed; None if no
    limit was exceeded.
    """
    self._poll = select.poll()
    for descriptor in (*self._pipes, control.socket.fileno()):
      self._poll.register(descriptor, select.POLLIN)

  def wait_for(self, pid: int, seconds: float = math.inf) -> None:
    """Waits until the process has ended, for at most `seconds` seconds.

    Kills all processes if they exceed a limit. Raises ChannelClosed if the host closes the control
    socket during the wait.
    """
    until = time.monotonic() + seconds
    while pid not in self.ended and time.monotonic() < until:
      self._read(pid)
      reason = self._exceeded()
      if reason and self._reason is None:
        self._reason = reason
        self._kill_all()
      self._reap()
    # The process may have written more output between the last read and its end.
    for pipe in self._pipes.values():
      pipe.read()
      if pipe.full and pid in self.ended:
        self.ended[pid] = {'ended': 'output'}

  def finish(self) -> None:
    """Kills the remaining processes and returns when none is left."""
    self._kill_all()
    while self._reap():
      time.sleep(0.001)
      self._kill_all()
    self._usage.close_run()
    for pipe in self._pipes.values():
      pipe.read()
      os.close(pipe.reader)

  def _read(self, pid: int) -> None:
    """Waits up to `_LOOK_S` seconds for output or for the process to end, and reads the output."""
    process = os.pidfd_open(pid)
    self._poll.register(process, select.POLLIN)
    try:
      for descriptor, _ in self._poll.poll(_LOOK_S * 1000):
        if descriptor == self._control.socket.fileno():
          raise ChannelClosed('the host has closed the control socket')
        if descriptor in self._pipes:
          self._pipes[descriptor].read()
          if not self._pipes[descriptor].open:
            self._poll.unregister(descriptor)
    finally:
      self._poll.unregister(process)
      os.close(process)

  def _exceeded(self) -> str | None:
    """Returns the name of a limit that all processes together have exceeded, or None."""
    if any(pipe.full for pipe in self._pipes.values()):
      return 'output'
    processes = self._proc.processes()
    self._usage.look(processes)
    if self._usage.used_s > self._limits.cpu_s:
      return 'cpu'
    if time.monotonic() > self._deadline:
      return 'starved' if self._usage.is_starved(self._limits.wall_s) else 'wall'
    if len(processes) > self._limits.processes + 2:
      return 'processes'
    held = sum(map(self._proc.resident_bytes, processes)) + self._proc.buffer_bytes()
    return 'memory' if held > self._limits.memory_bytes else None

  def _reap(self) -> bool:
    """Reaps child processes that have ended. Returns whether any child processes are left."""
    while True:
      try:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
      except ChildProcessError:
        return False
      if pid == 0:
        return True
      self._usage.add_reaped(usage)
      self.ended[pid] = {'ended': self._reason} if self._reason else self._ending(status, usage)

  def _ending(self, status: int, usage: resource.struct_rusage) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    if -code == signal.SIGXCPU or (
      -code == signal.SIGKILL and self._usage.used_s >= self._limits.cpu_s
    ):
      return {'ended': 'cpu'}
    if code < 0:
      return {'ended': 'signal', 'code': -code}
    named = {0: 'ok', _RAISED: 'exception', _NO_MEMORY: 'memory'}
    return {'ended': named.get(code, 'exit'), 'code': code}

  def _kill_all(self) -> None:
    # PID -1 addresses all processes at once, including those that fork meanwhile.
    _kill([-1] if self._alone else self._proc.processes())


def _kill(pids: list[int]) -> None:
  for pid in pids:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)


def _limit(name: str, soft: int, hard: int) -> None:
  """Sets a resource limit. Values above the current hard limit are lowered to it."""
  number = getattr(resource, f'RLIMIT_{name}')
  granted = resource.getrlimit(number)[1]
  if granted != resource.RLIM_INFINITY:
    soft, hard = min(soft, granted), min(hard, granted)
  resource.setrlimit(number, (soft, hard))


def _close_all_but(keep: set[int]) -> None:
  below = -1
  for descriptor in [*sorted(keep), 1 << 20]:
    if descriptor > below + 1:  # closerange would treat an empty range as all descriptors.
      os.closerange(below + 1, descriptor)
    below = descriptor


def _exit_code(work: Callable[[], Any]) -> int:
  """Runs `work` in the same way as Python runs a main program. This includes the steps at exit:
  waiting for threads, calling registered functions and flushing files. Returns the exit code.
  """
  sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = [
    open(number, mode, encoding='utf-8', errors='backslashreplace', closefd=False)
    for number, mode in enumerate(('r', 'w', 'w'))
  ]
  code = 0
  try:
    work()
  except SystemExit as error:
    code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
  except BaseException as error:
    code = _NO_MEMORY if isinstance(error, MemoryError) else _RAISED
    print(lines_of(error), file=sys.stderr)
  # Like Python at exit: ends the threads of executors, joins all other threads, and calls the
  # functions that the program has registered for the exit.
  threading._shutdown()
  atexit._run_exitfuncs()
  for stream in (sys.stdout, sys.stderr):
    try:
      if stream is not None and not getattr(stream, 'closed', False):
        stream.flush()
    except BaseException:  # The stream may be the program's own object, which can raise anything.
      code = 120  # Python's exit code if it cannot flush a stream.
  _flush_files()
  return code & 0xFF


def _flush_files() -> None:
  """Flushes files that the program has not closed, as Python does at exit."""
  variables = getattr(sys.modules.get('__main__'), '__dict__', {})
  for value in [sys.__stdout__, sys.__stderr__, *variables.values()]:
    if issubclass(type(value), io.IOBase):
      with contextlib.suppress(BaseException):
        value.flush()


def supervise(connection: socket.socket, *, alone: bool, proc: str = '/proc') -> None:
  """Runs one program under a `Supervisor`, then ends this process; never returns."""
  try:
    # SIGINT is ignored, because the program could otherwise interrupt this process and the tests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel.set_inspectable(False)
    if not alone:
      kernel.adopt_orphans()
    Supervisor(Channel(connection), alone=alone, proc=proc).run()
  except ChannelClosed:
    pass
  finally:
    if not alone:
      _kill(_Proc(proc, alone=False).processes())
    os._exit(0)
