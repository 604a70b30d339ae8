"""Advantages of a sample relative to its group, computed on the host in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from jaxrl_llm.core.errors import UserError

_Rewards = Float64[np.ndarray, 'members']


class GroupAdvantages(NamedTuple):
  advantages: Float64[np.ndarray, 'samples']
  """Advantage of each sample. It is 0 for a sample that is unscorable or the only scored one of its
  group, and for all samples of a group with equal rewards.
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
  mean is not exact, so identical rewards would otherwise have a small nonzero deviation and give a
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
  """RLOO: returns A_i = r_i - mean of the group's other rewards = n/(n-1) · (r_i - mean(r)).

  Source: Ahmadian et al. 2024 (arXiv:2402.14740), after Kool et al. 2019. If a sample is alone in
  its group, its advantage is 0.
  """
  return _within_groups(
    rewards, groups, lambda values: (values - values.mean()) * len(values) / (len(values) - 1)
  )


def log_partition_baseline(
  rewards: Sequence[float | None], groups: Sequence[str], *, tau: float
) -> GroupAdvantages:
  """Returns A_i = r_i - τ log(1/n Σ_j exp(r_j / τ)), whose baseline is the soft value of the group.

  Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.2, with log Z estimated from the n samples of
  the group. The baseline lies between the mean reward (τ → ∞) and the maximum reward (τ → 0), so
  these advantages do not sum to zero.

  Raises:
    UserError: tau is not above 0.
  """
  if not tau > 0:
    raise UserError(
      f'log-partition baseline: tau {tau}, wanted above 0 (a small tau is close to the group '
      'maximum)'
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


def step_credit(
  rewards: Sequence[float | None],
  groups: Sequence[str],
  trajectories: Sequence[str],
  steps: Sequence[int],
  *,
  credit: Literal['trajectory', 'step'],
  advantages: Callable[[Sequence[float | None], Sequence[str]], GroupAdvantages] = group_advantages,
) -> GroupAdvantages:
  """Returns the advantages of rows that are steps of trajectories. A trajectory may have several
  rows.

  With 'trajectory', the reward of a trajectory is that of its last step. All steps of the
  trajectory get the same advantage, relative to the other trajectories of the group. A trajectory
  counts once in the baseline, however many steps it has. In the result, `groups` and
  `zero_std_groups` count groups.

  With 'step', each row has its own reward, and rows with the same group and step index share a
  baseline. In the result, `groups` and `zero_std_groups` count these baselines. If only one
  trajectory of a group is long enough to have a certain step, the advantage of that step is 0.
  GiGPO (arXiv:2505.10978) compares steps that start from equal states; here the step index is a
  proxy for the state.

  In both modes, if the last step of a trajectory is unscorable, all rows of the trajectory are
  unscorable. With 'step', any other unscorable row affects no other row.

  Args:
    rewards: one per row; None for an unscorable row.
    groups: the group id of each row, the same in all rows of a trajectory.
    trajectories: the trajectory id of each row. A row with an empty id is a trajectory of its own.
    steps: the step index of each row within its trajectory. The row with the largest index is the
      last step.
    credit: 'trajectory' or 'step', see above.
    advantages: function that estimates advantages from rewards and group ids. Bind its options with
      `functools.partial`.

  Raises:
    ValueError: a trajectory has rows in two groups, or two rows of the same step.
  """
  members = _trajectories(groups, trajectories, steps)
  outcomes = [rewards[rows[-1]] for rows in members]
  if credit == 'trajectory':
    result = advantages(outcomes, [groups[rows[-1]] for rows in members])
    owner = np.zeros(len(rewards), np.int64)
    for i, rows in enumerate(members):
      owner[rows] = i
    return result._replace(advantages=result.advantages[owner], scored=result.scored[owner])
  lost = {
    row for rows, outcome in zip(members, outcomes, strict=True) if outcome is None for row in rows
  }
  scored_rewards = [None if row in lost else reward for row, reward in enumerate(rewards)]
  return advantages(
    scored_rewards, [f'{group} step {step}' for group, step in zip(groups, steps, strict=True)]
  )


def _trajectories(
  groups: Sequence[str], trajectories: Sequence[str], steps: Sequence[int]
) -> list[list[int]]:
  """Returns the row numbers of each trajectory, ordered by step index."""
  members: dict[str | int, dict[int, int]] = {}
  for row, (group, trajectory, step) in enumerate(zip(groups, trajectories, steps, strict=True)):
    rows = members.setdefault(trajectory or row, {})
    if rows and groups[next(iter(rows.values()))] != group:
      raise ValueError(f'trajectory {trajectory} has rows in group {group} and in another one')
    if step in rows:
      raise ValueError(f'trajectory {trajectory} of group {group} has two rows of step {step}')
    rows[step] = row
  return [[rows[step] for step in sorted(rows)] for rows in members.values()]


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
