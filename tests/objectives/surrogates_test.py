"""SAPO's surrogate against hand-worked numbers, a loop over tokens, and finite differences of that
loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import ACCURACY, SEGMENTS, assert_gradient, evaluate, gradient_of, packed

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.objectives.surrogates import SapoOptions, SurrogateTokens, sapo

DEFAULTS = SapoOptions()
APART = SapoOptions(tau_pos=2.0, tau_neg=0.5)


def token_losses(d, options=APART):
  return sapo(
    SurrogateTokens(d.logprobs, d.proximal, d.advantages, d.mask, d.ids, SEGMENTS), options
  ).loss


def expected(b, options=APART):
  ratio = oracles.token_log_ratio(b.logprobs, b.proximal, b.mask)
  return oracles.sapo(ratio, b.advantages, b.mask, tau_pos=options.tau_pos, tau_neg=options.tau_neg)


def of_token(ratio, advantage, options=DEFAULTS):
  """Loss of one token with this ratio, and its gradient over the logprob."""

  def column(value):
    return jnp.full((1, 1), value, jnp.float32)

  tokens = SurrogateTokens(
    column(0.0), column(-np.log(ratio)), column(advantage), column(1) > 0, column(1), 1
  )

  def loss(logprobs):
    return sapo(tokens._replace(logprobs=logprobs), options).loss.sum()

  return tuple(float(value.sum()) for value in jax.value_and_grad(loss)(tokens.logprobs))


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'loss', 'gradient'),
  [
    (1.0, 2.0, -4.0, -2.0),  # -4/1 σ(0) 2; on-policy the gate's slope is 1
    (1.0, -2.0, 4 / 1.05, 2.0),
    (2.0, 1.0, -4 * 0.731059, -4 * 0.731059 * 0.268941 * 2.0),  # σ(1) = 0.731059
    (2.0, -1.0, 4 / 1.05 * 0.740775, 4 * 0.740775 * 0.259225 * 2.0),  # σ(1.05) = 0.740775
    (0.5, 1.0, -4 * 0.377541, -4 * 0.377541 * 0.622459 * 0.5),  # σ(-0.5) = 0.377541
    (3.0, 0.0, 0.0, 0.0),
  ],
)
def test_hand_worked_sapo(ratio, advantage, loss, gradient):
  assert of_token(ratio, advantage) == pytest.approx((loss, gradient), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_sapo_equals_the_loop(dtype, seed):
  b = packed(seed)
  found = evaluate(token_losses, b, dtype=dtype)
  np.testing.assert_allclose(
    found[b.mask], expected(b)[b.mask], rtol=ACCURACY[dtype], atol=ACCURACY[dtype]
  )
  assert (b.advantages[b.mask] > 0).any() and (b.advantages[b.mask] < 0).any()


@pytest.mark.parametrize('seed', [0, 1])
def test_sapo_gradient_equals_differences_and_its_closed_form(seed):
  b = packed(seed)

  def loss(d):
    return jnp.where(d.mask, token_losses(d), 0.0).sum()

  gradient = assert_gradient(loss, lambda shifted: expected(shifted).sum(), b, 'logprobs')
  log_ratio = oracles.token_log_ratio(b.logprobs, b.proximal, b.mask)
  limited, ratio = np.abs(log_ratio) >= 20.0, np.exp(log_ratio)
  p = 1 / (1 + np.exp(-np.where(b.advantages > 0, APART.tau_pos, APART.tau_neg) * (ratio - 1)))
  closed_form = np.where(b.mask & ~limited, -4 * p * (1 - p) * ratio * b.advantages, 0.0)
  np.testing.assert_allclose(gradient, closed_form, rtol=1e-9, atol=1e-12)
  assert np.abs(gradient).max() > 0.1


def test_masked_positions_and_neighbours_change_no_gradient():
  b = packed(3)
  other = oracles.replaced(
    b, proximal=np.where(b.mask, b.proximal, 5.0), ids=np.where(b.mask, b.ids, 0)
  )

  def loss(d):
    return jnp.where(d.mask, token_losses(d), 0.0).sum()

  np.testing.assert_array_equal(
    gradient_of(loss, b, 'logprobs'), gradient_of(loss, other, 'logprobs')
  )


def test_far_from_the_proximal_policy_loss_and_gradient_are_bounded():
  for ratio in (1e-8, 1e8):
    for advantage in (2.0, -2.0):
      loss, gradient = of_token(ratio, advantage)
      assert abs(loss) <= 8.0 and gradient == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
  ('name', 'value'), [('tau_pos', 0.0), ('tau_neg', -1.0), ('tau_neg', float('inf'))]
)
def test_a_temperature_that_makes_no_gate_is_one_line(name, value):
  with pytest.raises(UserError, match=rf'^sapo.{name}: {value}, wanted a finite number above 0$'):
    SapoOptions(**{name: value})
