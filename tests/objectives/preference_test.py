"""Preference losses: pairs spread over chunks, formulas by hand, gradients by differences."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import ACCURACY, assert_gradient, evaluate

from jaxrl_llm.objectives.preference import (
  bradley_terry_loss,
  centering_penalty,
  dpo_loss,
  pair_sums,
)

LOSSES = [
  {'beta': 0.1, 'label_smoothing': 0.0, 'kind': 'sigmoid'},
  {'beta': 0.5, 'label_smoothing': 0.2, 'kind': 'sigmoid'},
  {'beta': 0.1, 'label_smoothing': 0.0, 'kind': 'ipo'},
]


def pairs(seed):
  """Pairs 1 to 5 spread over 3 x 5 segments, pair 6 with its rejected member missing, junk where
  there is no pair.
  """
  rng = np.random.default_rng(seed)
  pair = np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0])
  label = np.array([1] * 5 + [-1] * 5 + [1] + [0] * 4)
  order = rng.permutation(15)
  pair, label = (x[order].reshape(3, 5) for x in (pair, label))
  values = np.where(pair > 0, rng.normal(size=(3, 5)) * 3, np.resize([np.nan, np.inf], (3, 5)))
  return SimpleNamespace(values=values, pair=pair.astype(np.int32), label=label.astype(np.int32))


def test_hand_worked_pair_sums():
  # Pair 2 lies in two chunks: 5 - (-1) = 6. Pair 1 has no chosen member. The last segment is no
  # pair's.
  values = jnp.array([[4.0, -1.0], [5.0, jnp.nan]])
  found = pair_sums(values, jnp.array([[1, 2], [2, 0]]), jnp.array([[-1.0, -1.0], [1.0, 0.0]]))
  np.testing.assert_array_equal(found.difference, [0.0, 6.0, 0.0, 0.0])
  np.testing.assert_array_equal(found.present, [False, True, False, False])


def test_pairs_of_more_than_two_members_are_not_present():
  found = pair_sums(jnp.ones((1, 3)), jnp.array([[1, 1, 1]]), jnp.array([[1, 1, -1]]))
  assert not found.present.any() and not found.difference.any()


@pytest.mark.parametrize('dtype', ACCURACY)
@pytest.mark.parametrize('seed', [0, 1])
def test_pair_sums_equal_the_loops(dtype, seed):
  b = pairs(seed)
  found = evaluate(lambda d: pair_sums(d.values, d.pair, d.label), b, dtype=dtype)
  wanted = oracles.pair_differences(b.values, b.pair, b.label)
  assert wanted.keys() == {1, 2, 3, 4, 5}
  expected = [wanted.get(p, 0.0) for p in range(1, 16)]
  np.testing.assert_allclose(found.difference, expected, atol=10 * ACCURACY[dtype])
  np.testing.assert_array_equal(found.present, [p in wanted for p in range(1, 16)])


def test_sum_of_a_pair_is_the_difference_of_labelled_values():
  b = pairs(2)
  found = evaluate(lambda d: pair_sums(d.values * d.label, d.pair, d.label), b, dtype='float64')
  wanted = [b.values[b.pair == p].sum() for p in range(1, 6)]
  np.testing.assert_allclose(found.difference, [*wanted, *[0.0] * 10], rtol=1e-12)


@pytest.mark.parametrize('options', LOSSES)
def test_gradient_over_sequences_equals_differences(options):
  b = pairs(3)
  b.margin = np.random.default_rng(4).normal(size=15)

  def loss(d):
    found = pair_sums(d.values, d.pair, d.label)
    return jnp.where(found.present, dpo_loss(found.difference, d.margin, **options), 0.0).sum()

  def expected(b):
    wanted = oracles.pair_differences(b.values, b.pair, b.label)
    return oracles.dpo_loss([d - b.margin[p - 1] for p, d in wanted.items()], **options).sum()

  gradient = assert_gradient(loss, expected, b, 'values')
  np.testing.assert_array_equal(gradient != 0, (b.pair > 0) & (b.pair < 6))


def test_hand_worked_dpo():
  # h = 3 - 1 = 2. sigmoid, β 0.5: -log σ(1) = 0.3132617; with ε 0.1 also 0.1 * 1, as -log σ(-1) = 1
  # + 0.3132617. ipo, β 0.25: (2 - 1 / 0.5)² = 0; β 0.1: (2 - 5)² = 9.
  def call(**options):
    return float(dpo_loss(jnp.array([3.0]), jnp.array([1.0]), **options)[0])

  assert call(beta=0.5) == pytest.approx(0.3132617, rel=1e-6)
  assert call(beta=0.5, label_smoothing=0.1) == pytest.approx(0.3132617 + 0.1, rel=1e-6)
  assert call(beta=0.25, kind='ipo') == pytest.approx(0.0, abs=1e-9)
  assert call(beta=0.1, kind='ipo') == pytest.approx(9.0, rel=1e-6)


def test_hand_worked_reward_model():
  # -log σ(0) = ln 2 where the margin is just what is wanted; -log σ(3 - 1) = 0.1269280; (0.5 +
  # 1.5)² = 4.
  np.testing.assert_allclose(
    bradley_terry_loss(jnp.array([1.0]), target_margin=1.0), np.log(2.0), rtol=1e-6
  )
  margins = jnp.array([3.0, 3.0])
  found = bradley_terry_loss(margins, target_margin=jnp.array([1.0, 3.0]))
  np.testing.assert_allclose(found, [0.1269280, np.log(2.0)], rtol=1e-6)
  assert float(centering_penalty(jnp.array([2.0]))[0]) == 4.0


@pytest.mark.parametrize('options', LOSSES)
@pytest.mark.parametrize('dtype', ACCURACY)
def test_dpo_equals_the_loops(options, dtype):
  policy, reference = np.random.default_rng(5).normal(size=(2, 12)) * 8
  b = SimpleNamespace(policy=policy, reference=reference)
  found = evaluate(lambda d: dpo_loss(d.policy, d.reference, **options), b, dtype=dtype)
  wanted = oracles.dpo_loss(policy - reference, **options)
  np.testing.assert_allclose(found, wanted, rtol=5 * ACCURACY[dtype], atol=ACCURACY[dtype])


@pytest.mark.parametrize('dtype', ACCURACY)
def test_reward_model_losses_equal_the_loops(dtype):
  margin = np.random.default_rng(6).normal(size=12) * 8
  b = SimpleNamespace(margin=margin)
  found = evaluate(lambda d: bradley_terry_loss(d.margin, target_margin=0.5), b, dtype=dtype)
  wanted = [-oracles.log_sigmoid(x - 0.5) for x in margin]
  np.testing.assert_allclose(found, wanted, rtol=5 * ACCURACY[dtype], atol=ACCURACY[dtype])


def test_reward_model_gradients_equal_differences():
  b = SimpleNamespace(margin=np.random.default_rng(7).normal(size=12) * 4)

  def expected(b):
    return -sum(oracles.log_sigmoid(m - 0.5) for m in b.margin)

  assert_gradient(
    lambda d: bradley_terry_loss(d.margin, target_margin=0.5).sum(), expected, b, 'margin'
  )
  assert_gradient(
    lambda d: centering_penalty(d.margin).sum(), lambda b: sum(m * m for m in b.margin), b, 'margin'
  )


def test_hopeless_and_certain_pairs_stay_finite():
  margins = jnp.array([1e4, -1e4])
  for options in (LOSSES[0], LOSSES[1]):
    value, gradient = jax.value_and_grad(lambda x, o=options: dpo_loss(x, jnp.zeros(2), **o).sum())(
      margins
    )
    assert np.isfinite(value) and np.isfinite(gradient).all()
  # β |h| = 1000 nats for the wrong order, nothing for the right one.
  np.testing.assert_allclose(dpo_loss(margins, jnp.zeros(2), beta=0.1), [0.0, 1000.0])


def test_smoothing_has_no_meaning_for_ipo():
  with pytest.raises(ValueError, match='label_smoothing'):
    dpo_loss(jnp.zeros(1), jnp.zeros(1), beta=0.1, label_smoothing=0.1, kind='ipo')
