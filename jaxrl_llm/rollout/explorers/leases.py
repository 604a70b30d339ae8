"""Who explores which group: lends each to one explorer at a time, and takes it back from one that is gone.

Invariants: a group is lent to one explorer at a time; nobody can guess a lease, and nobody but its holder can use it; a
lease that was lost is worth nothing, and what was asked under it is cancelled; a group that was lost goes out again
before those that nobody has begun; each sample is handed in once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.explorers.wire import TAKE_S
from jaxrl_llm.rollout.workflow import Roster

_MAX_LOSSES = 5
"""Losses of one group after which the group is taken for the cause."""
_MAX_EVICTED = 4096
"""Number of evicted names to remember."""


class Gone(Exception):
  """The lease is somebody else's by now, or its group has ended."""

  def __init__(self, lease: str):
    super().__init__(f'lease {ascii(lease[:8])[1:-1]} is not held any more')


class Misbehaved(Exception):
  """A message that no honest explorer would send; the sender is to be evicted."""


class Evicted(Exception):
  """The sender has misbehaved before."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Group:
  """A group that the master wants."""

  order: dict[str, Any]
  """The order that its explorer gets."""
  name: str
  """`<stage>/<task uid>/<visit>`, which its samples' names begin with."""
  samples: int
  handed_in: asyncio.Queue[tuple[Sample, str] | Exception] = dataclasses.field(default_factory=asyncio.Queue)
  """Samples with their texts; an error ends it."""
  roster: Roster = dataclasses.field(init=False)
  """The samples that were handed in."""
  lease: str | None = None
  """A secret of its holder and the master."""
  announced: set[tuple[Version, str]] = dataclasses.field(default_factory=set)
  """Versions, with their engines, that drew tokens for this lease."""
  spoiled_by: set[str] = dataclasses.field(default_factory=set)
  """Labels of the explorers that were evicted while they held it."""
  holder: str | None = None
  """Name of the explorer that has it; None: it waits."""
  lent: float = 0.0
  """When its holder got it."""
  losses: int = 0
  """How often an explorer lost it."""
  calls: set[asyncio.Task] = dataclasses.field(default_factory=set)
  """Answers that its holder waits for."""

  def __post_init__(self):
    self.roster = Roster(self.name, self.samples)

  def hand_in(self, sample: Sample, text: str) -> bool:
    """Whether it is the first of its index. Raises ValueError for one that was not asked for."""
    if not self.roster.take(sample):
      return False
    self.handed_in.put_nowait((sample, text))
    return True

  def fail(self, error: Exception) -> None:
    """Ends the wait for its samples."""
    self.handed_in.put_nowait(error)


class Leases:
  """The groups that are wanted, and the explorers that are there.

  Attributes:
    counts: `lost` leases whose holder fell silent, ended, left, was evicted or forgot them, `late` messages of such
      leases, `evicted` explorers.
  """

  def __init__(self, *, silent_s: float):
    """
    Args:
      silent_s: an explorer that says nothing for so long is gone.
    """
    self.counts: collections.Counter[str] = collections.Counter()
    self._silent_s = silent_s
    self._waiting: collections.deque[Group] = collections.deque()
    self._lent: dict[str, Group] = {}
    self._evicted: dict[str, str] = {}
    """Why, by name; the oldest first."""
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
      self._work.notify_all()

  def admit(self, name: str) -> None:
    """Raises Evicted."""
    if name in self._evicted:
      raise Evicted(f'{name} was evicted: {self._evicted[name]}')

  def hear(self, name: str) -> None:
    """An explorer has said something."""
    self._heard[name] = time.monotonic()

  async def take(self, name: str) -> Group | None:
    """A group for this explorer; None when none has come in time."""
    self.hear(name)
    async with self._work:
      try:
        async with asyncio.timeout(TAKE_S):
          group = await self._work.wait_for(lambda: self._next(name))
      except TimeoutError:
        return None
      if name not in self._heard:  # It has left, or was given up, meanwhile.
        return None
      self._waiting.remove(group)
    group.lease, group.announced = secrets.token_hex(16), set()
    group.holder, group.lent = name, time.monotonic()
    self._lent[group.lease] = group
    return group

  def _next(self, name: str) -> Group | None:
    """The first waiting group for this explorer: one that its label has spoiled is left to others, if there are any."""
    label = _label(name)
    for group in self._waiting:
      if label not in group.spoiled_by or {_label(other) for other in self._heard} <= group.spoiled_by:
        return group
    return None

  def held(self, lease: str, name: str) -> Group:
    """The group that this explorer has under this lease. Raises Gone, and Misbehaved where another explorer has it."""
    if lease not in self._lent:
      self.counts['late'] += 1
      raise Gone(lease)
    group = self._lent[lease]
    if group.holder != name:
      raise Misbehaved(f'used a lease of {group.holder}')
    return group

  def is_held(self, lease: str) -> bool:
    return lease in self._lent

  @contextlib.contextmanager
  def called(self, lease: str, name: str) -> Iterator[Group]:
    """The call of this task is cancelled when the lease ends. Raises Gone and Misbehaved, as `held`."""
    group, task = self.held(lease, name), asyncio.current_task()
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

  async def reconcile(self, name: str, leases: Sequence[str]) -> list[str]:
    """An explorer says what it has; which of that it has lost. What it has forgotten goes to others."""
    self.hear(name)
    since = time.monotonic() - self._silent_s  # It may not have heard yet of what it was just lent.
    held = [group for group in self._lent.values() if group.holder == name and group.lent < since]
    await self._lend_again([group for group in held if group.lease not in leases], f'{name} lost it')
    return [lease for lease in leases if lease not in self._lent or self._lent[lease].holder != name]

  async def give_up(self, name: str, why: str) -> None:
    """An explorer is gone: others get its groups."""
    self._heard.pop(name, None)
    lost = [group for group in self._lent.values() if group.holder == name]
    if lost or why != 'left':
      logging.warning('explorers: %s %s; %d groups go to others', name, why, len(lost))
    await self._lend_again(lost, f'{name} {why}')

  async def evict(self, name: str, why: str) -> None:
    """An explorer has misbehaved: all its messages are refused from now on, and others get its groups."""
    self._evicted[name] = why
    if len(self._evicted) > _MAX_EVICTED:
      del self._evicted[next(iter(self._evicted))]
    self.counts['evicted'] += 1
    for group in self._lent.values():
      if group.holder == name:
        group.spoiled_by.add(_label(name))
    await self.give_up(name, f'was evicted: {why}')

  async def give_up_silent(self) -> list[str]:
    """Gives up the explorers that have said nothing for too long; their names."""
    now = time.monotonic()
    silent = [name for name, heard in self._heard.items() if now - heard > self._silent_s]
    for name in silent:
      await self.give_up(name, f'was silent for {self._silent_s:g} s')
    return silent

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
            "may neither end its process, nor block it for rollout.explorers.silent_s, nor break the run's limits"
          )
          group.fail(error)
      self._work.notify_all()


def _label(name: str) -> str:
  """The name without the part that the secret determines."""
  return name.rpartition('/')[0]


def _recall(group: Group) -> None:
  for call in [*group.calls]:
    if call is not asyncio.current_task():
      call.cancel()
  group.lease = group.holder = None
