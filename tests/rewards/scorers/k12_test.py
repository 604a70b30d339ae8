"""School questions by kind: the task states it, or the options do."""

import pytest
from fixtures.rewards_scorers import attempt

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer
from jaxrl_llm.rewards.scorers.k12 import k12_scorer

QUESTIONS = [
  ({'kind': 'choice', 'choices': ['2', '4', '6']}, 'B', r'\boxed{B}', 1.0),
  ({'kind': 'choice', 'choices': ['2', '4', '6']}, 'B', 'The answer is 4.', 1.0),
  ({'kind': 'choice', 'choices': ['2', '4', '6']}, 'B', 'The answer is C.', 0.0),
  ({'kind': 'numeric'}, '5 km', 'The answer is 5000 m.', 1.0),
  ({'kind': 'numeric'}, '5 km', 'The answer is 5.', 1.0),
  ({'kind': 'numeric'}, '5 km', 'The answer is 5 kg.', 0.0),
  ({'kind': 'numeric'}, '9.8 m/s^2', r'\boxed{9.81\text{ m/s}^2}', 1.0),
  (
    {'kind': 'text'},
    '["mitochondria", "mitochondrion"]',
    '<answer>The mitochondrion.</answer>',
    1.0,
  ),
  ({'kind': 'text'}, 'photosynthesis', 'Answer: respiration', 0.0),
  ({'extra_info': {'kind': 'text'}}, 'Newton', '#### newton', 1.0),
  ({'kind': 'latex'}, r'\frac{1}{2}', r'\boxed{0.5}', 1.0),
  ({'kind': 'interval'}, '[1,2)', r'\boxed{(1,2)}', 0.0),
]


@pytest.mark.parametrize(('fields', 'truth', 'completion', 'value'), QUESTIONS)
def test_each_kind_is_graded_as_answer_grades_it(fields, truth, completion, value):
  scored = k12_scorer(relative_tolerance=0.01)(attempt(completion, truth=truth, fields=fields))
  kind = fields.get('kind') or fields['extra_info']['kind']
  assert scored.value == value and scored.evidence['kind'] == kind
  own = answer_scorer(mode=kind, extraction=ANYWHERE, units='stated', relative_tolerance=0.01)
  assert own(attempt(completion, truth=truth, fields=fields)).value == value


def test_a_task_without_a_known_kind_is_unscorable():
  for fields in ({}, {'kind': 'essay'}, {'kind': ['choice']}, {'kind': {'choice': 1}}):
    said = k12_scorer()(attempt('B', truth='B', fields=fields))
    assert said.value is None and 'wanted one of exact, numeric' in said.evidence['reason']
  assert k12_scorer(mode='choice')(attempt('B', truth='B')).value == 1.0
  assert (
    k12_scorer(kind_field='type')(attempt('B', truth='B', fields={'type': 'choice'})).value == 1.0
  )
  assert k12_scorer()(attempt('B', truth=None, fields={'kind': 'choice'})).value is None


def test_options_are_those_of_answer():
  with pytest.raises(UserError, match="scorer 'k12': option relative_tolerance is -1"):
    k12_scorer(relative_tolerance=-1.0)
  with pytest.raises(UserError, match=r"scorer 'k12'\.units: got 'sometimes'"):
    k12_scorer(units='sometimes')
