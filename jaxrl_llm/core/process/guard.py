"""Process guard: runs a command and ends all its processes when the owner is gone.

  python guard.py --log=FILE [--log_bytes=N] [--remove_orphaned=PATH ...] [--grace_s=5] \\
    [--channel] -- COMMAND [ARGUMENT ...]

The guard is run by its file path, on Linux with Python 3.11 or later, and imports nothing of
jaxrl_llm. The owner is the process that starts the guard. It starts the guard with
`start_new_session=True` and, as stdin, a pipe whose write end only the owner has open. The owner
orders a stop by closing the pipe or by dying. SIGTERM, SIGINT and SIGHUP also order a stop.
COMMAND's output is appended to FILE, as is a line `guard: …` whenever the guard ends processes or
removes a file. Once FILE is larger than N bytes, only its last N / 2 bytes are kept, after a line
that says so; FILE may exceed N by the output of `_TRIM_S` seconds. With --channel, the guard's
stdout is a socket to the owner, and COMMAND uses this socket as stdin and stdout.

Invariant: when the guard has ended, every process that COMMAND started is gone, even if it called
setsid or ignored signals. A file in /dev/shm whose name matches `_NAMES` is gone, too, if the guard
saw one of those processes use it and no other process uses it. If the owner closed the pipe or
died, every PATH is gone. Otherwise the PATHs stay, since a live owner needs them to start COMMAND
again.

After an order to stop, COMMAND gets SIGTERM, and the whole process tree has `grace_s` seconds to
end. If COMMAND ends without such an order, the remaining processes are killed at once. The exit
code is COMMAND's (for a signal, 128 + its number), 0 after an order to stop, 127 if COMMAND cannot
be started, and 1 if a process survives SIGKILL after an order to stop.

Limits: /dev/shm is scanned ten times a second, or less often if scans would cost more than 1 % of a
core. A file whose users were all killed before the next scan may therefore stay. If the guard
itself gets SIGKILL, the kernel kills COMMAND, but COMMAND's descendants and files may stay. The
guard cannot inspect processes of other accounts or in other PID namespaces. It does not see which
files these processes use, and may remove such files.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SHARED = '/dev/shm'
_NAMES = re.compile(r'psm_|sem\.mp-|sem\.loky-|torch_|vllm')
"""Matches the beginning of the names of shared-memory files that servers create."""
_MAPPED = re.compile(rb' (\d+) +/dev/shm/')
"""Matches the inode in a line of /proc/PID/maps."""
_LOOK_S = 0.1
"""Seconds between scans of /dev/shm."""
_SCAN_S = 1.0
"""Minimum seconds between two inspections of the process tree if /dev/shm has no new files. They
look for users of the files that no process of the tree used before.
"""
_THRIFT = 125
"""Scans take at most 1 / _THRIFT of a core's time in the long run."""
_CREDIT_S = 0.2
"""CPU seconds by which scans may exceed the rate `1 / _THRIFT` at the start and after pauses."""
_VANISH_S = 30.0
"""Seconds to wait for processes to vanish after SIGKILL."""
_TRIM_S = 0.1
"""Seconds between checks of the log's size, if it is limited."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Process:
  pid: int
  name: str
  parent: int

  def __str__(self) -> str:
    return f'{self.pid} ({self.name})'


def _pids() -> list[int]:
  return sorted(int(name) for name in os.listdir('/proc') if name.isdecimal())


def _processes() -> Iterator[_Process]:
  for pid in _pids():
    try:
      with open(f'/proc/{pid}/stat', 'rb') as file:
        text = file.read().decode(errors='replace')
    except OSError:  # The process has ended meanwhile.
      continue
    # A name may itself contain parentheses and spaces.
    name, rest = text.split('(', 1)[1].rsplit(')', 1)
    yield _Process(pid, name, int(rest.split()[1]))


def _tree() -> Iterator[_Process]:
  """Yields all descendants of this process.

  Each descendant is yielded as soon as it is found, so that the caller can kill a process in time
  even if the process keeps forking and exiting.
  """
  tree = {os.getpid()}
  unrelated: list[_Process] = []
  for process in _processes():
    if process.parent in tree:
      tree.add(process.pid)
      yield process
    else:
      unrelated.append(process)
  # Processes are read in the order of their PIDs. If PIDs have wrapped around, a child may come
  # before its parent, so it is found only here.
  while late := [
    process for process in unrelated if process.parent in tree and process.pid not in tree
  ]:
    tree.update(process.pid for process in late)
    yield from late


def _files() -> set[tuple[str, int]]:
  """Returns the names and inodes of the shared-memory files whose names match `_NAMES`."""
  with contextlib.suppress(OSError), os.scandir(_SHARED) as entries:
    return {
      (e.name, e.inode())
      for e in entries
      if _NAMES.match(e.name) and e.is_file(follow_symlinks=False)
    }
  return set()


def _used_by(pid: int) -> set[int]:
  """Returns the inodes of shared-memory files that a process has mapped or open.

  Files are compared by inode because names change: glibc creates a semaphore under a temporary
  name, which /proc then shows as '(deleted)' forever.
  """
  used: set[int] = set()
  with contextlib.suppress(OSError):  # The process has ended, or belongs to another account.
    with open(f'/proc/{pid}/maps', 'rb') as maps:
      used.update(map(int, _MAPPED.findall(maps.read())))
    for fd in os.listdir(f'/proc/{pid}/fd'):
      with contextlib.suppress(OSError):  # The descriptor has been closed meanwhile.
        if os.readlink(f'/proc/{pid}/fd/{fd}').startswith(f'{_SHARED}/'):
          used.add(os.stat(f'/proc/{pid}/fd/{fd}').st_ino)
  return used


class _SharedMemory:
  """Records which shared-memory files the process tree has been seen to use."""

  def __init__(self) -> None:
    self._noted: set[tuple[str, int]] = set()
    self._foreign: set[tuple[str, int]] = set()
    self._next_scan = 0.0
    self._credit = _CREDIT_S
    self._credited = time.monotonic()

  def look(self, *, thorough: bool = False) -> float:
    """Records the files that the process tree uses now; returns the seconds until the next scan.

    Inspecting processes is expensive. They are inspected only while some files are not recorded: at
    once if one of these files is new, and otherwise from time to time or if `thorough` is set.
    """
    began = time.process_time()
    self._credit = min(_CREDIT_S, self._credit + (time.monotonic() - self._credited) / _THRIFT)
    self._credited = time.monotonic()
    present = _files()
    self._noted &= present
    unknown = present - self._noted
    due = thorough or time.monotonic() >= self._next_scan
    if unknown and (due or not unknown <= self._foreign):
      used = set().union(*(_used_by(process.pid) for process in _tree()))
      self._noted |= {file for file in unknown if file[1] in used}
      self._foreign = unknown - self._noted
      # Repeated checks use at most half of the permitted CPU time. The rest remains for new files.
      self._next_scan = time.monotonic() + max(_SCAN_S, 2 * _THRIFT * (time.process_time() - began))
    self._credit -= time.process_time() - began
    return max(_LOOK_S, -self._credit * _THRIFT)

  def remove(self, say: Callable[[str], None]) -> None:
    """Removes the remaining recorded files, except those that a process outside the tree uses."""
    remaining = self._noted & _files()
    if not remaining:
      return
    tree = {process.pid for process in _tree()}
    users = {inode: pid for pid in _pids() if pid not in tree for inode in _used_by(pid)}
    for name, inode in sorted(remaining):
      path = f'{_SHARED}/{name}'
      if inode in users:
        say(f'left {path}, which process {users[inode]} uses')
      else:
        _remove(path, say)


def _remove(path: str, say: Callable[[str], None]) -> None:
  if not os.path.lexists(path):
    return
  try:
    if os.path.isdir(path) and not os.path.islink(path):
      shutil.rmtree(path)
    else:
      os.unlink(path)
  except OSError as error:
    say(f'cannot remove {path}: {error}')
  else:
    say(f'removed {path}')


def _signal_source() -> int:
  """Returns a descriptor from which the numbers of arriving signals can be read."""
  source, target = os.pipe()
  for end in (source, target):
    os.set_blocking(end, False)
  signal.set_wakeup_fd(target, warn_on_full_buffer=False)
  for number in (*_STOPS, signal.SIGCHLD):
    signal.signal(number, lambda *_: None)
  return source


def _start(command: Sequence[str], log: BinaryIO, *, channel: bool) -> subprocess.Popen:
  """Starts COMMAND.

  The kernel kills COMMAND if the guard dies, and makes the guard the parent of COMMAND's orphaned
  descendants.
  """
  prctl = ctypes.CDLL(None, use_errno=True).prctl
  if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
    raise OSError(ctypes.get_errno(), 'the kernel cannot make the guard a subreaper')
  guard = os.getpid()

  def before_exec() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # The guard died before the prctl call.
      os._exit(128 + signal.SIGKILL)

  return subprocess.Popen(
    command,
    stdin=1 if channel else subprocess.DEVNULL,
    stdout=1 if channel else log,
    stderr=log,
    start_new_session=True,
    preexec_fn=before_exec,
  )


def _ending(code: int) -> str:
  """Describes how a process ended, given its `subprocess` return code."""
  if code >= 0:
    return f'with exit code {code}'
  return f'by signal {next((member.name for member in signal.Signals if member == -code), -code)}'


class _Log:
  """The file to which COMMAND's output is appended."""

  def __init__(self, path: str, limit: int | None):
    """
    Args:
      limit: size in bytes above which the log is cut to its last `limit` / 2 bytes; None for no
        limit.

    Raises OSError if the file cannot be opened.
    """
    self.file: BinaryIO = open(path, 'a+b', buffering=0)
    self.limit, self._removed = limit, 0

  def say(self, text: str) -> None:
    with contextlib.suppress(OSError):  # A full disk must not stop the guard.
      self.file.write(f'guard: {text}\n'.encode(errors='replace'))

  def trim(self) -> None:
    """Removes the beginning of a log that is too large.

    Output written between the last read and the truncation, some microseconds later, is lost.
    """
    if self.limit is None:
      return
    with contextlib.suppress(OSError):
      size = os.fstat(self.file.fileno()).st_size
      if size <= self.limit:
        return
      self.file.seek(size - self.limit // 2)
      tail = self.file.read(self.limit // 2)
      tail += self.file.read(self.limit // 2)  # Output written during the first read.
      tail = tail[tail.find(b'\n') + 1 :]
      # Every writer has the file open for appending, so the next line goes to its new end.
      os.ftruncate(self.file.fileno(), 0)
      self._removed += size - len(tail)
      self.say(f'removed about {self._removed} bytes of output before this line')
      self.file.write(tail)


class Guard:
  """Watches one command until all of its processes have ended."""

  def __init__(self, command: subprocess.Popen, signals: int, *, grace_s: float, log: _Log):
    self._command = command
    self._signals = signals
    self._sources = [signals, 0]
    self._grace_s = grace_s
    self._log, self._say = log, log.say
    self._memory = _SharedMemory()
    self._order: str | None = None
    self.orphaned = False
    """Whether the owner has closed its end of the pipe or died."""
    self._children = True

  def watch(self) -> None:
    """Waits until COMMAND ends or a stop is ordered."""
    while self._command.returncode is None and self._order is None:
      self._wait(self._memory.look())

  def end(self) -> int:
    """Ends the remaining processes and removes their files; returns the guard's exit code."""
    self._reap()
    self._memory.look(thorough=True)
    code = self._command.returncode
    if code is not None:
      self._say(f'stopping, because the command ended {_ending(code)}')
    else:
      self._say(f'stopping, because {self._order or "the guard failed"}')
      # The PID cannot be reused before the process is reaped.
      os.kill(self._command.pid, signal.SIGTERM)
      self._wait_for_all(time.monotonic() + self._grace_s)
      self._memory.look(thorough=True)
    all_gone = self._kill_all()
    self._log.trim()
    if code is None and self._command.returncode is not None:
      self._say(f'the command ended {_ending(self._command.returncode)}')
    self._memory.remove(self._say)
    if code is None:
      return 0 if all_gone else 1
    return code if code >= 0 else 128 - code

  def _wait(self, seconds: float) -> None:
    """Waits at most `seconds` for a signal or the closing of the pipe, and records an order to
    stop.
    """
    deadline = time.monotonic() + seconds
    while True:
      left = max(0.0, deadline - time.monotonic())
      most = left if self._log.limit is None else min(left, _TRIM_S)
      ready, _, _ = select.select(self._sources, [], [], most)
      self._log.trim()
      if ready or most == left:
        break
    if self._signals in ready:
      for number in os.read(self._signals, 4096):
        if number in _STOPS:
          self._order = self._order or f'it received {signal.Signals(number).name}'
    if 0 in ready and not os.read(0, 65536):
      self._sources.remove(0)
      self.orphaned = True
      self._order = self._order or 'the owner is gone or has closed the pipe'
    self._reap()

  def _reap(self) -> None:
    """Reaps ended children. Since orphans become the guard's children, no descendant is left once
    there is no child.
    """
    while self._children:
      try:
        pid, status = os.waitpid(-1, os.WNOHANG)
      except ChildProcessError:
        self._children = False
        return
      if pid == 0:
        return
      if pid == self._command.pid:
        self._command.returncode = os.waitstatus_to_exitcode(status)

  def _wait_for_all(self, deadline: float) -> None:
    while self._children and (left := deadline - time.monotonic()) > 0:
      self._wait(min(left, self._memory.look()))

  def _kill_all(self) -> bool:
    """Kills all descendants, repeatedly because they may fork. Returns whether all of them are
    gone.
    """
    killed: dict[int, str] = {}
    deadline = time.monotonic() + _VANISH_S
    while self._children and time.monotonic() < deadline:
      for process in _tree():
        with contextlib.suppress(OSError):  # The process has ended, or runs under another account.
          os.kill(process.pid, signal.SIGKILL)
          killed.setdefault(process.pid, str(process))
      self._wait(0.01)
    if killed:
      self._say(f'killed what was left: {", ".join(killed.values())}')
    if self._children:
      self._say(f'SIGKILL does not end {", ".join(map(str, _tree()))}; leaving them')
    return not self._children


def _bytes(text: str) -> int:
  value = int(text)
  if value < 1000:
    raise ValueError
  return value


def _seconds(text: str) -> float:
  value = float(text)
  if not 0 <= value < float('inf'):
    raise ValueError
  return value


def _complain(text: str) -> None:
  with contextlib.suppress(OSError):  # The reader of stderr may have exited.
    os.write(2, f'guard: {text}\n'.encode(errors='replace'))


def main(argv: Sequence[str]) -> int:
  """Runs the guard and returns its exit code. If the command line is invalid, raises SystemExit
  with code 2.
  """
  parser = argparse.ArgumentParser(
    prog='guard.py',
    usage=(
      '%(prog)s --log=FILE [--log_bytes=N] [--remove_orphaned=PATH ...] [--grace_s=5] [--channel] '
      '-- COMMAND [ARGUMENT ...]'
    ),
  )
  parser.add_argument('--log', required=True, help="File to which COMMAND's output is appended.")
  parser.add_argument(
    '--log_bytes', type=_bytes, help='Size above which only the end of the log is kept.'
  )
  parser.add_argument(
    '--remove_orphaned',
    action='append',
    default=[],
    help='File or directory to remove if the owner is gone.',
  )
  parser.add_argument(
    '--grace_s', type=_seconds, default=5.0, help='Seconds between SIGTERM and SIGKILL.'
  )
  parser.add_argument(
    '--channel',
    action='store_true',
    help="Whether stdout is a socket for COMMAND's stdin and stdout.",
  )
  split = argv.index('--') if '--' in argv else len(argv)
  options, command = parser.parse_args(argv[:split]), argv[split + 1 :]
  if not command:
    parser.error('no COMMAND after --')
  if sys.stdin is None:
    parser.error('stdin is closed; wanted a pipe whose write end the owner holds')
  signals = _signal_source()  # Opened before COMMAND starts, so that no signal is lost.
  try:
    log = _Log(options.log, options.log_bytes)
  except OSError as error:
    parser.error(f'--log={options.log}: {error.strerror}')
  try:
    command_process = _start(command, log.file, channel=options.channel)
    guard = Guard(command_process, signals, grace_s=options.grace_s, log=log)
  except (OSError, subprocess.SubprocessError) as error:
    reason = f'{command[0]} cannot be started: {getattr(error, "strerror", None) or error}'
    log.say(reason)
    _complain(reason)
    return 127
  try:
    guard.watch()
  finally:
    code = guard.end()
  if guard.orphaned:
    for path in options.remove_orphaned:
      _remove(path, log.say)
  return code


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
