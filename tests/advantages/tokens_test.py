"""Rows with holes: against loops over all tokens, against the same rows with the holes cut out, and
by hand.
"""

import jax.numpy as jnp
import numpy as np
import oracles_advantages as oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages.tokens import kl_penalty, masked_gae, place_rewards, token_returns, whiten
from jaxrl_llm.objectives.divergence import kl_estimate

nan = float('nan')
HOLES = np.array([False, True, False, True, True, False])
NOTHING = np.zeros(4, bool)
JUNK = np.array([nan, float('inf'), -float('inf'), nan])

fractions = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))


def at(mask, values, elsewhere=nan):
  row = np.full(len(mask), elsewhere)
  row[mask] = values
  return row


def test_gae_by_hand_on_a_row_with_holes():
  # gamma = 1/2, lambda = 1/2, valid tokens: rewards 0, 0, 1 and values 1, 2, 4; backwards:
  #   third:  delta = 1 - 4 = -3;              A = -3;                  R = 1
  #   second: delta = 0 + 4/2 - 2 = 0;         A = 0 - 3/4 = -3/4;      R = 5/4
  #   first:  delta = 0 + 2/2 - 1 = 0;         A = 0 - 3/16 = -3/16;    R = 13/16
  rewards, values = at(HOLES, [0.0, 0.0, 1.0]), at(HOLES, [1.0, 2.0, 4.0])
  advantages, returns = masked_gae(rewards, values, HOLES, gamma=0.5, lam=0.5)
  np.testing.assert_array_equal(advantages, at(HOLES, [-3 / 16, -3 / 4, -3.0], elsewhere=0.0))
  np.testing.assert_array_equal(returns, at(HOLES, [13 / 16, 5 / 4, 1.0], elsewhere=0.0))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 30), st.integers(0, 2**32 - 1), fractions, fractions)
def test_gae_equals_the_loop_that_carries_through_holes(length, seed, gamma, lam):
  rewards, values, mask = oracles.row(np.random.default_rng(seed), length)
  got = masked_gae(rewards, values, mask, gamma=gamma, lam=lam)
  for array, wanted in zip(got, oracles.gae(rewards, values, mask, gamma, lam), strict=True):
    np.testing.assert_allclose(array, wanted, atol=1e-13)


def test_gae_of_a_cut_row_by_hand():
  # As above, with a value of 8 after the cut: the third delta is 1 + 8/2 - 4 = 1, so R = 5;
  #   second: A = 0 + 1/4 = 1/4, R = 9/4;  first: A = 0 + 1/16 = 1/16, R = 17/16.
  rewards, values = at(HOLES, [0.0, 0.0, 1.0]), at(HOLES, [1.0, 2.0, 4.0])
  advantages, returns = masked_gae(rewards, values, HOLES, gamma=0.5, lam=0.5, last_value=8.0)
  np.testing.assert_array_equal(advantages, at(HOLES, [1 / 16, 1 / 4, 1.0], elsewhere=0.0))
  np.testing.assert_array_equal(returns, at(HOLES, [17 / 16, 9 / 4, 5.0], elsewhere=0.0))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 30), st.integers(0, 2**32 - 1), fractions, fractions, st.floats(-5, 5))
def test_a_cut_is_a_token_more_that_earns_what_is_expected_of_it(length, seed, gamma, lam, last):
  rewards, values, mask = oracles.row(np.random.default_rng(seed), length)
  got = masked_gae(rewards, values, mask, gamma=gamma, lam=lam, last_value=last)
  longer = [np.append(rewards, last), np.append(values, last), np.append(mask, True)]
  for array, wanted in zip(got, masked_gae(*longer, gamma=gamma, lam=lam), strict=True):
    np.testing.assert_allclose(array, wanted[:-1], atol=1e-13)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_undiscounted_gae_is_reward_to_go_minus_value(length, seed):
  rewards, values, mask = oracles.row(np.random.default_rng(seed), length)
  advantages, returns = masked_gae(rewards, values, mask, gamma=1.0, lam=1.0)
  for t in np.flatnonzero(mask):
    to_go = rewards[t:][mask[t:]].sum()
    np.testing.assert_allclose([advantages[t], returns[t]], [to_go - values[t], to_go], atol=1e-13)


def test_gae_at_lambda_zero_is_the_one_step_error():
  # gamma = 1: 0 + 2 - 1, 0 + 4 - 2, 1 - 4.
  rewards, values = at(HOLES, [0.0, 0.0, 1.0]), at(HOLES, [1.0, 2.0, 4.0])
  advantages, _ = masked_gae(rewards, values, HOLES, gamma=1.0, lam=0.0)
  np.testing.assert_array_equal(advantages[HOLES], [1.0, 2.0, -3.0])


@settings(max_examples=100, deadline=None)
@given(
  st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=12),
  st.randoms(use_true_random=False),
)
def test_holes_and_padding_anywhere_change_nothing_at_valid_tokens(tokens, random):
  mask = [True] * len(tokens) + [False] * 10
  random.shuffle(mask)
  mask = np.array(mask)
  junk = np.array([random.choice([nan, float('inf'), 0.9, -7.0]) for _ in mask])
  rewards, values = (np.where(mask, at(mask, column), junk) for column in zip(*tokens, strict=True))
  whole = np.ones(len(tokens), bool)

  plain = masked_gae(rewards[mask], values[mask], whole, gamma=0.99, lam=0.95)
  holed = masked_gae(rewards, values, mask, gamma=0.99, lam=0.95)
  for compact, spread in zip(plain, holed, strict=True):
    np.testing.assert_array_equal(spread[mask], compact)
    assert not spread[~mask].any()

  compact, spread = (
    token_returns(rewards[mask], whole, gamma=0.99),
    token_returns(rewards, mask, gamma=0.99),
  )
  np.testing.assert_array_equal(spread[mask], compact)
  assert not spread[~mask].any()


def test_one_token_and_no_token():
  one = np.array([False, True])
  advantages, returns = masked_gae(
    np.array([nan, 3.0]), np.array([nan, 1.0]), one, gamma=0.9, lam=0.9
  )
  assert (advantages.tolist(), returns.tolist()) == ([0.0, 2.0], [0.0, 3.0])
  for array in masked_gae(JUNK, JUNK, NOTHING, gamma=0.9, lam=0.9):
    np.testing.assert_array_equal(array, np.zeros(4))
  np.testing.assert_array_equal(token_returns(JUNK, NOTHING, gamma=0.9), np.zeros(4))


def test_single_precision_rows_are_computed_in_double():
  # In float32 both 1 + 2^-30 and the difference to 1 would be lost.
  rewards = np.array([1.0, 2.0**-30], np.float32)
  advantages, _ = masked_gae(rewards, np.ones(2, np.float32), np.ones(2, bool), gamma=1.0, lam=1.0)
  assert advantages.dtype == np.float64 and advantages[0] == 2.0**-30
  returns = token_returns(rewards, np.ones(2, bool), gamma=1.0)
  assert returns.dtype == np.float64 and returns[0] == 1.0 + 2.0**-30


def test_returns_by_hand_on_a_row_with_holes():
  # gamma = 1/2, rewards 1, 0, 4 at valid tokens: 4; 0 + 4/2 = 2; 1 + 2/2 = 2. A reset at the hole
  # would give 1 first.
  returns = token_returns(at(HOLES, [1.0, 0.0, 4.0]), HOLES, gamma=0.5)
  np.testing.assert_array_equal(returns, at(HOLES, [2.0, 2.0, 4.0], elsewhere=0.0))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 30), st.integers(0, 2**32 - 1), fractions)
def test_returns_equal_the_sum(length, seed, gamma):
  rewards, _, mask = oracles.row(np.random.default_rng(seed), length)
  np.testing.assert_allclose(
    token_returns(rewards, mask, gamma=gamma), oracles.returns(rewards, mask, gamma), atol=1e-13
  )


def test_rewards_are_placed_at_the_ends_of_turns():
  # Turns end at 1 and 4; the last one has both its own reward and that of the row.
  assert place_rewards(HOLES, 1.0).tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
  assert place_rewards(HOLES, 1.0, [0.25]).tolist() == [0.0, 0.25, 0.0, 0.0, 1.0, 0.0]
  assert place_rewards(HOLES, 1.0, [0.25, 0.5]).tolist() == [0.0, 0.25, 0.0, 0.0, 1.5, 0.0]
  assert place_rewards(np.ones(3, bool), 2.0, (0.5,)).tolist() == [0.0, 0.0, 2.5]


@settings(max_examples=100, deadline=None)
@given(
  st.lists(st.booleans(), max_size=20), st.floats(-5, 5), st.lists(st.floats(-5, 5), max_size=6)
)
def test_placing_equals_the_loop(mask, reward, turn_rewards):
  mask = np.array(mask, bool)
  turns = sum(bool(mask[t]) and not mask[t + 1 : t + 2].any() for t in range(len(mask)))
  if len(turn_rewards) > turns > 0:
    with pytest.raises(
      ValueError, match=f'{len(turn_rewards)} turn rewards for a row of {turns} turns'
    ):
      place_rewards(mask, reward, turn_rewards)
  else:
    got = place_rewards(mask, reward, turn_rewards)
    np.testing.assert_array_equal(got, oracles.placed(mask, reward, turn_rewards))
    placed = reward + sum(turn_rewards) if turns else 0.0
    np.testing.assert_allclose(got.sum(), placed, atol=1e-12)


def test_a_row_out_of_the_loss_has_no_place_for_rewards():
  np.testing.assert_array_equal(place_rewards(NOTHING, 1.0), np.zeros(4))
  np.testing.assert_array_equal(place_rewards(NOTHING, 1.0, [0.5, 0.5]), np.zeros(4))


def test_impossible_rewards_are_refused():
  with pytest.raises(ValueError, match='3 turn rewards for a row of 2 turns'):
    place_rewards(HOLES, 1.0, [1.0, 1.0, 1.0])
  for reward, turns in ((nan, []), (1.0, [nan])):
    with pytest.raises(ValueError, match='not finite'):
      place_rewards(HOLES, reward, turns)


def test_whitening_by_hand():
  # 1, 3 | 2, 6 over the batch: mean 3, deviations -2, 0, -1, 3, variance (4 + 0 + 1 + 9)/3 = 14/3.
  rows, masks = (
    [np.array([nan, 1.0, 3.0]), np.array([2.0, 6.0])],
    [np.array([False, True, True]), np.ones(2, bool)],
  )
  std = (14 / 3) ** 0.5
  first, second = whiten(rows, masks, eps=0.0)
  np.testing.assert_allclose(first, [0.0, -2 / std, 0.0], atol=1e-15)
  np.testing.assert_allclose(second, [-1 / std, 3 / std], rtol=1e-14)
  first, second = whiten(rows, masks, eps=0.0, shift_mean=False)
  np.testing.assert_allclose(first, [0.0, 3 - 2 / std, 3.0], rtol=1e-14)
  np.testing.assert_allclose(second, [3 - 1 / std, 3 + 3 / std], rtol=1e-14)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.sampled_from([1e-8, 0.5]), st.booleans())
def test_whitening_equals_the_loop(count, seed, eps, shift_mean):
  rng = np.random.default_rng(seed)
  drawn = [oracles.row(rng, length) for length in rng.integers(4, 12, count)] + [
    oracles.row(rng, 12, share=1.0)
  ]
  rows, masks = [row for row, _, _ in drawn], [mask for _, _, mask in drawn]
  got = whiten(rows, masks, eps=eps, shift_mean=shift_mean)
  for array, wanted in zip(got, oracles.whitened(rows, masks, eps, shift_mean), strict=True):
    np.testing.assert_allclose(array, wanted, atol=1e-12)


@pytest.mark.parametrize('shift_mean', [True, False])
def test_whitening_without_spread_gives_exactly_nothing(shift_mean):
  whole = np.ones(5, bool)
  cases = {
    'zero variance': ([np.full(5, 2.3), np.full(5, 2.3)], [whole, whole]),
    'zero variance, inexact mean': ([np.full(3, 0.1)], [np.ones(3, bool)]),
    'zero variance beside junk': (
      [np.array([2.3, nan, 2.3, 5.0])],
      [np.array([True, False, True, False])],
    ),
    'one token': ([np.array([nan, 7.0]), JUNK], [np.array([False, True]), NOTHING]),
    'all masked': ([JUNK, JUNK], [NOTHING, NOTHING]),
    'no rows': ([], []),
  }
  for name, (rows, masks) in cases.items():
    got = whiten(rows, masks, shift_mean=shift_mean)
    assert [row.tolist() for row in got] == [[0.0] * len(row) for row in rows], name


def test_whitening_keeps_its_digits_at_large_offsets():
  # 1000 ± 0.1: sample variance 2 * 0.01 / 1, so ±0.1 / sqrt(0.02) = ±sqrt(1/2).
  (got,) = whiten([np.array([1000.1, 999.9])], [np.ones(2, bool)], eps=0.0)
  np.testing.assert_allclose(got, [0.5**0.5, -(0.5**0.5)], rtol=1e-9)


def test_kl_penalty_by_hand():
  # d = log 2 and -log 2. k2 = log²2 / 2 in both; k3 = 1/2 + log 2 - 1 and 2 - log 2 - 1.
  mask = np.array([False, True, True])
  logprobs, reference = (
    np.array([nan, -1.0, -2.0]),
    np.array([nan, -1.0 - np.log(2), -2.0 + np.log(2)]),
  )
  wanted = {
    'k1': [np.log(2), -np.log(2)],
    'k2': [np.log(2) ** 2 / 2] * 2,
    'k3': [np.log(2) - 0.5, 1 - np.log(2)],
  }
  for kind, values in wanted.items():
    got = kl_penalty(logprobs, reference, mask, kind=kind, coef=0.1)
    np.testing.assert_allclose(got, [0.0, *(-0.1 * np.array(values))], rtol=1e-13)


@pytest.mark.parametrize('kind', ['k1', 'k2', 'k3'])
def test_kl_penalty_is_the_estimate_of_the_loss(kind):
  rng = np.random.default_rng(3)
  logprobs, reference, mask = oracles.row(rng, 40)
  logprobs *= 8.0
  # Some tokens reach the limits of k3.
  assert np.nanmin(logprobs - reference) < -3
  got = kl_penalty(logprobs, reference, mask, kind=kind, coef=0.5)
  as_loss = kl_estimate(jnp.array(logprobs[None]), jnp.array(reference[None]), kind=kind)
  np.testing.assert_allclose(got[mask], -0.5 * np.asarray(as_loss)[0, mask], rtol=1e-4, atol=1e-5)
  assert not got[~mask].any()


def test_k3_penalty_is_limited_on_both_sides():
  mask = np.ones(2, bool)
  logprobs, reference = np.array([-50.0, 0.0]), np.array([0.0, -50.0])
  # -d = 50 is cut to 20, and exp(20) - 21 to 10. -d = -50 is cut to -20: exp(-20) + 20 - 1 is cut
  # to 10.
  np.testing.assert_array_equal(
    kl_penalty(logprobs, reference, mask, kind='k3', coef=1.0), [-10.0, -10.0]
  )
  wide = kl_penalty(logprobs, reference, mask, kind='k3', coef=1.0, limit=1e30)
  np.testing.assert_allclose(wide, [-(np.exp(20) - 21), -(np.exp(-20) + 19)], rtol=1e-14)


def test_kl_penalty_of_a_masked_row_is_nothing():
  for kind in ('k1', 'k2', 'k3'):
    np.testing.assert_array_equal(kl_penalty(JUNK, JUNK, NOTHING, kind=kind, coef=1.0), np.zeros(4))
