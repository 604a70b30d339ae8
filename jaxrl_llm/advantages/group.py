"""Advantages of a sample relative to its group, on the host in float64."""

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
  """Advantage per sample; 0 if unscorable, alone in its group, or its group has zero variance."""
  scored: Bool[np.ndarray, 'samples']
  """False for unscorable samples (reward None), which enter neither a baseline nor the loss."""
  groups: int
  """Number of groups with at least one scored sample."""
  zero_std_groups: int
  """Number of these groups without a learning signal: only one scored sample, or equal rewards."""


def group_advantages(
  rewards: Sequence[float | None],
  groups: Sequence[str],
  *,
  normalize_by_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
) -> GroupAdvantages:
  """A_i = (r_i - mean(r)) / (std(r) + eps) within each group.

  Source: GRPO (arXiv:2402.03300). Dr.GRPO (arXiv:2503.20783) omits the division;
  REINFORCE++-baseline and OPMD start from its result. Equality of rewards is tested directly (max =
  min): a floating-point mean is not exact, so identical rewards would otherwise give a signal.

  Args:
    rewards: one per sample; None: unscorable.
    groups: the group id of each sample.
    normalize_by_std: whether to divide by the group's standard deviation.
    ddof: 1 for the sample standard deviation (the usual choice), 0 for the population's.
    eps: added to the standard deviation.
  """

  def rule(values: _Rewards) -> _Rewards:
    centred = values - values.mean()
    return centred / (values.std(ddof=ddof) + eps) if normalize_by_std else centred

  return _within_groups(rewards, groups, rule)


def leave_one_out(rewards: Sequence[float | None], groups: Sequence[str]) -> GroupAdvantages:
  """RLOO: A_i = r_i - mean of the group's other rewards = n/(n-1) · (r_i - mean(r)).

  Source: Ahmadian et al. 2024 (arXiv:2402.14740), after Kool et al. 2019. A sample alone in its
  group gets 0.
  """
  return _within_groups(
    rewards, groups, lambda values: (values - values.mean()) * len(values) / (len(values) - 1)
  )


def log_partition_baseline(
  rewards: Sequence[float | None], groups: Sequence[str], *, tau: float
) -> GroupAdvantages:
  """A_i = r_i - τ log(1/n Σ_j exp(r_j / τ)), the soft value of the group as the baseline.

  Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.2, with log Z estimated from the group's n
  samples. The baseline lies between the mean (τ → ∞) and the maximum (τ → 0), so these advantages
  do not sum to zero.

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
    # expm1 and log1p: for a large tau all exponents are close to 0, and 1 + x would round x away.
    return below - tau * np.log1p(np.expm1(below / tau).mean())

  return _within_groups(rewards, groups, rule)


def unequal(rewards: Sequence[float | None], groups: Sequence[str]) -> GroupAdvantages:
  """1 for each scored sample whose group has two different rewards, 0 for all others (DAPO's
  dynamic sampling).
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
  """Advantages of rows that are steps of trajectories: a trajectory may have several rows.

  'trajectory': a trajectory's reward is that of its last step. All its steps get the same
  advantage, relative to the other trajectories of its group; a trajectory counts once in the
  baseline, however many steps it has. In the result, `groups` and `zero_std_groups` count groups.
  'step': each row has its own reward, and rows with the same group and step index share a baseline.
  In the result, the two fields count these (group, step index) baselines. If only one trajectory is
  long enough to have a certain step, that step gets 0. (GiGPO, arXiv:2505.10978, compares steps
  that start from equal states; here the step index is a proxy for the state.)

  In both modes a trajectory whose last step is unscorable is unscorable as a whole. With 'step',
  any other unscorable row affects no other row.

  Args:
    rewards: one per row; None: unscorable.
    groups: the group id of each row, the same in all rows of a trajectory.
    trajectories: the trajectory id of each row; empty: the row is a trajectory of its own.
    steps: the step index of each row within its trajectory; the largest is the last.
    credit: 'trajectory' or 'step', see above.
    advantages: rule within a group, with its options bound by `functools.partial`.

  Raises:
    ValueError: a trajectory lies in two groups, or has two rows of one step.
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
  """Row numbers of each trajectory, in order of their step index."""
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
  """Applies `rule` to the scored rewards of each group with at least two different rewards."""
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
