"""Per-token rewards, returns and advantages in float64, over a row's trained (valid) tokens only.

A row's `mask` marks the valid tokens. All other tokens, such as the prompt and tool output, are
called holes. Values in holes are never read, and every result is exactly 0 there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float64

Estimator = Literal['k1', 'k2', 'k3']


def masked_gae(
  rewards: Float[np.ndarray, 'time'],
  values: Float[np.ndarray, 'time'],
  mask: Bool[np.ndarray, 'time'],
  *,
  gamma: float,
  lam: float,
  last_value: float = 0.0,
) -> tuple[Float64[np.ndarray, 'time'], Float64[np.ndarray, 'time']]:
  """Returns (advantages, returns) by generalized advantage estimation over the valid tokens.

  δ_t = r_t + γ V_t' - V_t;  A_t = δ_t + γ λ A_t';  R_t = A_t + V_t

  Here t' is the next valid token after t. After the last valid token, V is `last_value` (0 if the
  episode has ended) and A is 0.

  Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16. Holes and padding are skipped, so they do
  not affect the results at valid tokens, for any λ. A row without valid tokens gives zeros.
  """
  rewards, values = _compact(rewards, mask), _compact(values, mask)
  following = np.append(values[1:], last_value)[: len(values)]
  advantages = _discounted_sums(rewards + gamma * following - values, gamma * lam)
  return _spread(advantages, mask), _spread(advantages + values, mask)


def token_returns(
  rewards: Float[np.ndarray, 'time'], mask: Bool[np.ndarray, 'time'], *, gamma: float
) -> Float64[np.ndarray, 'time']:
  """Returns G_t = r_t + γ G_t' for the valid tokens, where t' is the next valid token after t.

  Source: REINFORCE++ (arXiv:2501.03262). Holes neither discount the return nor reset it. If they
  reset it, the reward of a trajectory with tool tokens would reach only the last turn.
  """
  return _spread(_discounted_sums(_compact(rewards, mask), gamma), mask)


def place_rewards(
  mask: Bool[np.ndarray, 'time'], reward: float, turn_rewards: Sequence[float] = ()
) -> Float64[np.ndarray, 'time']:
  """Returns token rewards: `reward` at the last valid token, plus `turn_rewards[i]` at the last
  token of turn i.

  A turn is a maximal run of valid tokens. Turns after the last entry of `turn_rewards` get no turn
  reward. A row without valid tokens is left out of the loss and gets zeros, regardless of its turn
  rewards.

  Raises:
    ValueError: a row with valid tokens has fewer turns than turn rewards, or a reward is not
      finite.
  """
  if not all(map(math.isfinite, (reward, *turn_rewards))):
    raise ValueError(
      f'reward {reward} or one of the turn rewards {list(turn_rewards)} is not finite'
    )
  ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
  if len(turn_rewards) > len(ends) > 0:
    raise ValueError(
      f'{len(turn_rewards)} turn rewards for a row of {len(ends)} turns (runs of trained tokens)'
    )
  rewards = np.zeros(mask.shape, np.float64)
  if len(ends):
    rewards[ends[: len(turn_rewards)]] = turn_rewards
    rewards[ends[-1]] += reward
  return rewards


def whiten(
  rows: Sequence[Float[np.ndarray, '_']],
  masks: Sequence[Bool[np.ndarray, '_']],
  *,
  eps: float = 1e-8,
  shift_mean: bool = True,
) -> list[Float64[np.ndarray, '_']]:
  """Returns (x - mean) / sqrt(var + eps), with mean and variance (ddof 1) over the batch's valid
  tokens.

  PPO and REINFORCE++ (arXiv:2501.03262) normalize advantages over the batch this way. If there are
  fewer than two valid tokens, or all valid values are equal, the result is all zeros, whether or
  not `shift_mean` is set.

  Args:
    rows: one array per row, of any lengths.
    masks: valid tokens of each row.
    eps: added to the variance.
    shift_mean: whether to subtract the mean. If False, the mean is kept and only the spread is
      normalized.
  """
  parts = [_compact(row, mask) for row, mask in zip(rows, masks, strict=True)]
  valid = np.concatenate([np.zeros(0), *parts])
  if valid.size == 0 or valid.max() == valid.min():
    return [np.zeros(mask.shape, np.float64) for mask in masks]
  mean, scale = valid.mean(), np.sqrt(valid.var(ddof=1) + eps)
  shift = 0.0 if shift_mean else mean
  return [
    _spread((part - mean) / scale + shift, mask) for part, mask in zip(parts, masks, strict=True)
  ]


def kl_penalty(
  logprobs: Float[np.ndarray, 'time'],
  reference: Float[np.ndarray, 'time'],
  mask: Bool[np.ndarray, 'time'],
  *,
  kind: Estimator,
  coef: float,
  log_ratio_limit: float = 20.0,
  limit: float = 10.0,
) -> Float64[np.ndarray, 'time']:
  """Returns the token rewards -coef · k, where k estimates the KL from d = logprobs - reference.

  k1 = d;  k2 = d²/2;  k3 = exp(-d) + d - 1

  Source: Schulman, "Approximating KL divergence" (2020). The estimators, and the limits of k3, are
  the same as in `objectives.divergence.kl_estimate`. A reward influences the policy only through
  the policy gradient. Used in this way, k1 gives the gradient of the reverse KL (as in Ziegler et
  al. 2019, arXiv:1909.08593).
  """
  difference = _compact(logprobs, mask) - _compact(reference, mask)
  if kind == 'k1':
    estimate = difference
  elif kind == 'k2':
    estimate = 0.5 * difference**2
  else:
    bounded = np.clip(-difference, -log_ratio_limit, log_ratio_limit)
    estimate = np.clip(np.exp(bounded) - bounded - 1.0, -limit, limit)
  return _spread(-coef * estimate, mask)


def _compact(
  row: Float[np.ndarray, 'time'], mask: Bool[np.ndarray, 'time']
) -> Float64[np.ndarray, 'valid']:
  return row[mask].astype(np.float64)


def _spread(
  values: Float64[np.ndarray, 'valid'], mask: Bool[np.ndarray, 'time']
) -> Float64[np.ndarray, 'time']:
  row = np.zeros(mask.shape, np.float64)
  row[mask] = values
  return row


def _discounted_sums(
  values: Float64[np.ndarray, 'valid'], decay: float
) -> Float64[np.ndarray, 'valid']:
  """Returns y_t = x_t + decay · y_{t+1}, where y is 0 after the end."""
  sums = itertools.accumulate(reversed(values.tolist()), lambda later, value: value + decay * later)
  return np.array(list(sums), np.float64)[::-1]
