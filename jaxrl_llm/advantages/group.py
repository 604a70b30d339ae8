"""Advantages of a sample relative to its group, on the host in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64


class GroupAdvantages(NamedTuple):
  advantages: Float64[np.ndarray, 'samples']
  """0 where the sample is unscorable, alone in its group, or its group has zero variance."""
  scored: Bool[np.ndarray, 'samples']
  """False for unscorable samples (reward None): they are in no baseline and in no loss."""
  groups: int
  """Groups with at least one scored sample."""
  zero_std_groups: int
  """Of these, groups of one and groups whose rewards are all equal: they teach nothing."""


def group_advantages(
  rewards: Sequence[float | None],
  groups: Sequence[str],
  *,
  normalize_by_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
) -> GroupAdvantages:
  """A_i = (r_i - mean(r)) / (std(r) + eps) within each group.

  GRPO (arXiv:2402.03300); without the division Dr.GRPO (arXiv:2503.20783). Equality of rewards is tested before any
  division (max = min): a mean in floating point is not exact, and identical rewards would give a signal.

  Args:
    rewards: one per sample; None = unscorable.
    groups: the group id of each sample.
    normalize_by_std: divide by the group's standard deviation.
    ddof: 1 for the sample estimator (the field's default), 0 for the population's.
    eps: added to the standard deviation.
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
    if len(values) == 1 or values.max() == values.min():
      zero_std += 1
      continue
    centred = values - values.mean()
    advantages[indices] = centred / (values.std(ddof=ddof) + eps) if normalize_by_std else centred
  scored = np.array([reward is not None for reward in rewards], bool)
  return GroupAdvantages(advantages, scored, len(members), zero_std)
