"""Explorer: draws tasks, has a group of samples generated and scored for each, and forms batches.

The gate (`Gate`) decides when a group may start. Only the explorer draws a stage's tasks, admits
its groups to batches and changes its samples in the store. It therefore also keeps the state that
these actions share and that a resumed run needs.

Invariant: every sample is recorded in the store when its group starts (it is issued), and ends
either admitted to a batch or dropped with a reason. The content of a batch depends on which groups
started and how they were scored, but, with the batch policy 'in_order', not on which of them
finished first.

If the gate's bound is above 0, groups may be in progress when the run commits, and the committed
state lists them. A resumed explorer reads the finished ones from the store and runs the others
again. With partial rollouts, the state also lists the parked groups, which continue from their
stored spans (see `partial`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.core.errors import RunError, first_cause
from jaxrl_llm.core.records.span import Span
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.waits import IdleClock, bounded
from jaxrl_llm.master.exploring.batch_policy import (
  POLICIES,
  Candidate,
  batches_ahead,
  passed_over,
)
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.gate import Gate
from jaxrl_llm.master.exploring.partial import GroupCut
from jaxrl_llm.master.exploring.processors import process
from jaxrl_llm.master.exploring.recall import recall
from jaxrl_llm.master.exploring.runner import GroupExpired, GroupRunner
from jaxrl_llm.master.exploring.selection import (
  Experience,
  choose,
  experience_rows,
  sampled_tokens,
)
from jaxrl_llm.master.exploring.waves import Waves
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import Ref
from jaxrl_llm.replay.tables import Issue, State
from jaxrl_llm.rewards.api import drops_group
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.sampler import TaskSampler


class NothingToLearn(RunError):
  """Raised when too many groups were dropped while one batch was collected."""


class Drawn(NamedTuple):
  """A complete batch."""

  chosen: list[Experience]
  """Samples of the new groups, followed by those of groups from earlier batches. A sample in
  several preference pairs occurs once per pair.
  """
  places: dict[str, Ref]
  """Location of each sample in the store's sealed segment files, keyed by uid."""
  counts: dict[str, int]
  """Counters of what happened while the batch was collected, such as the number of dropped
  groups.
  """


@dataclasses.dataclass(kw_only=True)
class _Group:
  """A started group that is not part of a batch yet."""

  task: Task
  visit: int
  chosen: list[Experience] | None = None
  """Samples selected for training; None until the group has finished."""
  rolled_out: float = 0.0
  """Monotonic time at which the group's last sample was generated; 0 if an earlier attempt (start
  of the run) generated it.
  """
  scored: float = 0.0
  last_batch: int = 0
  """Index in the stage of the last batch that may train on the group within the gate's bound."""
  is_parked: bool = False
  """Whether the group has used up its token budget and waits to be continued, usually for a later
  batch.
  """

  @property
  def is_running(self) -> bool:
    return self.chosen is None and not self.is_parked


class Explorer:
  """Starts groups as the gate admits them, and forms batches of the groups that have finished."""

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
    most = config.groups_per_batch
    if config.partial is not None:
      most = config.partial.max_groups(config.groups_per_batch, config.bound)
    in_waves = config.partial is not None and not config.bound
    self._waves = Waves(max_groups=most) if in_waves else None
    self._max_groups, self._collecting = most, False
    self._gate = Gate(
      bound=config.bound,
      ahead=batches_ahead(config.batch_policy, config.bound),
      groups_per_batch=config.groups_per_batch,
      batches=config.batches,
      spare=most - config.groups_per_batch if in_waves else 0,
    )
    self._events = events
    self._writer = store.at(0)
    """Writer of the store. It labels each change with the number of batches that the run has
    completed.
    """
    self._started = 0
    self._groups: dict[int, _Group] = {}
    """Started groups that are not part of a batch yet, keyed by their number in order of start."""
    self._round: collections.deque[int] = collections.deque()
    """Queue of the parked groups to continue next, by group number."""
    self._visits: dict[str, int] = {}
    """Number of times that earlier stages have drawn each prompt. This stage continues the count,
    which is part of the random keys: a repeated count would repeat the random numbers.
    """
    self._returned: set[str] = set()
    """Ids of the groups in the last batch that `next` returned. Empty once `complete` has been
    called for that batch.
    """
    self._outcomes: dict[int, tuple[str, int, int]] = {}
    """(task uid, number of correct samples, number of scorable samples) of finished groups that
    have not been reported to the task sampler, keyed by group number.
    """
    self._scoring_s = 0.0
    self._passed_over = 0
    self._tokens: collections.Counter[str] = collections.Counter()
    """Counts of tokens since the last call of `take_tokens`, under the keys of its result."""
    self._clock = IdleClock()
    self._progress = asyncio.Event()
    self._counts: collections.Counter[str] = collections.Counter()
    self._running: asyncio.Task | None = None
    self._completed = self._now()
    """State as of the last completed batch."""

  @property
  def clock_decisions(self) -> int:
    """Number of decisions that a clock has made: group runs that a time limit has ended, and groups
    that a batch has passed over because later groups had finished first.
    """
    return self._runner.clock_decisions + self._passed_over

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Runs the exploration in the background while the block is active. At its end, drops the
    unfinished samples with the reason 'given up'.

    If a signal stops the run, the run commits before the block ends. A resumed run undoes all
    changes after that commit, so it still has these samples.
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
      unfinished_groups = {
        self._name(group.task, group.visit) for group in self._groups.values()
      } | self._returned
      # Among samples of earlier attempts, only partial ones can be unfinished.
      live = [
        entry
        for entry in self._store.live()
        if entry.attempt == self._store.attempt or entry.state == State.PARTIAL
      ]
      unfinished = [entry for entry in live if entry.group_id in unfinished_groups]
      self._writer.drop([entry.uid for entry in unfinished], 'given up')
      for group in dict.fromkeys(entry.group_id for entry in unfinished):
        self._events.message(Edge.DROP, group=group, reason='given up')

  def _earlier_visits(self) -> dict[str, int]:
    """Returns the number of times that each task was drawn, in earlier stages and in this stage
    before it started its data again, keyed by task uid.
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
      served: number of this stage's batches that the engines' current weights have been trained on.
    """
    self._writer, self._returned = self._store.at(step), set()
    self._collecting = True
    self._give_up_surplus()
    self._round.clear()
    self._form_round()
    self._progress.set()  # The last batch has made room, and the parked groups are queued.
    self._sampler.advance(served)
    self._gate.advance(served)

  async def next(self) -> Drawn:
    """Returns the next batch: new groups, then groups of earlier batches if `past` is configured.

    Moves the samples to a sealed (immutable) segment file of the store. Raises the exceptions of
    `collect`.
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
    """Waits for the new groups of the next batch. Returns the samples selected from them, and
    counters of what happened meanwhile.

    Raises:
      WaitExpired: the groups did not finish within `collect_deadline_s`.
      NothingToLearn: more than `max_dropped_groups` groups were dropped.
      Exception: the engine or a scorer failed; its error is raised here.
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
      # The wait 'collect' is bounded by `collect_deadline_s`, through `ready`.
      await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
      # The wait 'collect' is over already, since the awaited task is done.
      await (ready if ready.done() else self._running)
    finally:
      ready.cancel()  # This has no effect if `ready` is done.
    numbers = self._next_batch()
    if self._config.batch_policy != 'in_order':
      self._counts['passed_over'] = passed_over(self._candidates(), numbers)
      self._passed_over += self._counts['passed_over']
    groups = [self._groups.pop(number) for number in numbers]
    self._collecting = False
    if self._waves is not None:
      self._waves.close()
    self._report_outcomes(numbers[-1])
    batch = [member for group in groups for member in group.chosen]
    self._tokens['trained'] += sampled_tokens(batch)
    self._scoring_s += max(group.scored for group in groups) - max(
      group.rolled_out for group in groups
    )
    self._returned = {self._name(group.task, group.visit) for group in groups}
    if self._gate.is_full and not any(group.is_running for group in self._groups.values()):
      self._give_up_parked()
    if self._config.partial is not None:
      for name in ('cut', 'continued', 'returned'):  # These keys are always present.
        self._counts[f'partial/{name}'] += 0
      self._counts['partial/open'] = sum(group.is_parked for group in self._groups.values())
    counts, self._counts = dict(self._counts), collections.Counter()
    return batch, counts

  def complete(self, uids: Sequence[str], experts: Sequence[Issue] = ()) -> None:
    """Records that the batch is complete.

    Args:
      uids: uids of the rollouts that the batch trained on.
      experts: records of the expert rows that the batch trained on.
    """
    self._writer.trained(uids)
    self._writer.join(experts)
    self._writer.trained([row.uid for row in experts])
    # Later changes to the store belong to the next batch, and a commit of this batch does not
    # contain them. The explorer's state for that commit is therefore captured here.
    self._writer, self._returned = self._store.at(self._writer.step + 1), set()
    self._completed = self._now()

  def _report_outcomes(self, last: int) -> None:
    """Reports the outcomes of the groups with numbers up to `last` to the task sampler, in order of
    number. With partial rollouts or a batch policy other than 'in_order', batches do not take
    groups in order of start, so the outcomes of all groups that are in a batch or dropped are
    reported instead.

    If the gate's bound is 0, the sampler has drawn all tasks of this batch and none of the next, so
    its choices do not depend on timing. If the bound is larger, they may: the replacement of a
    dropped group of a later batch may be drawn before or after this report.
    """
    in_order = self._config.partial is None and self._config.batch_policy == 'in_order'
    for number in sorted(self._outcomes):
      if number <= last if in_order else number not in self._groups:
        self._sampler.feedback(*self._outcomes.pop(number))

  def _give_up_parked(self) -> None:
    """Drops the parked groups, because the stage has no later batch to continue them."""
    if parked := [number for number, group in self._groups.items() if group.is_parked]:
      self._counts['dropped/given_up'] += self._abandon(parked)

  def _give_up_surplus(self) -> None:
    """Drops the newest groups if the stage was shortened and its batches need fewer than have
    started. This happens before any group runs, so the choice does not depend on timing.
    """
    if surplus := self._gate.surplus:
      started = [number for number, group in self._groups.items() if not group.is_parked]
      for number in started[-surplus:]:
        self._outcomes.pop(number, None)  # No batch hands it to the sampler.
        self._gate.drop()
      self._abandon(started[-surplus:])

  def _abandon(self, numbers: Sequence[int]) -> int:
    """Drops groups that no batch will train on. Returns the number of their samples that were
    dropped in the store. A group that has not run yet has no samples there.
    """
    live = {entry.uid for entry in self._store.live()} if numbers else set()
    dropped = 0
    for number in numbers:
      group = self._groups.pop(number)
      self._tokens['dropped'] += sampled_tokens(group.chosen or [])
      uids = [row.uid for row in self._issued(group.task, group.visit) if row.uid in live]
      self._writer.drop(uids, 'given up')
      dropped += len(uids)
      name = self._name(group.task, group.visit)
      self._events.message(Edge.DROP, group=name, reason='given up')
    return dropped

  def _candidates(self) -> list[Candidate]:
    """Returns the groups that may form the next batch, in order of start. Parked groups, which a
    later batch continues, are not among them.
    """
    return [
      Candidate(number, group.chosen is not None, group.last_batch)
      for number, group in self._groups.items()
      if not group.is_parked
    ]

  def _next_batch(self) -> list[int] | None:
    """Returns the numbers of the groups that form the next batch, or None as long as it is not
    complete.
    """
    if self._waves is not None and any(group.is_running for group in self._groups.values()):
      return None
    config = self._config
    batch = self._writer.step - config.first_step
    return POLICIES[config.batch_policy](self._candidates(), batch, config.groups_per_batch)

  async def _batch_ready(self) -> None:
    while self._next_batch() is None:
      self._progress.clear()
      await self._progress.wait()  # The wait 'collect' is bounded by the caller.

  async def _explore(self) -> None:
    try:
      async with asyncio.TaskGroup() as groups:
        await self._gate.opened()
        self._issue(self._unknown())
        self._start(groups, [number for number, g in self._groups.items() if g.is_running])
        while True:
          admitted = await self._gate.admit()
          parked, count = self._next_groups(admitted)
          self._gate.unpark(len(parked))
          self._continue(groups, parked)
          new = {self._started + i: self._draw() for i in range(count)}
          self._started += count
          self._groups |= new
          self._issue([*new.values()])
          self._start(groups, [*new])
          if unused := admitted - len(parked) - count:
            self._gate.give_back(unused)
            self._progress.clear()
            # The wait 'collect' is bounded by the loop, which cancels this task.
            await self._progress.wait()
    except BaseExceptionGroup as group:
      raise first_cause(group) from None

  def _draw(self) -> _Group:
    task, visit = self._sampler.next()
    visit += self._visits.get(_prompt(task.uid), 0)
    return _Group(task=task, visit=visit, last_batch=self._gate.last_batch)

  def _next_groups(self, admitted: int) -> tuple[list[int], int]:
    """Returns the numbers of the parked groups to continue, and the number of new groups to start.

    Parked groups of earlier batches are continued first, oldest first. If no more groups may start,
    and all groups of this batch have finished or used up their budget, the parked ones get another
    budget. The choice does not depend on timing, because parked groups are queued only at the start
    of a batch and when no group is running.

    Args:
      admitted: number of groups that the gate has admitted.
    """
    if self._config.partial is None:
      return [], admitted
    if self._waves is not None:
      return self._next_wave(self._waves)
    room = self._max_groups - len(self._groups)
    if room <= 0 and not self._round and not any(g.is_running for g in self._groups.values()):
      self._form_round()
    parked = [self._round.popleft() for _ in range(min(admitted, len(self._round)))]
    return parked, max(0, min(admitted - len(parked), room))

  def _next_wave(self, waves: Waves) -> tuple[list[int], int]:
    """Chooses the groups of the next wave (see `waves`), and returns them as `_next_groups` does. A
    wave starts once all groups of the previous wave have finished or been parked, if the batch
    still lacks groups.
    """
    groups = self._groups.values()
    needed = self._config.groups_per_batch - sum(g.chosen is not None for g in groups)
    if not self._collecting or needed <= 0 or any(g.is_running for g in groups):
      return [], 0
    size = waves.size(needed)
    parked = [self._round.popleft() for _ in range(min(size, len(self._round)))]
    # A branch may start with more groups than rollout.partial.groups now permits.
    new = max(0, min(size - len(parked), self._max_groups - len(self._groups)))
    if size > len(parked) + new:  # Then all groups of earlier batches continue already.
      cut = sorted(n for n, g in self._groups.items() if g.is_parked and n not in parked)
      parked += cut[: size - len(parked) - new]
    waves.start(len(parked) + new)
    return parked, new

  async def _place(self, number: int) -> bool:
    """Waits until it is certain whether the batch takes this finished group of the current wave,
    and returns whether it does. Of all groups that finish, the batch takes the first
    `groups_per_batch` in order of start, no matter which of them finishes first.
    """
    self._waves.finish()
    while True:
      places = self._candidates()[: self._config.groups_per_batch]
      if number in [place.number for place in places]:
        return True
      # A scored group keeps its place. Any other may still be parked or dropped.
      if all(place.is_finished for place in places):
        return False
      self._progress.clear()
      # The wait 'collect' is bounded by the loop, which cancels this task.
      await self._progress.wait()

  def _unknown(self) -> list[_Group]:
    """Returns the unfinished groups whose samples are not in the store, because the samples were
    lost when a process was killed, or because the run is a branch with a new store. These groups
    start again from their prompts.
    """
    unfinished = [group for group in self._groups.values() if group.chosen is None]
    stored = {entry.group_id for entry in self._store.live()} if unfinished else set()
    return [group for group in unfinished if self._name(group.task, group.visit) not in stored]

  def _form_round(self) -> None:
    self._round.extend(sorted(number for number, g in self._groups.items() if g.is_parked))

  def _continue(self, tasks: asyncio.TaskGroup, numbers: Sequence[int]) -> None:
    """Continues parked groups. A group is moved to the end of the started groups, as if it started
    now, so that the batch that takes it keeps the gate's bound.
    """
    for number in numbers:
      group = self._groups[number] = self._groups.pop(number)
      group.is_parked, group.last_batch = False, self._gate.last_batch
    self._start(tasks, numbers)
    if numbers:
      self._counts['partial/continued'] += len(numbers)

  def _start(self, tasks: asyncio.TaskGroup, numbers: Sequence[int]) -> None:
    for number in numbers:
      group = self._groups[number]
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
    """Returns the seconds from the end of a batch's last rollout to the end of its scoring, summed
    over the batches since the previous call.
    """
    seconds, self._scoring_s = self._scoring_s, 0.0
    return seconds

  def take_tokens(self) -> dict[str, int]:
    """Returns what became of the sampled tokens since the previous call, as numbers of tokens. The
    tokens of a sample are counted when it has finished and is stored. Tokens that were discarded,
    and spans of parked groups, are not counted.

    sampled: tokens of stored samples; trained: tokens that joined batches; dropped: tokens that no
    batch will contain; waiting: tokens in finished groups that wait for a batch now. Summed over
    all calls, sampled = trained + dropped, plus the newest value of waiting. The sum begins anew in
    a branch with an empty store, which generates the parent's waiting groups again.
    """
    waiting = [group.chosen for group in self._groups.values() if group.chosen is not None]
    tokens, self._tokens = self._tokens, collections.Counter()
    return {
      **{name: tokens[name] for name in ('sampled', 'trained', 'dropped')},
      'waiting': sum(map(sampled_tokens, waiting)),
    }

  def take_idle(self) -> float:
    """Returns the seconds since the previous call during which no group was in progress."""
    return self._clock.take() if self._running is not None else 0.0

  def state(self) -> Any:
    """Returns the state after the last completed batch, as JSON. Tasks drawn for the next batch do
    not affect it.
    """
    return self._completed

  def _now(self) -> Any:
    """Returns the current state, as JSON. If the gate's bound is 0, no group is in progress between
    two batches, so the state then lists only parked groups.
    """
    groups = [
      {
        'number': number,
        'task': group.task.uid,
        'visit': group.visit,
        'ended': group.chosen is not None,
        'parked': group.is_parked,
        'last_batch': group.last_batch,
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
    if self._waves is not None:
      flight['waves'] = self._waves.state()
    return {'sampler': self._sampler.state(), 'gate': self._gate.state(), 'explorer': flight}

  def restore(self, state: Any) -> None:
    """Restores the state from a commit. Call this before `running`, with a store that has been
    recovered to the same commit.
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
        # Commits of older program versions lack these keys. Such commits have no parked groups, and
        # batches take their groups in order of start.
        is_parked=group.get('parked', False),
        last_batch=group.get('last_batch', 0),
      )
    if self._waves is not None and 'waves' in flight:
      self._waves.restore(flight['waves'])
    self._completed = state

  def stored(self, task: Task, visit: int) -> list[Experience]:
    """Returns the selected samples of a finished group, read from the store."""
    return self._recall([row.uid for row in self._issued(task, visit)])

  def _recall(self, uids: Sequence[str]) -> list[Experience]:
    """Reads samples from the store, and returns those that were selected for training."""
    text, rewards = self._runner.workflow.text, self._runner.scorers.config
    return recall(self._store, uids, tasks=self._sampler.task, text=text, rewards=rewards)

  async def _group(self, number: int, task: Task, visit: int) -> None:
    """Runs one group from rollout to admission, or drops it if it exceeds its time limits."""
    with self._clock.busy():
      try:
        spans = await self._spans(task, visit)
        placed = functools.partial(self._place, number) if self._waves is not None else None
        judged = await self._runner.run(self._name(task, visit), task, visit, spans, placed=placed)
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
    """Returns the spans (runs of tokens) that earlier batches generated for each sample of a group.
    The result is empty without partial rollouts.
    """
    if self._config.partial is None:
      return []
    uids = [row.uid for row in self._issued(task, visit)]
    return [*(await asyncio.to_thread(self._store.spans, uids)).values()]

  def _park(self, number: int, task: Task, visit: int, spans: Mapping[int, Span]) -> None:
    """Stores the spans that a group has generated for this batch, and parks the group until a later
    batch continues it.
    """
    issued = self._issued(task, visit)
    self._writer.extend({issued[index].uid: span for index, span in spans.items()})
    self._groups[number].is_parked = True
    self._counts['partial/cut' if spans else 'partial/returned'] += 1
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
    not_selected = [m.sample.uid for m in verified.members if m.sample.uid not in admitted]
    dropped = {
      'scorer_failed' if scorer_failed else 'unscorable': unscorable,
      **verified.dropped,
      'not_selected': not_selected,
    }
    self._tokens['sampled'] += sampled_tokens(members)
    self._tokens['dropped'] += sampled_tokens(members) - sampled_tokens(chosen)
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
      verified: members that remain after the processors.
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
  """Returns the part of a task's uid after `<taskset>:`, which is a digest of the prompt. Tasks
  with the same prompt share this part, whatever their taskset.
  """
  return uid.rpartition(':')[2]
