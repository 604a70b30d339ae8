"""Gate: admits a group only if the staleness of its samples can stay within a bound."""

from __future__ import annotations

import asyncio
from typing import Any


class Gate:
  """Limits the number of started groups to `(served + bound + 1) * groups_per_batch`, as in AReaL.

  `served` is the number of the stage's batches that the engines' weights have been trained on.
  Dropped groups do not count, so each can be replaced. Parked groups, which wait for a later batch
  to continue them or for delayed rewards, do not count either. Apart from `spare` groups, the gate
  admits no more groups than all batches of the stage need.
  """

  def __init__(
    self,
    *,
    bound: int,
    groups_per_batch: int,
    ahead: int | None = None,
    batches: int | None = None,
    spare: int = 0,
  ):
    """
    Args:
      bound: maximum staleness in batches: the number of batches between the weights that generate a
        group and the weights that the group updates.
      groups_per_batch: number of groups in each batch.
      ahead: number of batches after the current one for which groups may start, at most `bound`. It
        replaces `bound` in the limit on started groups. With a value below `bound`, batches may
        pass over a group in favour of newer groups without making it too old. If None, it is
        `bound`.
      batches: number of batches in the stage. If None, the number is unlimited.
      spare: number of groups that may be started in addition to those that the batches need. The
        caller parks the groups that the current batch turns out not to need.
    """
    self._ahead = bound if ahead is None else ahead
    self._bound, self._groups_per_batch, self._batches = bound, groups_per_batch, batches
    self._spare = spare
    self._started = self._dropped = self._parked = 0
    self._served = -1
    self._changed = asyncio.Event()

  @property
  def capacity(self) -> int:
    """Number of groups that may start now; 0 until the engines serve a version of the policy."""
    if self._served < 0:
      return 0
    batches = self._served + self._ahead + 1
    if self._batches is not None:
      batches = min(batches, self._batches)
    return batches * self._groups_per_batch + self._spare - self._counted

  @property
  def last_batch(self) -> int:
    """Last batch that may train on a group that starts now, as an index within the stage."""
    return self._served + self._bound

  @property
  def _counted(self) -> int:
    return self._started - self._dropped - self._parked

  @property
  def is_full(self) -> bool:
    """Whether the stage has started as many groups as its batches need. Dropped and parked groups
    do not count as started.
    """
    return self._batches is not None and self._counted >= self._batches * self._groups_per_batch

  @property
  def surplus(self) -> int:
    """Number of started groups beyond the number that the stage's batches need. It is above 0 only
    if the stage has been shortened.
    """
    if self._batches is None:
      return 0
    return max(0, self._counted - self._batches * self._groups_per_batch)

  def advance(self, served: int) -> None:
    """Records that the engines serve weights that have been trained on `served` batches of this
    stage.
    """
    self._served = served
    self._changed.set()

  async def opened(self) -> None:
    """Waits until the engines serve a version of the policy."""
    while self._served < 0:
      self._changed.clear()
      # Wait 'gate': bounded: the trainer's waits have deadlines.
      await self._changed.wait()

  async def admit(self) -> int:
    """Waits until at least one group may start. Returns the number of groups that may start, and
    counts them as started.
    """
    while self.capacity <= 0:
      self._changed.clear()
      # Wait 'gate': bounded: the trainer's waits have deadlines.
      await self._changed.wait()
    groups = self.capacity
    self._started += groups
    return groups

  def drop(self) -> None:
    """Records that a started group was dropped, so that another group may start in its place."""
    self._dropped += 1
    self._changed.set()

  def park(self) -> None:
    """Records that a started group was parked until a later batch, so that another group may start
    for this batch.
    """
    self._parked += 1
    self._changed.set()

  def give_back(self, groups: int) -> None:
    """Takes back the admission of `groups` groups, which `admit` has counted as started although
    they have not started yet.
    """
    self._started -= groups

  def unpark(self, groups: int) -> None:
    """Records that `groups` of the admitted groups are parked groups that continue. They no longer
    count as parked, and they are not counted as started a second time.
    """
    self._started -= groups
    self._parked -= groups

  def state(self) -> Any:
    return {'started': self._started, 'dropped': self._dropped, 'parked': self._parked}

  def restore(self, state: Any) -> None:
    self._started, self._dropped = state['started'], state['dropped']
    self._parked = state.get('parked', 0)  # Commits of earlier program versions lack this key.
