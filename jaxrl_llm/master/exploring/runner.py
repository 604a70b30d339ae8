"""Runs a group within time limits: generates its samples, scores each sample when it ends, and then
scores the group as a whole.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from jaxrl_llm.core.records.span import Span
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.judging import judge, judge_group
from jaxrl_llm.master.exploring.partial import (
  GroupCut,
  PartialGenerator,
  keep_loss,
)
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.workflow import Rollout, Workflow
from jaxrl_llm.runtime.events import SILENT, Edge, Events

_TIMEOUT, _STRAGGLER = 'timeout', 'straggler'

Placed = Callable[[], Awaitable[bool]]


class GroupOrder(NamedTuple):
  """A group to roll out and score."""

  name: str
  """Id of the group."""
  task: Task
  visit: int
  sampling: Sampling
  spans: Sequence[Sequence[Span]] = ()
  """Spans (runs of tokens) that earlier batches generated for each sample, in order of sample
  index. Empty without partial rollouts.
  """


class Judged(NamedTuple):
  """A group whose samples are all generated and scored."""

  members: list[Experience]
  """Scored samples, ordered by sample index."""
  rolled_out: float
  """Monotonic time, in seconds, at which the group's last sample ended."""
  scored: float
  """Monotonic time, in seconds, at which the group's last score arrived."""


class GroupExpired(Exception):
  """Raised when a group exceeded its time limits. The argument is the drop reason, 'timeout' or
  'straggler'.
  """


class GroupRunner:
  """Rolls out and scores a stage's groups within `TaskLimits`.

  Attributes:
    workflow: generates the samples.
    scorers: pool that scores the samples.
    clock_decisions: number of tries (runs of a group) that a time limit has ended, plus the number
      of iterations of partial rollouts that ended because there was no request or answer for too
      long.
  """

  def __init__(
    self,
    config: ExplorerConfig,
    *,
    workflow: Workflow,
    scorers: ScorerPool,
    events: Events = SILENT,
    take_tokens: Callable[[str], int] | None = None,
    partials: PartialGenerator | None = None,
    may_repeat: bool = False,
  ):
    """
    Args:
      partials: generator of the workflow's completions. Required with partial rollouts, and with
        `may_repeat`.
      may_repeat: whether the workflow of a group may be run again from its beginning, which happens
        if the explorer process that runs it is lost.
      take_tokens: takes the name of a group, and returns the number of tokens that were generated
        for the group since the last call. If None, tokens that no sample contains are not counted.
    """
    self.workflow, self.scorers = workflow, scorers
    self.take_tokens, self._partials, self._may_repeat = take_tokens, partials, may_repeat
    self._config, self._events = config, events
    self.clock_decisions = 0
    self._durations: collections.deque[float] = collections.deque(
      maxlen=4 * config.groups_per_batch
    )
    """Durations of the most recent successful tries, in seconds."""

  async def run(self, order: GroupOrder, *, placed: Placed | None = None) -> Judged:
    """Generates and scores a group. Tries again if a try times out.

    Args:
      placed: function that is called once the group's samples are finished. It waits until it is
        known whether the batch takes the group, and returns True if so. If None, the group is
        always scored.

    Raises:
      GroupCut: a sample has spent its budget, or the batch does not take the group. A later
        iteration continues the group.
      GroupExpired: the last permitted try timed out, or a try exceeded the straggler limit.
    """
    limits = self._config.limits
    for tried in itertools.count():
      (reason, seconds), begun = self._limit(), time.monotonic()
      try:
        async with asyncio.timeout(seconds) as limit:
          hold = _Hold(limit)
          untimed = None if placed is None else functools.partial(hold.wait, placed)
          judged = await self._run(order, untimed)
      except TimeoutError:
        if not limit.expired():
          raise
        self.clock_decisions += 1
        if reason == _STRAGGLER or tried == limits.retries:
          raise GroupExpired(reason) from None
      except GroupCut as cut:
        self.clock_decisions += cut.by_clock
        raise
      else:
        self._durations.append(time.monotonic() - begun - hold.waited_s)
        return judged

  def _limit(self) -> tuple[str, float | None]:
    """Returns (reason, seconds): a try that starts now is ended after this many seconds, for this
    reason. `seconds` is None if there is no limit.
    """
    limits = self._config.limits
    if (
      limits.straggler_factor is not None and len(self._durations) >= self._config.groups_per_batch
    ):
      mean = sum(self._durations) / len(self._durations)
      if limits.timeout_s is None or limits.straggler_factor * mean < limits.timeout_s:
        return _STRAGGLER, limits.straggler_factor * mean
    return _TIMEOUT, limits.timeout_s

  async def _generate(self, order: GroupOrder, placed: Placed | None) -> AsyncIterator[Rollout]:
    """Returns an iterator over the group's trajectories with their texts. With partial rollouts,
    first waits until all trajectories are finished, since an unfinished group is not scored.
    """
    config = self._config
    rollouts = checked_run(
      self.workflow,
      order.task,
      order.visit,
      stage=config.stage,
      samples=config.group_size,
      sampling=order.sampling,
      max_steps=config.max_steps,
    )
    if config.partial is None and self._may_repeat:
      return self._partials.keep(order.name, config.group_size, rollouts)
    if config.partial is None:
      return rollouts
    whole = await self._partials.collect(order.name, config.partial, order.spans, rollouts)
    if placed is not None and not await placed():
      raise GroupCut({})
    return _each(whole)

  async def _run(self, order: GroupOrder, placed: Placed | None) -> Judged:
    count, rewards = self._config.group_size, self.scorers.config
    open_requests = {
      Edge.ROLLOUT: self._events.request(Edge.ROLLOUT, group=order.name, count=count)
    }
    try:
      try:
        runs = await self._generate(order, placed)
      except GroupCut:
        self._events.reply(open_requests.pop(Edge.ROLLOUT), count=0)
        raise
      async with asyncio.TaskGroup() as scoring:
        pending = []
        async for rollout in runs:
          if Edge.EVAL not in open_requests:
            open_requests[Edge.EVAL] = self._events.request(
              Edge.EVAL, group=order.name, count=count
            )
          pending.append(scoring.create_task(judge(rollout, order.task, self.scorers, rewards)))
        rolled_out = time.monotonic()
        self._events.reply(open_requests.pop(Edge.ROLLOUT), count=len(pending))
      members = await judge_group([p.result() for p in pending], self.scorers, rewards)
      if self._config.partial is not None:
        members = keep_loss(members, self._config.partial)
      scored = time.monotonic()
      self._events.reply(open_requests.pop(Edge.EVAL), count=len(pending))
    finally:
      for asked in open_requests.values():
        self._events.reply(asked, given_up=True)
    return Judged(members, rolled_out, scored)


@dataclasses.dataclass
class _Hold:
  """Measures how long a try waits for its group's place in the batch. This wait is left out of the
  duration of the try, and does not count towards its time limit.
  """

  limit: asyncio.Timeout
  waited_s: float = 0.0

  async def wait(self, placed: Placed) -> bool:
    """Returns the result of `placed`, and extends the time limit by the duration of the wait."""
    loop, deadline = asyncio.get_running_loop(), self.limit.when()
    begun = loop.time()
    self.limit.reschedule(None)
    try:
      return await placed()
    finally:
      self.waited_s = loop.time() - begun
      if deadline is not None:
        self.limit.reschedule(deadline + self.waited_s)


async def _each(rollouts: Iterable[Rollout]) -> AsyncIterator[Rollout]:
  for rollout in rollouts:
    yield rollout
