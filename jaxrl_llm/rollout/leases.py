"""Who explores which group: lends each to one explorer at a time, and takes it back from one that is gone.

Invariants: a group is lent to one explorer at a time; a lease that was lost is worth nothing, and what was asked
under it is cancelled; a group that was lost goes out again before those that nobody has begun; each sample is handed in
once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.experience.sample import Sample
from jaxrl_llm.rollout.wire import TAKE_S

_MAX_LOSSES = 5
"""Of one group, after which it is held for what its explorers end of."""


class Gone(Exception):
  """The lease is somebody else's by now, or its group has ended."""

  def __init__(self, lease: int):
    super().__init__(f'lease {lease} is not held any more')


@dataclasses.dataclass(eq=False, kw_only=True)
class Group:
  """A group that the master wants."""

  order: dict[str, Any]
  """What its explorer is told."""
  samples: int
  handed_in: asyncio.Queue[tuple[Sample, str] | Exception] = dataclasses.field(default_factory=asyncio.Queue)
  """Samples with their texts; an error ends it."""
  seen: set[int] = dataclasses.field(default_factory=set)
  """Indices of the samples that were handed in."""
  lease: int | None = None
  holder: str | None = None
  """Name of the explorer that has it; None: it waits."""
  lent: float = 0.0
  """When its holder got it."""
  losses: int = 0
  """How often an explorer lost it."""
  calls: set[asyncio.Task] = dataclasses.field(default_factory=set)
  """What its holder is waiting for."""

  def hand_in(self, sample: Sample, text: str) -> bool:
    """Whether it is the first of its index. Raises ValueError for one that was not asked for."""
    if not 0 <= sample.sample_index < self.samples:
      raise ValueError(f'sample {sample.uid} has index {sample.sample_index}, wanted one of {self.samples}')
    if sample.sample_index in self.seen:
      return False
    self.seen.add(sample.sample_index)
    self.handed_in.put_nowait((sample, text))
    return True

  def fail(self, error: Exception) -> None:
    """Ends the wait for its samples."""
    self.handed_in.put_nowait(error)


class Leases:
  """The groups that are wanted, and the explorers that are there.

  Attributes:
    counts: `lost` leases whose holder fell silent, ended, left or forgot them, `late` messages of such leases.
  """

  def __init__(self, *, silent_s: float):
    """
    Args:
      silent_s: an explorer that says nothing for so long is gone.
    """
    self.counts: collections.Counter[str] = collections.Counter()
    self._silent_s = silent_s
    self._waiting: collections.deque[Group] = collections.deque()
    self._lent: dict[int, Group] = {}
    self._leases = 0
    self._heard: dict[str, float] = {}
    """When each explorer last said something."""
    self._work = asyncio.Condition()

  @property
  def explorers(self) -> tuple[str, ...]:
    """Names of those that are there."""
    return tuple(self._heard)

  @property
  def groups(self) -> tuple[Group, ...]:
    """Those that wait, and those that are lent."""
    return (*self._waiting, *self._lent.values())

  async def offer(self, group: Group) -> None:
    """Somebody shall explore it."""
    async with self._work:
      self._waiting.append(group)
      self._work.notify()

  def hear(self, name: str) -> None:
    """An explorer has said something."""
    self._heard[name] = time.monotonic()

  async def take(self, name: str) -> Group | None:
    """A group for this explorer; None when none has come in time."""
    self.hear(name)
    async with self._work:
      try:
        async with asyncio.timeout(TAKE_S):
          await self._work.wait_for(lambda: self._waiting)
      except TimeoutError:
        return None
      except asyncio.CancelledError:
        self._work.notify()  # Python 3.11 loses one that comes with the cancellation.
        raise
      if name not in self._heard:  # It has left, or was given up, meanwhile.
        self._work.notify()
        return None
      group = self._waiting.popleft()
    self._leases += 1
    group.lease, group.holder, group.lent = self._leases, name, time.monotonic()
    self._lent[group.lease] = group
    return group

  def held(self, lease: int) -> Group:
    """Raises Gone."""
    if lease not in self._lent:
      self.counts['late'] += 1
      raise Gone(lease)
    return self._lent[lease]

  def is_held(self, lease: int) -> bool:
    return lease in self._lent

  @contextlib.contextmanager
  def called(self, lease: int) -> Iterator[Group]:
    """The call of this task is cancelled when the lease ends. Raises Gone."""
    group, task = self.held(lease), asyncio.current_task()
    group.calls.add(task)
    try:
      yield group
    finally:
      group.calls.discard(task)

  def end(self, group: Group) -> None:
    """Nobody holds it, and nobody will."""
    self._lent.pop(group.lease, None)
    with contextlib.suppress(ValueError):
      self._waiting.remove(group)
    _recall(group)

  async def reconcile(self, name: str, leases: Sequence[int]) -> list[int]:
    """An explorer says what it has; which of that it has lost. What it has forgotten goes to others."""
    self.hear(name)
    since = time.monotonic() - self._silent_s  # It may not have heard yet of what it was just lent.
    held = [group for group in self._lent.values() if group.holder == name and group.lent < since]
    await self._lend_again([group for group in held if group.lease not in leases], f'{name} lost it')
    return [lease for lease in leases if lease not in self._lent]

  async def give_up(self, name: str, why: str) -> None:
    """An explorer is gone: others get its groups."""
    self._heard.pop(name, None)
    lost = [group for group in self._lent.values() if group.holder == name]
    if lost or why != 'left':
      logging.warning('explorers: %s %s; %d groups go to others', name, why, len(lost))
    await self._lend_again(lost, f'{name} {why}')

  async def give_up_silent(self) -> None:
    """Those that have said nothing for too long."""
    now = time.monotonic()
    for name in [name for name, heard in self._heard.items() if now - heard > self._silent_s]:
      await self.give_up(name, f'was silent for {self._silent_s:g} s')

  async def _lend_again(self, lost: list[Group], why: str) -> None:
    async with self._work:
      for group in reversed(lost):
        if self._lent.pop(group.lease, None) is None:  # It has ended meanwhile.
          continue
        self.counts['lost'] += 1
        group.losses += 1
        _recall(group)
        self._waiting.appendleft(group)
        if group.losses >= _MAX_LOSSES:
          taskset = group.order['task']['taskset']
          error = RunError(
            f'explorers: a group of taskset {taskset} was lost {group.losses} times, at last because {why}; a workflow '
            'may neither end its process nor block it for rollout.explorers.silent_s'
          )
          group.fail(error)
      self._work.notify(len(lost))


def _recall(group: Group) -> None:
  for call in [*group.calls]:
    if call is not asyncio.current_task():
      call.cancel()
  group.lease = group.holder = None
