"""Hostile answers by the dozen: workers, canaries and the verdicts on others stay as they
were.
"""

import asyncio
import json
import os
import random

import hostile
import pytest
from composing import plant_canaries
from fixtures import worker_canaries
from fixtures.rewards_scorers import attempt
from fuzzing import TEXTS, state_of
from scoring import pool, started

from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer
from jaxrl_llm.rewards.scorers.verifier.evaluating import check_isolation
from jaxrl_llm.rewards.scorers.verifier.scorer import verifier_scorer

COUNTS = [
  pytest.param(12, marks=pytest.mark.full),
  pytest.param(1000, marks=pytest.mark.acceptance),
]
MODES = {
  'exact': ('the cat', {}),
  'numeric': ('42', {}),
  'latex': (r'\frac{3}{4}', {}),
  'interval': ('(2, 5]', {}),
  'set': (r'\{1, 2\}', {}),
  'tuple': ('(1, 2)', {}),
  'choice': ('B', {'choices': ['one', 'two', 'three']}),
  'text': ('Paris', {'aliases': ['city of light']}),
}
"""A truth and further fields of the row, by mode of `answer`."""
VERIFIERS = (
  *(
    'countdown',
    'puzzle24',
    'simple_integration',
    'polynomial_multiplication',
    'n_queens',
    'binary_matrix',
  ),
  *(
    'spiral_matrix',
    'string_insertion',
    'bitwise_arithmetic',
    'spell_backward',
    'number_sorting',
    'chain_sum',
  ),
  *(
    'propositional_logic',
    'basic_arithmetic',
    'mini_sudoku',
    'word_ladder',
    'time_intervals',
    'family_relationships',
  ),
  *(
    'complex_arithmetic',
    'number_format',
    'group_anagrams',
    'codeio',
    'knights_knaves',
    'rush_hour',
  ),
)
CODE = (
  "__import__('os').system('touch CANARY/touched')",
  "open('CANARY/canary', 'w').write('x')",
  "open('CANARY/canary').read()",
  "__import__('os').environ['JAXRL_CANARY']",
  'exec(\'import sys\\nfor m in list(sys.modules.values()):\\n  if hasattr(m, "_ask"): m._ask = '
  "lambda *a: 1.0')",
  "setattr(__import__('reasoning_gym'), 'get_score_answer_fn', lambda name: lambda **_: 1.0)",
  "setattr(__import__('builtins'), 'float', lambda *a: 1.0)",
  "__import__('shutil').rmtree('CANARY')",
  "__import__('os').kill(__import__('os').getppid(), 9)",
  "__import__('os')._exit(0)",
  '().__class__.__base__.__subclasses__()',
  '(lambda: (yield))()',
  '[x for x in iter(int, 1)]',
  'oracle_answer',
  'self.config.__class__.__init__.__globals__',
  'f\'{__import__("os").environ}\'',
  'entry["answer"]',
  'breakpoint()',
)
BOMBS = (
  '9**9**9', '9**9**9**9', '(' * 400 + '1' + ')' * 400, '[' * 3000 + ']' * 3000, '10**10**8',
  'factorial(10**6)', '3!!!!!!',
  '1' * 4000, '1' * 6000, '0.' + '0' * 5000 + '1', '1e999999999',
  r'\frac{1}{' * 60 + '1' + '}' * 60, '2^' * 300 + '2', r'\sqrt{' * 200 + '2' + '}' * 200,
  r'\binom{10^9}{10^8}', r'\sum_{i=1}^{10^{12}} i', r'\int_0^1 e^{-x^2} dx' * 20,
  r'\begin{matrix}' * 50, r'\left(' * 300, r'\boxed{' * 300, '{' * 5000, 'x+' * 3000 + 'x',
  '(x+1)**500', '1/0', '0/0', r'x^{x^{x^{x}}}' * 30, 'a' * 50_000, ' ' * 50_000, '1,' * 20_000,
  '\\' * 9999, '$' * 3001, '١٢٣', '½', '４２', '1_000', '0x2a', 'nan', 'inf', '-0', '1e-400',
  'True', 'None', '42\x00', '\u202e24', r'\input{CANARY/canary}',
  r'\write18{touch CANARY/touched}',
  '%(truth)s', '{truth}', '{0.__class__}', '<answer>' * 2000, '####' * 2000, r'\def\a{\a}\a',
  '2026-11-23' * 50, '12:60:99',
)  # fmt: skip
FORMS = (
  '{}', r'\boxed{{{}}}', '<answer>{}</answer>', '#### {}', 'The answer is {}.', '${}$',
  r'\boxed{{TRUTH}} \boxed{{{}}}', 'TRUTH + {}',
  '{} TRUTH', 'TRUTH! + {}', 'TRUTH if {} else TRUTH', '{}\n#### TRUTH',
  '{}\n\\boxed{{TRUTH}}', '[{}]', '"{}"', 'TRUTH, {}', '({}) + TRUTH',
  r'\text{{{}}}', 'TRUTH\n{}',
)  # fmt: skip


def entries():
  """An entry of each verifier, as JSON stores it."""
  import reasoning_gym

  return {
    name: json.loads(json.dumps(reasoning_gym.create_dataset(name, size=1, seed=3)[0], default=str))
    for name in VERIFIERS
  }


def hostile_answers(count, *, seed, canary):
  """(scorer, attempt), the same ones for the same seed."""
  draw, known = random.Random(seed), entries()
  return [_answer(draw, known, canary, number) for number in range(count)]


def _answer(draw, known, canary, number):
  payload = draw.choice(draw.choice([CODE, CODE, BOMBS, TEXTS])).replace('CANARY', canary)
  form = 'TRUTH' if draw.random() < 0.15 else draw.choice(FORMS).format(payload)
  if draw.random() < 0.4:
    mode = draw.choice([*MODES])
    truth, fields = MODES[mode]
    return mode, attempt(
      form.replace('TRUTH', truth), uid=f'u{number}', domain=mode, truth=truth, fields=fields
    )
  name = draw.choice(VERIFIERS)
  fields, truth = {'reasoning_gym': name, 'entry': known[name]}, str(known[name]['answer'])
  return 'verifier', attempt(
    form.replace('TRUTH', truth), uid=f'u{number}', domain='verifier', fields=fields
  )


def new_pool():
  """One worker, with a scorer for each kind of answer, and one that tells of the worker."""
  scorers = {mode: (answer_scorer(mode=mode), {'domains': (mode,)}) for mode in MODES}
  scorers['verifier'] = verifier_scorer(), {'domains': ('verifier',)}
  scorers['state'] = worker_canaries.state, {'domains': ('state',)}
  return pool(scorers, workers=1)


async def verdict(one, answer):
  (score,) = await one.score(answer)
  return score


async def state(one):
  return (await verdict(one, attempt(domain='state'))).evidence


def differing(answers, found, others):
  def told(score):
    return (score.value, score.status)

  return [
    (answer.task.fields.get('reasoning_gym', kind), answer.completion[:300], told(one), told(other))
    for (kind, answer), one, other in zip(answers, found, others, strict=True)
    if told(one) != told(other)
  ]


@pytest.mark.parametrize('count', COUNTS)
def test_no_hostile_answer_touches_anything_or_changes_a_verdict(tmp_path, monkeypatch, count):
  folder, secret = tmp_path, plant_canaries(tmp_path, monkeypatch)
  try:
    check_isolation('auto')
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error)
  answers = hostile_answers(count, seed=15, canary=str(folder))
  place = state_of(folder)

  async def fresh_verdict(few, answer):
    async with few, started(new_pool()) as one:
      return await verdict(one, answer)

  async def main():
    async with started(new_pool()) as used:
      before = await state(used)
      found = [await verdict(used, answer) for _, answer in answers]
      after = await state(used)
      again = [await verdict(used, answer) for _, answer in reversed(answers)]
      restarts = {
        key: number
        for key, number in used.counts.items()
        if key in ('breaks', 'crashed', 'error', 'timeout') and number
      }
    few = asyncio.Semaphore(3)
    fresh = await asyncio.gather(*(fresh_verdict(few, answer) for _, answer in answers))
    return before, after, found, again[::-1], fresh, restarts

  before, after, found, again, fresh, restarts = asyncio.run(main())
  assert state_of(folder) == place and os.environ['JAXRL_CANARY'] == secret
  assert secret not in repr(found)
  assert {name: after[name] for name in ('directory', 'environment')} == {
    name: before[name] for name in ('directory', 'environment')
  }
  assert {name: after['code'].get(name) for name in before['code']} == before['code']
  assert restarts == {} and after['pid'] == before['pid'], 'no answer ended the worker'
  assert differing(answers, found, again) == [] and differing(answers, found, fresh) == []
  assert {score.value for score in found} >= {0.0, 1.0}
