"""The code scorer: which text is the program, what its tests are, and what HumanEval says of the
sandbox.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import aiohttp
import hostile
import pytest
from fixtures.rewards_scorers import attempt
from paths import ROOT

from jaxrl_llm.app.composition.scorers import build_scorer
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import RemoteError
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.sandbox import server as server_module
from jaxrl_llm.rewards.sandbox.comparison import Tolerance
from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.sandbox.rows import read_tests
from jaxrl_llm.rewards.sandbox.sandbox import Case, Limits, SandboxError
from jaxrl_llm.rewards.sandbox.server import ROUTES, SandboxServer
from jaxrl_llm.rewards.scorers.code import (
  code_scorer,
  fenced,
  options_within,
  program_of,
  read_work,
)

sys.path.append(str(ROOT / 'benchmarks'))  # As Python has it for a script.

import mutants

PROMPT = (
  'from math import floor\n\n\ndef half(x: float) -> int:\n    """Half of x, rounded down."""\n'
)


def local_scorer(**options):
  try:
    return code_scorer(**options)
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error)


@pytest.fixture
def score():
  return scoring(local_scorer())


def scoring(scorer):
  def score(completion, *, prompt='Write it.', **fields):
    return scorer(attempt(completion, domain='code', fields=fields, prompt=prompt))

  return score


@functools.cache
def problems():
  if not mutants.HUMANEVAL.exists():
    pytest.skip(f'{mutants.HUMANEVAL} is missing')
  return mutants.load_problems()


# The program.


def test_the_last_block_of_python_is_the_program():
  text = 'First:\n```python\na = 1\n```\nthen\n```py\nb = 2\n```\nand so\n```\nplain\n```\n'
  assert fenced(text) == 'b = 2\n'
  assert fenced('```\nplain = 1\n```\nand\n```bash\nls\n```') == 'plain = 1\n'
  assert fenced('```bash\nls\n```') is None
  assert fenced('no fence') is None
  assert fenced('```python\ncut = off') == 'cut = off'
  assert fenced('```python\r\na = 1\r\n```\r\nThat is it.') == 'a = 1\r\n'
  assert (
    fenced('1. So:\n   ```python\n   if a:\n     b = 1\n\n  c\n   ```\n2. That is it.')
    == 'if a:\n  b = 1\n\nc\n'
  )
  for fence in ('````', '~~~'):
    assert fenced(f'{fence}python\na = 1\n{fence}\nThat is it.') == 'a = 1\n'
  assert (
    fenced('```python\nx = """\n  ```not a fence```\n"""\n```')
    == 'x = """\n  ```not a fence```\n"""\n'
  )


def test_no_text_makes_the_search_for_blocks_take_long():
  """In steps that grow with the square of its length each of these would take hours."""
  assert fenced('```' + 'a' * 3_000_000) is None
  assert fenced('```\n' * 300_001) == ''
  assert fenced('```' + ' ' * 3_000_000 + '\nx') == 'x'


@pytest.mark.parametrize(
  ('completion', 'prompt', 'wanted'),
  [
    ('def f(): pass', 'Write f.', 'def f(): pass'),
    ('Sure:\n```python\ndef f(): pass\n```', 'Write f.', 'def f(): pass\n'),
    ('    return floor(x / 2)\n', PROMPT, f'{PROMPT}    return floor(x / 2)\n'),
    ('```python\n    return floor(x / 2)\n```', PROMPT, f'{PROMPT}    return floor(x / 2)\n'),
    ('def half(x): return floor(x / 2)', PROMPT, f'{PROMPT}def half(x): return floor(x / 2)'),
    ('    return 1', f'Go on:\n```python\n{PROMPT}```', f'{PROMPT}    return 1'),
    ('  return x', 'def f(x):', 'def f(x):\n  return x'),
    ('<think>```python\nwrong\n```</think>def f(): pass', '', 'def f(): pass'),
    ('x = 1', 'word', 'x = 1'),
    ('not code at all', PROMPT, 'not code at all'),
    ('def f(x): return x', 'So:\n```python\ny = f(1)\nassert y == 1\n```', 'def f(x): return x'),
    ('def f(x): return x', 'def f(x: List[int]): pass', 'def f(x): return x'),
    (
      'def f(x): return g(x)',
      'g = lambda x: f(x) + 1',
      'g = lambda x: f(x) + 1\ndef f(x): return g(x)',
    ),
    (
      'def f(x): return g(x)',
      'from m import *\ng = h(1)',
      'from m import *\ng = h(1)\ndef f(x): return g(x)',
    ),
    (
      'def f(x): return T',
      'import os.path as p\nT = [len(i) for i in p.sep]',
      'import os.path as p\nT = [len(i) for i in p.sep]\ndef f(x): return T',
    ),
    (' \n', PROMPT, None),
    ('```python\n\n```', PROMPT, None),
  ],
)
def test_a_completion_that_continues_the_prompt_is_joined_to_it(completion, prompt, wanted):
  assert program_of(completion, prompt) == wanted


@pytest.mark.full
def test_programs_are_read_in_many_threads_at_a_time_while_garbage_is_collected():
  """A collection runs Python, as JAX's does at its end, and so lets other threads go on."""
  program = '\n'.join(f'def f{i}(x): return [x + {i}, (x, {{x: [x]}})]' for i in range(200))
  thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
  gc.callbacks.append(yielding := lambda *_: sum(range(300)))
  gc.set_threshold(50, 5, 5)
  sys.setswitchinterval(1e-6)
  try:
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
      read = list(threads.map(program_of, [program] * 120, [''] * 120))
  finally:
    gc.callbacks.remove(yielding)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)
  assert read == [program] * 120


def test_code_to_continue_is_that_of_the_users_last_message():
  said = [
    ('system', 'def a():'),
    ('user', 'def b():'),
    ('assistant', 'def c():'),
    ('user', 'def d():'),
  ]
  given = attempt('  return 1', domain='code', fields={'tests': ['assert d() == 1']})
  for last in (4, 3):
    prompt = tuple({'role': role, 'content': content} for role, content in said[:last])
    asked = dataclasses.replace(given, task=dataclasses.replace(given.task, prompt=prompt))
    assert read_work(asked).program == f'{"def d():" if last == 4 else "def b():"}\n  return 1'


# The tests.


def test_tests_are_read_in_each_of_their_forms():
  assert read_tests({}) is None and read_tests({'tests': []}) is None
  assert read_tests({'tests': ['assert f()']}).tests == ('assert f()',)
  work = read_tests({'tests': 'def check(candidate): assert candidate()', 'entry_point': 'f'})
  assert work.entry_point == 'f' and work.tests == (
    'def check(candidate): assert candidate()\n\ncheck(f)\n',
  )
  method = read_tests({'tests': 'def check(candidate): pass', 'entry_point': 'Solution().run'})
  assert method.entry_point == 'Solution' and method.tests[0].endswith('check(Solution().run)\n')
  assert read_tests({'tests': [{'stdin': '1', 'stdout': 2}]}).cases == (
    Case(stdin='1', stdout='2'),
  )


@pytest.mark.parametrize(
  ('fields', 'reason'),
  [
    ({}, 'the task has no tests'),
    ({'tests': 'def check(c): pass'}, 'tests are a string, but entry_point is missing'),
    ({'tests': 'def check(c): pass', 'entry_point': 'f); import os; (f'}, 'entry_point is'),
    ({'tests': 'def check(c): pass', 'entry_point': 'Solution(1).f'}, 'entry_point is'),
    ({'tests': [1]}, 'tests are neither statements'),
    ({'tests': [{'stdin': ''}]}, 'tests are neither statements'),
    ({'tests': {'a': 1}}, 'tests are neither statements'),
  ],
)
def test_tests_that_are_missing_or_unreadable_make_an_attempt_unscorable(score, fields, reason):
  verdict = score('def f(): pass', **fields)
  assert verdict.value is None and verdict.evidence['reason'].startswith(reason)


# Tolerances, checkers, weights and limits of single tests.


def test_tests_have_weights_tolerances_and_limits_of_their_own():
  work = read_tests(
    {
      'limits': {'cpu_s': 2, 'memory_mib': 256},
      'tolerance': 1e-6,
      'tests': [
        {'stdin': '1', 'stdout': '2', 'weight': 3},
        {'stdin': '', 'stdout': '', 'cpu_s': 0.5, 'tolerance': {'absolute': 0.1}, 'note': 'x'},
      ],
    }
  )
  both = Tolerance(absolute=1e-6, relative=1e-6)
  assert work.cases == (
    Case(stdin='1', stdout='2', weight=3.0, cpu_s=2.0, memory_mib=256, tolerance=both),
    Case(stdin='', stdout='', cpu_s=0.5, memory_mib=256, tolerance=Tolerance(absolute=0.1)),
  )
  statements = read_tests({'tests': ['assert f()', {'test': 'assert g()', 'weight': 2}]})
  assert statements.tests == ('assert f()', 'assert g()') and statements.weights == (1.0, 2.0)


@pytest.mark.parametrize(
  ('fields', 'reason'),
  [
    ({'tests': [{'stdin': '', 'stdout': '', 'weight': -1}]}, 'test 0: a test has weight -1'),
    ({'tests': [{'stdin': '', 'stdout': '', 'weight': 0}]}, 'the tests have weights'),
    ({'tests': [{'stdin': '', 'stdout': '', 'weight': '2'}]}, 'weight of a test is'),
    ({'tests': [{'stdin': '', 'stdout': '', 'cpu_s': 0}]}, 'cpu_s of a test is 0'),
    ({'tests': [{'stdin': '', 'stdout': ''}], 'limits': {'wall_s': 1}}, 'limits are'),
    ({'tests': [{'stdin': '', 'stdout': ''}], 'tolerance': 'small'}, "tolerance is 'small'"),
    ({'tests': [{'stdin': '', 'stdout': ''}], 'tolerance': -1}, 'tolerance: absolute is -1'),
    ({'tests': [{'stdin': '', 'stdout': ''}], 'checker': ''}, 'checker is not a program'),
    ({'tests': [{'stdin': '', 'stdout': ''}], 'checker': 'x', 'tolerance': 1}, 'the task has a ch'),
    ({'tests': ['assert f()'], 'checker': 'print(1)'}, 'the task has a checker, but its tests'),
    ({'tests': [{'test': 'f()', 'weight': 1e9}, 'g()']}, 'the tests have weights'),
  ],
)
def test_malformed_weights_tolerances_and_limits_are_one_line(score, fields, reason):
  verdict = score('def f(): pass', **fields)
  assert verdict.value is None and verdict.evidence['reason'].startswith(reason), verdict


def test_weights_decide_the_share():
  score = scoring(local_scorer(credit='fraction'))
  tests = [
    {'stdin': '1', 'stdout': '2', 'weight': 3},
    {'stdin': '2', 'stdout': '5'},
    {'stdin': '3', 'stdout': '6', 'weight': 0},
  ]
  verdict = score('print(2 * int(input()))', tests=tests)
  assert (verdict.value, verdict.evidence['passed'], verdict.evidence['tests']) == (0.75, 2, 3)
  tests[1]['weight'] = 0
  assert scoring(local_scorer())('print(2 * int(input()))', tests=tests).value == 1.0
  statements = [{'test': 'assert f(1) == 1', 'weight': 3}, 'assert f(2) == 3']
  assert score('def f(x): return x', tests=statements).value == 0.75


def test_a_test_over_its_own_limits_leaves_time_for_the_others():
  score = scoring(local_scorer(credit='fraction', cpu_s=3))
  program = 'n = int(input())\nwhile n == 1: pass\nx = bytearray((n == 2) * (300 << 20))\nprint(n)'
  tests = [
    {'stdin': '1', 'stdout': '1', 'cpu_s': 0.3},
    {'stdin': '2', 'stdout': '2', 'memory_mib': 200},
    {'stdin': '2', 'stdout': '2'},
    {'stdin': '3', 'stdout': '3'},
  ]
  verdict = score(program, tests=tests)
  assert (verdict.value, verdict.evidence['ended']) == (0.5, 'cpu')


CHECKER = """
import json, sys
case = json.load(sys.stdin)
wanted = int(case['input'])
parts = [int(word) for word in case['actual'].split()]
print('sum', sum(parts))
print(1 if sum(parts) == wanted and len(parts) == 2 else 0.5 if sum(parts) == wanted else 0)
"""


def test_a_checker_sees_input_expected_and_actual_output():
  score = scoring(local_scorer(credit='fraction'))
  tests = [{'stdin': '7', 'stdout': '3 4'}, {'stdin': '9', 'stdout': '4 5'}]
  asked = {'tests': tests, 'checker': CHECKER}
  verdict = score('n = int(input())\nprint(1, n - 1)', **asked)
  assert (verdict.value, verdict.evidence['ended'], verdict.evidence['passed']) == (
    1.0,
    'passed',
    2,
  )
  assert score('print(1, 6)', **asked).value == 0.5
  half = score('print(1, 1, int(input()) - 2)', **asked)
  assert (half.value, half.parts, half.evidence['passed']) == (0.5, {'passed': 0.5}, 0)
  assert scoring(local_scorer())('print(1, 1, int(input()) - 2)', **asked).value == 0.0
  # What the checker cannot read is wrong, not the checker's failure.
  for hostile_output in ('print("1" * 10**5, "x")', 'print("\\\\udcff\\x00{}")', 'print()'):
    verdict = score(hostile_output, **asked)
    assert (verdict.value, verdict.evidence['ended']) == (0.0, 'failed'), hostile_output


@pytest.mark.full
def test_output_on_which_the_checker_never_ends_is_wrong():
  score = scoring(local_scorer(cpu_s=1))
  checker = 'import json, sys\nwhile json.load(sys.stdin)["actual"] != "1\\n": pass\nprint(1)'
  tests = [{'stdin': '', 'stdout': '1\n'}, {'stdin': '', 'stdout': '1\n'}]
  assert score('print(1)', tests=tests, checker=checker).value == 1.0
  assert score('print(2)', tests=tests, checker=checker).value == 0.0


@pytest.mark.parametrize(
  'checker',
  [
    'raise SystemExit(3)',
    'print("right")',
    'print(2)',
    pytest.param('while True: pass', marks=pytest.mark.full),
  ],
)
def test_a_checker_that_fails_on_the_expected_output_is_the_scorers_failure(checker):
  score = scoring(local_scorer(cpu_s=1))
  with pytest.raises(SandboxError, match='the checker fails even on the expected output'):
    score('print(1)', tests=[{'stdin': '', 'stdout': '1'}], checker=checker)


def test_a_program_sees_neither_checker_nor_expected_output():
  look = (
    'import os\ntext = ""\nfor place, _, names in os.walk("/tmp"):\n  for name in names:\n    text '
    '+= open(os.path.join(place, name), errors="replace").read()\nprint("SECRET" in text)'
  )
  tests = [{'stdin': '', 'stdout': 'SECRET'}, {'stdin': '', 'stdout': 'SECRET'}]
  checker = (
    'import json, sys\nopen("/tmp/SECRET", "w").write("SECRET")\n'
    'print(int(json.load(sys.stdin)["actual"] == "False\\n"))'
  )
  assert scoring(local_scorer())(look, tests=tests, checker=checker).value == 1.0


# The value.


def test_all_tests_or_their_share(score):
  tests = [
    'assert half(4) == 2',
    'assert half(5) == 2',
    'assert half(6) == 4',
    'assert half(-1) == -1',
  ]
  verdict = score('    return floor(x / 2)', prompt=PROMPT, tests=tests)
  assert (verdict.value, dict(verdict.parts)) == (0.0, {'passed': 0.75})
  assert (
    verdict.evidence['ended'] == 'failed'
    and verdict.evidence['detail'] == 'test 2: AssertionError: '
  )
  assert verdict.evidence['isolation'] in ('namespaces', 'bubblewrap')
  share = code_scorer(credit='fraction')(
    attempt('    return floor(x / 2)', prompt=PROMPT, fields={'tests': tests}, domain='code')
  )
  assert share.value == 0.75
  assert score('    return floor(x / 2)', prompt=PROMPT, tests=[*tests[:2], tests[3]]).value == 1.0


def test_each_form_of_tests_gives_full_marks_to_what_is_right_alone(score):
  check = 'def check(candidate):\n    assert candidate(5) == 2\n'
  cases = [{'stdin': '5\n', 'stdout': '2\n'}, {'stdin': '8\n', 'stdout': '4'}]
  assert (
    score('    return floor(x / 2)', prompt=PROMPT, tests=check, entry_point='half').value == 1.0
  )
  assert score('    return round(x)', prompt=PROMPT, tests=check, entry_point='half').value == 0.0
  assert score('print(int(input()) // 2)', tests=cases).value == 1.0
  assert score('print(2)', tests=cases).value == 0.0
  assert score('I do not know.', tests=cases).value == 0.0
  method = 'class Solution:\n  def half(self, x): return x // 2'
  assert score(method, tests=check, entry_point='Solution().half').value == 1.0
  assert score(method.replace('//', '/'), tests=check, entry_point='Solution().half').value == 0.0
  assert score('', tests=cases).evidence == {'reason': 'no code'}


@pytest.mark.parametrize(
  ('option', 'message'),
  [
    ({'isolatoin': 'none'}, "options of scorer 'code'"),
    ({'isolation': 'docker'}, "options of scorer 'code'.isolation: got 'docker'"),
    ({'credit': 'some'}, "options of scorer 'code'.credit: got 'some'"),
    ({'cpu_s': 1.5}, "options of scorer 'code'.cpu_s: got 1.5"),
    ({'addresses': ['host:1']}, "scorer 'code': address 'host:1', wanted http://HOST:PORT"),
    (
      {'addresses': ['unix:/x'], 'key_file': '/nowhere'},
      "scorer 'code': key_file: /nowhere: cannot be read",
    ),
    (
      {'addresses': ['unix:/x'], 'wall_s': 60.0},
      'request_deadline_s is 60, but its programs may take wall_s=60;',
    ),
    ({'wall_s': 0.0}, 'limit wall_s is 0.0, wanted a positive number'),
  ],
)
def test_bad_options_are_one_line(option, message):
  with pytest.raises(UserError, match=r'^[^\n]*$') as refused:
    code_scorer(**option)
  assert message in str(refused.value)


# In the pool.


@pytest.mark.full
def test_hostile_completions_cost_their_own_score_in_a_pool(score):
  tests = ['assert f(1) == 2']
  config = ScorerConfig(name='code', deadline_s=30.0)

  async def main():
    pool = ScorerPool(
      {'code': code_scorer(wall_s=5.0, cpu_s=1)}, RewardsConfig(scorers=(config,), workers=2)
    )
    await pool.start()
    try:
      programs = [*hostile.EVERY.values(), 'def f(x): return x + 1'] * 2
      attempts = [attempt(p, domain='code', fields={'tests': tests}) for p in programs]
      return (
        programs,
        [s for (s,) in await asyncio.gather(*(pool.score(a) for a in attempts))],
        dict(pool.counts),
      )
    finally:
      await pool.close()

  programs, scores, counts = asyncio.run(main())
  # A machine that is too busy for one of them is nobody's score.
  judged = [
    (p, s)
    for p, s in zip(programs, scores, strict=True)
    if 'processors' not in str(s.evidence.get('error'))
  ]
  assert len(judged) > len(programs) // 2
  assert {s.status for _, s in judged} == {Status.OK}, [
    s for _, s in judged if s.status != Status.OK
  ]
  assert [s.value for _, s in judged] == [float('x + 1' in program) for program, _ in judged]
  assert counts['breaks'] == 0 if 'breaks' in counts else True
  assert hostile.until(lambda: not hostile.processes(hostile.LINGER))


def test_a_deadline_below_that_of_programs_is_refused():
  def config(deadline_s, **options):
    return ScorerConfig(name='c', kind='code', deadline_s=deadline_s, options=options)

  for short in (config(8.0, wall_s=8.0), config(10.0, wall_s=10)):
    with pytest.raises(
      UserError, match=r"^scorer 'c': deadline_s is [0-9]+, but its programs may take wall_s="
    ):
      build_scorer(short)
  local_scorer()  # Skips where nothing isolates.
  build_scorer(config(8.5, wall_s=8))


@pytest.mark.parametrize(
  ('deadline_s', 'options', 'wall_s'),
  [
    (10.0, {}, 8.0),
    (300.0, {}, 30.0),
    (10.0, {'wall_s': 9.5}, 9.5),
    (300.0, {'addresses': ['unix:/x'], 'request_deadline_s': 20.0}, 16.0),
    (300.0, {'addresses': ['unix:/x']}, 30.0),
  ],
)
def test_the_clock_of_programs_fits_the_deadline_where_nothing_else_is_said(
  deadline_s, options, wall_s
):
  config = ScorerConfig(name='c', kind='code', deadline_s=deadline_s, options=options)
  assert options_within(config)['wall_s'] == wall_s
  assert config.options == options


# On other hosts.


def attempts(count):
  tests = ['assert f(1) == 2', 'assert f(2) == 3']
  return [
    attempt(f'def f(x): return x + {i % 2}', uid=f'u{i}', domain='code', fields={'tests': tests})
    for i in range(count)
  ]


def served(use, **options):
  """The result of `use(scorer)`, with a sandbox host on a unix socket."""

  async def main():
    try:
      server = SandboxServer(at_once=2)
    except NoIsolation as error:
      hostile.skip_where_this_machine_forbids(error)
    try:
      async with (
        listening(server.application(), name='test', front=None, routes=ROUTES) as (address, _),
        code_scorer(addresses=[address], **options).open() as scorer,
      ):
        return await use(scorer)
    finally:
      server.close()

  return asyncio.run(main())


def test_a_sandbox_host_says_what_a_sandbox_here_says(tmp_path, score):
  check = {'tests': 'def check(c):\n  assert c(5) == 2', 'entry_point': 'half'}
  cases = {'tests': [{'stdin': '3', 'stdout': '4'}, {'stdin': '4', 'stdout': '6'}]}
  tries = [
    *attempts(2),
    attempt('    return floor(x / 2)', prompt=PROMPT, domain='code', fields=check),
    attempt('print(int(input()) + 1)', domain='code', fields=cases),
    attempt('1 / 0', domain='code', fields=cases),
    attempt('', domain='code', fields=cases),
    attempt('print()', domain='code'),
  ]
  there = served(lambda scorer: asyncio.gather(*map(scorer, tries)))
  assert there == [local_scorer()(each) for each in tries]


def test_a_sandbox_host_refuses_what_it_cannot_run(monkeypatch):
  async def use(scorer):
    return await asyncio.gather(scorer(attempts(1)[0]), return_exceptions=True)

  (refused,) = served(use, memory_mib=1 << 20)
  assert isinstance(refused, RemoteError)
  assert 'HTTP 400: limit memory_mib is 1048576, wanted 8192 at most' in str(refused)
  assert served(use, memory_mib=8192)[0].value == 0.0
  monkeypatch.setattr(server_module, '_KINDS', 1)
  (refused,) = served(use, cpu_s=7)
  assert 'HTTP 400: this host already has sandboxes with 1 different limits' in str(refused)


def test_a_sandbox_host_answers_a_body_that_is_no_order():
  async def main():
    try:
      server = SandboxServer(at_once=1)
    except NoIsolation as error:
      hostile.skip_where_this_machine_forbids(error)
    answers = []
    try:
      async with listening(server.application(), name='test', front=None, routes=ROUTES) as (
        address,
        _,
      ):
        connector = aiohttp.UnixConnector(address.removeprefix('unix:'))
        async with aiohttp.ClientSession(connector=connector) as session:
          for body in (b'[' * 100_000, b'{', b'[]', b'\xff'):
            async with session.post('http://host/run', data=body) as response:
              answers.append((response.status, await response.text()))
    finally:
      server.close()
    return answers

  for status, text in asyncio.run(main()):
    assert status == 400 and text and '\n' not in text, text


def test_a_program_ends_when_its_client_hangs_up(monkeypatch):
  begun, run_tests = threading.Semaphore(0), server_module.Sandboxes.run_tests

  def run(*arguments):
    begun.release()
    return run_tests(*arguments)

  async def use(scorer):
    monkeypatch.setattr(server_module.Sandboxes, 'run_tests', run)
    forever = attempt(
      'import signal\nsignal.pause()', domain='code', fields={'tests': ['assert f(1)']}
    )
    # As many as the host runs at once.
    clients = [asyncio.create_task(scorer(forever)) for _ in range(2)]
    for _ in clients:
      assert await asyncio.to_thread(begun.acquire, True, 60)
    for client in clients:
      client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return await asyncio.wait_for(scorer(attempts(2)[1]), 30)

  assert served(use, wall_s=120, cpu_s=120, request_deadline_s=300).value == 1.0


def test_a_sandbox_host_that_starts_no_sandbox_is_left_for_another(monkeypatch):
  def refuse(limits, **options):
    if limits == Limits():  # As at its start.
      return made(limits, **options)
    raise NoIsolation('fork: Resource temporarily unavailable')

  made = server_module.Sandboxes
  monkeypatch.setattr(server_module, 'Sandboxes', refuse)
  with pytest.raises(
    RemoteError, match=r'^2 tries: .*HTTP 503: fork: Resource temporarily unavailable'
  ):
    served(lambda scorer: scorer(attempts(1)[0]), cpu_s=7, retries=1, first_wait_s=0.01)


def test_a_sandbox_host_whose_sandbox_fails_is_left_for_another(monkeypatch):
  def fail(work, sandboxes, stop):
    raise SandboxError('the sandbox failed: end of file')

  monkeypatch.setattr(server_module.Work, 'run', fail)
  with pytest.raises(
    RemoteError, match=r'^2 tries: .*HTTP 503: SandboxError: the sandbox failed: end of file'
  ):
    served(lambda scorer: scorer(attempts(1)[0]), retries=1, first_wait_s=0.01)


@contextlib.contextmanager
def host(tmp_path, name, *flags):
  """launch/serve.py --role=sandbox on a loopback port; gives the process and its address."""
  addresses = tmp_path / f'{name}.json'
  command = [
    sys.executable,
    str(ROOT / 'launch' / 'serve.py'),
    '--role=sandbox',
    f'--addresses_file={addresses}',
    *flags,
  ]
  with subprocess.Popen(
    command, cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(ROOT), 'TMPDIR': str(tmp_path)}
  ) as process:
    try:
      assert hostile.until(lambda: addresses.exists() or process.poll() is not None, 60)
      assert process.poll() is None, 'it started here above'
      yield process, json.loads(addresses.read_text())[0]
    finally:
      process.terminate()


@pytest.mark.full
def test_several_hosts_share_the_work_and_one_that_dies_is_done_without(tmp_path):
  local_scorer()  # Skips where nothing isolates.
  key = tmp_path / 'key'
  key.write_text('a-token-of-this-test-only\n')
  key.chmod(0o600)
  wrong = tmp_path / 'wrong'
  wrong.write_text('another-token-altogether\n')
  flags = ['--host=127.0.0.1', '--port=0', f'--token_file={key}', '--programs=2']
  wanted = [0.0, 1.0] * 20
  with host(tmp_path, 'a', *flags) as (first, one), host(tmp_path, 'b', *flags) as (_, two):

    async def scores(scorer):
      return [verdict.value for verdict in await asyncio.gather(*map(scorer, attempts(40)))]

    async def main():
      async with code_scorer(
        addresses=[one, two], key_file=str(key), first_wait_s=0.01
      ).open() as scorer:
        assert await scores(scorer) == wanted
        pending = asyncio.create_task(scores(scorer))
        await asyncio.sleep(0)
        first.send_signal(signal.SIGKILL)
        assert await pending == wanted
        scorer.set_addresses([two])
        assert await scores(scorer) == wanted
      async with code_scorer(addresses=[two], key_file=str(wrong)).open() as scorer:
        with pytest.raises(RemoteError, match=r'HTTP 401.*check key_file'):
          await scorer(attempts(1)[0])

    asyncio.run(main())
  assert hostile.until(
    lambda: not any(str(tmp_path) in line for line in hostile.processes('serve.py'))
  )


@pytest.mark.full
def test_serve_refuses_in_one_line():
  for flags, line in (
    (
      ['--role=sandbox', '--host=127.0.0.1'],
      '--token_file is missing: with --host, a front requires a token from every client',
    ),
    (['--role=sandbox', '--', '--max-num-seqs', '1'], '--max-num-seqs: unexpected argument'),
    ([], "--model is missing: wanted a directory with the policy's config.json"),
  ):
    command = [sys.executable, str(ROOT / 'launch' / 'serve.py'), *flags]
    done = subprocess.run(
      command, env={**os.environ, 'PYTHONPATH': str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith(f'error: {line}'), done


# HumanEval.


def humaneval(problem, program, score):
  return score(program, prompt=problem.prompt, tests=problem.tests, entry_point=problem.entry_point)


@pytest.mark.full
def test_every_solution_of_humaneval_passes(score):
  assert len(problems()) == 164
  for write in (lambda p: p.solution, lambda p: f'Here it is:\n```python\n{p.program}```\nDone.'):
    verdicts = {p.name: humaneval(p, write(p), score) for p in problems()}
    assert {name: dict(v.evidence) for name, v in verdicts.items() if v.value != 1.0} == {}


@pytest.mark.full
def test_a_killed_mutant_of_each_solution_fails():
  """Which mutants their tests find is told by a plain Python without a sandbox."""
  killed = mutants.killed_mutants(problems(), seed=2026)
  assert len({mutant.problem.name for mutant in killed}) == 164
  score = scoring(local_scorer(cpu_s=1, wall_s=60.0))
  passing = [
    m for m in killed if humaneval(m.problem, f'```python\n{m.program}\n```', score).value != 0.0
  ]
  assert passing == []


def test_mutants_are_other_programs_that_parse_and_do_not_touch_the_prompt():
  problem = mutants.Problem(
    name='t/0',
    prompt=PROMPT,
    solution=textwrap.indent(
      'if x < 2 and x != 0:\n  return -x\nreturn floor(x / 2) + 1\n', '    '
    ),
    tests='',
    entry_point='half',
  )
  made = mutants.mutants(problem)
  assert [(m.kind, m.change.split(': ', 1)[1]) for m in made if 'line 1' in m.change] == [
    ('operator', 'x < 2 and x != 0 -> x < 2 or x != 0'),
    ('boundary', 'x < 2 -> x <= 2'),
    ('operator', 'x != 0 -> x == 0'),
    ('constant', '2 -> 3'),
    ('constant', '2 -> 1'),
    ('constant', '0 -> 1'),
    ('constant', '0 -> -1'),
  ]
  assert {m.kind for m in made} == set(mutants.KINDS)
  assert len({m.program for m in made}) == len(made)
  assert all('Half of x, rounded down.' in m.program for m in made)
  assert (
    mutants.shuffled(problem, 1) == mutants.shuffled(problem, 1) != mutants.shuffled(problem, 2)
  )
