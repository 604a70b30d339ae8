import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ACCURACY, assert_gradient, each, evaluate, packed

from jaxrl_llm.objectives.supervised import chord_token_weight, negative_log_likelihood


def test_negative_log_likelihood_is_its_name():
  np.testing.assert_array_equal(negative_log_likelihood(jnp.array([[-0.5, -2.0]])), [[0.5, 2.0]])


def test_hand_worked_token_weight():
  # 0.5 * 0.5, 0.9 * 0.1, 1 * 0, and 0 for what the policy holds impossible.
  logprobs = jnp.array([[np.log(0.5), np.log(0.9), 0.0, -np.inf]])
  np.testing.assert_allclose(chord_token_weight(logprobs), [[0.25, 0.09, 0.0, 0.0]], rtol=1e-6)


def test_weight_keeps_its_digits_near_certainty():
  # p = exp(-1e-9) rounds to 1 in float32, 1 - p to 0; p (1 - p) is 1e-9.
  np.testing.assert_allclose(chord_token_weight(jnp.full((1, 1), -1e-9)), [[1e-9]], rtol=1e-6)


@pytest.mark.parametrize('dtype', ACCURACY)
def test_weight_equals_the_loops(dtype):
  b = packed(0)
  found = evaluate(lambda d: chord_token_weight(d.logprobs, d.mask), b, dtype=dtype)
  wanted = each(b.mask, lambda at: np.exp(b.logprobs[at]) * (1 - np.exp(b.logprobs[at])))
  np.testing.assert_allclose(found, wanted, rtol=ACCURACY[dtype], atol=1e-15)


def test_weight_is_a_constant():
  b = packed(1)
  held = each(b.mask, lambda at: np.exp(b.logprobs[at]) * (1 - np.exp(b.logprobs[at])))

  def loss(d):
    return jnp.where(
      d.mask, chord_token_weight(d.logprobs, d.mask) * negative_log_likelihood(d.logprobs), 0.0
    ).sum()

  gradient = assert_gradient(
    loss, lambda b: -(held * np.where(b.mask, b.logprobs, 0.0)).sum(), b, 'logprobs'
  )
  np.testing.assert_array_equal(gradient != 0, b.mask)
