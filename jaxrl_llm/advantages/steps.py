"""Advantages of trajectories of several steps. Each step is a separate row.

Invariant: the reward of a trajectory counts once in the statistics of its group, regardless of the
number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64, Shaped

from jaxrl_llm.advantages.group import GroupAdvantages, group_advantages
from jaxrl_llm.core.errors import UserError

Credit = Literal['trajectory', 'step', 'gigpo']
Estimate = Callable[[Sequence[float | None], Sequence[str]], GroupAdvantages]
"""Function of (rewards, group ids) that estimates advantages."""


def step_credit(
  rewards: Sequence[float | None],
  groups: Sequence[str],
  trajectories: Sequence[str],
  steps: Sequence[int],
  *,
  credit: Credit,
  advantages: Estimate = group_advantages,
  states: Sequence[str] = (),
  gamma: float = 1.0,
  weight: float = 1.0,
) -> GroupAdvantages:
  """Returns the advantages of rows that are steps of trajectories. A trajectory may have several
  rows.

  The reward of a trajectory is the sum of the rewards of its rows, and the return of step k is
  R_k = r_k + γ R_{k+1}. With the estimator A (`advantages`), the advantage of step k is:

  trajectory: A of the trajectory's reward among the rewards of its group.
  step:       A of R_k among the returns of the same group at the same step index.
  gigpo:      A of the trajectory's reward as above, plus `weight` times A of R_k among the returns
              of the steps of the same group that start from the same state.

  Source of 'gigpo': GiGPO (arXiv:2505.10978), eq. 3 to 8. 'step' takes the step index as a proxy
  for the state. The estimators of `advantages.group` return 0 for a step without other steps to
  compare it with.

  In the result, `groups` and `zero_std_groups` count groups or, with 'step', pairs of a group and a
  step index. If any row of a trajectory is unscorable, all of its rows count as unscorable.

  Args:
    rewards: one per row; None for an unscorable row.
    groups: the group id of each row, the same in all rows of a trajectory.
    trajectories: the trajectory id of each row. A row with an empty id is a separate trajectory.
    steps: the step index of each row within its trajectory.
    credit: rule that decides which rows are compared, see above.
    advantages: the estimator A. Bind its options with `functools.partial`.
    states: identifier of the state in which each row's step starts. Read only with 'gigpo'; may be
      empty for a row with an empty trajectory id.
    gamma: discount γ per step.
    weight: weight of the steps' advantages with 'gigpo'.

  Raises:
    ValueError: a trajectory has rows in two groups, or two rows of the same step.
    UserError: with 'gigpo', a row of a trajectory has no state.
  """
  members = chains(groups, trajectories, steps)
  totals = [_total([rewards[row] for row in rows]) for rows in members]
  if credit == 'step':
    returns = _returns(rewards, members, totals, gamma)
    return advantages(returns, [f'{g} step {s}' for g, s in zip(groups, steps, strict=True)])
  whole = advantages(totals, [groups[rows[0]] for rows in members])
  owner = np.zeros(len(rewards), np.int64)
  for i, rows in enumerate(members):
    owner[rows] = i
  result = whole._replace(advantages=whole.advantages[owner], scored=whole.scored[owner])
  if credit == 'trajectory':
    return result
  if any(name and not state for name, state in zip(trajectories, states, strict=True)):
    raise UserError(
      "credit='gigpo': some steps have no prompt_digest, which identifies the steps that start "
      'from the same state; if they were recorded by another run, delete data/<stage>.arrayrecord '
      'and data/<stage>.groups.json to import them again, or use another credit'
    )
  returns = _returns(rewards, members, totals, gamma)
  anchored = advantages(returns, [f'{g} from {s}' for g, s in zip(groups, states, strict=True)])
  return result._replace(advantages=result.advantages + weight * anchored.advantages)


def chains(
  groups: Sequence[str], trajectories: Sequence[str], steps: Sequence[int]
) -> list[list[int]]:
  """Returns the row numbers of each trajectory, ordered by step index. The arguments are the same
  as in `step_credit`. Raises ValueError if a trajectory has rows in two groups, or two rows of the
  same step.
  """
  members: dict[str | int, dict[int, int]] = {}
  for row, (group, trajectory, step) in enumerate(zip(groups, trajectories, steps, strict=True)):
    rows = members.setdefault(trajectory or row, {})
    if rows and groups[next(iter(rows.values()))] != group:
      raise ValueError(f'trajectory {trajectory} has rows in group {group} and in another one')
    if step in rows:
      raise ValueError(f'trajectory {trajectory} of group {group} has two rows of step {step}')
    rows[step] = row
  return [[rows[step] for step in sorted(rows)] for rows in members.values()]


def along_chains(
  members: Sequence[Sequence[int]],
  rule: Callable[..., Float64[np.ndarray, '...']],
  *columns: Sequence[Shaped[np.ndarray, '_']],
) -> list[Float64[np.ndarray, '...']]:
  """Applies a rule for one sequence to whole trajectories, treating the tokens of all steps of a
  trajectory as one sequence in order. Returns the rule's results for each row.

  Args:
    members: row numbers of each trajectory, as `chains` returns them. Every row occurs once.
    rule: function of (number of the trajectory's last row, *columns of the trajectory). The last
      axis of its result is time.
    columns: values per token, one array for each row.
  """
  results = [np.zeros(0)] * sum(map(len, members))
  for rows in members:
    joined = [np.concatenate([column[row] for row in rows]) for column in columns]
    ends = np.cumsum([len(columns[0][row]) for row in rows])[:-1]
    for row, result in zip(rows, np.split(rule(rows[-1], *joined), ends, axis=-1), strict=True):
      results[row] = result
  return results


def _total(rewards: Sequence[float | None]) -> float | None:
  return None if None in rewards else sum(rewards)


def _returns(
  rewards: Sequence[float | None],
  members: Sequence[Sequence[int]],
  totals: Sequence[float | None],
  gamma: float,
) -> list[float | None]:
  """Returns R_k = r_k + γ R_{k+1} of each row; None in unscorable trajectories."""
  returns: list[float | None] = [None] * len(rewards)
  for rows, total in zip(members, totals, strict=True):
    after = 0.0
    for row in reversed(rows if total is not None else ()):
      after = returns[row] = rewards[row] + gamma * after
  return returns
