"""KL estimators: values by hand and by loops; gradients by differences and by sums over all
outcomes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import ACCURACY, assert_gradient, evaluate, packed

from jaxrl_llm.objectives.divergence import has_expected_gradient, kl_estimate, unbiased_kl

KINDS = ['k1', 'k2', 'k3']
LN2 = float(np.log(2.0))
LOGITS = np.array([0.2, -0.4, 0.7])
REFERENCE = np.log([0.2, 0.5, 0.3])
PROXIMAL = np.log([0.4, 0.35, 0.25])


def test_hand_worked_kl():
  # d = log p - log q = ln 2:  k1 = ln 2;  k2 = ln²2 / 2;  k3 = 1/2 + ln 2 - 1.
  def kl(kind):
    return float(kl_estimate(jnp.full((1, 1), LN2), jnp.zeros((1, 1)), kind=kind)[0, 0])

  assert kl('k1') == pytest.approx(LN2, rel=1e-6)
  assert kl('k2') == pytest.approx(LN2**2 / 2, rel=1e-6)
  assert kl('k3') == pytest.approx(LN2 - 0.5, rel=1e-5)


def test_hand_worked_unbiased_kl():
  # d = ln 2 and a ratio of 3: values 3 (ln 2 - 1/2) and 3 ln²2 / 2; both gradients are ratio * d =
  # 3 ln 2.
  proximal, mask = jnp.full((1, 1), LN2 - np.log(3.0)), jnp.ones((1, 1), bool)
  for kind, value in (('k3', 3 * (LN2 - 0.5)), ('k2', 1.5 * LN2**2)):

    def loss(lp, kind=kind):
      return unbiased_kl(lp, jnp.zeros((1, 1)), proximal, mask, kind=kind).sum()

    assert float(loss(jnp.full((1, 1), LN2))) == pytest.approx(value, rel=1e-5)
    assert float(jax.grad(loss)(jnp.full((1, 1), LN2))[0, 0]) == pytest.approx(3 * LN2, rel=1e-5)


@pytest.mark.parametrize('kind', ['k1', 'k3'])
def test_estimators_are_unbiased_under_the_policy(kind):
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
  values = kl_estimate(
    jnp.log(p)[None].astype(jnp.float32), jnp.log(q)[None].astype(jnp.float32), kind=kind
  )
  assert float((p * np.asarray(values[0])).sum()) == pytest.approx(
    float((p * np.log(p / q)).sum()), rel=1e-5
  )


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1])
def test_values_equal_the_loops(kind, dtype, seed):
  b = packed(seed)
  b.reference[2, [0, 8]] = b.logprobs[2, [0, 8]] + [3.0, 40.0]  # both over the limits of k3

  def close(found, wanted):
    return np.testing.assert_allclose(found, wanted, rtol=ACCURACY[dtype], atol=ACCURACY[dtype])

  found = evaluate(
    lambda d: kl_estimate(d.logprobs, d.reference, kind=kind, mask=d.mask), b, dtype=dtype
  )
  wanted = oracles.kl_estimate(b.logprobs, b.reference, b.mask, kind=kind)
  close(found, wanted)
  if kind != 'k1':
    found = evaluate(
      lambda d: unbiased_kl(d.logprobs, d.reference, d.proximal, d.mask, kind=kind), b, dtype=dtype
    )
    ratio = np.minimum(np.exp(oracles.token_log_ratio(b.logprobs, b.proximal, b.mask)), 10.0)
    close(found, ratio * wanted)


@pytest.mark.parametrize('kind', KINDS)
def test_gradient_of_the_estimate_equals_differences(kind):
  b = packed(2, extreme=False)

  def loss(d):
    return kl_estimate(d.logprobs, d.reference, kind=kind, mask=d.mask).sum()

  def expected(b):
    return oracles.kl_estimate(b.logprobs, b.reference, b.mask, kind=kind).sum()

  gradient = assert_gradient(loss, expected, b, 'logprobs')
  np.testing.assert_array_equal(gradient != 0, b.mask)


@pytest.mark.parametrize('kind', ['k2', 'k3'])
def test_unbiased_gradient_equals_differences(kind):
  b = packed(2, extreme=False)

  def expected(shifted):
    at = b.logprobs if kind == 'k2' else shifted.logprobs
    ratio = np.exp(oracles.token_log_ratio(at, b.proximal, b.mask))
    return (ratio * oracles.kl_estimate(shifted.logprobs, b.reference, b.mask, kind=kind)).sum()

  def loss(d):
    return unbiased_kl(d.logprobs, d.reference, d.proximal, d.mask, kind=kind).sum()

  gradient = assert_gradient(loss, expected, b, 'logprobs')
  np.testing.assert_array_equal(gradient != 0, b.mask)


def expected_gradient(per_token, weights=None, logits=LOGITS):
  """Gradient over the policy's logits of the mean of a per-token loss over all outcomes.

  Args:
    per_token: of logprobs [1, outcomes].
    weights: the outcomes' probabilities; None = the policy's own, held constant: on-policy samples.
  """

  def loss(logits):
    logp = jax.nn.log_softmax(logits)
    p = jax.lax.stop_gradient(jnp.exp(logp)) if weights is None else weights
    return (p * per_token(logp[None])[0]).sum()

  with jax.enable_x64(True):
    return np.asarray(jax.grad(loss)(jnp.asarray(logits)))


def reverse_kl_gradient(logits=LOGITS, reference=REFERENCE):
  # d/dz_k sum_a p_a (log p_a - q_a) = p_k ((log p_k - q_k) - KL).
  p = np.exp(logits) / np.exp(logits).sum()
  d = np.log(p) - reference
  return p * (d - (p * d).sum())


def test_expected_gradients_of_the_estimators_on_policy():
  def estimate(kind):
    return expected_gradient(lambda lp: kl_estimate(lp, jnp.asarray(REFERENCE)[None], kind=kind))

  np.testing.assert_allclose(estimate('k1'), 0.0, atol=1e-12)
  np.testing.assert_allclose(estimate('k2'), reverse_kl_gradient(), atol=1e-12)
  assert np.abs(estimate('k3') - reverse_kl_gradient()).max() > 1e-2


@pytest.mark.parametrize('kind', ['k2', 'k3'])
def test_unbiased_kl_has_the_reverse_gradient_off_policy(kind):
  reference, proximal = jnp.asarray(REFERENCE)[None], jnp.asarray(PROXIMAL)[None]
  found = expected_gradient(
    lambda lp: unbiased_kl(lp, reference, proximal, jnp.ones((1, 3), bool), kind=kind),
    np.exp(PROXIMAL),
  )
  np.testing.assert_allclose(found, reverse_kl_gradient(), atol=1e-12)
  plain = expected_gradient(lambda lp: kl_estimate(lp, reference, kind=kind), np.exp(PROXIMAL))
  assert np.abs(plain - reverse_kl_gradient()).max() > 1e-2


@pytest.mark.parametrize('kind', ['k2', 'k3'])
@pytest.mark.parametrize('p', [0.2, 0.05, 0.01, 1e-4, 1e-8])
@pytest.mark.parametrize('q', [0.2, 0.9, 1e-8])
def test_unbiased_gradient_is_exact_wherever_the_value_is_limited(kind, p, q):
  """k3 reaches its limit of 10 where the policy is 2.61 nats below the reference."""
  logits, reference = np.log([p, 1 - p]), np.log([q, 1 - q])

  def estimate(lp):
    return unbiased_kl(
      lp, jnp.asarray(reference)[None], jax.lax.stop_gradient(lp), jnp.ones((1, 2), bool), kind=kind
    )

  found = expected_gradient(estimate, logits=logits)
  np.testing.assert_allclose(found, reverse_kl_gradient(logits, reference), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize('kind', ['k2', 'k3'])
def test_unbiased_gradient_pulls_to_the_reference_from_everywhere(kind):
  difference = jnp.concatenate([jnp.linspace(-40.0, 40.0, 161), jnp.array([-2.61, -2.62])])[None]
  mask = jnp.ones(difference.shape, bool)
  for ahead, ratio in (
    (0.0, 1.0),
    (2.0, np.exp(2.0)),
    (2.4, 10.0),
    (15.0, 10.0),
    (40.0, 10.0),
    (-30.0, np.exp(-20.0)),
  ):

    def loss(lp, ahead=ahead):
      return unbiased_kl(lp, jnp.zeros_like(lp), difference - ahead, mask, kind=kind).sum()

    np.testing.assert_allclose(
      jax.grad(loss)(difference), ratio * np.clip(difference, -20, 20), rtol=1e-5
    )


def test_what_is_masked_has_no_value_and_no_gradient_whatever_it_holds():
  logprobs, mask = jnp.array([[-1.0, jnp.nan, -jnp.inf]]), jnp.array([[True, False, False]])
  nothing = jnp.full((1, 3), jnp.nan).at[0, 0].set(-2.0)
  for kind in ('k2', 'k3'):

    def loss(lp, kind=kind):
      return unbiased_kl(lp, nothing, nothing, mask, kind=kind)

    assert float(loss(logprobs)[0, 0]) > 0 and (np.asarray(loss(logprobs))[0, 1:] == 0).all()
    gradient = np.asarray(jax.grad(lambda lp, loss=loss: loss(lp).sum())(logprobs))
    assert gradient[0, 0] == pytest.approx(np.e, rel=1e-6) and (gradient[0, 1:] == 0).all()


@pytest.mark.parametrize('kind', KINDS)
def test_which_configurations_have_an_expected_gradient(kind):
  reference = jnp.asarray(REFERENCE)[None]

  def estimate(lp):
    return kl_estimate(lp, reference, kind=kind)

  in_loss = expected_gradient(estimate)
  # -advantage * logprob
  in_reward = expected_gradient(lambda lp: jax.lax.stop_gradient(estimate(lp)) * lp)
  for unbiased in (False, True):
    assert has_expected_gradient(kind, place='loss', unbiased=unbiased) == (
      np.abs(in_loss).max() > 1e-6
    )
    assert has_expected_gradient(kind, place='reward', unbiased=unbiased) == (
      np.abs(in_reward).max() > 1e-6
    )


def test_unbiased_k1_is_refused():
  one = jnp.zeros((1, 1))
  with pytest.raises(ValueError, match='k2 or k3'):
    unbiased_kl(one, one, one, jnp.ones((1, 1), bool), kind='k1')
