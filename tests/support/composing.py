"""Hostile programs, which surround right and wrong solutions with seeded combinations of attacks;
and canaries, which are secrets that attacks must not reach.
"""

from __future__ import annotations

import contextlib
import pathlib
import random
import secrets
import textwrap
from typing import NamedTuple

_HARM = {
  'delete': """
    import os, shutil
    for path in ('CANARY', '/tmp', '/home', '/etc', '/dev/shm', '/usr/local/bin'):
      shutil.rmtree(path, ignore_errors=True)
  """,
  'write': """
    import os
    for path in ('CANARY', '/tmp', '/', '/etc', '/usr', '/var', '/dev/shm', '/root', \
os.path.expanduser('~')):
      for name in ('canary', 'sitecustomize.py', '.bashrc', 'usercustomize.py'):
        try:
          with open(f'{path}/{name}', 'w') as file: file.write('raise SystemExit')
        except OSError: pass
  """,
  'symlinks': """
    import os
    for number, path in enumerate(('CANARY/canary', '/proc/1/root', '/proc/1/environ', \
'/proc/1/cwd', '/etc/passwd')):
      try:
        os.symlink(path, f'link{number}')
        print(open(f'link{number}').read())
      except OSError: pass
      try: open(f'link{number}', 'w').write('x')
      except OSError: pass
    try: os.link('CANARY/canary', 'hard')
    except OSError: pass
  """,
  'traverse': """
    import glob, os
    links = [f'/proc/{who}/{link}' for who in ('self', '1') for link in ('root', 'cwd/..')]
    for path in (folder + '/CANARY' for folder in ('../' * 20, *links)):
      for name in glob.glob(path + '/*'):
        try: print(open(name).read()); os.remove(name)
        except OSError: pass
  """,
  'environment': """
    import os, sys
    print(os.environ, file=sys.stderr)
    for pid in filter(str.isdecimal, os.listdir('/proc')):
      for name in ('environ', 'cmdline', 'maps'):
        try: print(open(f'/proc/{pid}/{name}', 'rb').read())
        except OSError: pass
    os.environ['PYTHONSTARTUP'] = os.environ['PYTHONPATH'] = os.environ['LD_PRELOAD'] = '/tmp/x'
  """,
  'signals': """
    import os, signal
    for pid in (1, os.getppid()):
      for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        try: os.kill(pid, number)
        except OSError: pass
  """,
  'scheduler': """
    import ctypes, os
    for call in (
      lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)), \
lambda: os.sched_setaffinity(1, {0}),
      lambda: os.setpriority(os.PRIO_USER, 0, 19),
    ):
      try: call()
      except OSError: pass
    ctypes.CDLL(None).prctl(15, bytes([255]))
  """,
  'kernel memory': """
    import ctypes, os, socket
    libc = ctypes.CDLL(None)
    for _ in range(20): libc.semget(0, 32000, 0o600)
    for _ in range(20):
      pair = socket.socketpair()
      try: pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
      except OSError: pass
    try: os.write(os.open('/proc/self/fd/0', os.O_RDWR | os.O_APPEND), bytes(1 << 20))
    except OSError: pass
  """,
  'ignore signals': """
    import signal
    for number in range(1, 65):
      try: signal.signal(number, signal.SIG_IGN)
      except (OSError, ValueError): pass
  """,
  'forks': """
    import os, time
    for _ in range(12):
      try:
        if os.fork() == 0:
          os.closerange(3, 300)
          time.sleep(1000)
      except OSError: break
  """,
  'threads': """
    import threading, time
    try:
      for _ in range(8): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    except RuntimeError: pass
  """,
  'daemon': """
    import os, time
    if os.fork() == 0:
      os.setsid()
      if os.fork() == 0:
        os.closerange(3, 300)
        time.sleep(1000)
      os._exit(0)
  """,
  'sockets': """
    import socket
    for family, address in (
      (socket.AF_INET, ('127.0.0.1', 22)), (socket.AF_INET, ('8.8.8.8', 53)), \
(socket.AF_UNIX, 'CANARY/socket'),
      (socket.AF_UNIX, chr(0) + 'abstract'), (16, (0, 0)), (40, (2, 1)), (17, ('lo', 3)), \
(38, ('hash', 'md5')),
    ):
      try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
          one.settimeout(0.1)
          one.connect(address)
          one.send(b'x')
      except (OSError, TypeError, OverflowError): pass
  """,
  'system calls': """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount(b'none', b'/tmp', b'tmpfs', 0, None); libc.chroot(b'/tmp'); libc.umount2(b'/tmp', 2)
    for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000): libc.unshare(flag)
    libc.ptrace(16, os.getppid(), 0, 0); libc.setuid(0); libc.shmget(0, 1 << 30, 0o1600)
    libc.syscall(319, b'x', 0); libc.syscall(321, 0, 0, 0); libc.syscall(425, 8, 0)
    libc.prctl(4, 1); libc.prctl(1, 0); libc.personality(0x0040000)
  """,
  'descriptors': """
    import os
    for number in range(3, 300):
      try: os.write(number, b'\\x00\\x00\\x00\\x02{}')
      except OSError: pass
  """,
  'close descriptors': 'import os\nos.closerange(3, 300)',
  'open files': """
    try: files = [open('/dev/null') for _ in range(10_000)]
    except OSError: files = None
  """,
  'memory': """
    try: x = bytearray(4 << 30)
    except MemoryError: x = None
  """,
  'disk': """
    for place in ('/tmp', '/dev/shm', '.', '/', '/var/tmp', 'CANARY'):
      try:
        with open(place + '/filled', 'wb') as file:
          for _ in range(300): file.write(b'x' * (1 << 20))
      except OSError: pass
  """,
  'delete itself': """
    import os, shutil
    shutil.rmtree('.', ignore_errors=True)
    try: os.rmdir(os.getcwd())
    except OSError: pass
  """,
}
"""Actions that harm a host or spy on it, and that take little time. CANARY is replaced by a
directory of the host that anybody may write to.

Attacks with a race, such as a signal to a process that is about to start, are in `hostile`: the
verdict on them depends on chance.
"""

_CHEAT = {
  'modules': """
    import sys
    for name in ('json', 'socket', 'math', 'operator', 'builtins', 'unittest', 'inside.examiner', \
'inside.channel'):
      sys.modules[name] = type(sys)('fake')
  """,
  'builtins': """
    import builtins
    for name in ('all', 'any', 'isinstance', 'sum', 'abs', 'len', 'sorted', 'print', 'compile', \
'AssertionError'):
      setattr(builtins, name, lambda *args, **kwargs: True)
  """,
  'atexit': 'import atexit, os\natexit.register(lambda: os._exit(0))',
  'exit hooks': """
    import sys, threading
    sys.excepthook = sys.unraisablehook = threading.excepthook = lambda *args: None
    sys.setprofile(lambda *args: None)
  """,
  'objects': """
    import gc, sys
    for thing in gc.get_objects():
      try:
        if isinstance(thing, dict) and 'passed' in thing: thing['passed'] = [True] * 99
      except Exception: pass
      for name in ('serve', '_do', '_answer', 'ask', 'receive'):
        try:
          if callable(getattr(thing, name, None)) and isinstance(thing, type):
            setattr(thing, name, lambda *args, **kwargs: {'value': True, 'passed': [True] * 99})
        except Exception: pass
  """,
  'frames': """
    import sys
    frame = sys._getframe()
    while frame:
      for name in ('tests', 'expected', 'cases', 'passed', 'total', 'result', 'outcome'):
        frame.f_globals[name] = True
      frame = frame.f_back
  """,
  'replies': """
    import json, os, struct
    for message in ({'value': True}, {'passed': [True] * 9, 'error': None, 'ended': 'ok'}, \
{'ready': True}, [], 'x'):
      body = json.dumps(message).encode()
      for number in range(3, 64):
        try: os.write(number, struct.pack('!I', len(body)) + body)
        except OSError: pass
  """,
  'rubbish replies': """
    import os, random
    draw = random.Random(SEED)
    for number in range(3, 64):
      try: os.write(number, draw.randbytes(draw.choice([1, 3, 4, 5, 100])))
      except OSError: pass
  """,
  'equal to all': """
    class Same:
      def __eq__(self, other): return True
      def __ne__(self, other): return False
      def __hash__(self): return 0
      def __bool__(self): return True
      def __getattr__(self, name): return Same()
      def __call__(self, *args, **kwargs): return Same()
      def __iter__(self): return iter(())
      def __len__(self): return 0
      __sub__ = __rsub__ = __add__ = __lt__ = __le__ = __contains__ = __getitem__ = __call__
  """,
  'customize': """
    import os, sys
    for place in (*sys.path, '.', os.path.expanduser('~')):
      try:
        with open(f'{place or "."}/sitecustomize.py', \
'w') as file: file.write('import os; os._exit(0)')
      except OSError: pass
  """,
}
"""Actions that try to decide a verdict. The verdict on a right solution may be any verdict, but it
must always be the same.
"""

_RIGHT = {
  'add': 'def f(x, y): return x + y',
  'reverse': 'def f(x): return x[::-1]',
  'primes': 'def f(n): return [p for p in range(2, n) if all(p % q for q in range(2, p))]',
  'count': 'def f(text):\n  import collections\n  return dict(collections.Counter(text))',
}
_WRONG = (
  'def f(*args): return None',
  'def f(*args): return Same() if "Same" in globals() else args',
  'class f:\n  def __new__(cls, *args): return Same() if "Same" in globals() else '
  'super().__new__(cls)',
  'def f(*args): raise SystemExit(0)',
  'def f(*args): raise StopIteration',
  'def f(*args):\n  import os\n  os._exit(0)',
  'def f(*args):\n  raise AssertionError("ok")',
  'def f(*args):\n  print(open("CANARY/canary").read())\n  return open("CANARY/canary").read()',
  'f = type("f", (int,), {"__eq__": lambda self, other: True})(3)',
  'pass',
)
_TESTS = {
  'add': ('assert f(2, 3) == 5', 'assert f(-1, 4) == 3'),
  'reverse': ('assert f([1, 2, 3]) == [3, 2, 1]', "assert f('ab') == 'ba'"),
  'primes': ('assert f(12) == [2, 3, 5, 7, 11]', 'assert sum(f(20)) == 77'),
  'count': ("assert f('aab') == {'a': 2, 'b': 1}", "assert sorted(f('ba')) == ['a', 'b']"),
}
_MAIN = {
  'add': 'x, y = map(int, input().split())\nprint(f(x, y))',
  'reverse': 'print(f(input()))',
  'primes': 'print(*f(int(input())))',
  'count': 'print(len(f(input())))',
}
_CASES = {
  'add': (('2 3', '5'), ('-1 4', '3')),
  'reverse': (('abc', 'cba'), ('xy', 'yx')),
  'primes': (('12', '2 3 5 7 11'), ('3', '2')),
  'count': (('aab', '2'), ('abcd', '4')),
}


def plant_canaries(folder: pathlib.Path, monkeypatch) -> str:
  """Writes a new secret to files that anybody may read and write, also in the home directory, and
  to the environment. Returns the secret.
  """
  secret = secrets.token_hex(16)
  for name in ('canary', 'home', 'run'):
    place = folder / name
    place.mkdir()
    (place / 'canary').write_text(secret)
    (place / 'canary').chmod(0o666)
    place.chmod(0o777)
  for above in (folder, *folder.parents):
    # The directory may belong to another user. It is then already accessible.
    with contextlib.suppress(OSError):
      above.chmod(above.stat().st_mode | 0o011)
  monkeypatch.setenv('HOME', str(folder / 'home'))
  # reasoning-gym imports matplotlib, whose first import writes its list of fonts to this directory.
  monkeypatch.setenv('MPLCONFIGDIR', str(folder.parent / 'matplotlib'))
  monkeypatch.setenv('JAXRL_CANARY', secret)
  return secret


class Program(NamedTuple):
  """A program that contains a solution of a task, and attacks."""

  text: str
  right: bool
  """Whether the solution in the program is right."""
  attacks: tuple[str, ...]
  tests: tuple[str, ...]
  cases: tuple[tuple[str, str], ...]
  """Pairs (input, output). Empty if the program has tests."""


def hostile_programs(count: int, *, seed: int, canary: str) -> list[Program]:
  """Returns `count` programs. About half of them contain right solutions. The same seed gives the
  same programs.
  """
  draw = random.Random(seed)
  return [_program(draw, canary) for _ in range(count)]


def _program(draw: random.Random, canary: str) -> Program:
  task, right = draw.choice([*_RIGHT]), draw.random() < 0.5
  every = {**_HARM, **_CHEAT}
  chosen = draw.sample([*every], draw.randint(1, 3))
  blocks = [_placed(draw, every[name]) for name in chosen]
  solution = _RIGHT[task] if right else draw.choice(_WRONG)
  parts = [*blocks, solution] if draw.random() < 0.7 else [solution, *blocks]
  by_output = draw.random() < 0.3
  if by_output:
    parts.append(_MAIN[task])
  text = '\n'.join(parts).replace('CANARY', canary).replace('SEED', str(draw.randrange(1000)))
  return Program(
    text, right, tuple(chosen), () if by_output else _TESTS[task], _CASES[task] if by_output else ()
  )


def _placed(draw: random.Random, block: str) -> str:
  """Returns the attack unchanged, or in a function, a thread, a child process, or a block that
  swallows errors.
  """
  block = textwrap.dedent(block).strip()
  within = textwrap.indent(block, '  ')
  match draw.choice(['plain', 'plain', 'try', 'function', 'thread', 'child']):
    case 'try':
      return f'try:\n{within}\nexcept BaseException: pass'
    case 'function':
      return f'def attack():\n{within}\nattack()'
    case 'thread':
      return (
        f'import threading\ndef attack():\n{within}\none = threading.Thread(target=attack); '
        'one.start(); one.join()'
      )
    case 'child':
      return (
        f'import os\nchild = os.fork()\nif child == 0:\n{within}\n  os._exit(0)\nos.waitpid(child, '
        '0)'
      )
  return block
