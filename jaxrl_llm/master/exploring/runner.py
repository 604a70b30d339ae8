"""Runs a group within its time limits: rolls out its samples, scores each as it ends, then scores
the whole group.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import time
from typing import NamedTuple

from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.judging import judge, judge_group
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.workflow import Workflow, checked_run
from jaxrl_llm.runtime.events import SILENT, Edge, Events

_TIMEOUT, _STRAGGLER = 'timeout', 'straggler'


class Judged(NamedTuple):
  """A group that has ended."""

  members: list[Experience]
  """Samples in order of issue."""
  rolled_out: float
  """Monotonic time at which its last sample ended."""
  scored: float
  """Monotonic time at which its last score arrived."""


class GroupExpired(Exception):
  """A group exceeded its limits; the argument is the reason for dropping it."""


class GroupRunner:
  """Rolls out and scores a stage's groups within `TaskLimits`.

  Attributes:
    workflow: generates the samples.
    scorers: pool that scores the samples.
    clock_decisions: number of tries of a group that a time limit cut short.
  """

  def __init__(
    self,
    config: ExplorerConfig,
    *,
    workflow: Workflow,
    scorers: ScorerPool,
    events: Events = SILENT,
  ):
    self.workflow, self.scorers = workflow, scorers
    self._config, self._events = config, events
    self.clock_decisions = 0
    self._durations: collections.deque[float] = collections.deque(
      maxlen=4 * config.groups_per_batch
    )
    """Durations, in seconds, of the groups that ended last."""

  async def run(self, name: str, task: Task, visit: int) -> Judged:
    """Rolls out and scores group `name`; retries if it times out. Raises GroupExpired when its
    tries are used up.
    """
    limits = self._config.limits
    for tried in itertools.count():
      (reason, seconds), begun = self._limit(), time.monotonic()
      try:
        async with asyncio.timeout(seconds) as limit:
          judged = await self._run(name, task, visit)
      except TimeoutError:
        if not limit.expired():
          raise
        self.clock_decisions += 1
        if reason == _STRAGGLER or tried == limits.retries:
          raise GroupExpired(reason) from None
      else:
        self._durations.append(time.monotonic() - begun)
        return judged

  def _limit(self) -> tuple[str, float | None]:
    """Returns (reason, seconds): why and when to give up a group that starts now."""
    limits = self._config.limits
    if (
      limits.straggler_factor is not None and len(self._durations) >= self._config.groups_per_batch
    ):
      mean = sum(self._durations) / len(self._durations)
      if limits.timeout_s is None or limits.straggler_factor * mean < limits.timeout_s:
        return _STRAGGLER, limits.straggler_factor * mean
    return _TIMEOUT, limits.timeout_s

  async def _run(self, name: str, task: Task, visit: int) -> Judged:
    count, rewards = self._config.group_size, self.scorers.config
    open_requests = {Edge.ROLLOUT: self._events.request(Edge.ROLLOUT, group=name, count=count)}
    try:
      async with asyncio.TaskGroup() as scoring:
        pending = []
        runs = checked_run(
          self.workflow,
          task,
          visit,
          stage=self._config.stage,
          samples=count,
          sampling=Sampling(temperature=self._config.temperature),
        )
        async for sample, completion in runs:
          if Edge.EVAL not in open_requests:
            open_requests[Edge.EVAL] = self._events.request(Edge.EVAL, group=name, count=count)
          pending.append(
            scoring.create_task(judge(sample, completion, task, self.scorers, rewards))
          )
        rolled_out = time.monotonic()
        self._events.reply(open_requests.pop(Edge.ROLLOUT), count=len(pending))
      members = await judge_group([p.result() for p in pending], self.scorers, rewards)
      scored = time.monotonic()
      self._events.reply(open_requests.pop(Edge.EVAL), count=len(pending))
    finally:
      for asked in open_requests.values():
        self._events.reply(asked, given_up=True)
    return Judged(members, rolled_out, scored)
