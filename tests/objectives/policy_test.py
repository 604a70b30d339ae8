"""Policy losses against hand-worked numbers, loops over tokens, and finite differences of those."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import ACCURACY, SEGMENTS, assert_gradient, evaluate, packed

from jaxrl_llm.objectives.policy import (
  cispo,
  clipped_surrogate,
  opmd_loss,
  sequence_log_ratio,
  token_log_ratio,
)
from jaxrl_llm.ops.reduce import segment_sums

CLIP = {'clip_ratio_low': 0.2, 'clip_ratio_high': 0.3}
DUAL = {**CLIP, 'clip_ratio_c': 3.0}
BOUNDS = {'low': 0.2, 'high': 0.3}
LEVELS = ['token', 'sequence']


def one(x):
  return jnp.full((1, 1), x, jnp.float32)


def log_ratio(level, d):
  if level == 'token':
    return token_log_ratio(d.logprobs, d.proximal, d.mask)
  return sequence_log_ratio(d.logprobs, d.proximal, d.mask, d.ids, segments=SEGMENTS)


def expected_log_ratio(level, b, held):
  """`held`: the logprobs under the stop-gradients."""
  if level == 'token':
    return oracles.token_log_ratio(b.logprobs, b.proximal, b.mask)
  return oracles.sequence_log_ratio(b.logprobs, b.proximal, b.mask, b.ids, held=held)


def summed(values, mask):
  return jnp.where(mask, values, 0.0).sum()


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'loss', 'clipped', 'lower'),
  [
    (1.0, 2.0, -2.0, False, False),
    (2.0, 1.0, -1.3, True, False),  # -min(2, 1.3)
    (0.5, 1.0, -0.5, False, False),  # -min(0.5, 0.8): not clipped from below where that would help
    (0.5, -1.0, 0.8, True, False),  # max(0.5, 0.8)
    (2.0, -1.0, 2.0, False, False),
    (4.0, -1.0, 3.0, False, True),  # dual clip: min(4, 3)
  ],
)
def test_hand_worked_surrogate(ratio, advantage, loss, clipped, lower):
  found = clipped_surrogate(one(np.log(ratio)), one(advantage), **DUAL)
  np.testing.assert_allclose(found.loss, [[loss]], rtol=1e-6)
  assert (bool(found.clipped[0, 0]), bool(found.clipped_lower[0, 0])) == (clipped, lower)


def test_dual_clip_can_be_off():
  found = clipped_surrogate(one(np.log(4.0)), one(-1.0), **CLIP, clip_ratio_c=None)
  np.testing.assert_allclose(found.loss, [[4.0]], rtol=1e-6)


def test_hand_worked_sequence_ratio():
  # Two sequences. Differences 0.2, (masked), 0.4 have the mean 0.3; 15 alone is over the limit of
  # 10.
  logprobs, proximal = (
    jnp.array([[-1.0, jnp.nan, -2.0, -1.0]]),
    jnp.array([[-1.2, -9.0, -2.4, -16.0]]),
  )
  mask, ids = jnp.array([[True, False, True, True]]), jnp.array([[1, 1, 1, 2]])
  found = sequence_log_ratio(logprobs, proximal, mask, ids, segments=3)
  np.testing.assert_allclose(found, [[0.3, 0.0, 0.3, 10.0]], rtol=1e-6)
  # The gradient is each token's own, not a third or half of it; beyond the limit there is none.
  gradient = jax.grad(lambda lp: sequence_log_ratio(lp, proximal, mask, ids, segments=3).sum())(
    logprobs
  )
  np.testing.assert_array_equal(gradient, [[1.0, 0.0, 1.0, 0.0]])


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'weight', 'cut'),
  [(1.1, 2.0, 1.1, False), (2.0, 2.0, 1.3, True), (0.5, -1.0, 0.8, True)],
)
def test_hand_worked_cispo(ratio, advantage, weight, cut):
  # -weight * A * (-0.7); the gradient over the logprob is -weight * A, cut or not.
  found = cispo(one(np.log(ratio)), one(-0.7), one(advantage), **CLIP)
  np.testing.assert_allclose(found.loss, [[0.7 * weight * advantage]], rtol=1e-6)
  assert bool(found.clipped[0, 0]) == cut and not found.clipped_lower.any()

  def loss(lp):
    return cispo(lp - one(-0.7 - np.log(ratio)), lp, one(advantage), **CLIP).loss.sum()

  np.testing.assert_allclose(jax.grad(loss)(one(-0.7)), [[-weight * advantage]], rtol=1e-6)


def test_hand_worked_opmd():
  # -(0.5 * 2) + 0.1 / 2 * 0.25 = -0.9875; gradient -2 + 0.1 * 0.5 = -1.95.
  def loss(s):
    return opmd_loss(s, one(2.0), tau=0.1).sum()

  assert float(loss(one(0.5))) == pytest.approx(-0.9875)
  np.testing.assert_allclose(jax.grad(loss)(one(0.5)), [[-1.95]], rtol=1e-6)


def test_opmd_is_the_squared_error_of_the_regularised_optimum():
  rng, tau = np.random.default_rng(0), 0.3
  s, reward, baseline = rng.normal(size=(3, 2, 4))

  def squared(s):
    return ((reward - baseline - tau * s) ** 2 / (2 * tau)).sum()

  with jax.enable_x64(True):
    s = jnp.asarray(s)

    def loss(s):
      return opmd_loss(s, jnp.asarray(reward - baseline), tau=tau).sum()

    np.testing.assert_allclose(jax.grad(loss)(s), jax.grad(squared)(s), rtol=1e-12)
    constant = ((reward - baseline) ** 2).sum() / (2 * tau)
    np.testing.assert_allclose(loss(s) + constant, squared(s), rtol=1e-12)


def test_opmd_gradient_over_tokens_equals_differences():
  b, tau = packed(5, extreme=False), 0.2
  b.rewards = np.random.default_rng(6).normal(size=(3, SEGMENTS))

  def loss(d):
    difference = jnp.where(d.mask, d.logprobs - d.reference, 0.0)
    return opmd_loss(segment_sums(difference, d.ids, segments=SEGMENTS), d.rewards, tau=tau).sum()

  def expected(b):
    total = 0.0
    for chunk, segment in np.ndindex(b.rewards.shape):
      members = b.mask[chunk] & (b.ids[chunk] == segment + 1)
      s = (b.logprobs[chunk][members] - b.reference[chunk][members]).sum()
      total += -s * b.rewards[chunk, segment] + tau / 2 * s * s
    return total

  gradient = assert_gradient(loss, expected, b, 'logprobs')
  np.testing.assert_array_equal(gradient != 0, b.mask)


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_log_ratios_equal_the_loops(level, dtype, seed):
  b = packed(seed)
  found = evaluate(lambda d: log_ratio(level, d), b, dtype=dtype)
  np.testing.assert_allclose(found, expected_log_ratio(level, b, b.logprobs), atol=ACCURACY[dtype])
  assert (found[~b.mask] == 0).all() and found.max() == (20.0 if level == 'token' else 10.0)


@pytest.mark.parametrize('c', [3.0, None])
@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_surrogate_equals_the_loops(c, dtype, seed):
  b = packed(seed)
  b.ratio = oracles.token_log_ratio(b.logprobs, b.proximal, b.mask)
  found = evaluate(
    lambda d: clipped_surrogate(d.ratio, d.advantages, **CLIP, clip_ratio_c=c), b, dtype=dtype
  )
  wanted = oracles.clipped_surrogate(b.ratio, b.advantages, b.mask, **BOUNDS, c=c)
  np.testing.assert_allclose(
    found.loss[b.mask], wanted[0][b.mask], rtol=ACCURACY[dtype], atol=ACCURACY[dtype]
  )
  for flags, expected in zip(found[1:], wanted[1:]):
    np.testing.assert_array_equal(flags[b.mask], expected[b.mask])
  assert wanted[1].any() and (wanted[2].any() == (c is not None))


@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_cispo_equals_the_loops(dtype, seed):
  b = packed(seed)
  b.ratio = oracles.token_log_ratio(b.logprobs, b.proximal, b.mask)
  found = evaluate(lambda d: cispo(d.ratio, d.logprobs, d.advantages, **CLIP), b, dtype=dtype)
  loss, cut = oracles.cispo(b.ratio, b.logprobs, b.advantages, b.mask, **BOUNDS)
  np.testing.assert_allclose(
    found.loss[b.mask], loss[b.mask], rtol=ACCURACY[dtype], atol=ACCURACY[dtype]
  )
  np.testing.assert_array_equal(found.clipped[b.mask], cut[b.mask])
  assert cut.any() and not found.clipped_lower.any()


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('seed', [0, 1])
def test_surrogate_gradient_equals_differences(level, seed):
  # With junk at masked positions of the logprobs, of the proximal ones, and of the advantages too.
  b = packed(seed)
  b.advantages = np.where(b.mask, b.advantages, np.nan)

  def loss(d):
    return summed(clipped_surrogate(log_ratio(level, d), d.advantages, **DUAL).loss, d.mask)

  def expected(shifted):
    ratio = expected_log_ratio(level, shifted, b.logprobs)
    return oracles.clipped_surrogate(ratio, b.advantages, b.mask, **BOUNDS, c=3.0)[0].sum()

  gradient = assert_gradient(loss, expected, b, 'logprobs')
  assert (gradient[~b.mask] == 0).all() and np.abs(gradient).max() > 0.1
  assert (gradient[0, 12:17] == 0).all()  # zero advantages


@pytest.mark.parametrize('level', LEVELS)
def test_cispo_gradient_equals_differences(level):
  b = packed(3)
  held = expected_log_ratio(level, b, b.logprobs)

  def loss(d):
    return summed(cispo(log_ratio(level, d), d.logprobs, d.advantages, **CLIP).loss, d.mask)

  def expected(shifted):
    return oracles.cispo(held, shifted.logprobs, b.advantages, b.mask, **BOUNDS)[0].sum()

  gradient = assert_gradient(loss, expected, b, 'logprobs')
  # No token loses its gradient, not even those whose weight is cut.
  np.testing.assert_array_equal(gradient != 0, b.mask & (b.advantages != 0))


def test_sequence_ratio_has_the_gradient_of_the_sequence_objective():
  # Mean over tokens of exp(s_t) A is GSPO's exp(mean difference) A, in value and gradient, where A
  # is the sequence's.
  rng = np.random.default_rng(4)
  with jax.enable_x64(True):
    logprobs, proximal = jnp.asarray(rng.normal(size=(2, 1, 6)))
    mask, ids = jnp.ones((1, 6), bool), jnp.ones((1, 6), jnp.int32)

    def by_token(lp):
      return jnp.exp(sequence_log_ratio(lp, proximal, mask, ids, segments=1)).mean()

    def by_sequence(lp):
      return jnp.exp((lp - proximal).mean())

    found, wanted = (jax.value_and_grad(f)(logprobs) for f in (by_token, by_sequence))
  np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
  np.testing.assert_allclose(found[1], wanted[1], rtol=1e-12)


def test_gradient_on_policy_is_minus_advantage():
  mask = jnp.ones((1, 2), bool)

  def on_policy(lp):
    return token_log_ratio(lp, jax.lax.stop_gradient(lp), mask)

  def loss(lp):
    return clipped_surrogate(on_policy(lp), jnp.array([[1.5, -2.0]]), **DUAL).loss.sum()

  np.testing.assert_allclose(jax.grad(loss)(jnp.array([[-1.0, -3.0]])), [[-1.5, 2.0]], rtol=1e-6)


@pytest.mark.parametrize('log_ratio_value', [500.0, -500.0])
def test_huge_log_ratios_are_bounded(log_ratio_value):
  # exp(20) = 4.9e8 without the dual clip; with it a negative advantage costs at most c |A| = 6.
  ratio = token_log_ratio(one(log_ratio_value), one(0.0), jnp.ones((1, 1), bool))
  assert float(ratio[0, 0]) == np.sign(log_ratio_value) * 20.0
  for advantage in (2.0, -2.0):
    loss = clipped_surrogate(ratio, one(advantage), **DUAL).loss
    assert abs(float(loss[0, 0])) <= 6.0
