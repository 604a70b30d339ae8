"""Programs that try to break out of a sandbox or to harm its host, and checks of what they leave on
the host.
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import subprocess
import threading
import time

import pytest

LINGER = f'sleep {10_000_000 + os.getpid()}'
"""Command that hostile programs leave running. Its number depends on this process's id, so no other
process on the machine has the same command.
"""
MARK = f'left-by-a-hostile-program-{os.getpid()}'

SPIN = 'while True: pass'
SLEEP = 'import time\ntime.sleep(1000)'
FORK_BOMB = 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'
THREAD_BOMB = (
  'import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()'
)
ALLOCATE = 'x = bytearray(4 << 30)'
ALLOCATE_IN_MANY = """
import os, time
for _ in range(20):
  if os.fork() == 0:
    x = b'x' * (100 << 20)
    time.sleep(1000)
time.sleep(1000)
"""
OUTPUT = "import os\nchunk = b'x' * (1 << 20)\nfor _ in range(1024): os.write(1, chunk)"
ERROR_OUTPUT = OUTPUT.replace('write(1', 'write(2')
DAEMONS = f"""
import os, subprocess
for _ in range(3):
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
      os.execvp('sleep', {LINGER.split()!r})
    os._exit(0)
subprocess.Popen({LINGER.split()!r}, start_new_session=True)
print('done')
"""
OPEN_FILES = "files = [open('/dev/null') for _ in range(10_000)]\nprint('done')"
DELETE_CWD = """
import os, shutil
for path in ('/tmp', '.', '/dev', '/etc', '/home'):
  shutil.rmtree(path, ignore_errors=True)
try: os.rmdir(os.getcwd())
except OSError: pass
print('done')
"""
IGNORE_SIGNALS = """
import signal, time
for number in range(1, 65):
  try: signal.signal(number, signal.SIG_IGN)
  except (OSError, ValueError): pass
"""
KILL_PARENT = """
import os, signal
for _ in range(3):
  for pid in {1, os.getppid(), *map(int, filter(str.isdecimal, os.listdir('/proc')))} \
- {os.getpid()}:
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
try: os.killpg(0, 0)
except OSError: pass
print('done')
"""
FILL_DISK = """
import os
for directory in ('/tmp', '/dev/shm', '/dev', '/', '/usr', '/var', '/proc', os.getcwd()):
  for number in range(100):
    try:
      with open(f'{directory}/MARK-{number}', 'wb') as file:
        for _ in range(32): file.write(b'x' * (1 << 20))
    except OSError: pass
print(sum(os.stat(f'{place}/{name}').st_size \
for place in {os.path.realpath(p) for p in ('/tmp', '/dev/shm')}
          for name in os.listdir(place)))
""".replace('MARK', MARK)
UNCOUNTED_MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
try: print(os.memfd_create('x'))
except OSError as error: print(error.errno)
print(libc.shmget(0, 1 << 30, 0o1600), ctypes.get_errno())
print(libc.semget(0, 32000, 0o600), libc.msgget(0, 0o600))
pipe, page = os.pipe(), ctypes.create_string_buffer(1 << 16)
part = (ctypes.c_size_t * 2)(ctypes.addressof(page), 4096)
print(libc.vmsplice(pipe[1], part, ctypes.c_ulong(1), 0), \
libc.syscall(IO_SETUP, 1000, ctypes.byref(ctypes.c_ulong())))
try: print(os.write(os.open('/proc/self/fd/0', os.O_RDWR | os.O_APPEND), b'x' * (1 << 20)))
except OSError as error: print(error.errno)
""".replace('IO_SETUP', str({'x86_64': 206, 'aarch64': 0}.get(platform.machine())))
PRIVILEGES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
  print(libc.unshare(flag))
print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.chroot(b'/tmp'), \
libc.ptrace(16, os.getppid(), 0, 0))
try: os.setuid(0); print('root')
except OSError: print(-1)
print(open('/proc/self/status').read().split('CapEff:')[1].split()[0])
"""

EVERY = {
  name: text
  for name, text in list(globals().items())
  if name.isupper() and isinstance(text, str) and name not in ('LINGER', 'MARK')
}


def processes(*needles: str) -> list[str]:
  """Returns the command lines of processes that contain one of the needles."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    try:
      line = path.read_bytes().replace(b'\0', b' ').decode(errors='replace')
    except OSError:
      continue
    if any(needle in line for needle in needles):
      found.append(f'{path.parent.name} {line}')
  return found


def descendants(pid: int) -> set[int]:
  """Returns the ids of the living descendants of a process. Zombies do not count."""
  parents: dict[int, int] = {}
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      state, parent = path.read_text().rpartition(')')[2].split()[:2]
    except OSError:
      continue
    if state != 'Z':
      parents[int(path.parent.name)] = int(parent)
  found = {pid}
  while more := {child for child, parent in parents.items() if parent in found} - found:
    found |= more
  return found - {pid}


def settled(count, still_s: float = 2.0) -> int:
  """Returns a count once it has been constant for `still_s` seconds: no process is starting or
  ending any more.
  """
  last, since = count(), time.monotonic()
  while time.monotonic() < since + still_s:
    time.sleep(0.05)
    if (now := count()) != last:
      last, since = now, time.monotonic()
  return last


def has_ended(pid: int) -> bool:
  """Returns whether a process has ended and closed its descriptors. A process that is ending loses
  its command line earlier than its descriptors.
  """
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] in 'ZX'
  except OSError:
    return True


def until(holds, patience_s: float = 30.0) -> bool:
  """Waits until `holds` returns True. Returns False if that takes longer than `patience_s`."""
  deadline = time.monotonic() + patience_s
  while not holds():
    if time.monotonic() > deadline:
      return False
    time.sleep(0.01)
  return True


class Host:
  """State of a host that a program must not change: mounts, descriptors, threads, processes,
  files.
  """

  def __init__(self, *directories: str):
    self._directories = directories
    self.before = self.state()

  def state(self) -> dict[str, object]:
    return {
      'mounts': pathlib.Path('/proc/self/mountinfo').read_text(),
      'descriptors': len(os.listdir('/proc/self/fd')),
      'threads': threading.active_count(),
      'files': sorted(name for directory in self._directories for name in os.listdir(directory)),
      'marked': [
        d
        for d in ('/tmp', '/dev/shm', '/', '/usr', '/var')
        if any(MARK in n for n in os.listdir(d))
      ],
      'lingering': processes(LINGER),
    }

  def is_as_before(self) -> bool:
    return self.state() == self.before


_PROBES = {
  'namespaces': [
    'unshare',
    '--user',
    '--map-root-user',
    '--net',
    '--pid',
    '--mount',
    '--fork',
    'true',
  ],
  'bubblewrap': ['bwrap', '--unshare-all', '--ro-bind', '/', '/', 'true'],
}


def skip_where_this_machine_forbids(error, isolation='auto'):
  """Skips the test if other tools cannot isolate on this machine either. Otherwise raises the
  error, because the sandbox is at fault.
  """
  for name, probe in _PROBES.items():
    if (
      isolation in (name, 'auto')
      and shutil.which(probe[0])
      and not subprocess.run(probe, check=False).returncode
    ):
      raise error
  pytest.skip(str(error))
