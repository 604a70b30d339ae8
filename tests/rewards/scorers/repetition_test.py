"""−max · (1 − distinct / all n-grams)."""

import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.scorers.repetition import repeated, repetition_scorer


@pytest.mark.parametrize(
  ('text', 'ngram', 'rate'),
  [
    ('', 3, 0.0),
    ('one two', 3, 0.0),
    ('one two three', 3, 0.0),
    ('a b a b', 2, 1 - 2 / 3),  # ab, ba, ab: two of three
    ('A b a B', 2, 1 - 2 / 3),
    ('x x x x x', 1, 1 - 1 / 5),
    ('x x x x x', 3, 1 - 1 / 3),
    ('a b c d e f', 2, 0.0),
    ('好好好好', 2, 1 - 1 / 3),  # characters: three pairs, one of them distinct
    ('x\ny  x y', 2, 1 - 2 / 3),
  ],
)
def test_rates_by_hand(text, ngram, rate):
  assert repeated(text, ngram) == pytest.approx(rate)


def test_the_penalty_is_between_minus_max_and_0():
  scorer = repetition_scorer(ngram=2, max_penalty=0.5)
  assert scorer(attempt('a b c')).value == 0.0
  assert scorer(attempt('a b a b')).value == pytest.approx(-0.5 / 3)
  assert -0.5 < scorer(attempt('no ' * 100_000)).value < -0.499


@given(words=st.lists(st.sampled_from('abc'), max_size=30), ngram=st.integers(1, 4))
@settings(deadline=None)
def test_it_equals_the_loop(words, ngram):
  grams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
  wanted = 1 - len(set(grams)) / len(grams) if grams else 0.0
  assert repeated(' '.join(words), ngram) == pytest.approx(wanted)


@pytest.mark.parametrize('options', [{'ngram': 0}, {'max_penalty': 0.0}, {'max_penalty': -1.0}])
def test_options_that_cannot_be_are_refused(options):
  with pytest.raises(UserError, match=f"scorer 'repetition': option {next(iter(options))}"):
    repetition_scorer(**options)
