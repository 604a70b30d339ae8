"""Leases of groups to explorers. A lease lends a group to one explorer; if that explorer is lost,
the group is lent to another.

Invariants: a group has at most one holder (the explorer to which it is lent). A lease is identified
by a secret name that only its holder can use. A lost lease becomes invalid, and requests made under
it are cancelled. Groups whose lease was lost are lent before groups that were never lent. Each
sample is accepted only once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.process_clock import ProcessClock
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import Roster, check_verdict
from jaxrl_llm.rollout.explorers.errands import Errands
from jaxrl_llm.rollout.explorers.generated import Generated
from jaxrl_llm.rollout.explorers.wire import TAKE_S
from jaxrl_llm.rollout.workflow import Rollout

_MAX_LOSSES = 5
"""Number of times that a group's lease is lost before the group itself is considered the cause. The
group then ends with an error.
"""
_MAX_EVICTED = 4096
"""Maximum number of evicted explorers to remember."""


class Gone(Exception):
  """Raised when the lease of a message is no longer valid, or when the group has ended."""

  def __init__(self, lease: str):
    super().__init__(f'lease {ascii(lease[:8])[1:-1]} is no longer held')


class Misbehaved(Exception):
  """Raised when an explorer sent a message that a correct explorer never sends. The explorer must
  be evicted.
  """


class SenderEvicted(Exception):
  """Raised when the sender of a message was evicted earlier."""


@dataclasses.dataclass(eq=False, kw_only=True)
class LentGroup:
  """A group of samples that the run has requested from explorers."""

  order: dict[str, Any]
  """Work order for the explorer: the task and the other arguments of `Workflow.run`, which are the
  visit, the stage, the number of samples and the sampling parameters.
  """
  name: str
  """Id of the group, `<stage>/<task uid>/<visit>`. It is the prefix of its samples' uids."""
  samples: int
  """Number of trajectories in the group."""
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  """Sampling parameters of the group."""
  max_steps: int = 1
  """Maximum number of steps of a trajectory."""
  handed_in: asyncio.Queue[Rollout | Exception] = dataclasses.field(default_factory=asyncio.Queue)
  """Queue through which the run receives finished trajectories. An exception in the queue ends the
  group and is raised in the run.
  """
  roster: Roster = dataclasses.field(init=False)
  """Record of the trajectories that have arrived."""
  lease: str | None = None
  """Secret name of the lease, known only to the holder and the master; None while the group is not
  lent.
  """
  generated: Generated = dataclasses.field(default_factory=Generated)
  """Completions that the engine has generated for the current lease of the group."""
  errands: Errands = dataclasses.field(default_factory=lambda: Errands(collections.Counter()))
  """Errands of the current holder: completions that it fetches from servers."""
  evicted_holders: set[str] = dataclasses.field(default_factory=set)
  """Labels of explorers that were evicted while the group was lent to them. A label is an
  explorer's name without the part that is derived from its secret.
  """
  holder: str | None = None
  """Name of the explorer to which the group is lent; None while the group waits for an explorer."""
  lent: float = 0.0
  """Monotonic time at which the group was lent to its holder."""
  losses: int = 0
  """Number of times that a lease of this group was lost."""
  calls: set[asyncio.Task] = dataclasses.field(default_factory=set)
  """asyncio tasks that serve the holder's pending requests."""

  def __post_init__(self):
    self.roster = Roster(self.name, self.samples, max_steps=self.max_steps)

  def hand_in(self, rollout: Rollout) -> bool:
    """Passes a trajectory on to the run. Returns False and does nothing if a trajectory with the
    same index has already arrived. Raises ValueError if the trajectory was not requested, or if one
    of its steps or its reward is invalid.
    """
    check_verdict(rollout)
    if not self.roster.take(rollout):
      return False
    self.handed_in.put_nowait(rollout)
    return True

  def fail(self, error: Exception) -> None:
    """Ends the group with an error, which is raised in the run."""
    self.handed_in.put_nowait(error)


class Leases:
  """Tracks the groups that the run has requested and the explorers that are connected.

  Attributes:
    counts: number of events by kind. `lost` counts leases whose holder fell silent, ended, left,
      was evicted, or no longer reported the lease. `late` counts messages under leases that were no
      longer valid. `evicted` counts evicted explorers.
  """

  def __init__(
    self,
    *,
    silent_s: float,
    groups: int | None = None,
    errands: Callable[[collections.Counter[str]], Errands] = Errands,
  ):
    """
    Args:
      silent_s: seconds without a message after which an explorer is considered lost.
      groups: maximum number of groups that one explorer holds; None for no limit.
      errands: creates the record of the errands of a lease, with the given counters.
    """
    self.counts: collections.Counter[str] = collections.Counter()
    self._silent_s, self._groups, self._make_errands = silent_s, groups, errands
    self._waiting: collections.deque[LentGroup] = collections.deque()
    self._lent: dict[str, LentGroup] = {}
    self._evicted: dict[str, str] = {}
    """Reason for each explorer's eviction, keyed by explorer name, oldest first."""
    self._heard: dict[str, float] = {}
    """Monotonic time of each explorer's last message, keyed by explorer name."""
    self._work = asyncio.Condition()
    self.clock = ProcessClock()
    """Clock of the time that the connected explorers spend in the activities 'work' (holding a
    group) and 'idle'.
    """

  @property
  def explorers(self) -> tuple[str, ...]:
    """Names of the connected explorers."""
    return tuple(self._heard)

  @property
  def groups(self) -> tuple[LentGroup, ...]:
    """Unfinished groups, waiting or lent."""
    return (*self._waiting, *self._lent.values())

  async def offer(self, group: LentGroup) -> None:
    """Queues a group, which any explorer may take."""
    async with self._work:
      self._waiting.append(group)
      self._work.notify_all()

  def admit(self, name: str) -> None:
    """Raises SenderEvicted if the explorer has been evicted. May be called in any thread."""
    if (why := self._evicted.get(name)) is not None:
      raise SenderEvicted(f'{name} was evicted: {why}')

  def hear(self, name: str) -> None:
    """Records that an explorer is connected and has just sent a message."""
    is_new = name not in self._heard
    self._heard[name] = time.monotonic()
    if is_new:
      self.clock.exist(len(self._heard))
      self._measure()

  def _measure(self) -> None:
    """Updates the clock with the number of explorers that currently have a group."""
    working = len(self._heard.keys() & {group.holder for group in self._lent.values()})
    self.clock.set({'work': working, 'idle': len(self._heard) - working})

  async def take(self, name: str) -> LentGroup | None:
    """Lends a group to this explorer. Returns None if no group becomes available within `TAKE_S`
    seconds.
    """
    self.hear(name)
    async with self._work:
      try:
        async with asyncio.timeout(TAKE_S):
          group = await self._work.wait_for(lambda: self._next(name))
      except TimeoutError:
        return None
      if name not in self._heard:  # The explorer was removed during the wait.
        return None
      self._waiting.remove(group)
    group.lease = secrets.token_hex(16)
    group.generated = Generated(group.sampling)
    group.errands = self._make_errands(self.counts)
    group.holder, group.lent = name, time.monotonic()
    self._lent[group.lease] = group
    self._measure()
    return group

  def _next(self, name: str) -> LentGroup | None:
    """Returns the first waiting group that this explorer may take, or None. A group is not lent to
    an explorer whose label is in its `evicted_holders`, unless that set contains all connected
    explorers. An explorer with the maximum number of groups may take none: a correct one asks only
    when it has fewer, unless it never got the reply with a group.
    """
    held = sum(group.holder == name for group in self._lent.values())
    if self._groups is not None and held >= self._groups:
      return None
    label = _label(name)
    for group in self._waiting:
      if (
        label not in group.evicted_holders
        or {_label(other) for other in self._heard} <= group.evicted_holders
      ):
        return group
    return None

  def held(self, lease: str, name: str) -> LentGroup:
    """Returns the group lent under a lease. Raises Gone if the lease is no longer valid, and
    Misbehaved if another explorer holds it. May be called in any thread.
    """
    group = self._lent.get(lease)
    holder = None if group is None else group.holder
    if group is None or not self.is_held(lease):  # The holder is that of the lease if it is held.
      raise Gone(lease)
    if holder != name:
      raise Misbehaved(f'used a lease of {holder}')
    return group

  def errands(self, lease: str, name: str) -> Errands:
    """Returns the errands of a lease. Raises the exceptions of `held`, and may be called in any
    thread, too.
    """
    errands = self.held(lease, name).errands
    if not self.is_held(lease):  # The group may have been lent again, with other errands.
      raise Gone(lease)
    return errands

  def note_late(self) -> None:
    """Counts a message under a lease that was no longer valid."""
    self.counts['late'] += 1

  def is_held(self, lease: str) -> bool:
    return lease in self._lent

  @contextlib.contextmanager
  def called(self, lease: str, name: str) -> Iterator[LentGroup]:
    """Yields the group lent under a lease, and cancels the current task if the lease ends during
    the block. Raises Gone if the lease is no longer valid, and Misbehaved if another explorer holds
    it.
    """
    group, task = self.held(lease, name), asyncio.current_task()
    group.calls.add(task)
    try:
      yield group
    finally:
      group.calls.discard(task)

  def end(self, group: LentGroup) -> None:
    """Removes the group and cancels its pending requests."""
    self._lent.pop(group.lease, None)
    self._measure()
    with contextlib.suppress(ValueError):
      self._waiting.remove(group)
    _recall(group)

  async def reconcile(self, name: str, leases: Sequence[str]) -> list[str]:
    """Compares the leases that an explorer reports with the leases recorded here. Returns the
    reported leases that the explorer no longer holds. If the explorer does not report a lease that
    it should hold, the lease's group is taken back and lent again.
    """
    self.hear(name)
    # An explorer may not yet have received a lease that was granted after this time.
    since = time.monotonic() - self._silent_s
    held = [group for group in self._lent.values() if group.holder == name and group.lent < since]
    await self._lend_again(
      [group for group in held if group.lease not in leases], f'{name} lost its lease'
    )
    return [
      lease for lease in leases if lease not in self._lent or self._lent[lease].holder != name
    ]

  async def give_up(self, name: str, why: str) -> None:
    """Removes a lost explorer, and queues its groups to be lent again."""
    self._heard.pop(name, None)
    self.clock.exist(len(self._heard))
    self._measure()
    lost = [group for group in self._lent.values() if group.holder == name]
    if lost or why != 'left':
      logging.warning('explorers: %s %s; %d groups go to others', name, why, len(lost))
    await self._lend_again(lost, f'{name} {why}')

  async def evict(self, name: str, why: str) -> None:
    """Evicts an explorer that misbehaved: refuses its later messages and queues its groups to be
    lent again.
    """
    self._evicted[name] = why
    if len(self._evicted) > _MAX_EVICTED:
      del self._evicted[next(iter(self._evicted))]
    self.counts['evicted'] += 1
    for group in self._lent.values():
      if group.holder == name:
        group.evicted_holders.add(_label(name))
    await self.give_up(name, f'was evicted: {why}')

  async def give_up_silent(self) -> list[str]:
    """Removes explorers that have sent no message for more than `silent_s` seconds, and returns
    their names.
    """
    now = time.monotonic()
    silent = [name for name, heard in self._heard.items() if now - heard > self._silent_s]
    for name in silent:
      await self.give_up(name, f'was silent for {self._silent_s:g} s')
    return silent

  async def _lend_again(self, lost: list[LentGroup], why: str) -> None:
    async with self._work:
      for group in reversed(lost):
        if self._lent.pop(group.lease, None) is None:  # The group has ended meanwhile.
          continue
        self.counts['lost'] += 1
        group.losses += 1
        _recall(group)
        self._measure()
        self._waiting.appendleft(group)
        if group.losses >= _MAX_LOSSES:
          taskset = group.order['task']['taskset']
          error = RunError(
            f'explorers: a group of taskset {taskset} was lost {group.losses} times, most recently '
            f'because {why}; a workflow must not end its process, block it for '
            'rollout.explorers.silent_s, or exceed the limits of the run'
          )
          group.fail(error)
      self._work.notify_all()


def _label(name: str) -> str:
  """Returns the name without the part derived from the secret."""
  return name.rpartition('/')[0]


def _recall(group: LentGroup) -> None:
  for call in [*group.calls]:
    if call is not asyncio.current_task():
      call.cancel()
  group.lease = group.holder = None
