"""Formulas of advantages and shaping, written as plain loops over Python floats, and random rows
for tests.
"""

import math

import numpy as np
from hypothesis import strategies as st


def outcomes(max_size=20):
  """Returns a strategy of lists of (group, reward or None). Groups are small, and ties of rewards
  are frequent.
  """
  reward = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.3]), st.floats(-10, 10))
  return st.lists(st.tuples(st.sampled_from('abc'), reward), max_size=max_size)


def row(rng, length, share=0.6):
  """Returns (rewards, values, mask), with NaN at masked positions. Position 0 is masked."""
  mask = rng.random(length) < share
  mask[:1] = False
  rewards, values = rng.normal(size=(2, length))
  rewards[~mask] = values[~mask] = np.nan
  return rewards, values, mask


def of_group(rewards, groups, rule):
  """Returns the advantage of each sample: `rule(reward, rewards of the group, position in the
  group)`. It is 0 for unscored samples, and for groups without two different rewards.
  """
  advantages = []
  for i, reward in enumerate(rewards):
    members = [j for j in range(len(rewards)) if groups[j] == groups[i] and rewards[j] is not None]
    values = [rewards[j] for j in members]
    if reward is None or len(set(values)) < 2:
      advantages.append(0.0)
    else:
      advantages.append(rule(reward, values, members.index(i)))
  return advantages


def leave_one_out(rewards, groups):
  def rule(reward, values, place):
    others = values[:place] + values[place + 1 :]
    return reward - math.fsum(others) / len(others)

  return of_group(rewards, groups, rule)


def log_partition(rewards, groups, tau):
  def rule(reward, values, place):
    return reward - tau * math.log(
      math.fsum(math.exp(value / tau) for value in values) / len(values)
    )

  return of_group(rewards, groups, rule)


def gae(rewards, values, mask, gamma, lam):
  """Computes the recursion over all tokens. A masked token passes (next value, advantage) on
  unchanged.
  """
  advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
  next_value = running = 0.0
  for t in range(len(mask) - 1, -1, -1):
    if mask[t]:
      running = rewards[t] + gamma * next_value - values[t] + gamma * lam * running
      next_value = values[t]
      advantages[t], returns[t] = running, running + values[t]
  return advantages, returns


def returns(rewards, mask, gamma):
  """Returns G_t as an explicit sum: a reward k valid tokens after t is multiplied by gamma**k."""
  valid = [t for t in range(len(mask)) if mask[t]]
  result = [0.0] * len(mask)
  for i, t in enumerate(valid):
    result[t] = sum(gamma**k * rewards[later] for k, later in enumerate(valid[i:]))
  return result


def placed(mask, reward, turn_rewards):
  result, turn = [0.0] * len(mask), 0
  for t in range(len(mask)):
    if mask[t] and (t + 1 == len(mask) or not mask[t + 1]):
      if turn < len(turn_rewards):
        result[t] += turn_rewards[turn]
      turn += 1
      if not any(mask[t + 1 :]):
        result[t] += reward
  return result


def whitened(rows, masks, eps, shift_mean):
  valid = [row[t] for row, mask in zip(rows, masks) for t in range(len(mask)) if mask[t]]
  mean = math.fsum(valid) / len(valid)
  variance = math.fsum((x - mean) ** 2 for x in valid) / (len(valid) - 1)
  shift = 0.0 if shift_mean else mean
  return [
    [
      (row[t] - mean) / math.sqrt(variance + eps) + shift if mask[t] else 0.0
      for t in range(len(mask))
    ]
    for row, mask in zip(rows, masks)
  ]


def overlong(length, max_length, buffer, factor):
  expected = max_length - buffer
  if length <= expected:
    return 0.0
  if length >= max_length:
    return -factor
  return (expected - length) / buffer * factor


def length_reward(lengths, correct, groups):
  result = []
  for i in range(len(lengths)):
    group = [
      lengths[j] for j in range(len(lengths)) if groups[j] == groups[i] and correct[j] is not None
    ]
    if correct[i] is None or max(group) == min(group):
      result.append(0.0)
      continue
    short = 0.5 - (lengths[i] - min(group)) / (max(group) - min(group))
    result.append(short if correct[i] else min(0.0, short))
  return result
