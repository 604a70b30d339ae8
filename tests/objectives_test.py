import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives.divergence import kl_estimate
from jaxrl_llm.objectives.policy import clipped_surrogate
from jaxrl_llm.objectives.supervised import negative_log_likelihood

LN2 = float(np.log(2.0))


def surrogate(log_ratio, advantage, **options):
  options = {'clip_ratio_low': 0.2, 'clip_ratio_high': 0.3, 'clip_ratio_c': 3.0, **options}
  one = lambda x: jnp.full((1, 1), x, jnp.float32)
  return clipped_surrogate(one(log_ratio), one(0.0), one(advantage), **options)


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
  found = surrogate(np.log(ratio), advantage)
  np.testing.assert_allclose(found.loss, [[loss]], rtol=1e-6)
  assert (bool(found.clipped[0, 0]), bool(found.clipped_lower[0, 0])) == (clipped, lower)


def test_dual_clip_can_be_off():
  np.testing.assert_allclose(surrogate(np.log(4.0), -1.0, clip_ratio_c=None).loss, [[4.0]], rtol=1e-6)


def test_gradient_on_policy_is_minus_advantage():
  loss = lambda lp: clipped_surrogate(
    lp, jax.lax.stop_gradient(lp), jnp.array([[1.5, -2.0]]), clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0
  ).loss.sum()
  np.testing.assert_allclose(jax.grad(loss)(jnp.array([[-1.0, -3.0]])), [[-1.5, 2.0]], rtol=1e-6)


def test_huge_log_ratios_stay_finite():
  found = surrogate(500.0, 1.0)
  assert np.isfinite(found.loss).all()


def test_hand_worked_kl():
  # d = log p - log q = ln 2:  k1 = ln 2;  k2 = ln²2 / 2;  k3 = 1/2 + ln 2 - 1.
  kl = lambda kind: float(kl_estimate(jnp.full((1, 1), LN2), jnp.zeros((1, 1)), kind=kind)[0, 0])
  assert kl('k1') == pytest.approx(LN2, rel=1e-6)
  assert kl('k2') == pytest.approx(LN2**2 / 2, rel=1e-6)
  assert kl('k3') == pytest.approx(LN2 - 0.5, rel=1e-5)


@pytest.mark.parametrize('kind', ['k1', 'k3'])
def test_estimators_are_unbiased_under_the_policy(kind):
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
  values = kl_estimate(jnp.log(p)[None].astype(jnp.float32), jnp.log(q)[None].astype(jnp.float32), kind=kind)
  assert float((p * np.asarray(values[0])).sum()) == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-5)


def expected_gradient(per_token):
  """Gradient of sum_a sg(p_a) * loss(log p_a) over the logits of p: what on-policy samples give on average."""
  logits, q = jnp.array([0.2, -0.4, 0.7]), jnp.log(jnp.array([0.2, 0.5, 0.3]))

  def loss(logits):
    logp = jax.nn.log_softmax(logits)
    return (jax.lax.stop_gradient(jnp.exp(logp)) * per_token(logp[None], q[None])[0]).sum()

  truth = lambda logits: (jnp.exp(jax.nn.log_softmax(logits)) * (jax.nn.log_softmax(logits) - q)).sum()
  return np.asarray(jax.grad(loss)(logits)), np.asarray(jax.grad(truth)(logits))


def test_expected_gradients_of_the_estimators():
  k1, truth = expected_gradient(lambda lp, q: kl_estimate(lp, q, kind='k1'))
  k2, _ = expected_gradient(lambda lp, q: kl_estimate(lp, q, kind='k2'))
  k3, _ = expected_gradient(lambda lp, q: kl_estimate(lp, q, kind='k3'))
  ratio = lambda lp: jnp.exp(lp - jax.lax.stop_gradient(lp))
  unbiased, _ = expected_gradient(lambda lp, q: ratio(lp) * kl_estimate(lp, q, kind='k3'))
  np.testing.assert_allclose(k1, 0.0, atol=1e-6)
  np.testing.assert_allclose(k2, truth, atol=1e-6)
  assert np.abs(k3 - truth).max() > 1e-2
  np.testing.assert_allclose(unbiased, truth, atol=1e-6)


def test_negative_log_likelihood_is_its_name():
  np.testing.assert_array_equal(negative_log_likelihood(jnp.array([[-0.5, -2.0]])), [[0.5, 2.0]])
