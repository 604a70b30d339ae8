"""Schedulers: choose which parked groups continue and how many new groups start.

The gate limits how many groups run. Within this limit, parked groups (partial rollouts that wait to
be continued) come before new ones. With partial rollouts at staleness bound 0, `waves.Waves` is the
scheduler; with delayed rewards, it is `awaiting.Awaiting`.

Invariant: except with delayed rewards, the choice does not depend on timing. Parked groups are
therefore queued only at the start of a batch, and when no group is running.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.master.exploring.started import StartedGroups


class Turn(NamedTuple):
  """Groups that the scheduler has chosen to run next."""

  parked: list[int]
  """Numbers of the parked groups to continue."""
  new: int
  """Number of new groups to start."""


class Scheduler(Protocol):
  """Chooses the groups that run next."""

  def begin_batch(self) -> None:
    """Records that the collection of a batch begins."""
    ...

  def next(self, admitted: int) -> Turn:
    """Chooses the groups that run next.

    Args:
      admitted: number of groups that the gate has admitted.
    """
    ...

  def close_batch(self) -> None:
    """Records that all groups of the batch have been chosen."""
    ...

  def state(self) -> Any:
    """Returns the state as JSON, or None if the scheduler has no state."""
    ...

  def restore(self, state: Any) -> None: ...


class Immediate:
  """Scheduler that starts every group that the gate admits. It never continues parked groups."""

  def begin_batch(self) -> None:
    pass

  def next(self, admitted: int) -> Turn:
    return Turn([], admitted)

  def close_batch(self) -> None:
    pass

  def state(self) -> Any:
    return None

  def restore(self, state: Any) -> None:
    pass


class ScoringRounds(Immediate):
  """Scheduler for batches that the trainer's reward model scores.

  A round begins once every group of the batch is generated. While it lasts, no group starts,
  because the reward model may have taken the engine's device memory. If groups are dropped because
  of their scores, other groups start after the round, and another round follows.
  """

  def __init__(self, groups: StartedGroups, *, groups_per_batch: int):
    self._groups, self._groups_per_batch, self._held = groups, groups_per_batch, False
    self.rounds = 0
    """Number of rounds of this batch that have begun."""

  @property
  def is_due(self) -> bool:
    """Whether groups wait for the reward model, and all groups of the batch are generated."""
    waiting = len(self._groups.unscored)
    return waiting > 0 and waiting + len(self._groups.finished) >= self._groups_per_batch

  def begin_round(self) -> None:
    self._held = True
    self.rounds += 1

  def end_round(self) -> None:
    self._held = False

  def begin_batch(self) -> None:
    self._held, self.rounds = False, 0

  def next(self, admitted: int) -> Turn:
    return Turn([], 0 if self._held else admitted)


class Rounds(Immediate):
  """Scheduler that continues parked groups of earlier batches, oldest first, and then starts new
  groups. If no more groups may start, and every group of this batch has finished or used up its
  budget, the parked groups get another budget.
  """

  def __init__(self, groups: StartedGroups, *, max_groups: int):
    """
    Args:
      max_groups: maximum number of started groups that are not part of a batch yet.
    """
    self._groups, self._max_groups = groups, max_groups
    self._queue: collections.deque[int] = collections.deque()
    """Numbers of the parked groups to continue next."""

  def begin_batch(self) -> None:
    self._queue = collections.deque(self._groups.parked)

  def next(self, admitted: int) -> Turn:
    room = self._max_groups - len(self._groups)
    if room <= 0 and not self._queue and not self._groups.running:
      self._queue.extend(self._groups.parked)
    parked = [self._queue.popleft() for _ in range(min(admitted, len(self._queue)))]
    return Turn(parked, max(0, min(admitted - len(parked), room)))
