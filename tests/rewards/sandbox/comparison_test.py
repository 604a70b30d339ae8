"""Outputs compared with a tolerance, credits of checkers, and the tests' weights."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox.comparison import Tolerance, read_credit, same_output, share


@pytest.mark.parametrize(
  ('actual', 'expected', 'same'),
  [
    ('0.333333', '0.33333301', True),
    ('0.3332', '0.3333', False),
    ('1e3', '1000', True),
    ('1000000.5', '1000000', True),  # Within a millionth of the expected number.
    ('1000001', '1000000', False),  # Integers are equal or not.
    ('+7', '7', True),
    ('007', '7', True),
    ('.5 x\n2', '0.5   x\n2.0000001', True),
    ('0.5\nx 2', '0.5 x\n2', False),
    ('1 2', '1 2 3', False),
    ('1\n2', '1', False),
    ('-0.0000001', '0', True),
    ('nan', 'nan', True),
    ('nan', '1.0', False),
    ('inf', '1e999', False),
    ('1_000', '1000', False),
    ('0x10', '16', False),
    ('١', '1', False),
    ('YES', 'yes', False),
    ('9' * 5000, '9' * 5000, True),
    ('9' * 5000 + '.0', '9' * 5000, False),
  ],
)
def test_words_that_are_numbers_may_differ_within_the_tolerance(actual, expected, same):
  assert same_output(actual, expected, Tolerance(absolute=1e-6, relative=1e-6)) is same


def test_without_a_tolerance_lines_are_equal_but_for_their_ends():
  assert same_output('1 \n2\n\n', '1\n2')
  assert not same_output('1  2', '1 2') and not same_output('1.0', '1')


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 0.9))
def test_a_number_within_the_tolerance_passes_and_one_beyond_it_does_not(numbers, part):
  expected = ' '.join(f'{number!r}' for number in numbers)
  tolerance = Tolerance(absolute=1e-3)
  near = ' '.join(f'{number + part * 1e-3:.9f}' for number in numbers)
  far = ' '.join([f'{numbers[0] + 1.1e-3:.9f}', *near.split()[1:]])
  assert same_output(near, expected, tolerance) and not same_output(far, expected, tolerance)


@pytest.mark.parametrize('value', [-1.0, math.nan, math.inf])
def test_a_tolerance_is_finite_and_not_negative(value):
  with pytest.raises(UserError, match='tolerance: absolute'):
    Tolerance(absolute=value)


def test_a_credit_is_the_number_in_the_last_line():
  assert read_credit('looks fine\n0.5\n') == 0.5
  assert read_credit('1') == 1.0
  for printed in ('', 'yes', '1.5', '-1', 'nan', '1 2', '0.5\nno'):
    assert read_credit(printed) is None, printed


def test_shares_by_hand():
  assert share([1, 0, 0.5], [1, 2, 1]) == 0.375
  assert share([1, 1, 0], [0.1, 0.2, 0]) == 1.0
  assert share([0, 1], [3, 1]) == 0.25
