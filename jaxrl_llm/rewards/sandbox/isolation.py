"""Starts sandboxes. Programs are isolated with Linux namespaces or bubblewrap or, on request, not
at all.

Invariant: no process started here outlives the process that started it. Each process waits on a
socket whose other end only the starting process has open, and ends when that end closes for any
reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from typing import Any, Literal

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox.inside.channel import Channel, ChannelClosed

Isolation = Literal['auto', 'namespaces', 'bubblewrap', 'none']
"""Kind of isolation of programs. namespaces: with Linux namespaces. bubblewrap: with the command
`bwrap`. auto: with namespaces if the kernel permits them, else with bubblewrap. none: programs have
resource limits, but are not isolated. If the kind does not work on this machine, NoIsolation is
raised.
"""

START_S = 30.0
"""Time limit in seconds for Python to start on a busy machine."""
_CODE = pathlib.Path(__file__).parent
_FLAGS = ('-P', '-s', '-S', '-B', '-X', 'utf8')
_SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32')
_FILES = ('/etc/ld.so.cache', '/etc/localtime', '/etc/alternatives')
_ENVIRONMENT = {
  'PATH': '/usr/local/bin:/usr/bin:/bin',
  'HOME': '/tmp',
  'LANG': 'C.UTF-8',
  'PYTHONHASHSEED': '0',  # Fixed, so that programs that depend on hashes get reproducible scores.
  'OPENBLAS_NUM_THREADS': '1',
}


class NoIsolation(UserError):
  """Raised if this machine cannot isolate programs as requested.

  Attributes:
    reasons: reason why each kind of isolation failed, as one line of text.
  """

  reasons = ''


@dataclasses.dataclass(frozen=True)
class Preload:
  """Libraries that programs in a sandbox can import, besides the standard library."""

  path: tuple[str, ...] = ()
  """Host directories from which programs import."""
  entries: tuple[str, ...] | None = None
  """Files and directories in `path` that programs can read. If None, they can read everything in
  `path`.
  """
  source: str = ''
  """Trusted Python statements that run once, before sandboxes are forked. With bubblewrap, they run
  in each sandbox.
  """

  def bound(self) -> tuple[str, ...]:
    """Returns the paths that programs can read and that `readable` does not cover."""

    def covered(path):
      return any(pathlib.Path(path).is_relative_to(known) for known in readable())

    paths = self.path if self.entries is None else self.entries
    return tuple(path for path in paths if not covered(path))

  def options(self) -> dict[str, Any]:
    return {'path': self.path, 'preload': self.source}


NOTHING = Preload()


@functools.cache
def readable() -> tuple[str, ...]:
  """Returns the host paths that programs may read: system programs, system libraries and Python."""
  paths = [path for path in (*_SYSTEM, *_FILES) if os.path.lexists(path)]
  for prefix in {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}:
    if not any(pathlib.Path(prefix).is_relative_to(path) for path in _SYSTEM):
      paths.append(prefix)
  return tuple(paths)


# The code directory is the last entry of `sys.path`, so that the files in it cannot hide Python's
# own modules.
_START = (
  'import json, os, sys; options = json.loads(os.read(0, int(sys.argv[2]))); '
  'sys.path.append(options["code"]); from inside.zygote import main; main(options)'
)


def _python(options: dict[str, Any]) -> tuple[list[str], bytes]:
  """Returns the command that starts a zygote, and the bytes to send to its standard input first.

  These bytes are the options as JSON. The options are not on the command line, because they name
  host directories, and programs in a sandbox can read the command line of the process that they
  descend from.
  """
  first = json.dumps(options).encode()
  arguments = [str(options['tmp_bytes']), str(len(first))]
  return [os.path.realpath(sys._base_executable), *_FLAGS, '-c', _START, *arguments], first


def first_words(control: socket.socket) -> str:
  """Waits for a sandbox to start. Returns its error, or '' once it is ready."""
  control.settimeout(START_S)
  try:
    return Channel(control).receive().get('failed', '')
  except (ChannelClosed, TimeoutError) as error:
    return f'it does not start ({error})'


class Zygote:
  """Starts sandboxes by forking one process, the zygote, which has already loaded Python.

  Attributes:
    kind: kind of isolation of programs: 'namespaces' or 'none'.
  """

  def __init__(self, *, tmp_bytes: int, isolated: bool, preload: Preload = NOTHING):
    self.kind = 'namespaces' if isolated else 'none'
    paths = (*readable(), *preload.bound())
    options = {'tmp_bytes': tmp_bytes, 'isolated': isolated, 'readable': paths, 'once': False}
    command, first = _python({'code': str(_CODE), **options, **preload.options()})
    self._requests, theirs = socket.socketpair()
    self._requests.sendall(first)
    with theirs:
      self._process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        cwd='/',
        start_new_session=True,
      )
    self._requests.settimeout(START_S)
    try:
      answer = self._requests.recv(1000).decode(errors='replace')
    except OSError as error:
      answer = str(error)
    answer = answer or 'Python does not start'
    if answer == 'ready':
      try:
        with self.start() as first:
          answer = first_words(first)
      except OSError as error:
        answer = str(error)
    if answer:
      self.close()
      raise NoIsolation(answer)

  def start(self) -> socket.socket:
    """Starts a sandbox and returns its control socket, without waiting until the sandbox is ready.

    Raises OSError if the sandbox cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
      try:
        socket.send_fds(self._requests, [b'+'], [theirs.fileno()])
      except OSError:
        ours.close()
        raise
    return ours

  def close(self) -> None:
    """Stops the zygote. Each sandbox ends when its control socket closes."""
    self._requests.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(1)
    self._process.kill()
    self._process.wait()


class Bubblewrap:
  """Starts bwrap and a Python process for each sandbox."""

  kind = 'bubblewrap'

  def __init__(self, *, tmp_bytes: int, preload: Preload = NOTHING):
    command = shutil.which('bwrap')
    if command is None:
      raise NoIsolation('bwrap is not installed')
    usage = subprocess.run([command, '--help'], capture_output=True, text=True, timeout=START_S)
    if '--size' not in usage.stdout:
      raise NoIsolation('bwrap is older than 0.5')
    self._processes: list[subprocess.Popen] = []
    code = pathlib.PurePath('/jaxrl')
    self._command = [
      command,
      '--unshare-all',
      '--unshare-user',
      '--uid',
      '1000',
      '--gid',
      '1000',
      '--new-session',
    ]
    self._command += ['--as-pid-1', '--hostname', 'sandbox']
    self._command += ['--disable-userns'] if '--disable-userns' in usage.stdout else []
    for path in (*readable(), *preload.bound()):
      link = os.path.islink(path)
      self._command += ['--symlink', os.readlink(path), path] if link else ['--ro-bind', path, path]
    self._command += [
      '--ro-bind',
      str(_CODE / 'inside'),
      str(code / 'inside'),
      '--proc',
      '/proc',
      '--dev',
      '/dev',
    ]
    # Two files are hidden: /proc/cmdline describes the host, and a shared mapping of /dev/zero is
    # memory that no limit counts.
    for path in ('/proc/cmdline', '/dev/zero'):
      self._command += ['--ro-bind', '/dev/null', path]
    for path in ('/dev/shm', '/tmp'):
      self._command += ['--size', str(tmp_bytes), '--tmpfs', path]
    self._command += ['--chmod', '1777', '/tmp', '--chdir', '/tmp']
    # /proc is read-only too. If root starts bwrap, programs are root outside the sandbox, and root
    # may change the kernel's settings there.
    for path in ('/dev', '/proc', '/'):
      self._command += ['--remount-ro', path]
    command, self._first = _python(
      {'code': str(code), 'tmp_bytes': tmp_bytes, 'once': True, **preload.options()}
    )
    self._command += command
    with self.start(subprocess.PIPE) as first:  # Checks that bwrap works here.
      if reason := first_words(first):
        process = self._processes.pop()
        process.kill()  # Killed, because it may be stuck.
        raise NoIsolation(
          process.communicate()[1].decode(errors='replace').strip()[-200:] or reason
        )
    self._processes[0].stderr.close()

  def start(self, errors: int = subprocess.DEVNULL) -> socket.socket:
    """Starts a sandbox like `Zygote.start`. `errors` is the destination of bwrap's error messages,
    a value that `subprocess.Popen` accepts as `stderr`.
    """
    self._processes = [process for process in self._processes if process.poll() is None]
    ours, theirs = socket.socketpair()
    ours.sendall(self._first)
    with theirs:
      self._processes.append(
        subprocess.Popen(
          self._command,
          stdin=theirs,
          stdout=subprocess.DEVNULL,
          stderr=errors,
          env=_ENVIRONMENT,
          cwd='/',
          start_new_session=True,
        )
      )
    return ours

  def close(self) -> None:
    for process in self._processes:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(START_S)
    self._processes.clear()


Starter = Zygote | Bubblewrap


def open_starter(isolation: Isolation, *, tmp_bytes: int, preload: Preload = NOTHING) -> Starter:
  """Returns a starter of sandboxes with the first kind of isolation that `isolation` permits and
  that works on this machine. Raises NoIsolation if none works.
  """
  ways = {
    'namespaces': lambda: Zygote(tmp_bytes=tmp_bytes, isolated=True, preload=preload),
    'bubblewrap': lambda: Bubblewrap(tmp_bytes=tmp_bytes, preload=preload),
    'none': lambda: Zygote(tmp_bytes=tmp_bytes, isolated=False, preload=preload),
  }
  reasons = []
  for way in ('namespaces', 'bubblewrap') if isolation == 'auto' else (isolation,):
    try:
      return ways[way]()
    except (NoIsolation, OSError) as error:
      reasons.append(f'{way}: {error}')
      if isolation == 'auto':
        logging.warning('Sandbox: no isolation by %s', reasons[-1])
  refusal = NoIsolation(
    f'sandbox: this machine cannot isolate programs ({"; ".join(reasons)}); permit unprivileged '
    'user namespaces, '
    'name sandbox hosts (addresses), or accept that programs can do whatever this user can with '
    "isolation='none'"
  )
  refusal.reasons = '; '.join(reasons)
  raise refusal
