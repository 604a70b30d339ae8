"""Explorer: takes groups from tasks to rollouts, scores and the store, in the order in which the gate admits them.

Invariant: every issued sample reaches one state in the store (admitted, or dropped with a reason), and a closed batch
is a function of which groups started and what they scored, never of which ended first.

With a bound above 0, groups are in flight at a commit, and its state lists them. A resumed explorer takes those that
had ended by then from the store and runs the others again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.core.errors import RunError, first_cause
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.waits import IdleClock, bounded
from jaxrl_llm.master.exploring.gate import Gate
from jaxrl_llm.master.exploring.judging import judge, judge_group
from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.processors import Processor, process
from jaxrl_llm.master.exploring.recall import recall
from jaxrl_llm.master.exploring.selection import (
  Chosen,
  Scored,
  SelectionConfig,
  choose,
  experience_rows,
)
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.tables import Issue
from jaxrl_llm.rewards.api import RewardsConfig, drops_group
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.workflow import Workflow, checked_run
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.sampler import TaskSampler

_TIMEOUT, _STRAGGLER = 'timeout', 'straggler'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorerConfig:
  """Exploration settings of a stage."""

  groups_per_batch: int
  """Tasks per batch."""
  group_size: int = 8
  """Samples per task."""
  temperature: float = 1.0
  processors: tuple[tuple[str, Processor], ...] = ()
  """(name, processor) pairs that run, in order, on a finished group."""
  selection: SelectionConfig = SelectionConfig()
  """Which samples of a group are trained on."""
  max_dropped_groups: int = 100
  """Maximum groups dropped (nothing scorable, or selected) while collecting one batch; one more ends the run."""
  limits: TaskLimits = TaskLimits()
  collect_deadline_s: float = 3600.0
  """Longest wait for a batch, in seconds."""


@dataclasses.dataclass(kw_only=True)
class _Group:
  """Started group that no batch has taken yet."""

  task: Task
  visit: int
  chosen: list[Chosen] | None = None
  """Members that may enter a batch; None until the group has ended."""
  rolled_out: float = 0.0
  """Monotonic time at which its last sample ended; 0 if that was before this start of the run."""
  scored: float = 0.0


class Explorer:
  """Keeps as many groups in flight as the gate admits, and returns closed batches.

  Attributes:
    clock_decisions: number of group tries that `TaskLimits` ended.
  """

  def __init__(
    self,
    config: ExplorerConfig,
    *,
    stage: str,
    workflow: Workflow,
    sampler: TaskSampler,
    scorers: ScorerPool,
    rewards: RewardsConfig,
    store: ReplayStore,
    gate: Gate,
    earlier: Sequence[str],
    events: Events = SILENT,
  ):
    """
    Args:
      earlier: previous stages of the run; visit numbers of a task continue from theirs.
    """
    self._config, self._stage, self._earlier = config, stage, earlier
    self._workflow, self._sampler, self._scorers, self._rewards = workflow, sampler, scorers, rewards
    self._store, self._gate = store, gate
    self._events = events
    self._step = 0
    self._started = 0
    self.clock_decisions = 0
    self._groups: dict[int, _Group] = {}
    """By group number, in order of start."""
    self._visits: dict[str, int] = {}
    """Visits by earlier stages, by prompt. A repeated visit number would draw the same noise."""
    self._handed_out: set[str] = set()
    """Names of the groups in a batch that is not completed yet."""
    self._outcomes: dict[int, tuple[str, int, int]] = {}
    """By number of an ended group: task uid, correct samples, scorable samples."""
    self._scoring_s = 0.0
    self._durations: collections.deque[float] = collections.deque(maxlen=4 * config.groups_per_batch)
    """Durations, in seconds, of the groups that ended last."""
    self._clock = IdleClock()
    self._progress = asyncio.Event()
    self._counts: collections.Counter[str] = collections.Counter()
    self._running: asyncio.Task | None = None

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Explores while the block runs; drops samples in flight at its end with reason 'given up'.

    The commit for a signal comes first, so a restarted run still has them.
    """
    self._clock = IdleClock()
    if self._earlier:
      for uid, count in (await asyncio.to_thread(self._store.visits, self._earlier)).items():
        self._visits[_prompt(uid)] = max(count, self._visits.get(_prompt(uid), 0))
    self._running = asyncio.create_task(self._explore())
    try:
      yield
    finally:
      self._running.cancel()
      await asyncio.gather(self._running, return_exceptions=True)
      self._running = None
      in_hand = {self._name(group.task, group.visit) for group in self._groups.values()} | self._handed_out
      live = [entry for entry in self._store.live() if entry.attempt == self._store.attempt]
      unfinished = [entry for entry in live if entry.group_id in in_hand]
      self._store.drop([entry.uid for entry in unfinished], 'given up', self._step)
      for group in dict.fromkeys(entry.group_id for entry in unfinished):
        self._events.message(Edge.DROP, group=group, reason='given up')

  def advance(self, step: int, served: int) -> None:
    """Records that `step` batches of the run are complete, and `served` of this stage are in the engines' weights."""
    self.completed(step)
    self._gate.advance(served)

  def completed(self, step: int) -> None:
    """Stamps store changes from here on with `step` completed batches."""
    self._step, self._handed_out = step, set()

  async def collect(self) -> tuple[list[Chosen], dict[str, int]]:
    """Returns the next batch: its chosen samples in order of issue, and the counters of its collection.

    Raises:
      WaitExpired: after `collect_deadline_s`.
      RunError: more than `max_dropped_groups` groups were dropped.
      Exception: the error of the engine or a scorer that ended exploration.
    """
    ready = asyncio.ensure_future(
      bounded(
        self._batch_ready(),
        name='collect',
        owner='the loop',
        waits_for=f'{self._config.groups_per_batch} groups of stage {self._stage} from the engine and the scorers '
        '(rollout.collect_deadline_s)',
        deadline_s=self._config.collect_deadline_s,
      )
    )
    try:
      # wait collect: the bound of `ready`
      await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
      await (ready if ready.done() else self._running)  # wait collect: none, it is done
    finally:
      ready.cancel()  # no effect if it is done
    first = self._first()
    self._tell(first[-1])
    groups = [self._groups.pop(number) for number in first]
    batch = [member for group in groups for member in group.chosen]
    self._scoring_s += max(group.scored for group in groups) - max(group.rolled_out for group in groups)
    self._handed_out = {self._name(group.task, group.visit) for group in groups}
    counts, self._counts = dict(self._counts), collections.Counter()
    return batch, counts

  def _tell(self, last: int) -> None:
    """Reports the outcomes of groups up to number `last`, all of them ended, to the sampler in order.

    With a bound of 0 nothing is drawn meanwhile. Above it, timing decides whether replacements for dropped groups of a
    later batch are drawn before or after this.
    """
    for number in sorted(number for number in self._outcomes if number <= last):
      self._sampler.feedback(*self._outcomes.pop(number))

  def _first(self) -> list[int]:
    """Numbers of the next batch's groups, as far as they have started."""
    return list(itertools.islice(self._groups, self._config.groups_per_batch))

  async def _batch_ready(self) -> None:
    # First started, not first ended: fast groups would bias the batch towards short answers.
    ended = lambda number: self._groups[number].chosen is not None
    while len(first := self._first()) < self._config.groups_per_batch or not all(map(ended, first)):
      self._progress.clear()
      await self._progress.wait()  # wait collect: bounded by the caller

  async def _explore(self) -> None:
    try:
      async with asyncio.TaskGroup() as groups:
        await self._gate.opened()
        self._start(groups, {number: group for number, group in self._groups.items() if group.chosen is None})
        while True:
          count = await self._gate.admit()
          new = {self._started + i: self._draw() for i in range(count)}
          self._started += count
          self._groups |= new
          self._start(groups, new)
    except BaseExceptionGroup as group:
      raise first_cause(group) from None

  def _draw(self) -> _Group:
    task, visit = self._sampler.next()
    return _Group(task=task, visit=self._visits.get(_prompt(task.uid), 0) + visit)

  def _start(self, tasks: asyncio.TaskGroup, groups: Mapping[int, _Group]) -> None:
    with self._store.transaction():
      self._store.offer([group.task for group in groups.values()], self._step)
      self._store.issue([row for group in groups.values() for row in self._issued(group.task, group.visit)], self._step)
    for number, group in groups.items():
      self._events.message(Edge.TASK, group=self._name(group.task, group.visit))
      tasks.create_task(self._group(number, group.task, group.visit))

  def _name(self, task: Task, visit: int) -> str:
    return f'{self._stage}/{task.uid}/{visit}'

  def _issued(self, task: Task, visit: int) -> list[Issue]:
    group = self._name(task, visit)
    return [
      Issue(uid=f'{group}/{i}', group_id=group, task_id=task.uid, visit=visit) for i in range(self._config.group_size)
    ]

  def take_scoring(self) -> float:
    """Seconds, since the previous call, that batches waited for scores after their last rollout ended."""
    seconds, self._scoring_s = self._scoring_s, 0.0
    return seconds

  def take_idle(self) -> float:
    """Seconds, since the previous call, without a group in progress."""
    return self._clock.take() if self._running is not None else 0.0

  def state(self) -> Any:
    """JSON state: groups in flight, and ended groups that wait for their batch. Empty at a bound of 0."""
    groups = [
      {'number': number, 'task': group.task.uid, 'visit': group.visit, 'ended': group.chosen is not None}
      for number, group in self._groups.items()
    ]
    outcomes = [[number, *outcome] for number, outcome in self._outcomes.items()]
    return {'started': self._started, 'groups': groups, 'outcomes': outcomes, 'counts': dict(self._counts)}

  def restore(self, state: Any) -> None:
    """Continues from the state of the commit that the store was recovered to; call before `running`."""
    self._started, self._counts = state['started'], collections.Counter(state['counts'])
    self._outcomes = {number: tuple(outcome) for number, *outcome in state['outcomes']}
    for group in state['groups']:
      task, visit = self._sampler.task(group['task']), group['visit']
      chosen = self.stored(task, visit) if group['ended'] else None
      self._groups[group['number']] = _Group(task=task, visit=visit, chosen=chosen)

  def stored(self, task: Task, visit: int) -> list[Chosen]:
    """Reads the chosen samples of a group from the store."""
    return self.recall([row.uid for row in self._issued(task, visit)])

  def recall(self, uids: Sequence[str]) -> list[Chosen]:
    """Reads the chosen ones among these samples from the store."""
    return recall(self._store, uids, tasks=self._sampler.task, text=self._workflow.text, rewards=self._rewards)

  async def _group(self, number: int, task: Task, visit: int) -> None:
    """Takes one group from rollout to admission, or gives it up."""
    with self._clock.busy():
      for tried in range(self._config.limits.retries + 1):
        (given_up, seconds), begun = self._limit(), time.monotonic()
        try:
          async with asyncio.timeout(seconds) as limit:
            members = await self._attempts(self._groups[number])
          break
        except TimeoutError:
          if not limit.expired():
            raise
          self.clock_decisions += 1
          if given_up == _STRAGGLER or tried == self._config.limits.retries:
            self._give_up(number, task, visit, given_up)
            return
    self._durations.append(time.monotonic() - begun)
    self._admit(number, members)

  def _limit(self) -> tuple[str, float | None]:
    """Reason and limit, in seconds, for giving up a group that starts now."""
    limits = self._config.limits
    if limits.straggler_factor is not None and len(self._durations) >= self._config.groups_per_batch:
      mean = sum(self._durations) / len(self._durations)
      if limits.timeout_s is None or limits.straggler_factor * mean < limits.timeout_s:
        return _STRAGGLER, limits.straggler_factor * mean
    return _TIMEOUT, limits.timeout_s

  def _give_up(self, number: int, task: Task, visit: int, reason: str) -> None:
    issued = self._issued(task, visit)
    self._store.drop([row.uid for row in issued], reason, self._step)
    self._counts[f'dropped/{reason}'] += len(issued)
    self._drop_group(number, reason, f'task {task.uid} took too long ({reason}, limits {self._config.limits})')
    self._progress.set()

  async def _attempts(self, group: _Group) -> list[Scored]:
    """Rolls out the group's samples, scores each as it ends, then judges them as a group."""
    task, visit = group.task, group.visit
    name, count = self._name(task, visit), self._config.group_size
    open_requests = {Edge.ROLLOUT: self._events.request(Edge.ROLLOUT, group=name, count=count)}
    try:
      async with asyncio.TaskGroup() as scoring:
        pending = []
        runs = checked_run(
          self._workflow,
          task,
          visit,
          stage=self._stage,
          samples=self._config.group_size,
          sampling=Sampling(temperature=self._config.temperature),
        )
        async for sample, completion in runs:
          if Edge.EVAL not in open_requests:
            open_requests[Edge.EVAL] = self._events.request(Edge.EVAL, group=name, count=count)
          judging = judge(sample, completion, task, self._scorers, self._rewards)
          pending.append(scoring.create_task(judging))
        group.rolled_out = time.monotonic()
        self._events.reply(open_requests.pop(Edge.ROLLOUT), count=len(pending))
      members = await judge_group([p.result() for p in pending], self._scorers, self._rewards)
      group.scored = time.monotonic()
      self._events.reply(open_requests.pop(Edge.EVAL), count=len(pending))
    finally:
      for asked in open_requests.values():
        self._events.reply(asked, given_up=True)
    return members

  def _admit(self, number: int, members: list[Scored]) -> None:
    """Stores a finished group; drops unscorable and unselected samples, and the group if none is left."""
    scorer_failed = drops_group((s for m in members for s in m.scores), self._rewards)
    scorable = [m for m in members if m.reward.value is not None]
    unscorable = [m.sample.uid for m in members if m.reward.value is None]
    if scorable:
      correct = sum(bool(m.reward.correct) for m in scorable)
      self._outcomes[number] = (scorable[0].task.uid, correct, len(scorable))
    verified = process(self._config.processors, scorable, self._step)
    chosen = choose(self._config.selection, verified.members) if verified.members else []
    admitted = dict.fromkeys(c.scored.sample.uid for c in chosen)
    left = [m.sample.uid for m in verified.members if m.sample.uid not in admitted]
    dropped = {'scorer_failed' if scorer_failed else 'unscorable': unscorable, **verified.dropped, 'not_selected': left}
    asked = self._events.request(Edge.STORE, group=members[0].sample.group_id, count=len(members))
    with self._store.transaction():
      self._store.append([m.sample for m in members], self._step)
      self._store.score([s for m in members for s in m.scores], self._step)
      self._store.derive([*verified.lineage, *experience_rows(chosen)], self._step)
      self._store.admit([*admitted], self._step)
      for reason, uids in dropped.items():
        if uids:
          self._store.drop(uids, reason.replace('_', ' '), self._step)
    self._events.reply(asked, admitted=len(admitted))
    self._counts.update({f'dropped/{reason}': len(uids) for reason, uids in dropped.items()})
    self._counts.update({f'processors/{name}': count for name, count in verified.counts.items()})
    if chosen:
      self._groups[number].chosen = chosen
    else:
      self._drop_group(number, 'scorer failed' if scorer_failed else 'nothing to learn from', self._why(members))
    self._progress.set()

  def _drop_group(self, number: int, reason: str, why: str) -> None:
    group = self._groups.pop(number)
    self._events.message(Edge.DROP, group=self._name(group.task, group.visit), reason=reason)
    self._counts['dropped/groups'] += 1
    if self._counts['dropped/groups'] > self._config.max_dropped_groups:
      raise RunError(
        f'stage {self._stage}: of {self._counts["dropped/groups"]} groups nothing could be learned while one batch was '
        f'collected, max_dropped_groups is {self._config.max_dropped_groups}; the last: {why}'
      )
    self._gate.drop()

  def _why(self, members: list[Scored]) -> str:
    failed = [s for m in members if m.reward.value is None for s in m.scores if s.value is None]
    if len({m.reward.value for m in members}) == 1 and failed:
      first = failed[0]
      return f'scorer {first.scorer} {first.status}: {dict(first.evidence)}; look at the tasks and at the scorer'
    rewards = [m.reward.worth for m in members]
    return (
      f'rewards {rewards}, of which selection {self._config.selection.kind!r} takes none; the tasks are too easy or '
      'too hard for this policy, or the group is too small'
    )


def _prompt(uid: str) -> str:
  """Part of a task's uid that the same prompt has in every taskset."""
  return uid.rpartition(':')[2]
