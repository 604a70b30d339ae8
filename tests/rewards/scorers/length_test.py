"""The objectives' length rewards as scorers: the same numbers."""

import dataclasses
import pickle

import pytest
from fixtures.rewards_scorers import attempt

from jaxrl_llm.advantages.shaping import length_rewards
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.rewards.scorers.length import length_scorer, overlong_scorer


def of_length(n, uid='u'):
  return dataclasses.replace(attempt('x', uid=uid), response_len=n)


def test_overlong_by_hand():
  # 100 tokens with a buffer of 20: free up to 80; 85 is a quarter into the buffer; past 100 it
  # stays at -factor.
  scorer = overlong_scorer(max_length=100, buffer=20, factor=2.0)
  assert [scorer(of_length(n)).value for n in (1, 80, 85, 100, 130)] == [0.0, 0.0, -0.5, -2.0, -2.0]


def group(values, scorer='answer'):
  return tuple((Score(uid=str(i), scorer=scorer, value=value),) for i, value in enumerate(values))


def test_length_by_hand():
  # Lengths 10, 20, 30, 50, range 40: 1/2, 1/4, 0, -1/2; a wrong answer keeps only what is negative.
  attempts = tuple(of_length(n, str(n)) for n in (10, 20, 30, 50))
  said = length_scorer().scorer(attempts, group([1.0, 0.0, 1.0, 0.0]))
  assert [one.value for one in said] == [0.5, 0.0, 0.0, -0.5]
  assert said[1].evidence == {'length': 20, 'correct': False}
  correct = [True, None, True, False]
  assert length_scorer().scorer(attempts, group([0.9, 1.0, 1.0, 1.0]))[0].value == 0.0, (
    '0.9 is not right'
  )
  said = length_scorer().scorer(attempts, group([1.0, None, 2.0, 0.9]))
  assert [one.value for one in said] == [0.5, None, 0.0, -0.5]
  assert [one.value or 0.0 for one in said] == length_rewards(
    [10, 20, 30, 50], correct, ['g'] * 4
  ).tolist()


def test_a_named_scorer_says_what_is_correct():
  attempts = (of_length(10), of_length(20))
  scores = tuple(
    (Score(uid='u', scorer='format', value=1.0), Score(uid='u', scorer='answer', value=v))
    for v in (0.0, 1.0)
  )

  def values(**options):
    return [one.value for one in length_scorer(**options).scorer(attempts, scores)]

  assert values() == [0.5, -0.5]
  assert values(correct_by='answer') == [0.0, -0.5]
  with pytest.raises(UserError, match="no scorer 'judge' judged u; wanted one of"):
    values(correct_by='judge')


def test_no_scores_and_equal_lengths():
  assert [one.value for one in length_scorer().scorer((of_length(3),), ((),))] == [None]
  assert [
    one.value for one in length_scorer().scorer((of_length(3), of_length(3)), group([1.0, 0.0]))
  ] == [0.0, 0.0]


def test_options_and_pickling():
  with pytest.raises(UserError, match='buffer 0, wanted 1 to max_length=10'):
    overlong_scorer(max_length=10, buffer=0)
  with pytest.raises(UserError, match='needs a value for max_length, buffer'):
    overlong_scorer()
  again = pickle.loads(pickle.dumps(length_scorer()))
  assert again.scorer((of_length(1), of_length(2)), group([1.0, 1.0]))[0].value == 0.5
