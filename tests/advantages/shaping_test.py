"""Shaping of rewards and schedules: by hand, against plain loops, and what bad options say."""

import numpy as np
import oracles_advantages as oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages.shaping import (
  AdaptiveKl,
  MuSchedule,
  adapted,
  length_rewards,
  overlong_penalty,
  warmup_weight,
)
from jaxrl_llm.core.errors import UserError


def test_overlong_penalty_by_hand():
  # 100 tokens with a buffer of 20: free up to 80; 85 is a quarter into the buffer; past 100 it
  # stays at -factor.
  got = overlong_penalty([1, 80, 85, 100, 130], max_length=100, buffer=20, factor=2.0)
  np.testing.assert_array_equal(got, [0.0, 0.0, -0.5, -2.0, -2.0])


def test_a_buffer_of_everything_punishes_from_the_first_token():
  # 3 of 4 tokens: -3/4; no token: nothing.
  np.testing.assert_array_equal(overlong_penalty([3, 0], max_length=4, buffer=4), [-0.75, 0.0])
  assert len(overlong_penalty([], max_length=4, buffer=4)) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=10), st.integers(1, 150), st.data())
def test_overlong_penalty_equals_the_loop(lengths, max_length, data):
  buffer, factor = data.draw(st.integers(1, max_length)), data.draw(st.floats(0, 3))
  wanted = [oracles.overlong(length, max_length, buffer, factor) for length in lengths]
  for form in (lengths, np.array(lengths, np.int32)):
    got = overlong_penalty(form, max_length=max_length, buffer=buffer, factor=factor)
    np.testing.assert_allclose(got, wanted, atol=1e-14)


@pytest.mark.parametrize('buffer', [0, -1, 101])
def test_impossible_buffers_are_refused(buffer):
  with pytest.raises(UserError, match=f'buffer {buffer}, wanted 1 to max_length=100'):
    overlong_penalty([1], max_length=100, buffer=buffer)


def test_length_rewards_by_hand():
  # Group a, lengths 10, 20, 30, 50, range 40: lambda = 1/2, 1/4, 0, -1/2. Wrong answers keep only
  # the last of these.
  lengths, groups = [10, 20, 30, 50], ['a'] * 4
  np.testing.assert_array_equal(length_rewards(lengths, [True] * 4, groups), [0.5, 0.25, 0.0, -0.5])
  np.testing.assert_array_equal(length_rewards(lengths, [False] * 4, groups), [0.0, 0.0, 0.0, -0.5])


def test_groups_without_a_range_of_lengths_get_nothing():
  got = length_rewards(
    [7, 7, 7, 3, 5], [True, False, True, True, None], ['equal'] * 3 + ['rest'] * 2
  )
  np.testing.assert_array_equal(got, np.zeros(5))
  assert len(length_rewards([], [], [])) == 0


def test_unscorable_lengths_do_not_stretch_the_range():
  # Of 10 and 20 alone: 1/2 and -1/2. With the unscorable 110 in the range, 20 would get 0.4.
  got = length_rewards([10, 20, 110], [True, True, None], ['a'] * 3)
  np.testing.assert_array_equal(got, [0.5, -0.5, 0.0])


members = st.tuples(
  st.integers(1, 60), st.sampled_from([True, False, None]), st.sampled_from('abc')
)


@settings(max_examples=100, deadline=None)
@given(st.lists(members, min_size=1, max_size=20))
def test_length_rewards_equal_the_loop(rows):
  lengths, correct, groups = (list(column) for column in zip(*rows, strict=True))
  wanted = oracles.length_reward(lengths, correct, groups)
  for form in (lengths, np.array(lengths)):
    got = length_rewards(form, correct, groups)
    np.testing.assert_allclose(got, wanted, atol=1e-15)
  assert (np.abs(got) <= 0.5).all()
  assert not (got[[right is not True for right in correct]] > 0).any()


def test_weight_starts_after_the_warm_up():
  assert [warmup_weight(step, warmup_steps=2, weight=0.3) for step in range(4)] == [
    0.0,
    0.0,
    0.3,
    0.3,
  ]
  assert warmup_weight(0, warmup_steps=0, weight=0.3) == 0.3


def test_coefficient_follows_the_measured_kl_by_hand():
  config = AdaptiveKl(init_coef=0.1, target=2.0, horizon=100.0)
  # KL 2.2 is 10 % over: 0.1 * (1 + 0.1 * 50/100) = 0.105. 1.8: 0.095. On target: no change.
  assert adapted(0.1, 2.2, 50, config) == pytest.approx(0.105)
  assert adapted(0.1, 1.8, 50, config) == pytest.approx(0.095)
  assert adapted(0.1, 2.0, 50, config) == 0.1
  # Any larger error counts as 20 %: 0.1 * (1 ± 0.2 * 50/100).
  for kl in (2.5, 100.0):
    assert adapted(0.1, kl, 50, config) == pytest.approx(0.11)
  for kl in (1.5, 0.0, -3.0):
    assert adapted(0.1, kl, 50, config) == pytest.approx(0.09)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-4, 10), st.floats(-5, 5), st.integers(0, 499))
def test_coefficient_stays_positive_and_moves_towards_the_target(coef, kl, n):
  config = AdaptiveKl(init_coef=0.1, target=0.5, horizon=100.0)
  error = 0.2 if kl > 0.6 else -0.2 if kl < 0.4 else (kl - 0.5) / 0.5
  got = adapted(coef, kl, n, config)
  assert got == pytest.approx(coef + coef * error * n / 100.0, rel=1e-9)
  assert got > 0


def test_impossible_kl_control_is_refused():
  good = {'init_coef': 0.1, 'target': 1.0, 'horizon': 10.0}
  for name, value in (
    ('init_coef', 0.0),
    ('target', -1.0),
    ('horizon', float('nan')),
    ('target', float('inf')),
  ):
    with pytest.raises(UserError, match=name):
      AdaptiveKl(**{**good, name: value})
  # At n = 5 horizons one step of -20 % takes all of the coefficient, whichever way this step goes.
  for kl in (0.0, 2.0):
    with pytest.raises(UserError, match='set the horizon above 10'):
      adapted(0.1, kl, 50, AdaptiveKl(**good))
  with pytest.raises(ValueError, match='not finite'):
    adapted(0.1, float('nan'), 1, AdaptiveKl(**good))


def test_constant_mu_ignores_the_step():
  schedule = MuSchedule(mu=0.3, peak=0.9, valley=0.0, warmup_steps=5, decay_steps=5)
  assert {schedule.at(step) for step in (0, 3, 7, 1000)} == {0.3}


def test_linear_mu_by_hand():
  # 0.9 to 0.1 over 4 steps: 0.2 less in each.
  schedule = MuSchedule(kind='linear', peak=0.9, valley=0.1, decay_steps=4)
  np.testing.assert_allclose(
    [schedule.at(step) for step in range(7)], [0.9, 0.7, 0.5, 0.3, 0.1, 0.1, 0.1], rtol=1e-14
  )
  assert MuSchedule(kind='linear', peak=0.9, valley=0.1).at(0) == 0.1


def test_chord_mu_by_hand():
  # Up by 0.2 a step to 0.8; then cosines of 0, 60, 120 and 180 degrees: 0.2 + 0.6 * (1, 3/4, 1/4,
  # 0).
  schedule = MuSchedule(kind='chord', peak=0.8, valley=0.2, warmup_steps=4, decay_steps=3)
  wanted = [0.0, 0.2, 0.4, 0.6, 0.8, 0.65, 0.35, 0.2, 0.2]
  np.testing.assert_allclose([schedule.at(step) for step in range(9)], wanted, atol=1e-14)


def test_chord_mu_without_warm_up_or_decay():
  # cos 90 degrees is halfway: (0.8 + 0.2) / 2.
  no_warmup = MuSchedule(kind='chord', peak=0.8, valley=0.2, decay_steps=2)
  np.testing.assert_allclose(
    [no_warmup.at(step) for step in range(4)], [0.8, 0.5, 0.2, 0.2], rtol=1e-14
  )
  no_decay = MuSchedule(kind='chord', peak=0.8, valley=0.2, warmup_steps=2)
  np.testing.assert_allclose(
    [no_decay.at(step) for step in range(4)], [0.0, 0.4, 0.2, 0.2], atol=1e-15
  )


@pytest.mark.parametrize(
  'fields',
  [
    {'mu': 1.5},
    {'peak': -0.1},
    {'valley': float('nan')},
    {'warmup_steps': -1},
    {'decay_steps': -1},
  ],
)
def test_impossible_schedules_are_refused(fields):
  with pytest.raises(UserError, match=next(iter(fields))):
    MuSchedule(kind='chord', **fields)
