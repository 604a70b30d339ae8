import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ops.reduce import aggregate, by_segment, masked_stat, segment_sums

# One chunk of two sequences: values 1, 2, 3 | 10, 20, then padding with junk.
VALUES = jnp.array([[1.0, 2.0, 3.0, 10.0, 20.0, jnp.nan]])
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0]])
MASK = jnp.array([[False, True, True, True, True, False]])


@pytest.mark.parametrize(
  ('mode', 'numerator', 'denominator'),
  [
    ('token-mean', 2 + 3 + 10 + 20, 4),
    ('seq-mean-token-sum', 2 + 3 + 10 + 20, 2),
    ('seq-mean-token-mean', (2 + 3) / 2 + (10 + 20) / 2, 2),
    ('seq-mean-token-sum-norm', (2 + 3 + 10 + 20) / 7, 2),
  ],
)
def test_hand_worked_aggregations(mode, numerator, denominator):
  found = aggregate(VALUES, MASK, SEGMENTS, segments=3, mode=mode, loss_scale_factor=7.0)
  assert (float(found[0]), float(found[1])) == (numerator, denominator)


@pytest.mark.parametrize(
  'mode', ['token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm']
)
def test_junk_at_masked_positions_reaches_neither_value_nor_gradient(mode):
  def numerator(v):
    return aggregate(v, MASK, SEGMENTS, segments=3, mode=mode)[0]

  gradient = jax.grad(numerator)(VALUES)
  assert np.isfinite(gradient).all()
  np.testing.assert_array_equal(gradient[0, [0, 5]], 0.0)


def test_fully_masked_sequences_are_in_no_denominator():
  mask = jnp.array([[False, True, True, False, False, False]])
  assert float(aggregate(VALUES, mask, SEGMENTS, segments=3, mode='seq-mean-token-mean')[1]) == 1.0


def test_nothing_valid_is_zero_over_zero_not_nan():
  found = aggregate(VALUES, jnp.zeros_like(MASK), SEGMENTS, segments=3, mode='seq-mean-token-mean')
  assert (float(found[0]), float(found[1])) == (0.0, 0.0)


def test_segment_sums_and_back():
  sums = segment_sums(jnp.where(SEGMENTS > 0, VALUES, 0.0), SEGMENTS, segments=3)
  np.testing.assert_array_equal(sums, [[6.0, 30.0, 0.0]])
  np.testing.assert_array_equal(by_segment(sums, SEGMENTS)[0, :5], [6, 6, 6, 30, 30])


def test_masked_stat_keeps_sum_and_count():
  stat = masked_stat(VALUES, MASK)
  assert (float(stat.total), float(stat.count)) == (35.0, 4.0)
