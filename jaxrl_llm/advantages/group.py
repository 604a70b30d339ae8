"""Advantages of a sample relative to its group, computed on the host in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from jaxrl_llm.core.errors import UserError

_Rewards = Float64[np.ndarray, 'members']


class GroupAdvantages(NamedTuple):
  advantages: Float64[np.ndarray, 'samples']
  """Advantage of each sample. It is 0 for a sample that is unscorable or the only scored sample of
  its group, and for all samples of a group with equal rewards.
  """
  scored: Bool[np.ndarray, 'samples']
  """False for unscorable samples (reward None), which enter neither a baseline nor the loss."""
  groups: int
  """Number of groups with at least one scored sample."""
  zero_std_groups: int
  """Number of groups with scored samples but without a learning signal: they have only one scored
  sample, or equal rewards.
  """


def group_advantages(
  rewards: Sequence[float | None],
  groups: Sequence[str],
  *,
  normalize_by_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
) -> GroupAdvantages:
  """Returns A_i = (r_i - mean(r)) / (std(r) + eps) within each group.

  Source: GRPO (arXiv:2402.03300). Dr.GRPO (arXiv:2503.20783), REINFORCE++-baseline and OPMD omit
  the division by the standard deviation. Equal rewards are detected by max = min: a floating-point
  mean is not exact, so identical rewards could otherwise have a small nonzero deviation and give a
  signal.

  Args:
    rewards: one per sample; None for an unscorable sample.
    groups: the group id of each sample.
    normalize_by_std: whether to divide by the group's standard deviation.
    ddof: 1 for the sample standard deviation (the usual choice), 0 for the population standard
      deviation.
    eps: added to the standard deviation.
  """

  def rule(values: _Rewards) -> _Rewards:
    centred = values - values.mean()
    return centred / (values.std(ddof=ddof) + eps) if normalize_by_std else centred

  return _within_groups(rewards, groups, rule)


def leave_one_out(rewards: Sequence[float | None], groups: Sequence[str]) -> GroupAdvantages:
  """Returns RLOO's A_i = r_i - mean of the group's other rewards = n/(n-1) · (r_i - mean(r)), where
  n is the number of scored samples in the group.

  Source: Ahmadian et al. 2024 (arXiv:2402.14740), after Kool et al. 2019. If a sample is alone in
  its group, its advantage is 0.
  """
  return _within_groups(
    rewards, groups, lambda values: (values - values.mean()) * len(values) / (len(values) - 1)
  )


def log_partition_baseline(
  rewards: Sequence[float | None], groups: Sequence[str], *, tau: float
) -> GroupAdvantages:
  """Returns A_i = r_i - τ log(1/n Σ_j exp(r_j / τ)). The baseline is the soft value of the group.

  Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.2, with log Z estimated from the n samples of
  the group. The baseline lies between the mean reward (τ → ∞) and the maximum reward (τ → 0), so
  these advantages do not sum to zero.

  Raises:
    UserError: tau is not above 0.
  """
  if not tau > 0:
    raise UserError(
      f'log-partition baseline: tau {tau}, wanted above 0 (for a small tau, the baseline is close '
      "to the group's maximum)"
    )

  def rule(values: _Rewards) -> _Rewards:
    below = values - values.max()
    # Use expm1 and log1p: for a large tau all exponents x are close to 0, and 1 + x would round x
    # away.
    return below - tau * np.log1p(np.expm1(below / tau).mean())

  return _within_groups(rewards, groups, rule)


def unequal(rewards: Sequence[float | None], groups: Sequence[str]) -> GroupAdvantages:
  """Marks the samples of groups with different rewards (DAPO's dynamic sampling).

  The advantage in the result is 1 for each scored sample whose group has at least two different
  rewards, and 0 for every other sample.
  """
  return _within_groups(rewards, groups, np.ones_like)


def _within_groups(
  rewards: Sequence[float | None], groups: Sequence[str], rule: Callable[[_Rewards], _Rewards]
) -> GroupAdvantages:
  """Applies `rule` to the scored rewards of each group with at least two different rewards. All
  other samples get advantage 0.
  """
  members: dict[str, list[int]] = {}
  for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
    if reward is not None:
      if not math.isfinite(reward):
        raise ValueError(f'reward {reward} of a sample of group {group} is not finite')
      members.setdefault(group, []).append(i)
  advantages = np.zeros(len(rewards), np.float64)
  zero_std = 0
  for indices in members.values():
    values = np.array([rewards[i] for i in indices], np.float64)
    if values.max() == values.min():
      zero_std += 1
    else:
      advantages[indices] = rule(values)
  scored = np.array([reward is not None for reward in rewards], bool)
  return GroupAdvantages(advantages, scored, len(members), zero_std)
