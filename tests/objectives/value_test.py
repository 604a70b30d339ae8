"""The critic's loss and the explained variance, with junk at masked positions."""

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import ACCURACY, assert_gradient, evaluate, packed

from jaxrl_llm.objectives.value import value_loss

RANGES = [0.2, 0.5, None]


@pytest.mark.parametrize(
  ('value', 'old', 'cliprange', 'loss', 'clipped'),
  [
    (1.0, 0.0, 0.5, 1.125, True),  # max((1 - 2)², (0 + 0.5 - 2)²) / 2 = 2.25 / 2
    (1.0, 0.8, 0.5, 0.5, False),  # within the range: (1 - 2)² / 2
    (3.0, 1.9, 0.5, 0.5, False),  # max((3 - 2)², (1.9 + 0.5 - 2)²) / 2
    (1.0, 0.0, None, 0.5, False),
  ],
)
def test_hand_worked_value_loss(value, old, cliprange, loss, clipped):
  def one(x):
    return jnp.full((1, 1), x)

  found = value_loss(one(value), one(old), one(2.0), cliprange_value=cliprange)
  assert float(found.loss[0, 0]) == pytest.approx(loss)
  assert bool(found.clipped[0, 0]) == clipped


@pytest.mark.parametrize('cliprange', RANGES)
@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1])
def test_value_loss_equals_the_loops(cliprange, dtype, seed):
  b = packed(seed)

  def call(d):
    return value_loss(d.values, d.old_values, d.returns, cliprange_value=cliprange, mask=d.mask)

  found = evaluate(call, b, dtype=dtype)
  loss, clipped = oracles.value_loss(b.values, b.old_values, b.returns, b.mask, cliprange=cliprange)
  np.testing.assert_allclose(found.loss, loss, rtol=ACCURACY[dtype], atol=ACCURACY[dtype])
  np.testing.assert_array_equal(found.clipped, clipped)
  assert clipped.any() == (cliprange is not None)


def test_values_within_the_range_are_not_clipped():
  # Nor are they by the rounding of old + (value - old), which differs from the value in a tenth of
  # these.
  old, move, returns = np.random.default_rng(0).normal(size=(3, 1, 1000))
  values, old, returns = (
    x.astype(np.float32) for x in (old + np.clip(move, -0.4, 0.4), old, returns)
  )
  assert (old + (values - old) != values).mean() > 0.1
  found = value_loss(*map(jnp.asarray, (values, old, returns)), cliprange_value=0.5)
  assert not found.clipped.any()
  np.testing.assert_allclose(found.loss, (values - returns) ** 2 / 2, rtol=1e-6)


@pytest.mark.parametrize('cliprange', RANGES)
def test_gradient_equals_differences(cliprange):
  b = packed(2)

  def loss(d):
    return value_loss(
      d.values, d.old_values, d.returns, cliprange_value=cliprange, mask=d.mask
    ).loss.sum()

  def expected(b):
    return oracles.value_loss(b.values, b.old_values, b.returns, b.mask, cliprange=cliprange)[
      0
    ].sum()

  gradient = assert_gradient(loss, expected, b, 'values')
  assert (gradient[~b.mask] == 0).all() and np.abs(gradient).max() > 0.1
