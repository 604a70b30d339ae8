"""The task's own verifier decides, and only its exact 1 is a right answer."""

import pytest
from fixtures.rewards_scorers import attempt

from jaxrl_llm.rewards.scorers.verifier.scorer import runs_code, verifier_scorer


def judged(completion, *, name='spell_backward', answer='retal', prompt='later>', **options):
  entry = {'question': prompt, 'answer': answer, 'metadata': {}}
  fields = {'reasoning_gym': name, 'entry': entry}
  return verifier_scorer(**options)(attempt(completion, prompt=prompt, truth=answer, fields=fields))


@pytest.mark.parametrize(
  ('completion', 'value'),
  [
    ('retal', 1.0),
    (' retal\n', 1.0),
    ('later', 0.0),
    ('', 0.0),
    ('reta', 0.0),
    ('retal retal', 0.0),
    ('retalx', 0.0),
  ],
)
def test_spell_backward(completion, value):
  assert judged(completion).value == value


def test_a_sum_of_partial_credits_is_not_a_right_answer():
  # Six letters, each worth 1/6: 1/6 + … + 1/6 in floats is 0.9999999999999999.
  verdict = judged('abcdefJUNK', answer='abcdef')
  assert verdict.evidence['verifier'] == 0.9999999999999999
  assert verdict.value == 0.0
  assert judged('abcdefJUNK', answer='abcdef', partial_credit=True).value == 0.9999999999999999


def test_partial_credit_is_passed_on_when_asked_for():
  assert judged('rexxx', partial_credit=True).value == 1 / 5 + 1 / 5
  assert judged('rexxx').value == 0.0


def test_extraction_and_strip():
  assert judged('I think <answer> retal </answer>', extraction='tags').value == 1.0
  assert judged('I think retal', extraction='tags').value == 0.0
  assert judged('<answer>retal</answer><answer>later</answer>', extraction='tags').value == 0.0
  assert judged(' retal', strip=False).value == 0.0
  assert (
    judged(
      'later> <answer>x</answer>', prompt='later> <answer>x</answer>', answer='x', extraction='tags'
    ).value
    == 0
  )


@pytest.mark.parametrize('answer', ['nan', 'NaN + nani', '8.0 + infi', '-Infinity', 'nanj'])
def test_nan_and_infinity_are_no_numbers(answer):
  """The library's verifier of complex numbers gives NaN the value min(1, exp(-NaN)), which is 1."""
  entry = {'question': '', 'answer': '8.0 + 3.0i', 'metadata': {'result': (8, 3)}}
  fields = {'reasoning_gym': 'complex_arithmetic', 'entry': entry}
  verdict = verifier_scorer(partial_credit=True)(attempt(answer, fields=fields))
  assert verdict.value == 0.0 and 'NaN or infinity' in verdict.evidence['reason']
  assert verifier_scorer()(attempt('8.0 + 3.0i', fields=fields)).value == 1.0


def test_nan_is_an_answer_where_no_number_is_wanted():
  assert judged('nan', answer='nan').value == 1.0
  assert 'verifier' in judged('information 7', answer='7 noitamrofni').evidence


@pytest.mark.parametrize(
  'name',
  ['spell_backward', 'chain_sum', 'number_sorting', 'word_sorting', 'fraction_simplification'],
)
def test_reference_answers_score_one_and_those_of_other_tasks_zero(name):
  import reasoning_gym

  entries = list(reasoning_gym.create_dataset(name, size=6, seed=11))
  for i, entry in enumerate(entries):
    fields = {'reasoning_gym': name, 'entry': entry}
    other = entries[(i + 1) % len(entries)]['answer']
    assert verifier_scorer()(attempt(entry['answer'], fields=fields)).value == 1.0
    assert other == entry['answer'] or verifier_scorer()(attempt(other, fields=fields)).value == 0.0


def test_a_task_without_a_verifier_is_unscorable():
  verdict = verifier_scorer()(attempt('42'))
  assert verdict.value is None and 'no verifier' in verdict.evidence['reason']


def test_a_verifier_that_raises_on_the_answer_alone_scores_zero(monkeypatch):
  import reasoning_gym

  class Strict:
    def __init__(self, config): ...

    def score_answer(self, answer, entry):
      return float(int(answer) == int(entry['answer']))

  monkeypatch.setitem(reasoning_gym.factory.DATASETS, 'strict_test', (Strict, dict))
  assert judged('42', name='strict_test', answer='42').value == 1.0
  assert judged('forty-two', name='strict_test', answer='42').value == 0.0
  # The entry itself is broken: the scorer's own error.
  with pytest.raises(ValueError, match='n/a'):
    judged('42', name='strict_test', answer='n/a')


def test_an_unknown_verifier_is_the_scorers_own_error():
  with pytest.raises(ValueError, match="Dataset 'no_such' not registered"):
    judged('42', name='no_such')


@pytest.mark.parametrize(
  'answer',
  ["__import__('os').system('true')", 'open("x", "w")', 'exit()', 'exec("1")', '[].append(1)',
   'S("1")', '(lambda: 1)()', '().__class__', '[print(1) for x in [1]]', 'f"{exit()}"',
   '1 + eval("1")'],
)  # fmt: skip
def test_code_is_recognised(answer):
  assert runs_code(answer)


@pytest.mark.parametrize(
  'answer',
  ['42', 'retal', 'x**2 + sqrt(2)*exp(x)', '[1, 2, 3]', '["a", "b"]', '{"a": 1}', 'Mr.Smith',
   '____', 'the cat (black)', 'open the door', '1 2 3', 'max(1, 2)', 'C + log(x)', '((((',
   'getattr', 'def f(): pass'],
)  # fmt: skip
def test_ordinary_answers_are_not_code(answer):
  assert not runs_code(answer)


def test_a_reference_answer_that_looks_like_code_is_right():
  assert judged("f('a')", answer="f('a')").value == 1.0


def test_a_verifier_never_evaluates_code(tmp_path):
  mark = tmp_path / 'mark'
  entry = {'question': '', 'answer': '1 + 2', 'metadata': {'numbers': [1, 2], 'target': 3}}
  fields = {'reasoning_gym': 'countdown', 'entry': entry}
  verdict = verifier_scorer()(
    attempt(f"__import__('pathlib').Path('{mark}').touch()", fields=fields)
  )
  assert (verdict.value, 'grammar' in verdict.evidence['reason'], mark.exists()) == (
    0.0,
    True,
    False,
  )
