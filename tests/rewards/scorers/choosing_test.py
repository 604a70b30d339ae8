"""Mode and extraction follow from the truths; what is given stays as it is."""

import pytest

from jaxrl_llm.app.composition.scorers import choose as choose_for
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.api import ScorerConfig
from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE, HASHES_FIRST, choose
from jaxrl_llm.rewards.scorers.answer.scorer import choose_options


@pytest.mark.parametrize(
  ('truths', 'mode', 'extraction'),
  [
    (['5 + 3 = 8.\n#### 8', 'So\n#### 1,200', '#### 12 km'], 'numeric', HASHES_FIRST),
    (['#### 8', r'#### \frac{1}{2}\pi'], 'latex', HASHES_FIRST),
    (['#### 8', '9', '10'], 'latex', ANYWHERE),
    (['42', '025', '1,000'], 'latex', ANYWHERE),
    ([r'\frac{1}{2}', '(1,2)', r'\text{even}'], 'latex', ANYWHERE),
    ([r'It is $3$, so \boxed{3}.', r'\boxed{x^2}'], 'latex', ANYWHERE),
    (['A', '(B)', r'\text{(C)}', 'D.'], 'choice', ANYWHERE),
    (['A', '7'], 'latex', ANYWHERE),
    (['Paris', 'the Nile', '["U.S.A.", "the United States"]'], 'text', ANYWHERE),
    (['Paris', 'the Nile', '["Moscow", "Moskva"]'], 'text', ANYWHERE),
    (['ab + c', 'x'], 'latex', ANYWHERE),
    (['Paris', '7'], 'latex', ANYWHERE),
    ([None, ' '], 'latex', ANYWHERE),
    ([], 'latex', ANYWHERE),
    ([None, 'yes', 'no way'], 'text', ANYWHERE),
  ],
)
def test_what_is_chosen_from_truths(truths, mode, extraction):
  chosen = choose(truths).options
  assert (chosen['mode'], chosen['extraction']) == (mode, extraction)
  assert choose(list(reversed(truths)) * 2) == choose(truths)
  assert ('units' in chosen) == (mode == 'numeric')


def test_what_is_given_stays():
  def truths():
    return ['#### 8']

  assert choose_options({}, truths).options == {
    'mode': 'numeric',
    'units': 'stated',
    'extraction': HASHES_FIRST,
  }
  assert choose_options({'units': 'refused'}, truths).options == {
    'mode': 'numeric',
    'extraction': HASHES_FIRST,
  }
  assert choose_options({'extraction': 'boxed'}, truths).options == {
    'mode': 'numeric',
    'units': 'stated',
  }
  assert choose_options({'mode': 'latex'}, truths).options == {'extraction': HASHES_FIRST}
  assert (
    choose_options(
      {'mode': 'latex', 'extraction': ['boxed']}, lambda: pytest.fail('nothing is open')
    )
    is None
  )
  with pytest.raises(UserError, match=r"scorer 'answer'\.mode: got 'latx'"):
    choose_options({'mode': 'latx'}, truths)


def test_a_scorer_gets_what_is_chosen_and_a_line_says_it():
  chosen = choose_for(ScorerConfig(name='math', kind='answer', weight=2.0), lambda: ['A', 'B'])
  assert chosen.scorer == ScorerConfig(
    name='math', kind='answer', weight=2.0, options={'mode': 'choice', 'extraction': ANYWHERE}
  )
  assert chosen.line() == (
    'scorer math: mode choice; extraction boxed, tags, hashes, phrase, bold, whole (all of 2 '
    'different truths are letters of choices)'
  )
  other = ScorerConfig(name='format')
  assert choose_for(other, lambda: pytest.fail('nothing is open')) == (other, '')
