"""Code of the zygote: the process from which sandboxes are forked.

The zygote has already loaded Python and common modules, and it runs no untrusted program itself.

Invariant: unless isolation is turned off, each sandbox has its own user, PID, mount, network, IPC,
UTS and cgroup namespaces, a read-only root with only those host files that programs may read, and
no capability left when its supervisor starts.

Standard input is a socket. The options come first, as a JSON object (read by `isolation._START`).
Each later message requests one sandbox and carries the socket that becomes its control channel.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import site
import socket
import sys
from typing import Any

from . import kernel
from .channel import Channel, ChannelClosed
from .supervisor import supervise

MODULES = (
  *(
    'array',
    'bisect',
    'calendar',
    'cmath',
    'collections',
    'copy',
    'dataclasses',
    'datetime',
    'decimal',
    'enum',
  ),
  *(
    'fractions',
    'functools',
    'hashlib',
    'heapq',
    'io',
    'itertools',
    'json',
    'math',
    'operator',
    'random',
    're',
  ),
  *('statistics', 'string', 'sys', 'textwrap', 'time', 'typing'),
)
"""Modules imported once, before sandboxes are forked, so that programs import them at no cost."""
_USER = 1000
"""User ID inside a sandbox."""
_HOST_USER = 64123
"""User ID of sandboxes on the host if this process is root. Sandboxes must not run as
root, since the kernel does not limit the number of root's processes.
"""
_NAMESPACES = (
  kernel.CLONE_NEWNS
  | kernel.CLONE_NEWPID
  | kernel.CLONE_NEWNET
  | kernel.CLONE_NEWIPC
  | kernel.CLONE_NEWUTS
  | kernel.CLONE_NEWCGROUP
)
_DEVICES = ('null', 'full', 'random', 'urandom')
"""Devices in a sandbox. /dev/zero is left out because a shared mapping of it is memory that no
limit counts.
"""
_ROOT = '/tmp'
"""Directory on which the sandboxes' root is mounted. Any existing directory will do, because only
this process sees the mount.
"""


def _become_user(outside: int, group: int) -> None:
  """Enters a user namespace in which this process's user is _USER and has all capabilities."""
  kernel.unshare(kernel.CLONE_NEWUSER)
  for name, text in (
    ('setgroups', 'deny'),
    ('uid_map', f'{_USER} {outside} 1'),
    ('gid_map', f'{_USER} {group} 1'),
  ):
    with open(f'/proc/self/{name}', 'w') as file:
      file.write(text)


def _build_root(readable: list[str]) -> None:
  """Builds the root file system of all sandboxes.

  It is read-only and contains the host paths in `readable` at the same places as on the host.
  """
  kernel.mount('none', '/', None, kernel.MS_REC | kernel.MS_PRIVATE)
  kernel.mount('tmpfs', _ROOT, 'tmpfs', kernel.MS_NOSUID | kernel.MS_NODEV, 'mode=755,size=1m')
  for path in readable:
    target = f'{_ROOT}{path}'
    if os.path.islink(path):
      os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
      os.makedirs(target, exist_ok=True)
      kernel.bind(path, target)
    else:
      _make_file(target)
      kernel.bind(path, target)
  for name in ('dev', 'etc', 'proc', 'tmp'):
    os.makedirs(f'{_ROOT}/{name}', exist_ok=True)
  for name in _DEVICES:
    _make_file(f'{_ROOT}/dev/{name}')
    kernel.bind(f'/dev/{name}', f'{_ROOT}/dev/{name}')
  for name, target in (
    ('fd', '/proc/self/fd'),
    ('stdin', 'fd/0'),
    ('stdout', 'fd/1'),
    ('stderr', 'fd/2'),
  ):
    os.symlink(target, f'{_ROOT}/dev/{name}')
  os.symlink('/tmp', f'{_ROOT}/dev/shm')
  with open(f'{_ROOT}/etc/passwd', 'w') as file:
    file.write(f'user:x:{_USER}:{_USER}::/tmp:/bin/sh\n')
  # The kernel lets a sandbox mount its own /proc only where a complete /proc is visible. The
  # sandbox's mount then hides this one.
  kernel.bind('/proc', f'{_ROOT}/proc')
  kernel.change_root(_ROOT)
  kernel.make_read_only('/', recursive=False)
  for path in [*readable, *(f'/dev/{name}' for name in _DEVICES)]:
    if not os.path.islink(path):
      kernel.make_read_only(path, recursive=True)
  # Libraries may write to this /tmp while they load. Each sandbox mounts its own /tmp over it.
  kernel.mount(
    'tmpfs',
    '/tmp',
    'tmpfs',
    kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC,
    'size=16m,mode=1777',
  )


def _make_file(path: str) -> None:
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'w'):
    pass


def _enter(connection: socket.socket, tmp_bytes: int) -> None:
  """Creates a sandbox's namespaces and their first process, which becomes the supervisor.

  Must be called in a forked process, and never returns.
  """
  _become_user(os.getuid(), os.getgid())
  kernel.unshare(_NAMESPACES)
  if os.fork():
    os._exit(0)
  socket.sethostname('sandbox')
  kernel.mount(
    'tmpfs',
    '/tmp',
    'tmpfs',
    kernel.MS_NOSUID | kernel.MS_NODEV,
    f'size={tmp_bytes},nr_inodes=16384,mode=1777',
  )
  os.chdir('/proc')
  proc = '/proc' if _mounts_proc() else '.'
  if proc == '/proc':
    os.chdir('/tmp')
  kernel.drop_capabilities()
  supervise(connection, alone=True, proc=proc)


def _mounts_proc() -> bool:
  """Mounts the sandbox's own /proc. Returns whether that worked, since many containers do not
  permit it.

  If mounting failed, /proc is empty. The supervisor then reads the hidden original /proc, which is
  its working directory and out of the program's reach.
  """
  quiet = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
  try:
    kernel.mount('proc', '/proc', 'proc', quiet)
  except OSError:
    kernel.mount('tmpfs', '/proc', 'tmpfs', quiet | kernel.MS_RDONLY, 'size=0,mode=555')
    return False
  for kind in ('user', 'mnt', 'pid', 'net', 'ipc', 'uts', 'cgroup'):
    with contextlib.suppress(OSError), open(f'/proc/sys/user/max_{kind}_namespaces', 'w') as file:
      file.write('0')
  with contextlib.suppress(OSError):  # Hides the kernel's command line, which describes the host.
    kernel.bind('/dev/null', '/proc/cmdline')
  kernel.mount('none', '/proc', None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | quiet)
  return True


def _start(connection: socket.socket, tmp_bytes: int, *, isolated: bool) -> int:
  pid = os.fork()
  if pid:
    return pid
  try:
    requests = os.open('/dev/null', os.O_RDWR)
    for number in (0, 1):
      os.dup2(requests, number)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if isolated:
      _enter(connection, tmp_bytes)
    supervise(connection, alone=False)
  except OSError as error:
    with contextlib.suppress(ChannelClosed):
      Channel(connection).send({'failed': str(error)})
  finally:
    os._exit(1)


def _serve(requests: socket.socket, options: dict[str, Any]) -> None:
  """Starts a sandbox for each request, until the process that sends requests has exited."""
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel then reaps children automatically.
  while True:
    _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
    if not descriptors:
      return
    with socket.socket(fileno=descriptors[0]) as connection:
      _start(connection, options['tmp_bytes'], isolated=options['isolated'])


def _preload(options: dict[str, Any]) -> None:
  exec(options['preload'], {'__name__': 'preload'})


def main(options: dict[str, Any]) -> None:
  """Serves requests for sandboxes until the process that sends them is gone.

  With the option `once`, this process becomes the supervisor of a single sandbox instead.

  Args:
    options: options from `isolation`, under the keys `code`, `tmp_bytes`, `once`, `path` and
      `preload`. If `once` is false, `isolated` and `readable` are also required.
  """
  requests = socket.socket(fileno=0)
  sys.path = [path for path in sys.path if path != options['code']]
  signal.pthread_sigmask(signal.SIG_SETMASK, [])
  for name in MODULES:
    importlib.import_module(name)
  site.setquit()  # Defines exit, quit and help, as Python does when it starts with `site`.
  site.sethelper()
  sys.path += options['path']
  if options['once']:
    try:
      _preload(options)
    except ImportError as error:
      Channel(requests).send({'failed': str(error)})
      return
    supervise(requests, alone=True)
  try:
    if options['isolated']:
      outside = os.getuid(), os.getgid()
      if outside[0] == 0:
        outside = _HOST_USER, _HOST_USER
        kernel.unshare(kernel.CLONE_NEWNS)
        _build_root(options['readable'])
        os.setgroups([])
        os.setresgid(*[outside[1]] * 3)
        os.setresuid(*[outside[0]] * 3)
        kernel.set_inspectable(True)  # Otherwise, /proc/self would belong to root.
      else:
        _become_user(*outside)
        kernel.unshare(kernel.CLONE_NEWNS)
        _build_root(options['readable'])
    # Orphaned processes, among them the first processes of sandboxes, are reaped here, because the
    # init process of some hosts does not do so.
    kernel.adopt_orphans()
    # Libraries load within the root, so that they find no package that programs cannot read.
    _preload(options)
  except (OSError, ImportError) as error:
    requests.sendall(str(error).encode())
    return
  gc.freeze()
  requests.sendall(b'ready')
  _serve(requests, options)
