"""Tasks to rollouts to scores to the store: groups, in the order in which the gate let them start.

Invariant: every issued sample reaches one state in the store (admitted, or dropped with a reason), and a closed batch
is a function of which groups started and what they scored, never of which ended first.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator

from jaxrl_llm.core.errors import RunError, first_cause
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.experience.sample import Sample
from jaxrl_llm.experience.task import Task
from jaxrl_llm.master.gate import Gate
from jaxrl_llm.master.selection import Chosen, Scored, SelectionConfig, choose
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.tables import Issue
from jaxrl_llm.rewards.api import Attempt, RewardsConfig, combine
from jaxrl_llm.rewards.pool import ScorerPool
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.workflow import SingleTurn
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.sampler import TaskSampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorerConfig:
  """How a stage explores; every number states its unit."""

  groups_per_batch: int
  """Tasks of a batch."""
  group_size: int = 8
  """Samples of a task."""
  temperature: float = 1.0
  selection: SelectionConfig = SelectionConfig()
  """What of a group is learned from."""
  max_dropped_groups: int = 100
  """Groups dropped (nothing of them scorable, or selected) while one batch is collected; one more ends the run."""
  collect_deadline_s: float = 3600.0
  """Longest wait for a batch."""


class Explorer:
  """Keeps as many groups in flight as the gate admits, and hands out closed batches."""

  def __init__(
    self,
    config: ExplorerConfig,
    *,
    stage: str,
    workflow: SingleTurn,
    sampler: TaskSampler,
    scorers: ScorerPool,
    rewards: RewardsConfig,
    store: ReplayStore,
    gate: Gate,
    events: Events = SILENT,
  ):
    self._config, self._stage = config, stage
    self._workflow, self._sampler, self._scorers, self._rewards = workflow, sampler, scorers, rewards
    self._store, self._gate = store, gate
    self._events = events
    self._step = 0
    self._started = 0
    self._groups: dict[int, list[Chosen] | None] = {}
    """By number, in the order of start, those that may enter a batch; None until a group has ended."""
    self._outcomes: dict[int, tuple[str, int, int]] = {}
    """By number, of groups that have ended: the task, how many attempts succeeded, how many there were."""
    self._progress = asyncio.Event()
    self._counts: collections.Counter[str] = collections.Counter()
    self._running: asyncio.Task | None = None

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Explores while the block runs; what is in flight at its end is given up, and dropped with that reason."""
    self._running = asyncio.create_task(self._explore())
    try:
      yield
    finally:
      self._running.cancel()
      await asyncio.gather(self._running, return_exceptions=True)
      own = [entry for entry in self._store.live() if entry.attempt == self._store.attempt]
      self._store.drop([entry.uid for entry in own], 'given up', self._step)
      for group in dict.fromkeys(entry.group_id for entry in own):
        self._events.message(Edge.DROP, group=group, reason='given up')

  def advance(self, step: int, served: int) -> None:
    """The engines serve the weights of `step` (`served` batches into this stage)."""
    self._step = step
    self._gate.advance(served)

  async def collect(self) -> tuple[list[Chosen], dict[str, int]]:
    """The next batch: its chosen samples in the order of issue, and what was counted on the way.

    Raises:
      WaitExpired: at `collect_deadline_s`.
      RunError: when too many groups come of which nothing can be learned.
      Exception: what ended the exploring: the engine's or a scorer's own error.
    """
    ready = asyncio.ensure_future(
      bounded(
        self._batch_ready(),
        name='collect',
        owner='the loop',
        waits_for=f'{self._config.groups_per_batch} groups of stage {self._stage} from the engine and the scorers',
        deadline_s=self._config.collect_deadline_s,
      )
    )
    try:
      await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
      await (ready if ready.done() else self._running)
    finally:
      ready.cancel()  # without effect on one that is done
    first = self._first()
    self._tell(first[-1])
    batch = [member for number in first for member in self._groups.pop(number)]
    counts, self._counts = dict(self._counts), collections.Counter()
    return batch, counts

  def _tell(self, last: int) -> None:
    """Tells the sampler what became of the groups up to number `last`, in their order; all of them have ended.

    With a bound of 0 nothing is drawn meanwhile. Above it, groups that replace dropped ones of a later batch would be
    drawn before or after this, as time has it.
    """
    for number in sorted(number for number in self._outcomes if number <= last):
      self._sampler.feedback(*self._outcomes.pop(number))

  def _first(self) -> list[int]:
    """Numbers of the groups that make the next batch, as far as they have started."""
    return list(itertools.islice(self._groups, self._config.groups_per_batch))

  async def _batch_ready(self) -> None:
    # The first that started, not the first that ended: fast groups would bias the batch to short answers.
    while len(first := self._first()) < self._config.groups_per_batch or None in map(self._groups.get, first):
      self._progress.clear()
      await self._progress.wait()

  async def _explore(self) -> None:
    try:
      async with asyncio.TaskGroup() as groups:
        while True:
          draws = [self._sampler.next() for _ in range(await self._gate.admit())]
          self._store.issue([row for task, visit in draws for row in self._issued(task, visit)], self._step)
          for task, visit in draws:
            self._groups[self._started] = None
            self._events.message(Edge.TASK, group=self._name(task, visit))
            groups.create_task(self._group(self._started, task, visit))
            self._started += 1
    except BaseExceptionGroup as group:
      raise first_cause(group) from None

  def _name(self, task: Task, visit: int) -> str:
    return f'{self._stage}/{task.uid}/{visit}'

  def _issued(self, task: Task, visit: int) -> list[Issue]:
    group = self._name(task, visit)
    return [
      Issue(uid=f'{group}/{i}', group_id=group, task_id=task.uid, visit=visit) for i in range(self._config.group_size)
    ]

  async def _group(self, number: int, task: Task, visit: int) -> None:
    """One group from rollout to admission: each sample is scored the moment it ends, all are joined here."""
    name = self._name(task, visit)
    rollout = self._events.request(Edge.ROLLOUT, group=name, count=self._config.group_size)
    score = None
    async with asyncio.TaskGroup() as scoring:
      pending = []
      runs = self._workflow.run(
        task,
        visit,
        stage=self._stage,
        samples=self._config.group_size,
        sampling=Sampling(temperature=self._config.temperature),
      )
      async for sample, completion in runs:
        score = score or self._events.request(Edge.EVAL, group=name, count=self._config.group_size)
        pending.append(scoring.create_task(self._score(sample, task, completion)))
      self._events.reply(rollout, count=len(pending))
    self._events.reply(score, count=len(pending))
    members = sorted((p.result() for p in pending), key=lambda m: m.sample.sample_index)
    self._admit(number, members)

  async def _score(self, sample: Sample, task: Task, completion: str) -> Scored:
    attempt = Attempt(
      uid=sample.uid,
      task=task,
      completion=completion,
      finish_reason=str(sample.finish_reason),
      response_len=sample.response_len,
    )
    scores = await self._scorers.score(attempt)
    return Scored(sample=sample, task=task, completion=completion, scores=scores, reward=combine(scores, self._rewards))

  def _admit(self, number: int, members: list[Scored]) -> None:
    """Writes a finished group down; what is unscorable or not selected is dropped, with the last of it the group."""
    scorable = [m for m in members if m.reward.value is not None]
    unscorable = [m.sample.uid for m in members if m.reward.value is None]
    if scorable:
      correct = sum(bool(m.reward.correct) for m in scorable)
      self._outcomes[number] = (scorable[0].task.uid, correct, len(scorable))
    chosen = choose(self._config.selection, scorable)
    admitted = {c.scored.sample.uid: None for c in chosen}
    left = [m.sample.uid for m in scorable if m.sample.uid not in admitted]
    store = self._events.request(Edge.STORE, group=members[0].sample.group_id, count=len(members))
    with self._store.transaction():
      self._store.append([m.sample for m in members], self._step)
      self._store.score([s for m in members for s in m.scores], self._step)
      self._store.admit([*admitted], self._step)
      for reason, uids in (('unscorable', unscorable), ('not selected', left)):
        if uids:
          self._store.drop(uids, reason, self._step)
    self._events.reply(store, admitted=len(admitted))
    self._counts['dropped/unscorable'] += len(unscorable)
    self._counts['dropped/not_selected'] += len(left)
    if chosen:
      self._groups[number] = chosen
    else:
      self._drop_group(number, members)
    self._progress.set()

  def _drop_group(self, number: int, members: list[Scored]) -> None:
    del self._groups[number]
    self._events.message(Edge.DROP, group=members[0].sample.group_id, reason='nothing to learn from')
    self._counts['dropped/groups'] += 1
    if self._counts['dropped/groups'] > self._config.max_dropped_groups:
      raise RunError(
        f'stage {self._stage}: of {self._counts["dropped/groups"]} groups nothing could be learned while one batch was '
        f'collected, max_dropped_groups is {self._config.max_dropped_groups}; the last: {self._why(members)}'
      )
    self._gate.drop()

  def _why(self, members: list[Scored]) -> str:
    failed = [s for m in members if m.reward.value is None for s in m.scores if s.value is None]
    if len({m.reward.value for m in members}) == 1 and failed:
      first = failed[0]
      return f'scorer {first.scorer} {first.status}: {dict(first.evidence)}; look at the tasks and at the scorer'
    rewards = [m.reward.value for m in members]
    return (
      f'rewards {rewards}, of which selection {self._config.selection.kind!r} takes none; the tasks are too easy or '
      'too hard for this policy, or the group is too small'
    )
