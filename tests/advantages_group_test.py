import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages.group import group_advantages


def test_hand_worked_group():
  # rewards 1, 0, 0, 0: mean 1/4, deviations 3/4 and -1/4; sample variance (9 + 1 + 1 + 1)/16 / 3 = 1/4, std 1/2.
  result = group_advantages([1.0, 0.0, 0.0, 0.0], ['a'] * 4, eps=0.0)
  np.testing.assert_allclose(result.advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-15)


def test_population_estimator_divides_by_n():
  # Rewards 1, 0: deviations ±1/2; population std 1/2 gives ±1, sample std sqrt(1/2) gives ±sqrt(1/2).
  np.testing.assert_allclose(group_advantages([1.0, 0.0], ['a', 'a'], ddof=0, eps=0.0).advantages, [1.0, -1.0])
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
  # With None as 0 the mean would be 2/3; it is 1/2 over the two that are scored, so the deviations are ±1/2.
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
@given(st.lists(st.tuples(st.sampled_from('abc'), st.floats(-10, 10)), min_size=1, max_size=20), st.randoms())
def test_sums_to_zero_and_follows_permutations(pairs, random):
  groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
  advantages = group_advantages(rewards, groups).advantages
  for group in set(groups):
    assert abs(sum(a for a, g in zip(advantages, groups) if g == group)) < 1e-6
  order = list(range(len(pairs)))
  random.shuffle(order)
  shuffled = group_advantages([rewards[i] for i in order], [groups[i] for i in order]).advantages
  np.testing.assert_allclose(shuffled, advantages[order], atol=1e-9)
