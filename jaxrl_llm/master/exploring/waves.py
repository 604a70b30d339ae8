"""Waves: groups that are generated together, for partial rollouts at staleness bound 0.

A batch waits for a wave as a whole, until each of its groups has finished or spent its token
budget. Since some groups do not finish, a wave has more groups than the batch needs. The number of
additional groups follows from the share of groups that finished in the last batch. Groups that
finish although the batch is full are returned to the parked groups: their new tokens are discarded,
because they would be tokens of older weights in the next batch.

Invariant: the sizes of waves depend on tokens alone, never on time.
"""

from __future__ import annotations

import collections
import math
from typing import Any

from jaxrl_llm.master.exploring.scheduling import Turn
from jaxrl_llm.master.exploring.started import StartedGroups


class WaveSize:
  """Decides how many groups form a wave."""

  def __init__(self, *, max_groups: int):
    """
    Args:
      max_groups: maximum size of a wave.
    """
    self._max_groups = max_groups
    self._groups_per_finished = 1.0
    """Number of groups in the last batch's waves, divided by the number of these groups that
    finished.
    """
    self._started = self._finished = 0

  def for_finished(self, needed: int) -> int:
    """Returns the size of a wave in which about `needed` groups will finish."""
    return min(math.ceil(needed * self._groups_per_finished), self._max_groups)

  def start(self, groups: int) -> None:
    """Records that this many groups start or continue."""
    self._started += groups

  def finish(self) -> None:
    """Records that all samples of a group have finished, whether or not the batch takes it."""
    self._finished += 1

  def close(self) -> None:
    """Records that the batch is complete."""
    self._groups_per_finished = max(1.0, self._started / max(1, self._finished))
    self._started = self._finished = 0

  def state(self) -> Any:
    return {'groups_per_finished': self._groups_per_finished}

  def restore(self, state: Any) -> None:
    self._groups_per_finished = state['groups_per_finished']


class Waves:
  """Scheduler for partial rollouts at staleness bound 0. If the batch lacks groups, it starts
  another wave as soon as no group of the previous wave is running: each has finished, was dropped
  or is parked.
  """

  def __init__(self, groups: StartedGroups, *, groups_per_batch: int, max_groups: int):
    """
    Args:
      max_groups: maximum number of started groups that are not part of a batch yet. It also limits
        the size of a wave.
    """
    self._groups, self._groups_per_batch = groups, groups_per_batch
    self._max_groups, self._size = max_groups, WaveSize(max_groups=max_groups)
    self._collecting = False
    self._queue: collections.deque[int] = collections.deque()
    """Numbers of the parked groups that no wave of this batch has continued yet."""

  def begin_batch(self) -> None:
    self._collecting, self._queue = True, collections.deque(self._groups.parked)

  def next(self, admitted: int) -> Turn:
    needed = self._groups_per_batch - len(self._groups.finished)
    if not self._collecting or needed <= 0 or self._groups.running:
      return Turn([], 0)
    size = self._size.for_finished(needed)
    parked = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
    # A branch may start with more groups than rollout.partial.groups now permits.
    new = max(0, min(size - len(parked), self._max_groups - len(self._groups)))
    if size > len(parked) + new:  # All groups of earlier batches are already part of this wave.
      cut = [number for number in self._groups.parked if number not in parked]
      parked += cut[: size - len(parked) - new]
    self._size.start(len(parked) + new)
    return Turn(parked, new)

  def finish(self) -> None:
    """Records that all samples of a group have finished, whether or not the batch takes it."""
    self._size.finish()

  def takes(self, number: int) -> bool | None:
    """Returns whether the batch takes this group, which belongs to the current wave and whose
    samples are finished. Returns None while that is undecided. Of the groups that finish, the batch
    takes the first `groups_per_batch` in order of start, regardless of which finishes first.
    """
    places = self._groups.candidates[: self._groups_per_batch]
    if number in [place.number for place in places]:
      return True
    # A scored group keeps its place. Any other group may still be parked or dropped.
    return False if all(place.is_finished for place in places) else None

  def close_batch(self) -> None:
    self._collecting = False
    self._size.close()

  def state(self) -> Any:
    return self._size.state()

  def restore(self, state: Any) -> None:
    self._size.restore(state)
