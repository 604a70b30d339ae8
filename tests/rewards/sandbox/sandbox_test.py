"""A program's actions stay in its sandbox, are reported truly, and only right answers pass."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import hostile
import pytest
from paths import ROOT

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox import isolation as isolation_module
from jaxrl_llm.rewards.sandbox.inside.channel import Channel
from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.sandbox.libraries import preload_of
from jaxrl_llm.rewards.sandbox.sandbox import Case, Ending, Limits, SandboxError, Sandboxes

LIMITS = Limits(wall_s=60.0, cpu_s=1, memory_mib=512)
BRIEF = Limits(wall_s=1.0, cpu_s=60, memory_mib=512)
ANY = (Case(stdin='', stdout='done'),)


def opened(isolation, limits=LIMITS, libraries=()):
  try:
    return Sandboxes(limits, isolation=isolation, preload=preload_of(libraries))
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error, isolation)


@pytest.fixture(
  scope='module',
  params=[
    'namespaces',
    pytest.param('bubblewrap', marks=pytest.mark.full),
    pytest.param('namespaces, libraries', marks=pytest.mark.acceptance),
  ],
)
def sandboxes(request):
  isolation, _, libraries = request.param.partition(', ')
  # Each process that a program forks counts with the libraries' pages, about 100 MiB.
  limits = dataclasses.replace(LIMITS, memory_mib=1024) if libraries else LIMITS
  chosen = ('numpy', 'pandas', 'sympy') if libraries else ()
  with contextlib.closing(opened(isolation, limits, chosen)) as made:
    yield made


def has_libraries(sandboxes) -> bool:
  return sandboxes.output('import numpy', '')[0].ended == Ending.PASSED


@pytest.fixture(scope='module')
def brief(sandboxes):
  with contextlib.closing(opened(sandboxes.isolation, BRIEF)) as made:
    yield made


def said(sandboxes, program, stdin='') -> str:
  """The program's output, by way of the detail of a test that fails."""
  outcome = sandboxes.run_cases(textwrap.dedent(program), [Case(stdin=stdin, stdout='never this')])
  assert outcome.ended == Ending.FAILED, outcome
  return eval(outcome.detail.removeprefix('output ')).strip()


def is_well(sandboxes) -> bool:
  return sandboxes.run_tests('def f(x): return x + 1', ['assert f(1) == 2']).ended == Ending.PASSED


# What programs and tests may expect.


def test_cases_are_compared_up_to_white_space_at_line_ends(sandboxes):
  program = 'n = int(input())\nfor i in range(n): print(i, end=" \\n")\nprint()'
  cases = [
    Case(stdin='2\n', stdout='0\n1'),
    Case(stdin='3', stdout='0\n1\n2\n'),
    Case(stdin='1', stdout=' 0'),
  ]
  outcome = sandboxes.run_cases(program, cases)
  assert (outcome.passed, outcome.total, outcome.ended) == (2, 3, Ending.FAILED)
  assert outcome.fraction == 2 / 3


def test_programs_import_pythons_own_modules_and_none_of_ours(sandboxes):
  program = """
    import code, json, numbers
    print(all(module.__file__.startswith(json.__file__.removesuffix('json/__init__.py')) \
for module in (code, numbers)))
    for name in ('isolation', 'sandbox', 'extraction', 'jaxrl_llm'):
      try: __import__(name); print(name)
      except ModuleNotFoundError: pass
  """
  assert said(sandboxes, program) == 'True'


def test_programs_and_tests_are_compiled_without_our_future_statements(sandboxes):
  program = 'def f(x: int) -> str: return x'
  tests = [
    'assert f.__annotations__ == {"x": int, "return": str}',
    'def g(x: int): pass\nassert g.__annotations__["x"] is int',
  ]
  assert said(sandboxes, f'{program}\nprint(f.__annotations__["x"] is int)') == 'True'
  assert sandboxes.run_tests(program, tests[1:]).ended == Ending.PASSED
  outcome = sandboxes.run_tests('def f(x: List[int]): return x', ['assert f(1) == 1'])
  assert outcome.ended == Ending.EXCEPTION
  # Python 3.12 adds what it may mean.
  assert outcome.detail.startswith("NameError: name 'List' is not defined")


def test_hashes_are_the_same_in_every_sandbox(sandboxes, brief):
  assert said(sandboxes, 'print(hash("text"))') == said(brief, 'print(hash("text"))')


def test_each_case_has_a_process_of_its_own(sandboxes):
  program = 'import sys\ncount = globals().get("count", 0) + 1\nprint(count, sys.stdin.read())'
  outcome = sandboxes.run_cases(program, [Case(stdin=f'{i}', stdout=f'1 {i}') for i in range(3)])
  assert outcome.ended == Ending.PASSED


def test_a_program_reads_and_writes_as_one_that_is_run_by_hand(sandboxes):
  program = """
    import sys, threading, atexit, dataclasses, subprocess
    @dataclasses.dataclass
    class Point:
      x: int = 1
    def main():
      print(sys.stdin.readline().strip(), Point(), 'ü')
    if __name__ == '__main__':
      threading.Thread(target=lambda: print('thread')).start()
      atexit.register(lambda: print('end'))
      sys.setrecursionlimit(10000)
      main()
      open('note', 'w').write('kept')
      print(open('/tmp/note').read(), subprocess.run(['echo', 'child'], capture_output=True, \
text=True).stdout, end='')
      sys.exit(0)
  """
  got = said(sandboxes, program, stdin='hello\n').splitlines()
  assert sorted(got) == sorted(['hello Point(x=1) ü', 'kept child', 'thread', 'end'])


def test_a_program_ends_itself_and_knows_its_file_as_one_that_is_run_by_hand(sandboxes):
  for end in ('exit()', 'quit(0)', 'import sys; sys.exit()'):
    assert (
      sandboxes.run_cases(f'print("done")\n{end}\nprint("more")', ANY).ended == Ending.PASSED
    ), end
  assert sandboxes.run_cases('print("done")\nexit(3)', ANY).detail == 'exit 3'
  given = 'import fileinput, os, sys\nassert len(sys.argv) == 1 and os.path.basename(__file__)\n'
  assert (
    said(sandboxes, f'{given}print([line.strip() for line in fileinput.input()])', stdin='a\nb')
    == "['a', 'b']"
  )


def test_a_program_ends_with_executors_and_threads_that_it_left_to_themselves(sandboxes):
  for name in ('Thread', 'Process'):
    program = (
      f'from concurrent.futures import {name}PoolExecutor\nexecutor = {name}PoolExecutor(2)\n'
    )
    outcome = sandboxes.run_cases(f'{program}print(executor.submit(str, "done").result())', ANY)
    assert outcome.ended == Ending.PASSED, outcome
  late = 'import threading, time\nthreading.Timer(0.1, lambda: print("done")).start()'
  assert sandboxes.run_cases(late, ANY).ended == Ending.PASSED


def test_a_program_may_close_its_output_or_put_another_in_its_place(sandboxes):
  for end in (
    'sys.stdout.close()',
    'sys.stdout.flush(); sys.stdout = None',
    'class Own:\n  def __init__(s, to): s.to = to\n  def flush(s): s.to.flush()\nsys.stdout = '
    'Own(sys.stdout)',
  ):
    assert sandboxes.run_cases(f'import sys\nprint("done")\n{end}', ANY).ended == Ending.PASSED, end
  outcome = sandboxes.run_cases('import sys\nprint("done", flush=True)\nsys.stdout = 3', ANY)
  assert (outcome.ended, outcome.detail) == (Ending.EXIT, 'exit 120')  # As without a sandbox.


def test_what_a_program_has_written_is_there_wherever_it_wrote_it(sandboxes):
  for program in (
    'import io, sys\nsys.stdout = io.StringIO()\nprint("no")\nsys.stdout = '
    'sys.__stdout__\nprint("done")',
    'import atexit, sys\natexit.register(lambda: sys.__stdout__.write("done"))',
    'to = open(1, "w", closefd=False)\nto.write("done")',
    'import io, sys\nold, sys.stdout = sys.stdout, '
    'io.TextIOWrapper(sys.stdout.buffer)\nprint("done")',
  ):
    assert sandboxes.run_cases(program, ANY).ended == Ending.PASSED, program


def test_statements_run_in_order_in_one_namespace(sandboxes):
  program = (
    'class Stack(list):\n  def push(self, x): self.append(x)\n  def top(self): return self[-1]\n'
  )
  tests = [
    's = [1]',
    's.append(2)',
    'assert s == [1, 2]',
    'assert s == []',
    'assert undefined',
    'assert True',
  ]
  outcome = sandboxes.run_tests(program, tests)
  assert (outcome.passed, outcome.total, outcome.ended) == (4, 6, Ending.FAILED)
  assert outcome.detail == 'test 3: AssertionError: '


VALUES = [
  *(
    'None',
    'True',
    '-7',
    '10**400',
    '10**5000',
    '1.5',
    "float('inf')",
    '2+3j',
    "'ü\\n'",
    "b'\\x00\\xff'",
    "bytearray(b'a')",
  ),
  *(
    '[1, [2]]',
    '(1, (2,))',
    '{1, 2}',
    'frozenset({3})',
    "{'a': [1], (1, 2): None}",
    'range(1, 9, 2)',
    'slice(1, 2)',
  ),
  *("__import__('fractions').Fraction(1, 3)", "__import__('decimal').Decimal('1.10')"),
  *("__import__('collections').deque([1, 2], 5)", "__import__('collections').Counter('aab')"),
  "__import__('datetime').datetime(2024, 1, 2, 3, 4, 5, 6)",
]


def test_values_go_to_the_program_and_back_as_they_are(sandboxes):
  program = 'def same(x): return x\ndef name(x): return type(x).__name__'
  tests = [
    f'v = {v}; assert same(v) == v and type(same(v)) is type(v) and name(v) == type(v).__name__'
    for v in VALUES
  ]
  outcome = sandboxes.run_tests(program, tests)
  assert outcome.passed == len(VALUES), outcome


def test_objects_of_the_program_behave_in_tests_as_they_do_in_the_program(sandboxes):
  program = """
    import math
    from collections import namedtuple
    class Vector:
      def __init__(self, x, y): self.x, self.y = x, y
      def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
      def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
      def __mul__(self, n): return Vector(self.x * n, self.y * n)
      __rmul__ = __mul__
      def __len__(self): return 2
      def __repr__(self): return f'<{self.x} {self.y}>'
      def __iter__(self): return iter((self.x, self.y))
      def __getitem__(self, i): return (self.x, self.y)[i]
      def __enter__(self): return 'in'
      def __exit__(self, *error): self.x = 'out'
      def norm(self): return math.hypot(self.x, self.y)
      @property
      def both(self): return [self.x, self.y]
    class Empty(Exception): pass
    class Worse(Empty): pass
    Pair = namedtuple('Pair', 'a b')
    LIMIT = 10
    def numbers():
      yield from range(3)
    def forever():
      while True: yield 1
    def adder(n): return lambda x: x + n
    def apply(f, items): return [f(x) for x in items]
    def fail(x): raise Worse(f'no {x}')
    def divide(a, b): return a / b
    def decode(data): return data.decode()
    def sort(items): items.sort()
    def fill(table, more): table['a'] = more; more.append(1)
    def pair(): return Pair(1, 2)
    def total(*items, scale=1): return scale * sum(items)
    def consume(iterator): return next(iterator), list(iterator)
  """
  tests = """
    v = Vector(3, 4); assert v.norm() == 5 and v.both == [3, 4] and v[1] == 4 and len(v) == 2 \
and repr(v) == '<3 4>'
    assert v + Vector(1, 1) == Vector(4, 5) and v * 2 == 2 * v == Vector(6, 8) and v != Vector(0, 0)
    assert list(v) == [3, 4] and isinstance(v, Vector) and not isinstance(3, Vector)
    v.x = 7; assert v.x == 7 and str(v) == '<7 4>'
    with v as inside: assert inside == 'in'
    assert v.x == 'out'
    assert list(numbers()) == [0, 1, 2] and next(forever()) == 1 and sum(numbers()) == 3
    assert adder(2)(3) == 5 and apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(adder(1), [1]) \
== [2]
    try: fail(1)
    except Empty as error: assert str(error) == 'no 1'
    try: divide(1, 0)
    except ZeroDivisionError: pass
    try: decode(b'\\xff'); assert False
    except UnicodeError as error: assert 'invalid start byte' in str(error)
    items = [3, 1, 2]; assert sort(items) is None and items == [1, 2, 3]
    table, more = {}, []; fill(table, more); assert table == {'a': [1]} and more == [1]
    table, more = {}, []; fill(table, more=more); assert table == {'a': [1]} and more == [1]
    assert pair() == (1, 2) and LIMIT == 10 and total(1, 2, scale=3) == 9 \
and math.isclose(math.pi, 3.1415926535898)
    assert consume(iter([1, 2, 3])) == (1, [2, 3])
  """
  lines = textwrap.dedent(tests).strip().splitlines()
  joined = []
  for line in lines:
    if line.startswith('except'):
      joined[-1] += f'\n{line}'
    else:
      joined.append(line)
  outcome = sandboxes.run_tests(textwrap.dedent(program), joined)
  assert outcome.passed == len(joined), outcome


def test_the_program_gets_its_builtin_names_only_where_it_is_to_define_them(sandboxes):
  program = (
    'def abs(x): return 0\ndef sorted(x): return 7\nclass math:\n  isclose = staticmethod(lambda '
    'a, b: True)'
  )
  outcome = sandboxes.run_tests(
    program,
    ['assert abs(-1) == 1', 'assert sorted([2, 1]) == 7', 'assert not math.isclose(1, 2)'],
    'sorted',
  )
  assert outcome.ended == Ending.PASSED, outcome
  assert (
    sandboxes.run_tests('class queue: size = 3', ['assert queue.size == 3'], 'queue').ended
    == Ending.PASSED
  )


def test_a_time_of_a_zone_is_none_without_it(sandboxes):
  program = (
    'from datetime import datetime, timezone\ndef f(): return datetime(2024, 1, 2, '
    'tzinfo=timezone.utc)'
  )
  outcome = sandboxes.run_tests(
    program, ['import datetime', 'assert f() == datetime.datetime(2024, 1, 2)']
  )
  assert outcome.passed == 1, outcome


def test_an_object_that_was_told_a_value_says_no_number(sandboxes):
  lie = """
    class Lie:
      def __sub__(self, other): return self
      __rsub__ = __sub__
      def __abs__(self): return 0
      __neg__ = lambda self: self
      __round__ = lambda self, digits=0: 0
      __float__ = lambda self: 0.0
      __bool__ = lambda self: False
    Lie.__name__ = '{}'
    def f(x): return Lie()
  """
  distances = [
    'abs(f(2) - 3.5) < 1e-6',
    'abs(-(3.5 - f(2))) < 1e-6',
    'round(f(2) - 3.5, 6) == 0',
    'not f(2) - 3.5',
  ]
  distances += ['float(f(2) - 3.5) == 0', 'abs(f(2) - 3.5 - f(3)) < 1e-6']
  for name in ('f', 'abs', 'Lie'):
    outcome = sandboxes.run_tests(
      textwrap.dedent(lie).format(name), [f'assert {test}' for test in distances]
    )
    assert outcome.passed == 0, outcome
  trusted = textwrap.dedent(lie).replace(
    'def f(x): return Lie()', 'Lie.__init__ = lambda self, x: None; f = Lie'
  )
  assert (
    sandboxes.run_tests(trusted.format('f'), [f'assert {test}' for test in distances]).passed == 0
  )
  check = 'def check(candidate):\n  assert abs(candidate(2) - 3.5) < 1e-6\ncheck(f)'
  assert sandboxes.run_tests(textwrap.dedent(lie).format('candidate'), [check], 'f').passed == 0
  assert (
    sandboxes.run_tests(
      'def f(x): return 3.5', [check, *map('assert {}'.format, distances[:4])]
    ).passed
    == 5
  )


def test_a_long_name_of_an_exception_is_cut(sandboxes):
  program = 'Long = type("E" * 1000, (Exception,), {})\ndef f(x): raise Long("why")'
  assert sandboxes.run_tests(program, ['f(1)']).detail == f'test 0: {"E" * 100}: why'


ENDINGS = {
  'x = 1 / 0': (Ending.EXCEPTION, 'ZeroDivisionError: division by zero'),
  'def f(:': (Ending.EXCEPTION, 'SyntaxError: invalid syntax'),
  'import os; os._exit(3)': (Ending.EXIT, 'exit 3'),
  'import sys; sys.exit(4)': (Ending.EXIT, 'exit 4'),
  'import os; os.abort()': (Ending.SIGNAL, 'signal 6'),
  'import ctypes; ctypes.string_at(0)': (Ending.SIGNAL, 'signal 11'),
  hostile.ALLOCATE: (Ending.MEMORY, 'MemoryError'),
  hostile.SPIN: (Ending.CPU, ''),
}


@pytest.mark.parametrize('program', ENDINGS)
def test_the_outcome_says_how_the_program_ended(sandboxes, program):
  outcomes = [sandboxes.run_cases(program, ANY)]
  outcomes += [sandboxes.run_tests(program, ['assert True'])] if program != hostile.SPIN else []
  for outcome in outcomes:
    assert (outcome.ended, outcome.detail) == ENDINGS[program]
    assert (outcome.passed, outcome.total) == (0, 1)


def test_what_happens_inside_of_a_test_is_told_too(sandboxes):
  program = (
    'import os, sys\ndef spin():\n  while True: pass\ndef hog(): return len(bytearray(4 << 30))\n'
  )
  program += 'def leave(): os._exit(0)\ndef stop(): sys.exit(0)\ndef one(): return 1\n'
  tests = ['assert one() == 1', 'assert {}() == 1', 'assert one() == 1']
  for name, ended, passed in (
    ('spin', Ending.CPU, 1), ('hog', Ending.MEMORY, 2), ('leave', Ending.EXIT, 1),
    ('stop', Ending.FAILED, 2), ('one', Ending.PASSED, 3),
  ):  # fmt: skip
    outcome = sandboxes.run_tests(program, [test.format(name) for test in tests])
    assert (outcome.ended, outcome.passed) == (ended, passed), (name, outcome)


# Containment.


def test_a_program_that_sleeps_is_ended_by_the_clock(brief):
  assert brief.run_cases(hostile.SLEEP, ANY).ended == Ending.WALL
  outcome = brief.run_tests(
    f'def f():\n  {hostile.SLEEP.replace(chr(10), ";")}', ['assert True', 'f()', 'assert True']
  )
  assert (outcome.ended, outcome.passed, outcome.total) == (Ending.WALL, 1, 3)


def test_nothing_is_run_when_the_time_of_all_cases_is_over(brief, monkeypatch):
  sent, send = [], Channel.send
  monkeypatch.setattr(
    Channel, 'send', lambda channel, message: (sent.append(message), send(channel, message))
  )
  outcome = brief.run_cases(hostile.SLEEP, ANY * 50)
  assert (outcome.ended, outcome.passed, outcome.total) == (Ending.WALL, 0, 50)
  assert len(sent) == 2  # The program and one input.


@pytest.mark.full
def test_the_processor_time_of_all_processes_and_cases_counts_together(sandboxes):
  spin = 'while time.process_time() - began < {}: pass'
  many = (
    'import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n    began = '
    'time.process_time()\n    '
  )
  many += (
    f'{spin.format(0.35)}\n    os._exit(0)\nwhile True:\n  try: os.wait()\n  except '
    'ChildProcessError: break'
  )
  assert sandboxes.run_cases(many, ANY).ended == Ending.CPU
  one = f'import time\nbegan = time.process_time()\n{spin.format(0.35)}\nprint("done")'
  outcome = sandboxes.run_cases(one, ANY * 50)
  assert (outcome.ended, outcome.passed) == (Ending.CPU, 2)
  assert (
    sandboxes.run_tests('def f():\n  while True: yield 1', ['assert 2 in f()']).ended == Ending.CPU
  )


def test_a_program_that_a_busy_machine_keeps_waiting_is_the_scorers_failure(sandboxes, monkeypatch):
  """The supervisor's verdict; which programs are starved is `rewards_usage_test`'s."""
  receive = Channel.receive

  def starved(channel):
    return {**message, 'ended': 'starved'} if 'ended' in (message := receive(channel)) else message

  monkeypatch.setattr(Channel, 'receive', starved)
  for run in (
    lambda: sandboxes.run_cases('print("done")', ANY),
    lambda: sandboxes.run_tests('f = 1', ['assert f == 1']),
    lambda: sandboxes.output('print("done")', ''),
  ):
    with pytest.raises(SandboxError, match='other processes held the CPUs'):
      run()


@pytest.mark.full
def test_a_fork_bomb_is_bounded_and_gone(sandboxes, brief):
  outcomes = sandboxes.run_cases(hostile.FORK_BOMB, ANY), brief.run_cases(hostile.THREAD_BOMB, ANY)
  ends = {Ending.PROCESSES, Ending.CPU, Ending.WALL, Ending.EXCEPTION}
  for outcome in outcomes:
    assert outcome.ended in ends | ({Ending.MEMORY} if has_libraries(sandboxes) else set()), outcome
  assert is_well(sandboxes)


def test_memory_of_many_processes_counts_together(sandboxes):
  assert sandboxes.run_cases(hostile.ALLOCATE_IN_MANY, ANY).ended == Ending.MEMORY


def test_memory_of_sockets_counts(sandboxes):
  program = """
    import os, socket
    one, other = socket.socketpair()
    try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    except PermissionError: print('refused')
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    one.setblocking(False)
    try: print(one.send(b'x' * (1 << 20)) < 1 << 18)
    except BlockingIOError: pass
  """
  assert said(sandboxes, program).split() == ['refused', 'True']
  many = 'import os, socket, time\nfor _ in range(20):\n  if os.fork() == 0: break\n'
  many += 'pairs = [socket.socketpair() for _ in range(100)]\ntime.sleep(1000)'
  assert sandboxes.run_cases(many, ANY).ended == Ending.MEMORY


HIDDEN = """
import sys
from jaxrl_llm.rewards.sandbox.sandbox import *
sandboxes = Sandboxes(Limits(wall_s=20, cpu_s=1, memory_mib=512), isolation='namespaces')
print(sandboxes.output('import os; print(os.listdir("/proc"), os.getcwd())', '')[1])
print(*(sandboxes.output(program, '')[0].ended.value for program in sys.argv[1:]))
sandboxes.close()
"""


@pytest.mark.full
def test_limits_hold_where_a_container_hides_proc():
  """A file of /proc is covered, as in containers: the kernel permits no other /proc there."""
  within = [
    'unshare',
    '--mount',
    'sh',
    '-c',
    'mount --bind /dev/null /proc/version && exec "$@"',
    'sh',
  ]
  if subprocess.run([*within, 'true'], capture_output=True).returncode:
    pytest.skip('no mount namespace without root')
  many = (
    'import os, time\nfor _ in range(3): os.fork()\nwhile time.process_time() < 0.4: '
    'pass\ntime.sleep(1000)'
  )
  run = subprocess.run(
    [*within, sys.executable, '-c', HIDDEN, hostile.ALLOCATE_IN_MANY, many],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert run.stdout.split('\n')[:3] == ['[] /tmp', '', 'memory cpu'], run


def test_a_gigabyte_of_output_is_cut(sandboxes):
  for program in (hostile.OUTPUT, hostile.ERROR_OUTPUT):
    assert sandboxes.run_cases(program, ANY).ended == Ending.OUTPUT
    assert sandboxes.run_tests(program, ['assert True']).ended == Ending.OUTPUT
  # And the end of the line.
  for count, ended in (((1 << 20) - 1, Ending.PASSED), (1 << 20, Ending.OUTPUT)):
    assert (
      sandboxes.run_cases(f'print("x" * {count})', [Case(stdin='', stdout='x' * count)]).ended
      == ended
    )


def test_files_of_the_host_can_neither_be_seen_nor_written(sandboxes, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('of the host')
  home = pathlib.Path.home()
  reads = [
    *(
      str(secret),
      __file__,
      '/etc/shadow',
      '/etc/hostname',
      f'{home}/.ssh',
      f'/tmp/../..{secret}',
      '/run',
      '/var',
    ),
    *(
      f'/proc/1/root{secret}',
      '/proc/1/environ',
      '/proc/1/mem',
      '/proc/1/fd/0',
      '/proc/1/cwd/x',
      '/sys/kernel',
    ),
    *('/dev/sda', '/dev/vda', '/dev/kmsg', '/dev/mem', '/proc/kcore'),
  ]
  writes = [
    *(
      '/x',
      '/usr/x',
      '/usr/bin/x',
      '/etc/passwd',
      '/etc/x',
      '/dev/x',
      f'{home}/x',
      str(secret),
      os.__file__,
    ),
    *('/proc/sys/kernel/hostname', '/proc/sys/user/max_user_namespaces', '/proc/sysrq-trigger'),
    *(
      '/proc/sys/fs/suid_dumpable',
      '/proc/sys/fs/lease-break-time',
      '/proc/1/oom_score_adj',
      '/proc/1/autogroup',
    ),
  ]
  usual = {
    'bin',
    'dev',
    'etc',
    'home',
    'jaxrl',
    'lib',
    'lib32',
    'lib64',
    'opt',
    'proc',
    'root',
    'sbin',
    'tmp',
    'usr',
  }
  program = f"""
    import glob, os
    for mode, paths in (('rb', {reads}), ('wb', {writes})):
      for path in paths:
        try:
          open(path, mode).read(1)
          print('opened', path)
        except OSError as error: pass
        except ValueError: print('opened', path)
    for path in {writes}:
      try: print('opened', path, os.open(path, os.O_WRONLY))  # Of settings, \
what is there is not cut to nothing.
      except OSError: pass
    print([name for name in os.listdir('/') if name not in {usual}])
    print([path for home in ('/root', '/home', '/opt') for path in glob.glob(home + '/*')])
    print(os.getuid(), len(glob.glob('/proc/[0-9]*')) < 4)
  """
  places = {path.split('/')[1] for path in preload_of(('numpy',)).path}
  others = str(sorted(places - usual) if has_libraries(sandboxes) else [])
  assert said(sandboxes, program) == f'{others}\n[]\n1000 True'
  assert secret.read_text() == 'of the host'


def test_privileges_and_uncounted_memory_are_refused(sandboxes):
  assert said(sandboxes, hostile.UNCOUNTED_MEMORY) == '1\n-1 1\n-1 -1\n-1 -1\n1'
  got = said(sandboxes, hostile.PRIVILEGES).split()
  assert got == ['-1'] * 8 + ['0000000000000000']


def test_shared_memory_that_no_limit_counts_is_refused(sandboxes):
  program = """
    import mmap, multiprocessing.sharedctypes, os
    def shared(open_file):
      try:
        mmap.mmap(open_file(), 1 << 20)
        print('mapped')
      except OSError: print('refused')
    shared(lambda: -1)
    shared(lambda: os.open('/dev/zero', os.O_RDWR))
    print(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)[0])
    # In /tmp, whose size is limited.
    print(multiprocessing.sharedctypes.RawArray('i', 10)[3])
  """
  assert said(sandboxes, program).split() == ['refused', 'refused', '0', '0']


def test_the_disk_is_memory_of_a_fixed_size(sandboxes):
  written = int(said(sandboxes, hostile.FILL_DISK))
  assert 32 << 20 < written <= 2 * (64 << 20)  # /tmp and, under bubblewrap, /dev/shm.


def test_no_program_waits_for_the_hosts_disks(sandboxes):
  program = """
    import ctypes, os
    libc = ctypes.CDLL(None)
    print([libc.fsync(-1), libc.fdatasync(-1), libc.syncfs(-1), libc.sync_file_range(-1, 0, 0, 0)])
    with open('x', 'w') as file: os.fsync(file.fileno())
  """
  assert said(sandboxes, program) == '[0, 0, 0, 0]'


def test_no_program_keeps_the_host_from_opening_a_file(sandboxes):
  program = """
    import fcntl, os
    open('x', 'w').close()
    for place, command, operand in (('x', fcntl.F_SETLEASE, fcntl.F_WRLCK), \
('.', fcntl.F_NOTIFY, fcntl.DN_ACCESS)):
      try: fcntl.fcntl(os.open(place, os.O_RDONLY), command, operand); print('done')
      except PermissionError as error: print(error.errno)
    print(fcntl.fcntl(os.open('x', os.O_RDONLY), fcntl.F_GETFD))
  """
  assert said(sandboxes, program).split() == ['1', '1', '1']


def test_sockets_are_of_families_that_the_namespace_confines(sandboxes):
  program = """
    import socket
    unix, inet, inet6, netlink, packet, bluetooth, alg, vsock = 1, 2, 10, 16, 17, 31, 38, 40
    for family in (unix, inet, inet6, netlink, packet, bluetooth, alg, vsock):
      for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        try:
          socket.socket(family, kind).close()
          print(family)
          break
        except OSError: pass
    socket.socketpair()
  """
  assert set(said(sandboxes, program).split()) - {'10'} == {'1', '2'}  # IPv6 may be off.


def test_the_host_is_not_described(sandboxes):
  # Compared inside: `said` has the first 200 characters only.
  program = f"""
    def read(path):
      try: return open(path).read()
      except OSError: return ''
    print(len(read('/proc/cmdline')), {str(ROOT)!r} in read('/proc/1/cmdline'))
  """
  assert said(sandboxes, program) == '0 False'


@pytest.mark.parametrize('family', ['loopback', 'abstract', 'outside', 'name'])
def test_there_is_no_network(sandboxes, family):
  with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
    tcp.bind(('127.0.0.1', 0))
    tcp.listen()
    name = f'\0sandbox-test-{os.getpid()}'
    unix.bind(name)
    unix.listen()
    connect = {
      'loopback': f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2)",
      'abstract': f'socket.socket(socket.AF_UNIX).connect({name!r})',
      'outside': "socket.create_connection(('192.0.2.1', 80), 1)",
      'name': "socket.getaddrinfo('example.org', 80)",
    }[family]
    program = (
      f'import socket\ntry: {connect}; print("connected")\nexcept OSError as error: '
      'print("refused")'
    )
    assert said(sandboxes, program) == 'refused'


def test_a_program_cannot_kill_its_parent(sandboxes):
  outcome = sandboxes.run_cases(hostile.KILL_PARENT, ANY)
  assert outcome.ended in (Ending.PASSED, Ending.SIGNAL)
  tests = sandboxes.run_tests(
    f'{hostile.KILL_PARENT}\ndef f(): return 1', ['assert f() == 1', 'assert f() == 2']
  )
  assert tests.ended != Ending.PASSED
  assert is_well(sandboxes)


def test_a_program_cannot_take_its_supervisors_limits_away(sandboxes):
  limit = (
    'import resource\ntry: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\nexcept '
    'PermissionError: print("no")\n'
  )
  limit += 'resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))'  # Its own it may lower.
  assert said(sandboxes, limit) == 'no'
  assert (
    sandboxes.run_tests(f'{limit}\ndef f(): return 1', ['assert f() == 1']).ended == Ending.PASSED
  )


def test_a_program_cannot_interrupt_its_supervisor(sandboxes):
  interrupt = 'import os, signal\nfor pid in (1, os.getppid()): os.kill(pid, signal.SIGINT)\n'
  assert sandboxes.run_cases(f'{interrupt}print("done")', ANY * 3).passed == 3
  outcome = sandboxes.run_tests(f'{interrupt}def f(): return 1', ['assert f() == 1'])
  assert outcome.ended == Ending.PASSED, outcome
  own = (
    'import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: '
    'print("done")'
  )
  assert sandboxes.run_cases(own, ANY).ended == Ending.PASSED


def test_a_program_cannot_take_its_supervisors_processor(sandboxes):
  program = """
    import os
    for call in (
      lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
      lambda: os.sched_setaffinity(1, {0}),
      lambda: os.setpriority(os.PRIO_USER, 0, 19),
      lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    ):
      try: call(); print('done')
      except PermissionError: print('refused')
  """
  assert said(sandboxes, program).split() == ['refused'] * 4


def test_processor_time_counts_under_any_name(sandboxes):
  spin = (
    'import os, time\nfor _ in range(2):\n  if os.fork() == 0: break\nwhile time.process_time() < '
    '0.8: pass\n'
  )
  named = (
    f'import ctypes\nctypes.CDLL(None).prctl(15, b"\\xff")\n{spin}print("done", '
    'flush=True)\ntime.sleep(1000)'
  )
  assert sandboxes.run_cases(named, ANY).ended == Ending.CPU


def test_processor_time_of_children_that_nobody_waits_for_counts(sandboxes):
  program = """
    import ctypes, signal
    try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    except OSError: print('refused')
    libc = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(256)
    action[0] = 1  # SIG_IGN.
    print(libc.sigaction(signal.SIGCHLD, action, None), \
libc.sigaction(signal.SIGCHLD, None, action))
    print(signal.signal(signal.SIGUSR1, signal.SIG_IGN) == signal.SIG_DFL)
  """
  assert said(sandboxes, program).split() == ['refused', '-1', '0', 'True']


def test_user_namespaces_are_refused_without_the_help_of_proc(sandboxes):
  program = """
    import ctypes, errno, os, platform, signal
    libc, number = ctypes.CDLL(None, use_errno=True), \
{'x86_64': 56, 'aarch64': 220}[platform.machine()]
    pid = libc.syscall(number, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    print(pid, ctypes.get_errno() == errno.EPERM)
    print(libc.syscall(435, ctypes.create_string_buffer(88), 88), \
ctypes.get_errno() == errno.ENOSYS)
  """
  assert said(sandboxes, program).split() == ['-1', 'True'] * 2


def test_a_program_that_kills_its_tests_passes_none(sandboxes):
  program = f'def f():\n{textwrap.indent(hostile.KILL_PARENT, "  ")}\n  return 1'
  outcome = sandboxes.run_tests(program, ['assert f() == 1', 'assert f() == 1'])
  assert (outcome.ended, outcome.passed) == (Ending.SIGNAL, 0)


def test_no_daemon_is_left(sandboxes):
  assert sandboxes.run_cases(hostile.DAEMONS, ANY).ended == Ending.PASSED
  assert hostile.until(lambda: not hostile.processes(hostile.LINGER))
  program = f'{hostile.DAEMONS}\ndef f(): return 1'
  assert sandboxes.run_tests(program, ['assert f() == 1']).ended == Ending.PASSED
  assert hostile.until(lambda: not hostile.processes(hostile.LINGER))


def test_nothing_of_one_case_lives_on_in_the_next(sandboxes):
  program = f"""
import os
print(sum(name.isdecimal() for name in os.listdir('/proc')))
if os.fork() == 0:
  os.setsid()
  os.execvp('sleep', {hostile.LINGER.split()!r})
"""
  # The supervisor and the program.
  assert sandboxes.run_cases(program, [Case(stdin='', stdout='2')] * 3).ended == Ending.PASSED


def test_no_more_processes_are_forked_than_are_permitted(sandboxes):
  program = """
    import os, time
    for number in range(200):
      try: pid = os.fork()
      except OSError: print('refused', 20 < number < 32); break
      if pid == 0: time.sleep(1000)
  """
  outcome = sandboxes.run_cases(textwrap.dedent(program), [Case(stdin='', stdout='refused True')])
  # The kernel does not limit root, who bubblewrap's processes stay on the outside: there it is the
  # supervisor who sees.
  uncounted = sandboxes.isolation == 'bubblewrap' and os.getuid() == 0
  if has_libraries(sandboxes):
    assert outcome.ended == Ending.MEMORY, outcome
  else:
    assert outcome.ended == (Ending.PROCESSES if uncounted else Ending.PASSED), outcome


def test_no_file_is_longer_than_permitted(sandboxes):
  with contextlib.closing(opened(sandboxes.isolation, Limits(file_mib=1))) as small:
    program = """
      try: open('long', 'wb').write(bytes(2 << 20))
      except OSError as error: print(error.errno, os.stat('long').st_size)
    """
    assert said(small, f'import os\n{textwrap.dedent(program)}') == f'{errno.EFBIG} {1 << 20}'


def test_ten_thousand_open_files_are_refused(sandboxes):
  outcome = sandboxes.run_cases(hostile.OPEN_FILES, ANY)
  assert outcome.ended == Ending.EXCEPTION and 'Too many open files' in outcome.detail


def test_deleting_the_working_directory_harms_nobody(sandboxes):
  assert sandboxes.run_cases(hostile.DELETE_CWD, ANY).ended == Ending.PASSED
  assert is_well(sandboxes)


@pytest.mark.full
def test_ignored_signals_do_not_help(sandboxes, brief):
  assert sandboxes.run_cases(hostile.IGNORE_SIGNALS + hostile.SPIN, ANY).ended == Ending.CPU
  assert brief.run_cases(hostile.IGNORE_SIGNALS + 'time.sleep(1000)', ANY).ended == Ending.WALL


SEARCH = """
def search(pattern):
  'Whether the process can find a text in its memory, in that of others, in files, \
or in its frames.'
  import gc, glob, os, re, sys
  found = set()
  for path in [*glob.glob('/proc/[0-9]*/mem')]:
    try:
      maps = open(path[:-3] + 'maps').read().splitlines()
      memory = open(path, 'rb', buffering=0)
    except OSError: continue
    for line in maps:
      start, end = (int(x, 16) for x in line.split()[0].split('-'))
      try:
        memory.seek(start)
        while start < end:
          part = memory.read(min(1 << 20, end - start))
          if not part: break
          found.update(re.findall(pattern, part)); start += len(part)
      except (OSError, ValueError, OverflowError): pass
  for path in [*glob.glob('/tmp/**', recursive=True), *glob.glob('/proc/[0-9]*/[ce][mn]*')]:
    try: found.update(re.findall(pattern, open(path, 'rb').read()))
    except OSError: pass
  return found
"""


def test_the_answers_are_not_to_be_found(sandboxes):
  """The program looks through all memory that it may read; that the search finds what is there is
  shown as well.
  """
  find = SEARCH + '\nhidden = "".join(["need", "le-", "0417"])\n'
  find += 'def f(x):\n  found = search(rb"needle-[0-9]{4}")\n  return sorted(found)\n'
  own = sandboxes.run_tests(find, ['assert f(1) == [b"need" + b"le-0417"]'])
  assert own.ended == Ending.PASSED, own
  search = (
    SEARCH + '\ndef f(x):\n  found = search(rb"needle-[0-9]{4}")\n'
    '  return found.pop().decode() if found else None\n'
  )
  outcome = sandboxes.run_tests(search, ['assert f(1) == "needle-2931"'])
  assert (outcome.ended, outcome.detail[:22]) == (Ending.FAILED, 'test 0: AssertionError')
  program = SEARCH + '\nprint(sorted(search(rb"needle-[0-9]{4}")))'
  assert said(sandboxes, program) == '[]'
  outcome = sandboxes.run_cases(
    program, [Case(stdin='', stdout='needle-5555'), Case(stdin='', stdout="[b'needle-5555']")]
  )
  assert (outcome.ended, outcome.passed) == (Ending.FAILED, 0)


CHEATS = {
  'equals everything': 'class A:\n  def __eq__(s, o): return True\ndef f(x): return A()',
  'is itself the function': """
    class f:
      def __init__(s, x): pass
      def __eq__(s, o): return True
      __ne__ = __lt__ = __gt__ = __le__ = __ge__ = lambda s, o: True
      __sub__ = __rsub__ = lambda s, o: 0.0
      __abs__ = lambda s: 0.0
  """,
  'is an integer that equals everything': """
    class A(int):
      def __eq__(s, o): return True
      __hash__ = int.__hash__
    def f(x): return A(99)
  """,
  'is a list that equals everything': """
    class A(list):
      def __eq__(s, o): return True
    def f(x): return A()
  """,
  'leaves': 'import os\ndef f(x): os._exit(0)',
  'leaves at once': 'import os\nos._exit(0)',
  'exits': 'import sys\ndef f(x): sys.exit(0)',
  'exits at once': 'raise SystemExit(0)',
  'hangs up and stays': 'import os, time\ndef f(x):\n  os.closerange(3, 256)\n  time.sleep(1000)',
  'patches '
  'builtins': 'import builtins\nbuiltins.exec = builtins.abs = lambda *a: 0\ndef f(x): return 0',
  'patches the harness': """
    import sys
    for name, module in list(sys.modules.items()):
      if name.startswith('inside'):
        for attribute in dir(module):
          if not attribute.startswith('__'): setattr(module, attribute, lambda *a, **k: True)
    def f(x): return 0
  """,
  'patches the harness later': """
    import gc, sys
    def f(x):
      for frame in sys._current_frames().values():
        while frame:
          for value in list(frame.f_locals.values()):
            if type(value).__name__ in ('Candidate', 'Peer', 'Channel'):
              try: value._answer = lambda m: {'value': True, 'passed': [True, True]}
              except Exception: pass
          frame = frame.f_back
      return 0
  """,
  'writes to every descriptor': """
    import json, os, struct
    def f(x):
      for message in ({'passed': [True, True], 'error': None}, \
{'ended': 'ok', 'passed': [True, True], 'error': None},
                      {'value': True}, {'value': {'tuple': []}}, {'ready': True}):
        body = json.dumps(message).encode()
        for number in range(256):
          for data in (struct.pack('!I', len(body)) + body, body):
            try: os.write(number, data)
            except OSError: pass
      os._exit(0)
  """,
  'prints what passes': (
    "print('passed: [true, true]')\ndef f(x): print('{\"passed\": [true, true]}'); return 0"
  ),
  'answers what is no value': """
    import os, struct
    def f(x):
      for number in range(3, 64):
        try: os.write(number, struct.pack('!I', 4) + b'}}}}')
        except OSError: pass
  """,
  'answers without end': """
    import os, struct
    def f(x):
      for number in range(3, 64):
        try:
          os.write(number, struct.pack('!I', 200 << 20))
          while True: os.write(number, b'[' * 65536)
        except OSError: pass
  """,
  'calls back into the tests': """
    def f(x):
      try: return x.__globals__
      except AttributeError: return 0
  """,
}
"""Programs that cannot pass the tests `f(1) == 4` and `abs(f(2) - 5) < 1e-6`."""


@pytest.mark.parametrize('cheat', CHEATS)
def test_a_pass_cannot_be_faked(sandboxes, cheat):
  tests = ['assert f(1) == 4', 'assert abs(f(2) - 5) < 1e-6', 'assert f(3) > 7 and f(3) in [9]']
  outcome = sandboxes.run_tests(textwrap.dedent(CHEATS[cheat]), tests)
  assert outcome.passed == 0 and outcome.ended != Ending.PASSED, outcome


def test_what_is_asked_of_plain_values_no_object_answers_as_it_likes(sandboxes):
  program = """
    class Yes:
      startswith = endswith = isdigit = count = get = lambda s, *a: True
      __contains__ = lambda s, item: True
      __iter__ = lambda s: iter(())
    Yes.__name__ = Yes.__qualname__ = 'f'
    def f(x): return Yes()
  """
  tests = [
    'assert f(1).startswith("q")',
    'assert f(1).isdigit()',
    'assert f(1).get("q")',
    'assert "z" in f(1)',
  ]
  assert sandboxes.run_tests(textwrap.dedent(program), tests).passed == 0
  named = 'class Bag:\n  def count(s, x): return 2\n  def __contains__(s, x): return x == 1'
  outcome = sandboxes.run_tests(
    named, ['bag = Bag()\nassert bag.count(7) == 2', 'assert 1 in Bag() and 3 not in Bag()']
  )
  assert outcome.ended == Ending.PASSED, outcome


_ECHO = """
  def m(s, *a): return a[0] if a else s
  union = intersection = difference = equals = is_equal = is_equal_to = get = index = count = m
  __sub__ = __rsub__ = __mul__ = __and__ = __xor__ = __matmul__ = lambda s, o: s
  total_seconds = lambda s: 0
  isdigit = lambda s: True
  __format__ = lambda s, spec: '0.00'
  __iter__ = lambda s: iter(())
  __len__ = lambda s: 0
  __str__ = __repr__ = lambda s: '0'
  __bool__ = __enter__ = lambda s: True
  __getitem__ = lambda s, i: i
  __contains__ = __exit__ = lambda s, *a: True
  __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = lambda s, o: True
  __hash__ = lambda s: 1
  __abs__ = __neg__ = lambda s: s
  __round__ = lambda s, n=0: 0
  __divmod__ = lambda s, o: (0, 0)
"""
"""The body of a class whose objects answer whatever tests would like to hear."""
ECHOES = {
  'a class with the name of the function': f'class f:\n  def __init__(s, *a): pass{_ECHO}',
  'a function that returns one': f'class A:{_ECHO}def f(*a): return A()',
  'a function that returns a function with such attributes': """
def f(*a):
  def g(*a): return a[0] if a else g
  echo = lambda *a: a[0] if a else True
  g.union = g.equals = g.is_equal = g.get = g.index = g.count = g.isdigit = g.intersection = echo
  g.total_seconds = lambda: 0
  return g
""",
  'a named tuple with such fields': """
import collections
names = 'union intersection equals is_equal get index count isdigit total_seconds'
T = collections.namedtuple('T', names)
def f(*a): return T(*[lambda *a: a[0] if a else 0] * len(names.split()))
""",
  'a type': 'def f(*a): return set',
  'an object with classes of exceptions for methods': """
class A: union = equals = is_equal = get = index = count = isdigit = intersection = total_seconds \
= ValueError
def f(*a): return A()
""",
  'a named tuple with classes of exceptions in its fields': """
import collections
names = 'union intersection equals is_equal get index count isdigit total_seconds'
T = collections.namedtuple('T', names)
def f(*a): return T(*[ValueError] * len(names.split()))
""",
}
ECHO_TESTS = (
  'assert (f(2) - 3).total_seconds() == 0',
  'import datetime; assert (f(2) - datetime.datetime(2024, 1, 2)).total_seconds() == 0',
  'import datetime; assert (datetime.datetime(2024, 1, 2) - f(2)).total_seconds() == 0',
  'assert f"{f(2)-3.5:.2f}" == "0.00"',
  'assert f"{f(2):.2f}" == "0.00"',
  'assert f"{f(2)-3.5}" == "0"',
  'assert list(f({1}) - {3}) == []',
  'assert not f({1}) ^ {3}',
  'assert len(f({1}) - {3}) == 0',
  'assert f(3).union({7, 8}) == {7, 8}',
  'assert f(3).intersection({7, 8}) == {7, 8}',
  'assert f(3).equals([7])',
  'assert f(3).is_equal_to([7])',
  'assert f(3).is_equal([7])',
  'assert f("a").isdigit()',
  'assert f("a").isdigit() and f("a").get("b") == "b"',
  'assert f(3).index(7) == 7',
  'for i in range(3): assert f(3)[i] == i',
  'assert 4 in f(3)',
  'assert round(f(2), 2) == 0',
  'assert divmod(f(2), 3) == (0, 0)',
  'with f(3): assert f(1) == 4',
  'with f(3) as x: assert x.y - 4 == 0',
  'import unittest; unittest.TestCase().assertAlmostEqual(f(3), 4)',
  'import unittest; unittest.TestCase().assertIn(4, f(3))',
  'import datetime; r = f(3); r -= datetime.timedelta(1); assert r.total_seconds() == 0',
)


@pytest.mark.parametrize('echo', ECHOES)
def test_no_object_of_the_program_computes_with_values_of_the_tests(sandboxes, echo):
  outcome = sandboxes.run_tests(textwrap.dedent(ECHOES[echo]), ECHO_TESTS)
  assert outcome.passed == 0, outcome


def test_an_object_shows_as_many_items_as_it_says(sandboxes):
  program = """
    class Items:
      shown = [0, 0, 0]
      __len__ = lambda s: 3
      __iter__ = __reversed__ = lambda s: iter(())
    class Once(Items):
      def __iter__(s):
        items, s.shown = s.shown, []
        return iter(items)
    class Iterator(Items):
      __iter__ = lambda s: s
      def __next__(s): raise StopIteration
    def f(x): return Items()
    def iterator(x): return Iterator()
    def once(x): return Once()
    def three(x):
      class Bare:  # An iterator without an `__iter__`.
        left = 3
        def __next__(s):
          s.left -= 1
          if s.left < 0: raise StopIteration
          return 0
      class Three(Items): __iter__ = lambda s: Bare()
      return Three()
  """
  near = 'all(abs(a - b) < 1e-6 for a, b in zip({}, [1.0, 2.0, 3.0]))'
  tests = [
    f'r = f(3); assert len(r) == 3 and {near.format("r")}',
    f'r = f(3); assert {near.format("r")} and len(r) == 3',
    f'r = f(3); assert len(r) == 3 and {near.format("reversed(r)")}',
    'r = f(3); assert r and all(x > 0 for x in r)',
    f'r = iterator(3); assert len(r) == 3 and {near.format("r")}',
    'r = once(3); assert list(r) == [0, 0, 0] and all(x > 0 for x in r)',
  ]
  assert sandboxes.run_tests(textwrap.dedent(program), tests).passed == 0
  right = (
    'r = three(3); assert r and len(r) == 3 and list(r) == list(reversed([*r])) and sum(r) == 0 '
    'and next(iter(r)) == 0'
  )
  outcome = sandboxes.run_tests(textwrap.dedent(program), [right])
  assert outcome.ended == Ending.PASSED, outcome


def test_a_method_that_returns_its_own_object_is_no_more_trusted_than_a_function(sandboxes):
  tests = [test.replace('f(', 'Solution().f(') for test in ECHO_TESTS]
  for result in ('s', 'Solution()'):
    program = f'class Solution:{_ECHO}  def f(s, *a): return {result}\n'
    assert sandboxes.run_tests(program, tests).passed == 0, result


def test_a_variable_of_the_program_is_no_more_trusted_than_a_result(sandboxes):
  program = f'class function:{_ECHO}x = X = function()'  # It says that it is what it likes.
  for name in ('x', 'X'):
    tests = [re.sub(r'\bf\([^()]*\)', name, test) for test in ECHO_TESTS]
    assert not any('f(' in test for test in tests)
    assert sandboxes.run_tests(program, tests).passed == 0


def test_a_name_written_like_a_class_that_the_tests_compare_as_a_function_is_one(sandboxes):
  program = f'class Extract:\n  def __init__(s, *a): pass{_ECHO}class Solution: Extract = Extract'
  for name in ('Extract', 'Solution.Extract'):
    tests = [f'assert {name}([1]) == [2]', *(test.replace('f(', f'{name}(') for test in ECHO_TESTS)]
    assert sandboxes.run_tests(program, tests).passed == 0, name


def test_a_function_that_a_check_compares_is_no_class_whatever_its_name(sandboxes):
  program = f'class Extract:\n  def __init__(s, *a): pass{_ECHO}'
  for test in ECHO_TESTS:
    body = textwrap.indent(test.replace('f(', 'candidate('), '  ')
    outcome = sandboxes.run_tests(
      program,
      [
        f'def check(candidate):\n{body}\n  if 0: assert candidate(1) == 2\ncheck(Extract)',
        f'same = Extract\n{test.replace("f(", "same(")}\nif 0: assert same(1) == 2',
      ],
      'Extract',
    )
    assert outcome.passed == 0, test


ESCAPES = {
  'the end of an iteration': ('def f(*a): raise StopIteration', 'assert all(map(f, [1, 2]))'),
  'a class derived from it': (
    'class E(ValueError, StopIteration): pass\ndef f(*a): raise E',
    'assert all(map(f, [1]))',
  ),
  'it, of an attribute': (
    'class A:\n  @property\n  def x(s): raise StopIteration\ndef f(*a): return A()',
    'assert all(map(lambda v: f(v).x == 3, [1, 2]))',
  ),
  'it, in a filter': (
    'def f(*a): raise StopIteration',
    'assert not list(filter(lambda v: f(v) != 3, [1, 2]))',
  ),
  'the end of an asynchronous iteration': (
    'async def f(x): raise StopAsyncIteration',
    'import asyncio\nclass I:\n  def __aiter__(s): return s\n  async def __anext__(s): return '
    'await f(1)\n'
    'async def main():\n  async for x in I(): pass\nasyncio.run(main())',
  ),
  'its own end, where an exception is awaited': (
    'import os\ndef f(x): os._exit(0)',
    'try: f(3)\nexcept Exception: pass',
  ),
  'an exit, where one is awaited': (
    'def f(x): raise SystemExit(0)',
    'try:\n  f(3)\n  assert False\nexcept Exception: pass',
  ),
  'the end of a generator': (
    'def f(x): raise GeneratorExit',
    'try:\n  f(3)\n  assert False\nexcept Exception: pass',
  ),
  'no message': (
    'import os, struct\ndef f(x):\n  for n in range(3, 64):\n    try: os.write(n, '
    "struct.pack('!I', 4) + b'}}}}')\n"
    '    except OSError: pass',
    'try: f(3)\nexcept Exception: pass',
  ),
  'an exception that every failure is': (
    'Bad = AssertionError\ndef f(x): return 0',
    'try:\n  f(3)\n  assert False\nexcept Bad: pass',
  ),
  'an exception above it': (
    'Bad = Exception\ndef f(x): return 0',
    'try:\n  f(3)\n  assert False\nexcept Bad: pass',
  ),
  'an assertion in a function of the tests': (
    'def f(g):\n  try: g(1)\n  except BaseException: pass',
    'def g(x): assert x == 2\nf(g)',
  ),
  'whatever ends a block': (
    'import contextlib\n@contextlib.contextmanager\ndef f(x):\n  try: yield None\n  except '
    'BaseException: pass',
    'with f(3) as x: assert x + 1 == 4',
  ),
  'an assertion in a block': (
    'import contextlib\n@contextlib.contextmanager\ndef f(x):\n  try: yield None\n  except '
    'BaseException: pass',
    'with f(3) as x: assert False',
  ),
}
"""How an exception may not get round a test: the program, and the test."""


@pytest.mark.parametrize('escape', ESCAPES)
def test_no_exception_of_the_program_gets_round_a_test(sandboxes, escape):
  program, test = ESCAPES[escape]
  assert sandboxes.run_tests(program, [test]).passed == 0


def test_the_program_chooses_no_module_and_no_type_of_the_tests_process(sandboxes):
  loaded = (
    'import sys; assert not {"antigravity", "turtle", "sqlite3", "webbrowser"} & sys.modules.keys()'
  )
  program = (
    'import antigravity as a, sqlite3 as b\nclass E(Exception): pass\ndef f(x): return b\nd = b'
  )
  outcome = sandboxes.run_tests(
    program, ['f(1); f(2); a; d; b; E; assert d.sqlite_version', loaded]
  )
  assert outcome.passed == 2, outcome
  capable = (
    'from collections.abc import Iterable, Iterator\nassert not callable(f(1)) and not '
    'isinstance(f(1), Iterable)'
  )
  assert sandboxes.run_tests('def f(x): return object()', [capable]).passed == 1


def test_helpers_that_compare_are_never_the_programs_where_python_or_a_library_has_them(sandboxes):
  for program, test in (
    ('def sum(x): return 0\ndef len(x): return 0', 'assert sum([1, 2]) == len([1, 2, 3, 4])'),
    ('def abs(x): return 0\ndef f(x): return 1', 'assert abs(f(2) - 3.5) < 1e-6'),
    ('class math: isclose = lambda *a: True\ndef f(x): return 1', 'assert math.isclose(f(2), 3.5)'),
    ('class np: isclose = lambda *a: True\ndef f(x): return 1', 'assert np.isclose(f(2), 3.5)'),
    (
      'class pytest: approx = lambda *a: 1\ndef f(x): return 1',
      'assert f(2) == pytest.approx(3.5)',
    ),
    (
      'class math: fabs = lambda x: 0\ndef f(x): return 1',
      'assert math.fabs(f(2) - 3.5) < 1e-6\nimport math',
    ),
    ('def fabs(x): return 0\ndef f(x): return 1', 'assert fabs(f(2) - 3.5) < 1e-6'),
    ('def isclose(*a, **k): return True\ndef f(x): return 1', 'assert isclose(f(2), 3.5)'),
    ('def deepcopy(x): return 0\ndef f(x): return 0', 'a = [2]\nassert f(a) == deepcopy(a)'),
    (
      'class Counter(list):\n  def __init__(s, x): pass\ndef f(x): return 1',
      'assert Counter(f("a")) == Counter("b")',
    ),
    (
      'def abs(x): return 0\ndef count(x): return 1',
      'count = count([1])\nassert abs(count - 3.5) < 1e-6',
    ),
  ):
    assert sandboxes.run_tests(program, [test]).passed == 0, program
  check = 'def check({}):\n  assert {}\ncheck(f)'
  for program, parameter, test in (
    ('def abs(x): return 0\ndef f(x): return 1', 'f', 'abs(f(2) - 3.5) < 1e-6'),
    ('def sorted(x): return 0\ndef f(x): return 1', 'f', 'sorted(f(2)) == sorted([3])'),
    ('def isclose(*a): return True\ndef f(x): return 1', 'candidate', 'isclose(candidate(2), 3.5)'),
    (
      'class deque:\n  def __init__(s, x): pass\n  def __eq__(s, o): return True\ndef f(x): return '
      '1',
      'candidate',
      'deque(candidate(2)) == deque([3])',
    ),
  ):
    assert sandboxes.run_tests(program, [check.format(parameter, test)], 'f').passed == 0, program


RIGHT = {
  'types as arguments': (
    'def f(t, x): return t(x)\ndef only(xs, t): return [x for x in xs if isinstance(x, t)]',
    'assert f(int, "3") == 3 and f(str, 4) == "4" and only([1, "a", 2.5], (int, float)) == [1, '
    '2.5]',
  ),
  'types as results': (
    'def f(xs): return [type(x) for x in xs]',
    'assert f([1, "a"]) == [int, str] and f([2])[0] != str',
  ),
  'an exception class as argument': (
    'def f(g, e):\n  try: g()\n  except e: return "caught"',
    'def g(): raise ValueError("x")\nassert f(g, ValueError) == "caught"',
  ),
  'a name of a built-in function': (
    'def sorted(x): return x[::-1]',
    'assert sorted([1, 2]) == [2, 1]',
  ),
  'another within one of Python': (
    'def round(x, n): return 2.57',
    'assert abs(round(2.5, 2) - 2.57) < 1e-9',
  ),
  'the fields of a named tuple': (
    'from collections import namedtuple\nP = namedtuple("P", "x y")\ndef f(a): return [P(a, 2)]',
    '(r,) = f(1)\nassert r.x == 1 and r == (1, 2) and r._fields == ("x", "y") and P(3, 4).y == 4',
  ),
  'the default of a defaultdict': (
    'from collections import defaultdict\ndef f(a): return defaultdict(int, {a: 1})\n'
    'def g(): return defaultdict(lambda: [7])',
    'r = f("k")\nassert r["z"] == 0 and r == {"k": 1, "z": 0} and g()["a"] == [7]',
  ),
  'coroutines': (
    'import asyncio\nasync def f(x):\n  await asyncio.sleep(0)\n  return x + 1\n'
    'async def g(n):\n  for i in range(n): yield i',
    'import asyncio\nasync def main():\n  assert await asyncio.gather(f(1), f(2)) == [2, 3]\n'
    '  assert [x async for x in g(2)] == [0, 1]\nasyncio.run(main())\nassert asyncio.run(f(1)) == '
    '2',
  ),
  'documentation': (
    'def f(x: int) -> str:\n  "Says f."\nclass A:\n  "Class A."',
    'assert f.__doc__ == "Says f." and A.__doc__ == "Class A." and f.__annotations__ == {"x": int, '
    '"return": str}',
  ),
  'captured output': (
    'def f(n):\n  print("hi", n)\ndef g():\n  print("at")\n  yield 1',
    'import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as to:\n  f(2)\n  '
    'list(g())\n'
    'assert to.getvalue() == "hi 2\\nat\\n"',
  ),
  'captured output, patched': (
    'import sys\ndef f(n): print("hi", n); print("no", file=sys.stderr)',
    'import io\nfrom unittest.mock import patch\nwith patch("sys.stdout", '
    'new_callable=io.StringIO) as to: f(2)\n'
    'assert to.getvalue() == "hi 2\\n"',
  ),
  'given input': (
    'def f(): return int(input()) + 1',
    'import io, sys\nsys.stdin = io.StringIO("3\\n4\\n")\nassert f() == 4 and f() == 5',
  ),
  'views of a dict': (
    'def f(d): return d.keys(), d.values(), d.items()',
    'keys, values, items = f({"a": 1})\nassert keys == {"a"} and list(values) == [1] and ("a", 1) '
    'in items',
  ),
  'a time of a zone': (
    'from datetime import datetime, timezone\ndef f(): return datetime(2024, 1, 2, '
    'tzinfo=timezone.utc)',
    'import datetime as d\nassert f() == d.datetime(2024, 1, 2, tzinfo=d.timezone.utc) != '
    'd.datetime(2024, 1, 2)',
  ),
  'another name of a module': (
    'import datetime as dt\ndef f(): return dt.date(2024, 1, 2)',
    'assert f() == dt.date(2024, 1, 2)',
  ),
  'a name of a module': (
    'class Q:\n  def push(s, x): s.x = x\nqueue = Q()',
    'queue.push(3)\nassert queue.x == 3',
  ),
  'a function that makes objects': (
    'class _A:\n  def __init__(s, b): s.b = b\n  def give(s, n):\n    s.b += n\n    return s\ndef '
    'f(b): return _A(b)',
    'a = f(1)\nassert a.give(2).give(3).b == 6 and a.b == 6',
  ),
  'an object that suppresses': (
    'class Suppress:\n  def __init__(s, *k): s.k = k\n  def __enter__(s): return s\n'
    '  def __exit__(s, t, v, tb): return t is not None and issubclass(t, s.k)',
    'with Suppress(ValueError): raise ValueError("x")\nwith Suppress(ZeroDivisionError): 1 / 0\n'
    'try:\n  with Suppress(KeyError): raise ValueError\n  assert False\nexcept ValueError: pass',
  ),
  'a decorator that tries again': (
    'def f(g):\n  def again(*a):\n    try: return g(*a)\n    except ValueError: return g(*a)\n  '
    'return again',
    'n = []\n@f\ndef g(x):\n  n.append(x)\n  if len(n) < 2: raise ValueError("x")\n  return '
    'x\nassert g(3) == 3',
  ),
  'a decorator that keeps the name and the documentation': (
    'import functools\ndef f(g):\n  @functools.wraps(g)\n  def call(*a): return g(*a)\n  return '
    'call',
    '@f\ndef g(x):\n  "Says g."\n  return x\nassert g(3) == 3 and g.__name__ == "g" and g.__doc__ '
    '== "Says g."',
  ),
  'an attribute that is deleted': (
    'class A:\n  @property\n  def x(s): return s.y\n  @x.deleter\n  def x(s): s.y = 0\na = '
    'A()\na.y = a.z = 3',
    'del a.x\ndel a.z\nassert a.x == 0 and not hasattr(a, "z")',
  ),
  'methods with names of attributes of standard values': (
    'import re\nclass A:\n  def start(s): return s\n  stop = start\n'
    'def f(x): return re.search("b", x)\ndef g(): return A()',
    'assert f("abc").start() == 1 and g().start().stop() is not None',
  ),
  'exceptions of the tests that pass through it': (
    'def f(g, n):\n  for i in range(n):\n    try: return g()\n    except LookupError:\n      if i '
    '== n - 1: raise\n'
    'def name(g):\n  try: g()\n  except Exception as e: return type(e).__name__',
    'class Own(LookupError):\n  def __init__(s, code): s.code = code\n'
    'n = []\ndef g():\n  n.append(1)\n  raise Own(7)\n'
    'try:\n  f(g, 3)\n  assert False\nexcept Own as e: assert e.code == 7 and len(n) == 3\n'
    'assert name(g) == "Own"',
  ),
  'functions of the tests that its threads call': (
    'from concurrent.futures import ThreadPoolExecutor\ndef f(g, items):\n'
    '  with ThreadPoolExecutor(8) as threads: return list(threads.map(g, items))',
    'assert f(lambda x: x * 2, range(200)) == list(range(0, 400, 2))',
  ),
  'paths and UUIDs': (
    'import pathlib, uuid\ndef f(path):\n  path.with_suffix(".txt").write_text("x")\n  return '
    'path.parent\n'
    'def g(): return uuid.UUID(int=7)',
    'import pathlib, uuid\npath = pathlib.Path("/tmp/a")\n'
    'assert f(path) == pathlib.Path("/tmp") and g() == uuid.UUID(int=7)\n'
    'assert path.with_suffix(".txt").read_text() == "x" and isinstance(g(), uuid.UUID)',
  ),
  'an exception with its own attribute': (
    'class E(Exception):\n  def __init__(s, code): super().__init__("bad"); s.code = code\ndef '
    'f(): raise E(3)\n'
    'def g(d): return d["a"]',
    'try:\n  f()\n  assert False\nexcept E as e: assert e.code == 3 and str(e) == "bad"\n'
    'try: g({})\nexcept KeyError as e: assert e.args == ("a",)',
  ),
  'classes derived from built-in ones': (
    'import enum\nclass Stack(list):\n  def push(s, x): s.append(x)\n  def top(s): return s[-1]\n'
    'class C(enum.IntEnum):\n  A = 1\n  B = 2',
    's = Stack()\ns.push(3)\nassert s.top() == 3 and len(s) == 1 and s == [3] and isinstance(s, '
    'list)\n'
    'assert C.A == 1 and C.A.name == "A" and C.A < C.B and C.A + 1 == 2 and {1: "x"}[C.A] == "x"',
  ),
  'identity': (
    'import enum\nclass C(enum.Enum):\n  A = 1\n  B = 2\nclass Node:\n  def __init__(s, n=None): '
    's.next = n\n'
    'def f(x): return C.A if x else C.B\ndef kind(x): return type(x)',
    'a = Node()\nb = Node(a)\nassert b.next is a and a.next is not b and a.next is None and f(1) '
    'is C.A\n'
    'assert f(0) is not C.A and type(a) is Node and kind(3) is int and kind("") is not int and f '
    'is not Node',
  ),
  'equal objects in sets and dicts': (
    'class P:\n  def __init__(s, x): s.x = x\n  def __eq__(s, o): return s.x == o.x\n'
    '  def __hash__(s): return hash(s.x)\nclass Q(P): __hash__ = None\ndef f(): return {P(1): 2}',
    'assert len({P(1), P(1), P(2)}) == 2 and f() == {P(1): 2} and f()[P(1)] == 2\n'
    'try:\n  {Q(1)}\n  assert False\nexcept TypeError as e: assert "unhashable" in str(e)',
  ),
  'an object among others': (
    'class P:\n  def __init__(s, x): s.x = x\n  def __eq__(s, o): return s.x == o.x\n  def '
    '__hash__(s): return s.x',
    'assert P(1) in [P(2), P(1)] and P(3) not in (P(1),) and P(1) in {P(1): 7}',
  ),
  'a formatted object': (
    'class P:\n  def __str__(s): return "P!"\nclass Q:\n  def __format__(s, how): return '
    'f"<{how}>"\n'
    'def f(): return P()',
    'assert f"{P()} {f()}" == "P! P!" and "{}".format(P()) == format(P()) == "P!" and '
    'f"{Q()}{Q():x}" == "<><x>"',
  ),
  'a generator that is closed': (
    'def f():\n  yield 1\nclass C:\n  def close(s): s.closed = True\ndef make(): return C()',
    'g = f()\nassert next(g) == 1\ng.close()\nassert list(g) == []\nc = make()\nc.close()\nassert '
    'c.closed',
  ),
  'the text and the arguments of its exceptions': (
    'class Missing(KeyError): pass\nclass Short(Exception):\n  def __init__(s, need, have):\n'
    '    super().__init__(need, have)\n    s.need = need\n  def __str__(s): return f"need '
    '{s.need}"\n'
    'def f(): raise Missing("x")\ndef g(): raise Short(2, 1)',
    'try: f()\nexcept Missing as e: assert str(e) == repr("x") and e.args == ("x",) and '
    'isinstance(e, KeyError)\n'
    'try: g()\nexcept Short as e: assert str(e) == "need 2" and e.args == (2, 1) and e.need == 2 '
    'and type(e) is Short',
  ),
  'exceptions of the standard library': (
    'import dataclasses, json, statistics\n@dataclasses.dataclass(frozen=True)\nclass P: x: int\n'
    'f, g = json.loads, statistics.mean',
    'import json, statistics\nfrom dataclasses import FrozenInstanceError\n'
    'try:\n  f("{")\n  assert False\nexcept json.JSONDecodeError as e: assert e.pos == 1\n'
    'try:\n  g([])\n  assert False\nexcept statistics.StatisticsError: pass\n'
    'p = P(1)\ntry:\n  p.x = 2\n  assert False\nexcept FrozenInstanceError: pass',
  ),
  'exceptions of many arguments': (
    'class Own(UnicodeEncodeError): pass\ndef f(data): return data.decode()\n'
    'def g(): raise Own("ascii", "x", 0, 1, "why")\ndef h(): raise ExceptionGroup("more", '
    '[ValueError()])',
    'try:\n  f(b"\\xff")\n  assert False\nexcept UnicodeDecodeError as e: assert "invalid start '
    'byte" in str(e)\n'
    'try:\n  g()\n  assert False\nexcept UnicodeEncodeError as e: assert isinstance(e, Own) and '
    '"why" in str(e)\n'
    'try:\n  h()\n  assert False\nexcept Exception as e: assert "more" in str(e)',
  ),
  'an exit': (
    'def f(x): exit(x)',
    'try:\n  f(3)\n  assert False\nexcept SystemExit as e: assert e.code == 3',
  ),
  'a name of a standard class': (
    'class Counter:\n  def __init__(s): s.n = 0\n  def step(s): s.n += 1\n  def value(s): return '
    's.n\n'
    'def make(): return Counter()',
    'c = Counter()\nc.step()\nassert c.value() == 1 and make().n == 0',
  ),
  'iterators of the tests, as far as it wants their items': (
    'import itertools\ndef f(n, items): return list(itertools.islice(items, n))\ndef g(items): '
    'yield from items',
    'import itertools\nassert f(3, itertools.count(1)) == [1, 2, 3] and '
    'next(g(itertools.repeat(7))) == 7\n'
    'items = iter(range(100_000))\nassert f(2, items) == [0, 1] and next(items) == 2 and f(1, '
    'items) == [3]\n'
    'assert sum(f(100_000, items)) == sum(range(4, 100_000)) and list(items) == []',
  ),
  'a generator by its type': (
    'def f(n): yield from range(n)',
    'import types\ng = f(2)\nassert isinstance(g, types.GeneratorType) and next(g) == 0 and '
    'list(g) == [1]',
  ),
}
"""Right programs and their tests."""


@pytest.mark.parametrize('right', RIGHT)
def test_a_right_program_passes(sandboxes, right):
  program, test = RIGHT[right]
  outcome = sandboxes.run_tests(program, [test])
  assert outcome.ended == Ending.PASSED, outcome


def test_a_function_of_the_tests_gives_nothing_but_its_results(sandboxes):
  program = """
    def f(key):
      got = []
      for name in ('__globals__', '__code__', '__closure__'):
        try: got.append(getattr(key, name)['answer'])
        except Exception: pass
      return key(20), got
  """
  test = 'answer = 41\nassert f(lambda x: x + 1) == (21, [])'
  assert sandboxes.run_tests(textwrap.dedent(program), [test]).ended == Ending.PASSED


def test_a_case_passes_only_with_exit_code_zero(sandboxes):
  for program in (
    "print('done')\n1 / 0",
    "import os\nprint('done', flush=True)\nos._exit(1)",
    "print('done')\nraise SystemExit(2)",
  ):
    assert sandboxes.run_cases(program, ANY).passed == 0


# The host.


OWNER = """
import sys
from jaxrl_llm.rewards.sandbox.sandbox import *
sandboxes = Sandboxes(Limits(wall_s=600, cpu_s=600, tmp_mib=37), isolation=sys.argv[1])
sandboxes.run_cases(sys.argv[2], [Case(stdin='', stdout='')])
"""


@pytest.mark.full
@pytest.mark.parametrize(
  'program', [hostile.SPIN, hostile.DAEMONS + hostile.IGNORE_SIGNALS + 'time.sleep(1000)']
)
def test_no_sandbox_outlives_the_process_that_opened_it(sandboxes, program):
  command = [sys.executable, '-c', OWNER, sandboxes.isolation, f'print("begun")\n{program}']
  size = str(37 << 20)  # Stands in the command lines of this owner's sandboxes only.
  with subprocess.Popen(command, env={**os.environ, 'PYTHONPATH': str(ROOT)}) as owner:

    def started() -> set[int]:
      return hostile.descendants(owner.pid) | {
        int(line.split()[0]) for line in hostile.processes(size)
      }

    # A starter or a bwrap, a waiting sandbox, and the supervisor and its program.
    assert hostile.until(lambda: len(started()) >= 4)
    known = started()
    owner.send_signal(signal.SIGKILL)
  assert hostile.until(lambda: not any(pathlib.Path(f'/proc/{pid}').exists() for pid in known))
  assert hostile.until(lambda: not hostile.processes(hostile.LINGER, size))


def test_a_waiting_sandbox_that_was_killed_is_replaced(sandboxes):
  def waiting() -> set[int]:
    ours = {
      int(line.split()[0]) for line in hostile.processes('inside.zygote')
    } & hostile.descendants(os.getpid())
    return ours & set().union(*map(hostile.descendants, ours))  # Not the starters themselves.

  assert hostile.until(waiting)  # It is started in passing.
  killed = waiting()
  for pid in killed:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)
  assert hostile.until(lambda: all(map(hostile.has_ended, killed)))
  assert is_well(sandboxes)


def test_a_starter_that_was_killed_is_replaced(sandboxes):
  lines = hostile.processes('inside.zygote')
  killed = {int(line.split()[0]) for line in lines} & hostile.descendants(os.getpid())
  for pid in killed:
    # The sandbox of the test before this one may be about to end.
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)
  assert killed and hostile.until(lambda: all(map(hostile.has_ended, killed)))
  assert is_well(sandboxes)


@pytest.mark.parametrize(
  'sandboxes',
  ['namespaces', pytest.param('bubblewrap', marks=pytest.mark.acceptance)],
  indirect=True,
)
@pytest.mark.parametrize(
  'count',
  [pytest.param(50, marks=pytest.mark.full), pytest.param(1000, marks=pytest.mark.acceptance)],
)
def test_the_host_stays_healthy(sandboxes, count, tmp_path, monkeypatch):
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  limits = Limits(wall_s=1.0, cpu_s=1, memory_mib=256)
  with contextlib.closing(opened(sandboxes.isolation, limits)) as brief:
    programs = [*hostile.EVERY.values(), *map(textwrap.dedent, CHEATS.values())]
    is_well(brief)

    def alive():
      return len(hostile.descendants(os.getpid()))

    own = hostile.settled(alive)  # The sandbox that waits for the next program was still starting.
    host = hostile.Host(str(tmp_path))
    draws = random.Random(0)
    for number in range(count):
      program = programs[number] if number < len(programs) else draws.choice(programs)
      # A busy machine may not let it reach its own limits in a second.
      with contextlib.suppress(SandboxError):
        if number % 2:
          brief.run_cases(program, ANY)
        else:
          brief.run_tests(program, ['assert f(1) == 4', 'assert abs(f(2) - 5) < 1e-6'])
    assert is_well(brief)
    assert hostile.until(host.is_as_before), (host.before, host.state())
    assert hostile.settled(alive) == own


def test_closing_ends_what_runs(sandboxes, monkeypatch):
  began, raised, send = threading.Event(), [], Channel.send
  monkeypatch.setattr(
    Channel, 'send', lambda channel, message: (send(channel, message), began.set())
  )
  made = opened(sandboxes.isolation)

  def run():
    try:
      made.run_cases(hostile.SLEEP, ANY)
    except SandboxError as error:
      raised.append(error)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  assert began.wait(30)
  made.close()
  thread.join(30)  # Half of its wall_s.
  assert raised and not thread.is_alive()
  with pytest.raises(SandboxError, match='closed'):
    made.run_cases(hostile.SLEEP, ANY)


# Without isolation.


def test_a_bwrap_that_never_starts_is_refused(monkeypatch, tmp_path):
  bwrap = tmp_path / 'bwrap'
  bwrap.write_text('#!/bin/sh\n[ "$1" = --help ] && exec echo --size\nexec sleep 20\n')
  bwrap.chmod(0o755)
  monkeypatch.setattr(isolation_module.shutil, 'which', lambda name: str(bwrap))
  monkeypatch.setattr(
    isolation_module, 'first_words', lambda control: 'it does not start (timed out)'
  )
  with pytest.raises(NoIsolation, match='does not start'):
    isolation_module.Bubblewrap(tmp_bytes=1 << 20)


def test_where_nothing_isolates_it_is_refused_in_one_line(monkeypatch):
  def refuse(**options):
    raise NoIsolation('unshare: Operation not permitted')

  monkeypatch.setattr(isolation_module, 'Zygote', refuse)
  monkeypatch.setattr(isolation_module.shutil, 'which', lambda name: None)
  with pytest.raises(UserError) as refused:
    Sandboxes(LIMITS)
  assert str(refused.value) == (
    'sandbox: this machine cannot isolate programs (namespaces: unshare: Operation not '
    'permitted; '
    'bubblewrap: bwrap is not installed); permit unprivileged user namespaces, name sandbox hosts '
    '(addresses), '
    "or accept that programs can do whatever this user can with isolation='none'"
  )


@pytest.mark.full
def test_limits_alone_hold_where_that_is_asked_for(tmp_path):
  with contextlib.closing(Sandboxes(LIMITS, isolation='none')) as sandboxes:
    outcome = sandboxes.run_tests(
      'def f(x): return x + 1', ['assert f(1) == 2', 'assert f(1) == 3']
    )
    assert (outcome.passed, outcome.isolation) == (1, 'none')
    assert sandboxes.run_cases(hostile.SPIN, ANY).ended == Ending.CPU
    assert sandboxes.run_cases(hostile.ALLOCATE, ANY).ended == Ending.MEMORY
    assert sandboxes.run_cases(hostile.OUTPUT, ANY).ended == Ending.OUTPUT
    assert sandboxes.run_cases(hostile.DAEMONS, ANY).ended == Ending.PASSED
    assert hostile.until(lambda: not hostile.processes(hostile.LINGER))
    assert (
      sandboxes.run_cases('import os, signal\nos.kill(0, signal.SIGKILL)', ANY).ended
      == Ending.SIGNAL
    )
    for cheat in ('equals everything', 'leaves', 'writes to every descriptor'):
      assert sandboxes.run_tests(textwrap.dedent(CHEATS[cheat]), ['assert f(1) == 4']).passed == 0


def test_limits_must_be_positive():
  with pytest.raises(UserError, match='limit cpu_s is 0, wanted a positive number'):
    Limits(cpu_s=0)
