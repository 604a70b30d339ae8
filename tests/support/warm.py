"""Starts Python scripts without their imports, as forks of a process that has imported the same
modules.

The imports of a job alone take 4 to 7 s of a core. Each test worker has one process that has done
them, started at the first call. `start` forks that process, and the fork becomes the script. It has
its own session, directory, environment, arguments, file descriptors and exit code. The Python
scripts that launch/cluster/local.py starts are forks as well. Some libraries read the environment
when they are imported. A script that needs another value of a variable in `_FIXED` must therefore
be started as usual. XLA reads its flags when the first device is used, which is after the fork.

If this module runs as a program (`python tests/support/warm.py SOCKET`), it is that process. SOCKET
is the inherited descriptor that receives requests.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import json
import os
import pathlib
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from paths import ROOT

_FIXED = ('JAX_PLATFORMS', 'JAX_ENABLE_X64', 'JAX_COMPILATION_CACHE_DIR')
"""Names of environment variables that libraries read when they are imported."""
_MODULES = (
  'jaxrl_llm.app.commands.train',
  'jaxrl_llm.app.commands.evaluate',
  'jaxrl_llm.app.serve.explorer',
  'jaxrl_llm.app.offline.replay',
  'reasoning_gym',
)
_SUPERVISOR = ROOT / 'launch' / 'cluster' / 'local.py'


class Process:
  """A script that `start` has started. Attributes and methods are like those of
  `subprocess.Popen`.
  """

  def __init__(
    self, args: Sequence[str], connection: socket.socket, stdout: int | None, stderr: int | None
  ):
    self.args, self.returncode = list(args), None
    self._connection = connection
    self.stdout = None if stdout is None else os.fdopen(stdout)
    self.stderr = None if stderr is None else os.fdopen(stderr)
    self.pid = int(self._receive())

  def _receive(self) -> str:
    data = self._connection.recv(64)
    if not data:
      raise RuntimeError('the process that forks scripts has ended')
    return data.decode()

  def poll(self) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.wait(0)
    return self.returncode

  def wait(self, timeout: float | None = None) -> int:
    if self.returncode is None:
      self._connection.settimeout(timeout)
      try:
        self.returncode = int(self._receive())
      except (TimeoutError, BlockingIOError):
        raise subprocess.TimeoutExpired(self.args, timeout) from None
      self._connection.close()
    return self.returncode

  def communicate(self, timeout: float | None = None) -> tuple[str, str]:
    """Waits for the script to end. Returns (stdout, stderr), without the parts that were read
    before.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    streams = [
      stream for stream in (self.stdout, self.stderr) if stream is not None and not stream.closed
    ]
    parts = {stream: [] for stream in streams}
    with selectors.DefaultSelector() as selector:
      for stream in streams:
        selector.register(stream, selectors.EVENT_READ)
      while selector.get_map():
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = selector.select(left)
        if not ready:
          raise subprocess.TimeoutExpired(self.args, timeout)
        for key, _ in ready:
          data = os.read(key.fd, 1 << 16)
          parts[key.fileobj].append(data)
          if not data:
            selector.unregister(key.fileobj)
    self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    for stream in streams:
      stream.close()
    return tuple(b''.join(parts.get(stream, ())).decode() for stream in (self.stdout, self.stderr))

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.kill(self.pid, number)

  def terminate(self) -> None:
    self.send_signal(signal.SIGTERM)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)


def start(
  args: Sequence[str],
  *,
  cwd: str | os.PathLike,
  env: Mapping[str, str],
  piped: bool = True,
) -> Process:
  """Starts a script in its own session.

  Args:
    args: the script and its arguments.
    piped: whether `communicate` reads stdout and stderr. If False, they go to /dev/null.

  Raises:
    ValueError: a variable of `_FIXED` has another value in `env` than in the forking process.
  """
  server, fixed = _server()
  different = [name for name in _FIXED if env.get(name) != fixed.get(name)]
  if different:
    raise ValueError(
      f'{args}: a fork cannot change {", ".join(different)}; start it with subprocess'
    )
  ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  null = os.open(os.devnull, os.O_RDWR)
  reads, writes = zip(os.pipe(), os.pipe()) if piped else ((None, None), (null, null))
  request = json.dumps({'args': list(map(str, args)), 'cwd': str(cwd), 'env': dict(env)}).encode()
  descriptors = array.array('i', (theirs.fileno(), null, *writes))
  try:
    # On a stream, the length comes first. The descriptors are sent together with it.
    server.sendmsg(
      [len(request).to_bytes(4)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    )
    server.sendall(request)
  finally:
    theirs.close()
    for descriptor in {null, *writes}:
      os.close(descriptor)
  return Process(args, ours, *reads)


@functools.cache
def _server() -> tuple[socket.socket, dict[str, str]]:
  """Returns (socket of the forking process, its environment). That process ends when this process
  ends.
  """
  import job  # `job` imports this module.

  ours, theirs = socket.socketpair()
  env = job.environment()
  subprocess.Popen(
    [sys.executable, __file__, str(theirs.fileno())],
    pass_fds=[theirs.fileno()],
    env=env,
    start_new_session=True,
  )
  theirs.close()
  return ours, env


def _serve(requests: socket.socket) -> tuple[dict, list[int]]:
  """Forks for each request and reports exit codes. Returns only in a fork: the fork's request and
  its standard descriptors.
  """
  children: dict[int, socket.socket] = {}
  wake, woken = socket.socketpair()
  wake.setblocking(False)
  signal.set_wakeup_fd(wake.fileno())
  signal.signal(signal.SIGCHLD, lambda *_: None)
  selector = selectors.DefaultSelector()
  selector.register(requests, selectors.EVENT_READ)
  selector.register(woken, selectors.EVENT_READ)
  while True:
    for key, _ in selector.select():
      if key.fileobj is woken:
        woken.recv(4096)
        _report_exit_codes(children)
        continue
      head, descriptors, _, _ = socket.recv_fds(requests, 4, 4)
      length, data = int.from_bytes(head), b''
      while len(data) < length and (part := requests.recv(length - len(data))):
        data += part
      if not head or len(data) < length:  # The test process has ended.
        os._exit(0)
      connection = socket.socket(fileno=descriptors[0])
      pid = os.fork()
      if pid == 0:
        os.setsid()  # The fork needs its own session before its caller can signal the group.
        connection.send(str(os.getpid()).encode())
        selector.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for unused in (requests, wake, woken, connection, *children.values()):
          unused.close()
        return json.loads(data), descriptors[1:]
      for descriptor in descriptors[1:]:
        os.close(descriptor)
      children[pid] = connection


def _report_exit_codes(children: dict[int, socket.socket]) -> None:
  while children:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid == 0:
      return
    with children.pop(pid) as connection, contextlib.suppress(OSError):
      connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: dict, descriptors: list[int]) -> None:
  """Makes this fork look like an interpreter that was started for the script, and runs the
  script.
  """
  for number, descriptor in enumerate(descriptors):
    os.dup2(descriptor, number)
  for descriptor in descriptors:
    os.close(descriptor)
  os.chdir(request['cwd'])
  if pathlib.Path(request['args'][0]).resolve() == _SUPERVISOR:
    subprocess.Popen.__init__ = _forking(subprocess.Popen.__init__, dict(os.environ))
  _run_to_the_end(request['args'], request['env'])


def _run(args: list[str], env: Mapping[str, str]) -> None:
  """Runs a script in this process, with these arguments and this environment."""
  os.environ.clear()
  os.environ.update(env)
  tempfile.tempdir = None
  sys.argv = args
  sys.orig_argv = [sys.executable, *sys.argv]
  script = sys.argv[0]
  paths = env.get('PYTHONPATH', '').split(os.pathsep)
  sys.path[:0] = [
    str(pathlib.Path(script).resolve().parent),
    *(path for path in paths if path not in sys.path),
  ]
  runpy.run_path(script, run_name='__main__')


def _forking(initialise: Callable[..., None], fixed: Mapping[str, str]) -> Callable[..., None]:
  """Returns a replacement of `subprocess.Popen.__init__` for the supervisor of a job: a child that
  would execute a Python script runs it in the fork instead. The supervisor must not have started
  threads when it starts its children.

  Args:
    initialise: the original method, for all other commands.
    fixed: the environment in which this process has imported its modules.
  """

  def wrapped(popen: subprocess.Popen, args: Sequence[str], **options: Any) -> None:
    env, before = options['env'], options['preexec_fn']

    def run() -> None:
      subprocess.Popen.__init__ = initialise
      if before is not None:
        before()
      # This includes the pipe whose end tells `Popen` in the parent that the program was executed.
      os.closerange(3, os.sysconf('SC_OPEN_MAX'))
      signal.signal(signal.SIGPIPE, signal.SIG_IGN)
      signal.signal(signal.SIGINT, signal.default_int_handler)
      signal.signal(signal.SIGTERM, signal.SIG_DFL)
      _run_to_the_end([*args[1:]], env)

    is_script = args[0] == sys.executable and args[1].endswith('.py')
    if is_script and all(env.get(name) == fixed.get(name) for name in _FIXED):
      options['preexec_fn'] = run
    initialise(popen, args, **options)

  return wrapped


def _run_to_the_end(args: list[str], env: Mapping[str, str]) -> NoReturn:
  """Runs a script and ends this process as an interpreter ends, except that it does not free all
  modules and objects, which would copy most of the memory that it shares with its parent.
  """
  for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(line_buffering=True)
  code, interrupted = 0, False
  try:
    _run(args, env)
  except SystemExit as ended:
    code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if code == 1 and ended.code != 1:
      print(ended.code, file=sys.stderr)
  except BaseException as error:
    sys.excepthook(*sys.exc_info())
    code, interrupted = 1, isinstance(error, KeyboardInterrupt)
  threading._shutdown()
  atexit._run_exitfuncs()
  sys.stdout.flush()
  sys.stderr.flush()
  if interrupted:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
  os._exit(code)


if __name__ == '__main__':
  import importlib

  for _name in _MODULES:
    importlib.import_module(_name)
  # Scripts must not import from this folder by accident.
  sys.path.remove(str(pathlib.Path(__file__).parent))
  gc.collect()
  gc.freeze()
  _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
