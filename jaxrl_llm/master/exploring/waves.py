"""Waves: with partial rollouts at staleness bound 0, the groups that are generated together.

A batch waits for a wave as a whole, until each of its groups has finished or spent its token
budget. Since some groups do not finish, a wave has more groups than the batch needs. How many more
follows from the share of groups that finished in the last batch. Groups that finish although the
batch is full are returned to the parked groups: their new tokens are discarded, because they would
be tokens of older weights in the next batch.

Invariant: the sizes of waves depend on tokens alone, never on time.
"""

from __future__ import annotations

import math
from typing import Any


class Waves:
  """Decides how many groups form a wave."""

  def __init__(self, *, max_groups: int):
    """
    Args:
      max_groups: maximum number of groups that have started and are in no batch yet. It also
        limits the size of a wave.
    """
    self._max_groups = max_groups
    self._groups_per_finished = 1.0
    """Number of groups in the last batch's waves, divided by the number of those that finished."""
    self._started = self._finished = 0

  def size(self, needed: int) -> int:
    """Returns the number of groups that a wave must have so that about `needed` of them finish."""
    return min(math.ceil(needed * self._groups_per_finished), self._max_groups)

  def start(self, groups: int) -> None:
    """Records that this many groups start or continue."""
    self._started += groups

  def finish(self) -> None:
    """Records that a group has finished within its budget."""
    self._finished += 1

  def close(self) -> None:
    """Records that the batch is complete."""
    self._groups_per_finished = max(1.0, self._started / max(1, self._finished))
    self._started = self._finished = 0

  def state(self) -> Any:
    return {'groups_per_finished': self._groups_per_finished}

  def restore(self, state: Any) -> None:
    self._groups_per_finished = state['groups_per_finished']
