"""Explorer: draws tasks, lets the group of each task be rolled out and scored, and closes batches.

The gate decides when a group may start. Only the explorer draws a stage's tasks, admits its groups
and changes its samples in the store. It therefore keeps the state that these actions share: the
number of completed batches, and everything that a commit needs for a resumed run.

Invariant: every issued sample is finally either admitted, or dropped with a reason. The content of
a batch depends on which groups started and how they were scored, but not on which ended first.

If the gate's bound is above 0, groups are in progress at a commit, and the committed state lists
them. A resumed explorer reads the groups that had ended by then from the store and runs the others
again. With partial rollouts, the state lists the parked groups, which continue from their stored
spans (`partial`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.core.errors import RunError, first_cause
from jaxrl_llm.core.records.span import Span
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.waits import IdleClock, bounded
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.gate import Gate
from jaxrl_llm.master.exploring.partial import GroupCut
from jaxrl_llm.master.exploring.processors import process
from jaxrl_llm.master.exploring.recall import recall
from jaxrl_llm.master.exploring.runner import GroupExpired, GroupRunner
from jaxrl_llm.master.exploring.selection import Experience, choose, experience_rows
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import Ref
from jaxrl_llm.replay.tables import Issue, State
from jaxrl_llm.rewards.api import drops_group
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.sampler import TaskSampler


class NothingToLearn(RunError):
  """Raised when too many groups were dropped while one batch was collected."""


class Drawn(NamedTuple):
  """A closed (complete) batch."""

  chosen: list[Experience]
  """Samples of new groups, then samples of groups from earlier batches, each in order of issue. A
  sample in several preference pairs occurs once per pair.
  """
  places: dict[str, Ref]
  """Places of the samples in the store's sealed segments, keyed by uid."""
  counts: dict[str, int]
  """Counters of what happened while the batch was collected, such as dropped samples."""


@dataclasses.dataclass(kw_only=True)
class _Group:
  """A started group that is not part of a batch yet."""

  task: Task
  visit: int
  chosen: list[Experience] | None = None
  """Samples that enter a batch; None until the group has ended."""
  rolled_out: float = 0.0
  """Monotonic time at which the group's last sample ended; 0 if that was in an earlier start of the
  run.
  """
  scored: float = 0.0
  is_parked: bool = False
  """Whether the group's budget is spent and it waits to be continued, usually for a later batch."""

  @property
  def is_running(self) -> bool:
    return self.chosen is None and not self.is_parked


class Explorer:
  """Starts as many groups as the gate admits, and returns batches of the groups that have ended."""

  def __init__(
    self,
    config: ExplorerConfig,
    runner: GroupRunner,
    *,
    sampler: TaskSampler,
    store: ReplayStore,
    events: Events = SILENT,
  ):
    self._config, self._runner, self._sampler, self._store = config, runner, sampler, store
    self._gate = Gate(
      bound=config.bound, groups_per_batch=config.groups_per_batch, batches=config.batches
    )
    self._events = events
    self._writer = store.at(0)
    """Writer that stamps changes to the store with the number of batches that the run completed."""
    self._started = 0
    self._groups: dict[int, _Group] = {}
    """Started groups that are not part of a batch yet, keyed by group number, in order of start."""
    self._round: collections.deque[int] = collections.deque()
    """Numbers of the parked groups that are continued next, in this order."""
    self._visits: dict[str, int] = {}
    """Number of visits in earlier stages, keyed by prompt. This stage counts visits onwards from
    there, because random keys depend on the visit and a repeated one would repeat random draws.
    """
    self._handed_out: set[str] = set()
    """Names of the groups in the batch that was returned last, until that batch is completed."""
    self._outcomes: dict[int, tuple[str, int, int]] = {}
    """(task uid, correct samples, scorable samples) of ended groups, keyed by group number."""
    self._scoring_s = 0.0
    self._clock = IdleClock()
    self._progress = asyncio.Event()
    self._counts: collections.Counter[str] = collections.Counter()
    self._running: asyncio.Task | None = None
    self._completed = self._now()
    """State as of the last completed batch."""

  @property
  def clock_decisions(self) -> int:
    """Number of times that a time limit ended a try to run a group."""
    return self._runner.clock_decisions

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Explores while the block runs. At its end, drops the unfinished samples with the reason
    'given up'.

    After a signal, the run commits before the block ends. A resumed run undoes changes made after
    the commit, so it still has these samples.
    """
    self._clock = IdleClock()
    for uid, count in (await asyncio.to_thread(self._earlier_visits)).items():
      self._visits[_prompt(uid)] = max(count, self._visits.get(_prompt(uid), 0))
    self._running = asyncio.create_task(self._explore())
    try:
      yield
    finally:
      self._running.cancel()
      await asyncio.gather(self._running, return_exceptions=True)
      self._running = None
      in_hand = {
        self._name(group.task, group.visit) for group in self._groups.values()
      } | self._handed_out
      # Of earlier starts, only partial samples are still unfinished.
      live = [
        entry
        for entry in self._store.live()
        if entry.attempt == self._store.attempt or entry.state == State.PARTIAL
      ]
      unfinished = [entry for entry in live if entry.group_id in in_hand]
      self._writer.drop([entry.uid for entry in unfinished], 'given up')
      for group in dict.fromkeys(entry.group_id for entry in unfinished):
        self._events.message(Edge.DROP, group=group, reason='given up')

  def _earlier_visits(self) -> dict[str, int]:
    """Returns how often earlier stages, and this one before it began its data afresh, have drawn
    each task, keyed by task uid.
    """
    config, visits = self._config, {}
    if config.earlier:
      visits = self._store.visits(config.earlier)
    if config.restarted:
      before = self._store.visits([config.stage], before=config.restarted)
      visits |= {uid: max(count, visits.get(uid, 0)) for uid, count in before.items()}
    return visits

  def advance(self, step: int, served: int) -> None:
    """Records the progress of the run.

    Args:
      step: number of batches that the run has completed.
      served: number of batches of this stage on which the weights served by the engines were
        trained.
    """
    self._writer, self._handed_out = self._store.at(step), set()
    self._give_up_surplus()
    self._round.clear()
    self._form_round()
    self._sampler.advance(served)
    self._gate.advance(served)

  async def next(self) -> Drawn:
    """Returns the next batch: new groups, then groups of earlier batches if `past` is configured.

    The samples are sealed in the store. Raises the exceptions of `collect`.
    """
    chosen, counts = await self.collect()
    if (past := self._config.past) is not None:
      groups = await asyncio.to_thread(past.draw, self._store, self._writer.step)
      chosen += await asyncio.to_thread(
        self._recall, [uid for group in groups for uid in group.uids]
      )
      counts['past_groups'] = len(groups)
    asked = self._events.request(Edge.FETCH, source='rollouts')
    uids = [*dict.fromkeys(choice.sample.uid for choice in chosen)]
    places = await asyncio.to_thread(self._writer.seal, uids)
    self._events.reply(asked, count=len(places))
    return Drawn(chosen, places, counts)

  async def collect(self) -> tuple[list[Experience], dict[str, int]]:
    """Waits for the new groups of the next batch. Returns their chosen samples, in order of issue,
    and counters of what happened meanwhile.

    Raises:
      WaitExpired: the groups did not end within `collect_deadline_s`.
      NothingToLearn: more than `max_dropped_groups` groups were dropped.
      Exception: an error of the engine or a scorer ended the exploration; it is raised here.
    """
    ready = asyncio.ensure_future(
      bounded(
        self._batch_ready(),
        name='collect',
        owner='the loop',
        waits_for=(
          f'{self._config.groups_per_batch} groups of stage {self._config.stage} from the engine '
          'and the scorers (rollout.collect_deadline_s)'
        ),
        deadline_s=self._config.collect_deadline_s,
      )
    )
    try:
      # wait collect: the bound of `ready`
      await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
      await (ready if ready.done() else self._running)  # wait collect: none, it is done
    finally:
      ready.cancel()  # This has no effect if `ready` is done.
    first = self._first()
    # With partial rollouts, a parked group may have started before the last group of the batch, and
    # an ended one after it. No group is in progress now, so all known outcomes are reported.
    self._tell(first[-1] if self._config.partial is None else self._started)
    groups = [self._groups.pop(number) for number in first]
    batch = [member for group in groups for member in group.chosen]
    self._scoring_s += max(group.scored for group in groups) - max(
      group.rolled_out for group in groups
    )
    self._handed_out = {self._name(group.task, group.visit) for group in groups}
    if self._gate.is_full:
      self._give_up_parked()
    if self._config.partial is not None:
      self._counts.update({'partial/cut': 0, 'partial/continued': 0})  # Both keys are present.
      self._counts['partial/open'] = sum(group.is_parked for group in self._groups.values())
    counts, self._counts = dict(self._counts), collections.Counter()
    return batch, counts

  def complete(self, uids: Sequence[str], experts: Sequence[Issue] = ()) -> None:
    """Records that the batch is complete.

    Args:
      uids: samples that the batch trained on.
      experts: static rows that the batch trained on.
    """
    self._writer.trained(uids)
    self._writer.join(experts)
    self._writer.trained([row.uid for row in experts])
    # Changes to the store from here on belong to the next batch, and a commit of this batch does
    # not contain them. The explorer's state for that commit must therefore be captured here.
    self._writer, self._handed_out = self._store.at(self._writer.step + 1), set()
    self._completed = self._now()

  def _tell(self, last: int) -> None:
    """Reports to the task sampler, in order, the outcomes of the groups with numbers up to `last`.

    All of these groups but parked ones have ended. If the gate's bound is 0, timing decides
    nothing: all tasks of the batch were drawn before, none since. If it is larger, groups of later
    batches may have been dropped, and timing decides whether their replacements are drawn before or
    after this report.
    """
    for number in sorted(number for number in self._outcomes if number <= last):
      self._sampler.feedback(*self._outcomes.pop(number))

  def _give_up_parked(self) -> None:
    """Drops the groups that no later batch of the stage continues."""
    if parked := [number for number, group in self._groups.items() if group.is_parked]:
      self._counts['dropped/given_up'] += self._abandon(parked)

  def _give_up_surplus(self) -> None:
    """Drops the groups that started last, if the stage was shortened so that its batches need fewer
    than have started. This is done before any group runs, so that timing does not matter.
    """
    if surplus := self._gate.surplus:
      started = [number for number, group in self._groups.items() if not group.is_parked]
      for number in started[-surplus:]:
        self._outcomes.pop(number, None)  # No batch hands it to the sampler.
        self._gate.drop()
      self._abandon(started[-surplus:])

  def _abandon(self, numbers: Sequence[int]) -> int:
    """Drops groups that no batch trains on, and returns the number of their samples. Those not run
    yet have no samples.
    """
    live = {entry.uid for entry in self._store.live()} if numbers else set()
    dropped = 0
    for number in numbers:
      group = self._groups.pop(number)
      uids = [row.uid for row in self._issued(group.task, group.visit) if row.uid in live]
      self._writer.drop(uids, 'given up')
      dropped += len(uids)
      name = self._name(group.task, group.visit)
      self._events.message(Edge.DROP, group=name, reason='given up')
    return dropped

  def _first(self) -> list[int]:
    """Returns the numbers of the groups in the next batch, as far as they have started.

    A batch consists of the groups that started first, leaving out those that a later batch
    continues.
    """
    here = (number for number, group in self._groups.items() if not group.is_parked)
    return list(itertools.islice(here, self._config.groups_per_batch))

  async def _batch_ready(self) -> None:
    # To take the groups that ended first would bias a batch towards short answers, and would let
    # timing decide. With partial rollouts, which groups are parked depends on their tokens alone.
    def ended(number):
      return self._groups[number].chosen is not None

    while len(first := self._first()) < self._config.groups_per_batch or not all(map(ended, first)):
      self._progress.clear()
      await self._progress.wait()  # wait collect: bounded by the caller

  async def _explore(self) -> None:
    try:
      async with asyncio.TaskGroup() as groups:
        await self._gate.opened()
        self._issue(self._unknown_parked())
        self._start(
          groups,
          {number: group for number, group in self._groups.items() if group.is_running},
        )
        while True:
          places = await self._gate.admit()
          parked, count = self._next_groups(places)
          self._gate.unpark(len(parked))
          self._continue(groups, parked)
          new = {self._started + i: self._draw() for i in range(count)}
          self._started += count
          self._groups |= new
          self._start(groups, new)
          if unused := places - len(parked) - count:
            self._gate.give_back(unused)
            self._progress.clear()
            await self._progress.wait()  # wait collect: of the loop, which cancels this
    except BaseExceptionGroup as group:
      raise first_cause(group) from None

  def _draw(self) -> _Group:
    task, visit = self._sampler.next()
    return _Group(task=task, visit=self._visits.get(_prompt(task.uid), 0) + visit)

  def _next_groups(self, places: int) -> tuple[list[int], int]:
    """Returns the numbers of the parked groups to continue, and how many new groups to start.

    Parked groups of earlier batches are continued first, oldest first. If no more groups may start,
    and all groups of this batch have ended or spent their budget, those with spent budgets get
    another. Timing decides none of this, since a round of parked groups is formed only at the start
    of a batch and when no group is running.
    """
    if self._config.partial is None:
      return [], places
    room = self._config.partial.max_groups(self._config.groups_per_batch) - len(self._groups)
    if room <= 0 and not self._round and not any(g.is_running for g in self._groups.values()):
      self._form_round()
    parked = [self._round.popleft() for _ in range(min(places, len(self._round)))]
    return parked, max(0, min(places - len(parked), room))

  def _unknown_parked(self) -> list[_Group]:
    """Returns the parked groups that the store lacks, as it does in a branch with a new store. They
    begin anew.
    """
    parked = [group for group in self._groups.values() if group.is_parked]
    known = {entry.group_id for entry in self._store.live()} if parked else set()
    return [group for group in parked if self._name(group.task, group.visit) not in known]

  def _form_round(self) -> None:
    self._round.extend(number for number, group in self._groups.items() if group.is_parked)

  def _continue(self, tasks: asyncio.TaskGroup, numbers: Sequence[int]) -> None:
    for number in numbers:
      group = self._groups[number]
      group.is_parked = False
      self._events.message(Edge.TASK, group=self._name(group.task, group.visit))
      tasks.create_task(self._group(number, group.task, group.visit))
    if numbers:
      self._counts['partial/continued'] += len(numbers)

  def _start(self, tasks: asyncio.TaskGroup, groups: Mapping[int, _Group]) -> None:
    self._issue([*groups.values()])
    for number, group in groups.items():
      self._events.message(Edge.TASK, group=self._name(group.task, group.visit))
      tasks.create_task(self._group(number, group.task, group.visit))

  def _issue(self, groups: Sequence[_Group]) -> None:
    with self._store.transaction():
      self._writer.offer([group.task for group in groups])
      self._writer.issue([row for group in groups for row in self._issued(group.task, group.visit)])

  def _name(self, task: Task, visit: int) -> str:
    return f'{self._config.stage}/{task.uid}/{visit}'

  def _issued(self, task: Task, visit: int) -> list[Issue]:
    group = self._name(task, visit)
    return [
      Issue(uid=f'{group}/{i}', group_id=group, task_id=task.uid, visit=visit)
      for i in range(self._config.group_size)
    ]

  def take_scoring(self) -> float:
    """Returns for how many seconds, in the batches since the previous call, scoring continued after
    the last rollout had ended.
    """
    seconds, self._scoring_s = self._scoring_s, 0.0
    return seconds

  def take_idle(self) -> float:
    """Returns the seconds since the previous call during which no group was in progress."""
    return self._clock.take() if self._running is not None else 0.0

  def state(self) -> Any:
    """Returns the state after the last completed batch, as JSON. Tasks drawn since then do not
    affect it.
    """
    return self._completed

  def _now(self) -> Any:
    """Returns the current state, as JSON. If the gate's bound is 0, it lists no groups between two
    batches but parked ones, since none is in progress then.
    """
    groups = [
      {
        'number': number,
        'task': group.task.uid,
        'visit': group.visit,
        'ended': group.chosen is not None,
        'parked': group.is_parked,
      }
      for number, group in self._groups.items()
    ]
    outcomes = [[number, *outcome] for number, outcome in self._outcomes.items()]
    flight = {
      'started': self._started,
      'groups': groups,
      'outcomes': outcomes,
      'counts': dict(self._counts),
    }
    return {'sampler': self._sampler.state(), 'gate': self._gate.state(), 'explorer': flight}

  def restore(self, state: Any) -> None:
    """Restores the state from a commit. The store must have been recovered to the same commit. Call
    this before `running`.
    """
    self._sampler.restore(state['sampler'])
    self._gate.restore(state['gate'])
    flight = state['explorer']
    self._started, self._counts = flight['started'], collections.Counter(flight['counts'])
    self._outcomes = {number: tuple(outcome) for number, *outcome in flight['outcomes']}
    for group in flight['groups']:
      task, visit = self._sampler.task(group['task']), group['visit']
      chosen = self.stored(task, visit) if group['ended'] else None
      self._groups[group['number']] = _Group(
        task=task,
        visit=visit,
        chosen=chosen,
        # Commits of earlier versions do not say, and had no such groups.
        is_parked=group.get('parked', False),
      )
    self._completed = state

  def stored(self, task: Task, visit: int) -> list[Experience]:
    """Reads the chosen samples of a group from the store."""
    return self._recall([row.uid for row in self._issued(task, visit)])

  def _recall(self, uids: Sequence[str]) -> list[Experience]:
    """Reads those of the samples from the store that were chosen for training."""
    text, rewards = self._runner.workflow.text, self._runner.scorers.config
    return recall(self._store, uids, tasks=self._sampler.task, text=text, rewards=rewards)

  async def _group(self, number: int, task: Task, visit: int) -> None:
    """Runs one group from rollout to admission, or drops it if it exceeds its time limits."""
    with self._clock.busy():
      try:
        spans = await self._spans(task, visit)
        judged = await self._runner.run(self._name(task, visit), task, visit, spans)
      except GroupCut as cut:
        self._park(number, task, visit, cut.spans)
        return
      except GroupExpired as expired:
        self._give_up(number, task, visit, str(expired))
        return
    group = self._groups[number]
    group.rolled_out, group.scored = judged.rolled_out, judged.scored
    self._admit(number, judged.members)

  async def _spans(self, task: Task, visit: int) -> list[list[Span]]:
    """Returns the spans of earlier batches for each sample of a group."""
    if self._config.partial is None:
      return []
    uids = [row.uid for row in self._issued(task, visit)]
    return [*(await asyncio.to_thread(self._store.spans, uids)).values()]

  def _park(self, number: int, task: Task, visit: int, spans: Mapping[int, Span]) -> None:
    """Stores what a group has generated for this batch. A later batch continues it."""
    issued = self._issued(task, visit)
    self._writer.extend({issued[index].uid: span for index, span in spans.items()})
    self._groups[number].is_parked = True
    self._counts['partial/cut'] += 1
    self._gate.park()
    self._progress.set()

  def _give_up(self, number: int, task: Task, visit: int, reason: str) -> None:
    issued = self._issued(task, visit)
    self._writer.drop([row.uid for row in issued], reason)
    self._counts[f'dropped/{reason}'] += len(issued)
    self._drop_group(
      number, reason, f'task {task.uid} took too long ({reason}, limits {self._config.limits})'
    )
    self._progress.set()

  def _admit(self, number: int, members: list[Experience]) -> None:
    """Stores a finished group. Drops samples that are unscorable, removed by a processor or not
    selected, and drops the group if no sample is left.
    """
    scorer_failed = drops_group((s for m in members for s in m.scores), self._runner.scorers.config)
    scorable = [m for m in members if m.reward.value is not None]
    unscorable = [m.sample.uid for m in members if m.reward.value is None]
    if scorable:
      correct = sum(bool(m.reward.correct) for m in scorable)
      self._outcomes[number] = (scorable[0].task.uid, correct, len(scorable))
    verified = process(self._config.processors, scorable, self._writer.step)
    chosen = choose(self._config.selection, verified.members) if verified.members else []
    admitted = dict.fromkeys(c.sample.uid for c in chosen)
    left = [m.sample.uid for m in verified.members if m.sample.uid not in admitted]
    dropped = {
      'scorer_failed' if scorer_failed else 'unscorable': unscorable,
      **verified.dropped,
      'not_selected': left,
    }
    asked = self._events.request(Edge.STORE, group=members[0].sample.group_id, count=len(members))
    with self._store.transaction():
      self._writer.append([m.sample for m in members])
      self._writer.score([s for m in members for s in m.scores])
      self._writer.derive([*verified.lineage, *experience_rows(chosen)])
      self._writer.admit([*admitted])
      for reason, uids in dropped.items():
        if uids:
          self._writer.drop(uids, reason.replace('_', ' '))
    self._events.reply(asked, admitted=len(admitted))
    self._counts.update({f'dropped/{reason}': len(uids) for reason, uids in dropped.items()})
    self._counts.update({f'processors/{name}': count for name, count in verified.counts.items()})
    if chosen:
      self._groups[number].chosen = chosen
    else:
      self._drop_group(
        number,
        'scorer failed' if scorer_failed else 'nothing to learn from',
        self._why(members, verified.members),
      )
    self._progress.set()

  def _drop_group(self, number: int, reason: str, why: str) -> None:
    group = self._groups.pop(number)
    self._events.message(Edge.DROP, group=self._name(group.task, group.visit), reason=reason)
    self._counts['dropped/groups'] += 1
    if self._counts['dropped/groups'] > self._config.max_dropped_groups:
      raise NothingToLearn(
        f'stage {self._config.stage}: {self._counts["dropped/groups"]} groups had nothing to learn '
        'from while one batch was collected, max_dropped_groups is '
        f'{self._config.max_dropped_groups}; the last: {why}'
      )
    self._gate.drop()

  def _why(self, members: list[Experience], verified: list[Experience]) -> str:
    """Returns why no sample of a group is trained on.

    Args:
      members: all samples of the group.
      verified: those that the processors left.
    """
    failed = [s for m in members if m.reward.value is None for s in m.scores if s.value is None]
    if len({m.reward.value for m in members}) == 1 and failed:
      first = failed[0]
      return (
        f'scorer {first.scorer} {first.status}: {dict(first.evidence)}; look at the tasks and at '
        'the scorer'
      )
    if verified and all(m.masked for m in verified):
      earlier = sum(not m.sample.loss_mask.any() for m in verified)
      return (
        f'all of its {len(verified)} samples are masked: {earlier} have no token in the loss (with '
        'rollout.partial: they ended in an earlier batch than the group), '
        f'{len(verified) - earlier} are masked by a processor '
        f'({", ".join(name for name, _ in self._config.processors) or "none is configured"})'
      )
    rewards = [m.reward.worth for m in members]
    return (
      f'rewards {rewards}, of which selection {self._config.selection.kind!r} accepts none; the '
      'tasks are too easy or too hard for this policy, or the group is too small'
    )


def _prompt(uid: str) -> str:
  """Returns the part of a task's uid that identifies its prompt in every taskset."""
  return uid.rpartition(':')[2]
