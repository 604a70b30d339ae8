"""Corrections for another policy's samples: by hand, by loops, and without a gradient."""

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import ACCURACY, SEGMENTS, evaluate, gradient_of, packed

from jaxrl_llm.objectives.correction import (
  importance_weights,
  negative_sequence_mask,
  sequence_mask,
)

# Two sequences of two and three tokens, the last token a tool's (junk), then padding.
IDS = jnp.array([[1, 1, 2, 2, 2, 0]])
MASK = jnp.array([[True, True, True, True, False, False]])
RATIOS = np.array([[3.0, 0.1, 1.5, 0.8, 9.0, 9.0]])
PROXIMAL = jnp.where(MASK, jnp.log(RATIOS), jnp.nan)
ZERO = jnp.zeros((1, 6))

MODES = [
  {'mode': 'token', 'threshold': 2.0},
  {'mode': 'token', 'threshold': 1.2, 'lower': 0.8},
  {'mode': 'sequence', 'threshold': 2.0},
  {'mode': 'sequence', 'threshold': 1.2, 'lower': 0.8},
  {'mode': 'icepop', 'threshold': 5.0},
  {'mode': 'icepop', 'threshold': 1.2, 'lower': 0.8},
]


@pytest.mark.parametrize(
  ('options', 'wanted'),
  [
    ({'mode': 'token'}, [2.0, 0.1, 1.5, 0.8, 1.0, 1.0]),  # min(w, 2)
    ({'mode': 'token', 'threshold': 5.0, 'lower': 0.5}, [3.0, 0.5, 1.5, 0.8, 1.0, 1.0]),
    # 3 * 0.1; min(1.5 * 0.8, 1.1)
    ({'mode': 'sequence', 'threshold': 1.1}, [0.3, 0.3, 1.1, 1.1, 1.0, 1.0]),
    ({'mode': 'icepop', 'threshold': 5.0}, [3.0, 0.0, 1.5, 0.8, 1.0, 1.0]),  # 0.1 < 0.5
    ({'mode': 'icepop', 'threshold': 2.0, 'lower': 0.05}, [0.0, 0.1, 1.5, 0.8, 1.0, 1.0]),  # 3 > 2
  ],
)
def test_hand_worked_weights(options, wanted):
  found = importance_weights(PROXIMAL, ZERO, MASK, IDS, segments=3, **options)
  np.testing.assert_allclose(found, [wanted], rtol=1e-6)


def test_hand_worked_sequence_mask():
  # Geometric means: sqrt(3 * 0.1) = 0.548 and sqrt(1.5 * 0.8) = 1.095.
  def keep(low, high):
    return sequence_mask(PROXIMAL, ZERO, MASK, IDS, segments=3, low=low, high=high)[0].tolist()

  assert keep(0.54, 1.10) == [True] * 6
  assert keep(0.56, 1.10) == [False, False, True, True, True, True]
  assert keep(0.54, 1.09) == [True, True, False, False, True, True]


def test_hand_worked_negative_sequence_mask():
  # Mean of old - new: -ln(0.3) / 2 = 0.602 in the first sequence, -ln(1.2) / 2 = -0.091 in the
  # second.
  def keep(advantages, threshold):
    arrays = ZERO, PROXIMAL, jnp.array([advantages])
    return negative_sequence_mask(*arrays, MASK, IDS, segments=3, threshold=threshold)[0].tolist()

  negative = [-1.0] * 6
  assert keep(negative, 0.6) == [False, False, True, True, True, True]
  assert keep(negative, 0.61) == [True] * 6
  assert keep(negative, -0.1) == [False] * 4 + [True] * 2
  assert keep([1.0] * 6, -10.0) == [True] * 6
  assert keep([0.0] * 6, -10.0) == [True] * 6


@pytest.mark.parametrize('options', MODES, ids=str)
@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1])
def test_weights_equal_the_loops(options, dtype, seed):
  b = packed(seed)

  def call(d):
    return importance_weights(d.proximal, d.behaviour, d.mask, d.ids, segments=SEGMENTS, **options)

  found = evaluate(call, b, dtype=dtype)
  wanted = oracles.importance_weights(b.proximal, b.behaviour, b.mask, b.ids, **options)
  np.testing.assert_allclose(found, wanted, rtol=5 * ACCURACY[dtype])
  assert (found[~b.mask] == 1).all() and len(np.unique(found[b.mask])) > 1


@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_masks_equal_the_loops(dtype, seed):
  b = packed(seed, extreme=False)

  def call(d):
    return sequence_mask(
      d.proximal, d.behaviour, d.mask, d.ids, segments=SEGMENTS, low=0.8, high=1.1
    )

  found = evaluate(call, b, dtype=dtype)
  wanted = oracles.sequence_mask(b.proximal, b.behaviour, b.mask, b.ids, low=0.8, high=1.1)
  np.testing.assert_array_equal(found, wanted)
  assert not found.all() and found[b.mask].any()
  options = {'threshold': 0.0}

  def call(d):
    return negative_sequence_mask(
      d.behaviour, d.logprobs, d.advantages, d.mask, d.ids, segments=SEGMENTS, **options
    )

  found = evaluate(call, b, dtype=dtype)
  wanted = oracles.negative_sequence_mask(
    b.behaviour, b.logprobs, b.advantages, b.mask, b.ids, **options
  )
  np.testing.assert_array_equal(found, wanted)
  assert not found.all() and found[b.mask].any()


@pytest.mark.parametrize('options', MODES, ids=str)
def test_weights_are_constants(options):
  # On the trainer's own logprobs the gradient of weight * logprob is the weight, and 0 at masked
  # junk.
  b = packed(3)

  def loss(d):
    weights = importance_weights(
      d.logprobs, d.behaviour, d.mask, d.ids, segments=SEGMENTS, **options
    )
    return jnp.where(d.mask, weights * d.logprobs, 0.0).sum()

  wanted = oracles.importance_weights(b.logprobs, b.behaviour, b.mask, b.ids, **options)
  np.testing.assert_allclose(
    gradient_of(loss, b, 'logprobs'), np.where(b.mask, wanted, 0.0), rtol=1e-12
  )


def test_log_ratios_beyond_the_limit_stay_finite():
  # 500 nats at each of three tokens: exp(20) each, and exp(20) for their product; the other way
  # exp(-20).
  ones, ids = jnp.ones((1, 3), bool), jnp.ones((1, 3), jnp.int32)
  for mode in ('token', 'sequence'):
    for sign in (1.0, -1.0):
      far = jnp.full((1, 3), sign * 500.0)
      found = importance_weights(
        far, jnp.zeros((1, 3)), ones, ids, segments=1, mode=mode, threshold=1e12
      )
      np.testing.assert_allclose(found, np.exp(sign * 20.0), rtol=1e-5)
