"""A verifier that evaluates answers sees only harmless ones, in a sandbox; the others are known not
to evaluate.
"""

import asyncio
import contextlib
import inspect
import json
import os
import pathlib
import re
import sys
import threading

import hostile
import pytest
from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards import watch
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.pool import worker
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.sandbox.sandbox import Ending, ProgramOutcome, SandboxError
from jaxrl_llm.rewards.scorers.verifier import evaluating
from jaxrl_llm.rewards.scorers.verifier import scorer as verifier
from jaxrl_llm.rewards.scorers.verifier.evaluating import (
  GRAMMARS,
  PLAIN,
  evaluates,
  may_evaluate,
  score_in_sandbox,
)
from jaxrl_llm.rewards.scorers.verifier.scorer import check_verifiers, verifier_scorer

REVIEWED = {
  'basic_arithmetic': {'return eval(exp.replace("/", "//"))'},  # In the generator.
  'codeio': {'exec(full_code, local_vars, local_vars)'},  # In the generator.
  'number_sorting': {'expected_answer = eval(entry["answer"])'},  # The reference answer, a list.
  'propositional_logic': {  # A parser of its own.
    'def parse_expr(expr: str):',
    'return parse_expr(expr[1:-1])',
    'return Expression(operator, parse_expr(left_expr), parse_expr(right_expr))',
    'return Expression(Operator.NOT, parse_expr(sub_expr))',
    'parsed_expr = parse_expr(expr)',
  },
}
"""Lines of plain verifiers' modules that look like evaluation, and have been read."""
EVALUATION = re.compile(
  r'\b(?:eval|exec|parse_expr|parse_latex|sympify|literal_eval|lambdify|__import__)\s*\('
)
COUNTDOWN = {'question': '', 'answer': '1 + 2', 'metadata': {'numbers': [1, 2], 'target': 3}}
PUZZLE24 = {'question': '', 'answer': '4*(2 + 3 + 1)', 'metadata': {'numbers': [4, 2, 3, 1]}}


@pytest.fixture(scope='module')
def sandboxes():
  """The sandboxes of this process, which its verifiers share."""
  evaluating._opened.clear()
  try:
    opened = evaluating._sandboxes('auto')
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error)
  with contextlib.closing(opened):
    yield opened
  evaluating._opened.clear()


def judged(name, answer, entry, **options):
  return verifier_scorer(**options)(attempt(answer, fields={'reasoning_gym': name, 'entry': entry}))


def plain(entry):
  return json.loads(json.dumps(entry, default=str))


# The list.


def test_each_verifier_of_this_version_is_plain_or_has_a_grammar():
  from reasoning_gym.factory import DATASETS

  assert PLAIN.isdisjoint(GRAMMARS)
  assert PLAIN | GRAMMARS.keys() == DATASETS.keys() - {'composite'}
  assert evaluates('composite') and evaluates('countdown') and not evaluates('spell_backward')


def _sources(name):
  """Of the verifier's class, what that derives from, and what of reasoning-gym their modules
  use.
  """
  from reasoning_gym.factory import DATASETS

  kinds = [
    kind for kind in DATASETS[name][0].__mro__ if kind.__module__.startswith('reasoning_gym')
  ]
  own = {sys.modules[kind.__module__] for kind in kinds}
  used = {
    getattr(thing, '__module__', None) or '' for module in own for thing in vars(module).values()
  }
  for module in own | {
    sys.modules[other] for other in used if str(other).startswith('reasoning_gym')
  }:
    yield inspect.getsource(module)


@pytest.mark.parametrize('name', sorted(PLAIN))
def test_the_source_of_a_plain_verifier_does_not_evaluate(name):
  lines = {
    line.strip()
    for source in _sources(name)
    for line in source.splitlines()
    if EVALUATION.search(line)
  }
  assert lines == REVIEWED.get(name, set())


@pytest.mark.parametrize('name', sorted(GRAMMARS))
def test_the_source_of_the_others_does(name):
  assert any(EVALUATION.search(source) for source in _sources(name))


def test_what_derives_from_a_verifier_is_sandboxed_like_it(monkeypatch):
  import reasoning_gym

  for name in ('countdown', 'spell_backward'):
    kind, config = reasoning_gym.factory.DATASETS[name]
    monkeypatch.setitem(
      reasoning_gym.factory.DATASETS, f'my_{name}', (type('Mine', (kind,), {}), config)
    )
  assert evaluates('my_countdown') and not evaluates('my_spell_backward')


# Grammars.


@pytest.mark.parametrize(
  ('name', 'answer'),
  [
    ('countdown', '(3 + 4)*5 / 2 - 1'),
    ('countdown', '1.5 + .5'),
    ('puzzle24', '(8 / (3 - 8/3))\n'),
    ('simple_integration', '4*x**2/3 - 5*X + C'),
    ('intermediate_integration', 'exp(2*x)*sin(x)/5 + sqrt(x) + log(Abs(x)) + atan(x/2) + C'),
    ('polynomial_multiplication', '4*x**2 - 2.5*x*y + 7'),
    ('binary_matrix', '0 1\n1 2'),
    ('binary_matrix', '[[0, 1], [1, 2]]'),
    ('n_queens', '_ Q _\nQ _ _'),
    ('n_queens', "[['_', 'Q'], ['Q', '_']]"),
    ('string_insertion', 'ABCDDA'),
    ('string_insertion', '["A", "B"]'),
    ('spiral_matrix', '1 2 3'),
    ('spiral_matrix', '[1, -2, 3]'),
  ],
)
def test_ordinary_answers_are_in_the_grammar(name, answer):
  assert may_evaluate(name, answer, 'another')


@pytest.mark.parametrize('name', ['countdown', 'intermediate_integration'])
@pytest.mark.parametrize('answer', ['9**9**9', '9**(9**9)', '2**123456', '(' * 50 + '1' + ')' * 50])
def test_what_could_be_computed_for_hours_is_not(name, answer):
  assert not may_evaluate(name, answer, 'another')


@pytest.mark.parametrize('name', sorted(GRAMMARS.keys() - {'bitwise_arithmetic'}))
@pytest.mark.parametrize(
  'answer',
  [
    "3! + __import__('os').system('true')",
    '3!',
    'exit()',
    'print(1)',
    '(1).real',
    '1 .real',
    '().__class__',
    '[].append',
    '[x for x in [1]]',
    '(lambda: 1)()',
    'f"{exit()}"',
    "b'a'",
    "'a'.join",
    "'a' 'b' % c",
    "'\\x41'",
    '１ + ２',
    'x = 1',
    'x; y',
    '@x',
    '{1: 2}',
    'oracle_answer',
    'self',
    "'a'*9",
    'S("1")',
    '1 if x else 2',
    '0x1f',
    '9' * (evaluating.MAX_LENGTH + 1),
  ],
)
def test_anything_else_is_not(name, answer):
  assert not may_evaluate(name, answer, 'another')
  assert may_evaluate(name, answer, answer)  # Its own reference answer is trusted.


def test_names_of_the_reference_answer_may_be_used():
  assert may_evaluate('intermediate_integration', '2*erf(x)', 'erf(x)')
  assert not may_evaluate('intermediate_integration', '2*erf(x)', 'sin(x)')
  assert not may_evaluate('intermediate_integration', 'eval(x)', 'sin(x).eval')


# Attacks. The issue's own, first as a completion, then past the grammar.


def attacks(mark):
  touch = f"__import__('os').system('touch {mark}')"
  patch = (
    'exec(\'import sys\\nfor m in list(sys.modules.values()):\\n  if hasattr(m, "_ask"): m._ask = '
    "lambda *a: 1.0')"
  )
  return f'3! + {touch}', f'3! + ({patch} or 0)', f"3! + (open('{mark}', 'w').write('x'))"


@pytest.mark.parametrize(('name', 'entry'), [('countdown', COUNTDOWN), ('puzzle24', PUZZLE24)])
def test_a_completion_runs_no_code(sandboxes, tmp_path, name, entry):
  mark, ask = tmp_path / 'mark', verifier._ask
  for attack in attacks(mark):
    verdict = judged(name, attack, entry)
    assert (verdict.value, 'grammar' in verdict.evidence['reason']) == (0.0, True), attack
    assert judged(name, '5 + 5', entry).value == 0.0
  assert not mark.exists() and verifier._ask is ask
  assert judged(name, entry['answer'], entry).value == 1.0


def test_code_that_is_evaluated_touches_nothing_outside_its_sandbox(sandboxes, tmp_path):
  mark, ask = tmp_path / 'mark', verifier._ask
  tmp_path.chmod(0o777)
  for attack in attacks(mark):
    score, _ = score_in_sandbox('countdown', attack, COUNTDOWN, 'auto')
    assert score != 1.0
    patch = (
      "3! + (exec('import reasoning_gym\\nreasoning_gym.get_score_answer_fn = lambda name: lambda "
      "**_: 1.0') or 0)"
    )
    score_in_sandbox('countdown', patch, COUNTDOWN, 'auto')
    assert score_in_sandbox('countdown', '5 + 5', COUNTDOWN, 'auto')[0] < 1.0
  assert not mark.exists() and verifier._ask is ask
  assert score_in_sandbox('countdown', '2 + 1', COUNTDOWN, 'auto')[0] == 1.0


def test_inside_there_is_no_environment_of_ours_and_no_file_but_libraries(
  sandboxes, monkeypatch, tmp_path
):
  from reasoning_gym.games import countdown

  monkeypatch.setenv('TOKEN_OF_OURS', 'secret')
  (tmp_path / 'secret').write_text('x')
  tmp_path.chmod(0o777)
  for path, value in ((tmp_path / 'secret', 1.0), ('/usr', 0.01)):
    checks = (
      f'import os\\nassert not os.path.exists("{path}")\\nassert not '
      'os.environ.get("TOKEN_OF_OURS")'
    )
    answer = f"exec('{checks}') or 3"
    entry = {**COUNTDOWN, 'metadata': {'numbers': countdown._extract_ints(answer), 'target': 3}}
    assert score_in_sandbox('countdown', answer, entry, 'auto')[0] == value


# Right answers.


@pytest.mark.parametrize('name', sorted(GRAMMARS))
def test_reference_answers_score_one(sandboxes, name):
  import reasoning_gym

  entries = [plain(entry) for entry in reasoning_gym.create_dataset(name, size=3, seed=5)]
  for entry in entries:
    assert judged(name, entry['answer'], entry).value == 1.0
  if name != 'n_queens':  # Its puzzles have several solutions.
    assert judged(name, entries[0]['answer'] + ' + x**7 + X**7', entries[0]).value == 0.0


def test_other_right_answers_score_one(sandboxes):
  assert judged('countdown', '(2 + 1)', COUNTDOWN).value == 1.0
  assert judged('puzzle24', '(3 + 2 + 1) * 4', PUZZLE24).value == 1.0
  assert judged('puzzle24', '4 * 2 * 3 + 1', PUZZLE24).value == 0.0
  integral = {'answer': 'x**2/2 + C', 'metadata': {'variable': 'x', 'integrand': 'x'}}
  assert judged('simple_integration', 'x*x/3 + 7 + C', integral).value == 0.0
  assert judged('simple_integration', 'x*x/2 + 7 + C', integral).value == 1.0
  matrix = {'answer': '0 1\n1 0', 'metadata': {}}
  assert judged('binary_matrix', '[[0, 1], [1, 0]]', matrix, partial_credit=True).value == 0.1


def test_a_verifier_that_raises_on_its_reference_answer_is_the_scorers_own_error(sandboxes):
  with pytest.raises(
    SandboxError, match="verifier 'spiral_matrix' raises an exception on its own reference"
  ):
    score_in_sandbox('spiral_matrix', '1 2', {'answer': 7}, 'auto')


def test_an_answer_that_meets_a_limit_is_wrong_or_has_no_verdict(monkeypatch):
  ended = ProgramOutcome(ended=Ending.CPU, passed=0, total=1, isolation='namespaces')
  monkeypatch.setattr(verifier, 'score_in_sandbox', lambda *args: (None, ended))
  verdict = judged('countdown', '9**9999', COUNTDOWN)
  assert (verdict.value, verdict.evidence['reason']) == (
    0.0,
    'the verifier met a limit of its sandbox (cpu)',
  )
  with pytest.raises(TimeoutError, match='cpu'):
    judged('countdown', '9**9999', COUNTDOWN, on_timeout='none')


def test_a_sandbox_that_is_slow_to_start_does_not_count_against_the_answer(monkeypatch):
  started, may_start = threading.Event(), threading.Event()

  def slow(isolation):
    started.set()
    may_start.wait(60)
    raise SandboxError('too late')

  monkeypatch.setattr(evaluating, '_sandboxes', slow)
  monkeypatch.setattr(evaluating, 'BUDGET_S', 0.1)
  try:
    with pytest.raises(SandboxError, match=r'no verdict within 0.1 s'):
      judged('countdown', '2 + 1', COUNTDOWN)
    assert started.is_set()
  finally:
    may_start.set()


# Start-up.


@pytest.fixture
def no_sandbox(monkeypatch):
  def refuse(*args, **options):
    error = NoIsolation('sandbox: none')
    error.reasons = 'namespaces: no'
    raise error

  monkeypatch.setattr(evaluating, 'Sandboxes', refuse)
  monkeypatch.setattr(evaluating, '_opened', {})
  evaluating.check_isolation.cache_clear()
  yield
  evaluating.check_isolation.cache_clear()


def test_a_missing_sandbox_is_refused_at_startup_with_the_remedy(no_sandbox):
  def task(name):
    return attempt('', fields={'reasoning_gym': name, 'entry': {'answer': ''}}).task

  scorers = (ScorerConfig(name='v', kind='verifier'),)
  with pytest.raises(
    UserError, match=r"taskset t: verifier 'countdown' .*namespaces: no.*isolation='none'"
  ):
    check_verifiers([task('spell_backward'), task('countdown')], scorers)
  check_verifiers([task('spell_backward'), task('number_sorting')], scorers)
  check_verifiers([task('countdown')], (ScorerConfig(name='length'),))
  check_verifiers([attempt('').task], scorers)


def test_without_a_sandbox_nothing_is_evaluated(no_sandbox):
  assert judged('spell_backward', 'ab', {'answer': 'ab'}).value == 1.0
  with pytest.raises(NoIsolation):
    judged('countdown', '2 + 1', COUNTDOWN)


# The watch over plain verifiers.


def test_a_plain_verifier_that_evaluates_is_stopped_first(monkeypatch, tmp_path):
  import reasoning_gym

  class Evaluates:
    def __init__(self, config): ...

    def score_answer(self, answer, entry):
      try:
        return float(eval(answer))
      except Exception:
        return 1.0

  monkeypatch.setitem(reasoning_gym.factory.DATASETS, 'evaluates_test', (Evaluates, dict))
  mark = tmp_path / 'mark'
  with pytest.raises(watch.BadSign, match=r"verifier 'evaluates_test' was stopped: .*compile"):
    judged('evaluates_test', f'open({str(mark)!r}, "w").write("x")', {'answer': '1'})
  assert not mark.exists()


@pytest.mark.parametrize(
  'act',
  [
    lambda path: path.write_text('x'),
    lambda path: path.mkdir(),
    lambda path: path.unlink(missing_ok=True),
    lambda path: __import__('os').system(f'touch {path}'),
    lambda path: __import__('subprocess').Popen(['touch', str(path)]),
    lambda path: exec('1'),
    lambda path: pathlib.Path('/proc/self/environ').read_bytes(),
    lambda path: os.open('self/environ', os.O_RDONLY, dir_fd=os.open('/proc', os.O_RDONLY)),
    lambda path: pathlib.Path(f'/proc/self/../{os.getppid()}/environ').read_bytes(),
  ],
)
def test_what_a_plain_verifier_never_does_is_refused(tmp_path, act):
  with pytest.raises(watch.BadSign), watch.watched('v'), contextlib.suppress(Exception):
    act(tmp_path / 'mark')
  assert not (tmp_path / 'mark').exists()
  with watch.watched('v'):
    assert pathlib.Path(__file__).read_text()
  (tmp_path / 'after').write_text('x')


def test_a_worker_is_discarded_at_a_bad_sign():
  configs = tuple(ScorerConfig(name=name, domains=(name,)) for name in ('bad', 'length'))

  async def main():
    pool = ScorerPool(
      {'bad': rewards_scorers.evaluates_under_watch, 'length': rewards_scorers.length},
      RewardsConfig(scorers=configs),
    )
    await pool.start()
    try:
      return [
        (await pool.score(attempt('1', domain=name)))[0] for name in ('length', 'bad', 'length')
      ]
    finally:
      await pool.close()

  before, bad, after = asyncio.run(main())
  assert (bad.status, bad.value, bad.evidence['exit_code']) == (
    Status.CRASHED,
    None,
    worker.DISCARDED,
  )
  assert after.value == before.value == 1.0 and after.evidence['pid'] != before.evidence['pid']


@pytest.mark.full
@pytest.mark.parametrize('name', sorted(PLAIN))
def test_plain_verifiers_give_no_bad_sign(name):
  import reasoning_gym

  entries = [plain(reasoning_gym.create_dataset(name, size=2, seed=3)[i]) for i in range(2)]
  for entry in entries:
    assert judged(name, str(entry['answer']) or 'x', entry).value is not None
    for answer in ('42', 'x', '[1, 2]', '{"a": 1}', '01:02:03', '1/2', 'a, b\nc'):
      assert judged(name, answer, entry).value is not None
