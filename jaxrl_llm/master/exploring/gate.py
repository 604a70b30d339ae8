"""Admits rollout groups at most `bound` updates ahead of the version that the engines serve."""

from __future__ import annotations

import asyncio
from typing import Any


class Gate:
  """Groups may start while `started - dropped < (served + bound + 1) * groups_per_batch` (AReaL).

  A dropped group gives its capacity back. `served` counts batches of the running stage whose
  weights the engines have acknowledged. No group starts beyond the needs of the stage's last batch.
  """

  def __init__(self, *, bound: int, groups_per_batch: int, batches: int | None = None):
    """
    Args:
      bound: maximum lag, in batches, of a group's weights behind those that its batch updates.
      batches: number of batches in the stage; None: unlimited.
    """
    self._bound, self._groups_per_batch, self._batches = bound, groups_per_batch, batches
    self._started = self._dropped = 0
    self._served = -1
    self._changed = asyncio.Event()

  @property
  def capacity(self) -> int:
    """Groups that may start now; 0 before the first version is served."""
    if self._served < 0:
      return 0
    batches = self._served + self._bound + 1
    if self._batches is not None:
      batches = min(batches, self._batches)
    return batches * self._groups_per_batch - (self._started - self._dropped)

  def advance(self, served: int) -> None:
    """Records that the engines acknowledged the weights after `served` batches of this stage."""
    self._served = served
    self._changed.set()

  async def opened(self) -> None:
    """Waits for the first version to be served."""
    while self._served < 0:
      self._changed.clear()
      await self._changed.wait()  # wait gate: the trainer's waits; it is left with the stage

  async def admit(self) -> int:
    """Waits until groups may start, takes all of the capacity and returns the number of groups."""
    while self.capacity <= 0:
      self._changed.clear()
      await self._changed.wait()  # wait gate: the trainer's waits; it is left with the stage
    groups = self.capacity
    self._started += groups
    return groups

  def drop(self) -> None:
    """Gives back the capacity of a started group that will not enter a batch."""
    self._dropped += 1
    self._changed.set()

  def state(self) -> Any:
    return {'started': self._started, 'dropped': self._dropped}

  def restore(self, state: Any) -> None:
    self._started, self._dropped = state['started'], state['dropped']
