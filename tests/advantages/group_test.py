import functools
import math

import numpy as np
import oracles_advantages as oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages.group import (
  group_advantages,
  leave_one_out,
  log_partition_baseline,
)
from jaxrl_llm.core.errors import UserError


def test_hand_worked_group():
  # rewards 1, 0, 0, 0: mean 1/4, deviations 3/4 and -1/4; sample variance (9 + 1 + 1 + 1)/16 / 3 =
  # 1/4, std 1/2.
  result = group_advantages([1.0, 0.0, 0.0, 0.0], ['a'] * 4, eps=0.0)
  np.testing.assert_allclose(result.advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-15)


def test_population_estimator_divides_by_n():
  # Rewards 1, 0: deviations ±1/2; population std 1/2 gives ±1, sample std sqrt(1/2) gives
  # ±sqrt(1/2).
  np.testing.assert_allclose(
    group_advantages([1.0, 0.0], ['a', 'a'], ddof=0, eps=0.0).advantages, [1.0, -1.0]
  )
  np.testing.assert_allclose(
    group_advantages([1.0, 0.0], ['a', 'a'], ddof=1, eps=0.0).advantages, [0.5**0.5, -(0.5**0.5)]
  )


def test_without_std_only_centres():
  result = group_advantages([3.0, 1.0, 5.0, 5.0], ['a', 'a', 'b', 'b'], normalize_by_std=False)
  np.testing.assert_array_equal(result.advantages, [1.0, -1.0, 0.0, 0.0])


def test_identical_rewards_give_exactly_nothing():
  # In float32 the mean of ten 2.3 is not 2.3; divided by eps that would be an advantage of 0.19.
  result = group_advantages([2.3] * 10, ['a'] * 10)
  np.testing.assert_array_equal(result.advantages, np.zeros(10))
  assert (result.groups, result.zero_std_groups) == (1, 1)


def test_group_of_one_is_zero_and_counted():
  result = group_advantages([1.0, 1.0, 0.0], ['alone', 'b', 'b'])
  assert result.advantages[0] == 0.0
  assert (result.groups, result.zero_std_groups) == (2, 1)


def test_unscorable_leaves_the_baseline():
  # With None as 0 the mean would be 2/3; it is 1/2 over the two that are scored, so the deviations
  # are ±1/2.
  result = group_advantages([1.0, 0.0, None], ['a'] * 3, normalize_by_std=False)
  np.testing.assert_array_equal(result.advantages, [0.5, -0.5, 0.0])
  np.testing.assert_array_equal(result.scored, [True, True, False])


def test_large_offsets_do_not_cancel():
  # 1000 ± 0.1: the advantages are ±1/sqrt(2) whatever the offset.
  result = group_advantages([1000.1, 999.9], ['a', 'a'], eps=0.0)
  np.testing.assert_allclose(result.advantages, [0.5**0.5, -(0.5**0.5)], rtol=1e-9)


def test_nan_reward_is_refused():
  with pytest.raises(ValueError, match='not finite'):
    group_advantages([float('nan'), 1.0], ['a', 'a'])


@settings(max_examples=50, deadline=None)
@given(
  st.lists(st.tuples(st.sampled_from('abc'), st.floats(-10, 10)), min_size=1, max_size=20),
  st.randoms(),
)
def test_sums_to_zero_and_follows_permutations(pairs, random):
  groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
  advantages = group_advantages(rewards, groups).advantages
  for group in set(groups):
    assert abs(sum(a for a, g in zip(advantages, groups) if g == group)) < 1e-6
  order = list(range(len(pairs)))
  random.shuffle(order)
  shuffled = group_advantages([rewards[i] for i in order], [groups[i] for i in order]).advantages
  np.testing.assert_allclose(shuffled, advantages[order], atol=1e-9)


RULES = {
  'group_advantages': group_advantages,
  'leave_one_out': leave_one_out,
  'log_partition_baseline': functools.partial(log_partition_baseline, tau=0.5),
}


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_every_rule_gives_nothing_where_nothing_is_to_be_learnt(rule):
  # Equal rewards (the mean of three 0.1 is not 0.1 in float64 either), a group of one, a group left
  # with one scored sample, an unscorable group.
  rewards = [2.3] * 10 + [0.1] * 3 + [1.0] + [0.7, None] + [None, None]
  groups = ['equal'] * 10 + ['inexact'] * 3 + ['alone'] + ['rest'] * 2 + ['lost'] * 2
  assert np.std([0.1] * 3) > 0
  result = rule(rewards, groups)
  np.testing.assert_array_equal(result.advantages, np.zeros(18))
  assert (result.groups, result.zero_std_groups) == (4, 4)
  assert result.scored.tolist() == [True] * 15 + [False] * 3


@pytest.mark.parametrize('rule', RULES.values(), ids=RULES)
def test_every_rule_refuses_what_is_not_finite_and_takes_an_empty_batch(rule):
  with pytest.raises(ValueError, match='group b is not finite'):
    rule([1.0, float('inf')], ['a', 'b'])
  result = rule([], [])
  assert (len(result.advantages), len(result.scored), result.groups, result.zero_std_groups) == (
    0,
    0,
    0,
    0,
  )


def test_leave_one_out_by_hand():
  # Others' means: (0 + 2)/2 = 1, (3 + 2)/2 = 5/2, (3 + 0)/2 = 3/2; so 3 - 1, 0 - 5/2, 2 - 3/2.
  np.testing.assert_allclose(
    leave_one_out([3.0, 0.0, 2.0], ['a'] * 3).advantages, [2.0, -2.5, 0.5], rtol=1e-15
  )


def test_leave_one_out_keeps_its_digits_at_large_offsets():
  # Each other's reward is the baseline: 1000.1 - 999.9 and the reverse.
  result = leave_one_out([1000.1, 999.9], ['a', 'a'])
  np.testing.assert_allclose(result.advantages, [0.2, -0.2], rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(oracles.outcomes())
def test_leave_one_out_equals_the_loop(pairs):
  groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
  wanted = oracles.leave_one_out(rewards, groups)
  np.testing.assert_allclose(leave_one_out(rewards, groups).advantages, wanted, atol=1e-13)


def test_log_partition_by_hand():
  # tau = 1/2: exp(r/tau) of log(3)/2 and 0 are 3 and 1, their mean 2, so the baseline is log(2)/2.
  rewards = [0.5 * math.log(3), 0.0]
  wanted = [0.5 * math.log(3 / 2), -0.5 * math.log(2)]
  result = log_partition_baseline(rewards, ['a', 'a'], tau=0.5)
  np.testing.assert_allclose(result.advantages, wanted, rtol=1e-14)


@settings(max_examples=100, deadline=None)
@given(oracles.outcomes(), st.floats(0.1, 10))
def test_log_partition_equals_the_loop(pairs, tau):
  groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
  wanted = oracles.log_partition(rewards, groups, tau)
  np.testing.assert_allclose(
    log_partition_baseline(rewards, groups, tau=tau).advantages, wanted, atol=1e-12
  )


def test_log_partition_goes_from_the_maximum_to_the_mean():
  rewards, groups = [1.0, 0.0, 0.0, 3.0], ['a'] * 4
  small = log_partition_baseline(rewards, groups, tau=1e-6).advantages
  np.testing.assert_allclose(small, [-2.0, -3.0, -3.0, 0.0], atol=1e-5)
  # The baseline is the mean plus variance / (2 tau): 1.5 / 2e9 above it here.
  large = log_partition_baseline(rewards, groups, tau=1e9).advantages
  np.testing.assert_allclose(large, [0.0, -1.0, -1.0, 2.0], atol=2e-9)


def test_log_partition_stays_finite_at_large_offsets():
  # exp(1000.1 / 0.1) overflows. Relative to 1000: tau = 0.1 and ±0.1 give log(cosh 1) as the
  # baseline over tau.
  result = log_partition_baseline([1000.1, 999.9], ['a', 'a'], tau=0.1)
  baseline = 0.1 * math.log(math.cosh(1.0))
  np.testing.assert_allclose(result.advantages, [0.1 - baseline, -0.1 - baseline], rtol=1e-10)


@pytest.mark.parametrize('tau', [0.0, -1.0, float('nan')])
def test_log_partition_needs_a_positive_tau(tau):
  with pytest.raises(UserError, match='tau'):
    log_partition_baseline([1.0, 0.0], ['a', 'a'], tau=tau)
