"""Explorer: draws tasks, has a group of samples generated and scored for each task, and forms
batches.

The gate (`Gate`) decides when a group may start. Only the explorer draws a stage's tasks, admits
its groups to batches and changes its samples in the store. It therefore also keeps the state that
these actions share and that a resumed run needs.

Invariant: every trajectory is recorded in the store when its group starts (its first step is
issued), and its further steps when they arrive. Each of these samples is finally admitted to a
batch, or dropped with a reason. The content of a batch depends on which groups started and how they
were scored, but, with the batch policy 'in_order', not on which of them finished first.

If the gate's bound is above 0, groups may be in progress when the run commits, and the committed
state lists them. A resumed explorer reads the finished ones from the store and runs the others
again. With partial rollouts, the state also lists the parked groups, which continue from their
stored spans (see `partial`). Groups that wait for delayed rewards survive a crash even if they
began to wait after the commit (see `awaiting`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.core.errors import first_cause
from jaxrl_llm.core.records.span import Span
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.waits import IdleClock, bounded
from jaxrl_llm.master.exploring.batch_policy import POLICIES, passed_over
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.delayed import DelayedRewards
from jaxrl_llm.master.exploring.endings import Endings
from jaxrl_llm.master.exploring.finished import scorable_of
from jaxrl_llm.master.exploring.outcomes import Outcomes
from jaxrl_llm.master.exploring.partial import GroupCut
from jaxrl_llm.master.exploring.processors import Processed, Processors
from jaxrl_llm.master.exploring.runner import GroupExpired, GroupOrder, GroupRunner
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.exploring.stage_samples import StageSamples
from jaxrl_llm.master.exploring.started import StartedGroup, StartedGroups
from jaxrl_llm.master.exploring.starting import build_starting
from jaxrl_llm.master.exploring.tally import Tally
from jaxrl_llm.master.exploring.trainer_scores import TrainerScores
from jaxrl_llm.master.exploring.waves import Waves
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import Ref
from jaxrl_llm.replay.tables import Issue
from jaxrl_llm.rewards.api import Verdict
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.sampler import TaskSampler

_AT_ONCE = 128
"""Maximum number of samples that a callback of the event loop issues or starts to generate, which
takes a few milliseconds.
"""


class Drawn(NamedTuple):
  """Result of `Explorer.next`: a complete batch."""

  chosen: list[Experience]
  """Trajectories of the new groups, followed by the trajectories of groups from earlier batches. A
  sample in several preference pairs occurs once per pair.
  """
  places: dict[str, Ref]
  """Location of each sample in the store's sealed segment files, keyed by uid."""
  counts: dict[str, int]
  """Counts of events while the batch was collected, such as dropped groups, keyed by name."""


class Explorer:
  """Starts groups when the gate admits them, and forms batches from finished groups."""

  def __init__(
    self,
    config: ExplorerConfig,
    runner: GroupRunner,
    *,
    sampler: TaskSampler,
    store: ReplayStore,
    events: Events = SILENT,
  ):
    self._config, self._runner, self._sampler = config, runner, sampler
    self._events = events
    self._samples = StageSamples(config, runner, sampler, store, events)
    self._tally = Tally(config, runner.take_tokens)
    self._groups = StartedGroups()
    starting = build_starting(config, runner.scorers, self._groups, store)
    self._gate, self._scheduler, self._waves = starting.gate, starting.scheduler, starting.waves
    may_pass_over = config.partial is not None or starting.awaiting is not None
    in_order = not may_pass_over and config.batch_policy == 'in_order'
    self._outcomes = Outcomes(sampler, in_order=in_order)
    self._endings = Endings(
      config=config,
      rewards=runner.scorers.config,
      groups=self._groups,
      gate=self._gate,
      samples=self._samples,
      tally=self._tally,
      outcomes=self._outcomes,
      events=events,
    )
    self._processors = Processors(config.processors)
    self._delayed: DelayedRewards | None = None
    """Groups that wait for delayed rewards; None if the run has no delayed scorer."""
    if starting.awaiting is not None:
      self._delayed = DelayedRewards(awaiting=starting.awaiting, endings=self._endings)
    self._trainer_scores: TrainerScores | None = None
    """Scoring by the trainer's reward model; None if the run has none."""
    if starting.rounds is not None:
      self._trainer_scores = TrainerScores(
        config=config,
        scorers=runner.scorers,
        rounds=starting.rounds,
        processors=self._processors,
        endings=self._endings,
      )
    self._clock = IdleClock()
    self._progress = asyncio.Event()
    self._running: asyncio.Task | None = None
    self._returned: set[str] = set()
    """Ids of the groups in the last batch that `next` returned. Empty once `complete` has been
    called for that batch.
    """
    self._completed = self._now()
    """State as of the last completed batch."""

  @property
  def clock_decisions(self) -> int:
    """Number of decisions that depended on a clock: those of the runner
    (`GroupRunner.clock_decisions`), groups that a batch passed over because later groups finished
    first, and groups whose delayed rewards arrived in time or too late.
    """
    waited = self._delayed.awaiting.decisions if self._delayed is not None else 0
    return self._runner.clock_decisions + self._tally.passed_over + waited

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Runs the exploration in the background while the block is active. At the end of the block,
    drops the unfinished samples with the reason 'given up'. Raises the error of a finished group
    that could not be stored.

    If a signal stops the run, the run commits before the block ends. A resumed run undoes all
    changes after that commit, so it still has these samples.
    """
    self._clock = IdleClock()
    await self._samples.count_visits()
    models = contextlib.AsyncExitStack()
    judged = self._processors.opened(self._samples.judged, self._config.stage)
    await models.enter_async_context(judged)
    self._running = asyncio.create_task(self._explore())
    try:
      yield
    finally:
      self._running.cancel()
      await asyncio.gather(self._running, return_exceptions=True)
      self._running = None
      await models.aclose()
      try:
        self._samples.settling.close()
      finally:
        others = self._returned
        if self._delayed is not None:
          others = others | self._delayed.awaiting.kept(self._config.stage)
        self._endings.give_up(others)

  def advance(self, step: int, served: int) -> None:
    """Records the progress of the run.

    Args:
      step: number of batches that the run has completed.
      served: number of this stage's batches that the engines' current weights have been trained on.
    """
    self._samples.advance(step)
    self._returned = set()
    self._endings.give_up_surplus()
    self._scheduler.begin_batch()
    self._progress.set()  # Capacity was freed, and parked groups are queued.
    self._sampler.advance(served)
    self._gate.advance(served)

  async def next(self) -> Drawn:
    """Returns the next batch: new groups, then groups of earlier batches if `past` is configured.

    Moves the samples to a sealed (immutable) segment file of the store. Raises the exceptions of
    `collect`.
    """
    chosen, counts = await self.collect()
    if self._config.past is not None:
      earlier, counts['past_groups'] = await asyncio.to_thread(self._samples.past)
      chosen += earlier
    places = await self._samples.seal(chosen)
    return Drawn(chosen, places, counts)

  async def collect(self) -> tuple[list[Experience], dict[str, int]]:
    """Waits for the new groups of the next batch. Returns the samples selected from them, and
    counts of events since the previous batch, keyed by name.

    Raises:
      WaitExpired: the groups did not finish within `collect_deadline_s`, extended by the maximum
        wait for delayed rewards (`max_age_hours`) if the run has any.
      NothingToLearn: more than `max_dropped_groups` groups were dropped.
      Exception: the engine or a scorer failed; its error is raised here.
    """
    await self._wait_until(lambda: self._next_batch() is not None)
    return self._take_batch(self._next_batch())

  async def unscored(self) -> list[Experience]:
    """Waits until the trainer's reward model must score samples, and returns them, in order of uid.
    Returns an empty list if the batch is complete, or if no sample needs the reward model. Raises
    the exceptions of `collect`.

    After the method has returned samples, no group starts until `proceed` is called.
    """
    scores = self._trainer_scores
    if scores is None:
      return []
    await self._wait_until(lambda: scores.rounds.is_due or self._next_batch() is not None)
    return scores.begin() if scores.rounds.is_due else []

  async def score(self, verdicts: Mapping[str, Verdict]) -> bool:
    """Finishes the groups whose samples `unscored` returned. Returns True if the batch needs more
    groups, because some of these groups were dropped.

    Args:
      verdicts: verdicts of the trainer's reward model, keyed by uid.

    Raises:
      NothingToLearn: more than `max_dropped_groups` groups were dropped, or the batch needs more
        than `max_rounds` further rounds of rollouts.
    """
    await self._trainer_scores.finish(verdicts)
    self._progress.set()
    if self._next_batch() is not None:
      return False
    self._trainer_scores.check_rounds()
    return True

  def proceed(self) -> None:
    """Lets groups start again after `unscored`, once the engine serves again."""
    self._trainer_scores.rounds.end_round()
    self._progress.set()

  async def _wait_until(self, condition: Callable[[], bool]) -> None:
    """Waits until the condition holds, within the time limit of a batch. The condition is checked
    whenever a group has made progress. Raises the exceptions of `collect`.
    """
    ready = asyncio.ensure_future(
      bounded(
        self._until(condition),
        name='collect',
        owner='the loop',
        waits_for=(
          f'{self._config.groups_per_batch} groups of stage {self._config.stage} from the engine '
          'and the scorers (rollout.collect_deadline_s)'
        ),
        deadline_s=self._config.collect_deadline_s
        + (self._delayed.awaiting.max_age_s if self._delayed is not None else 0),
      )
    )
    try:
      # Wait 'collect': bounded: `ready` completes within `collect_deadline_s`.
      await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
      # Wait 'collect': over already, because the awaited task is done.
      await (ready if ready.done() else self._running)
    finally:
      ready.cancel()  # This has no effect if `ready` is done.

  def _take_batch(self, numbers: Sequence[int]) -> tuple[list[Experience], dict[str, int]]:
    """Takes the groups of a complete batch. Returns the samples selected from the groups, and
    counts of events since the previous batch, keyed by name.
    """
    if self._config.batch_policy != 'in_order':
      self._tally.pass_over(passed_over(self._groups.candidates, numbers))
    groups = self._groups.take(numbers)
    self._scheduler.close_batch()
    self._outcomes.report(numbers[-1], self._groups)
    batch = [member for group in groups for member in group.chosen]
    self._tally.join(groups, batch)
    self._returned = {group.name for group in groups}
    if self._gate.is_full and not self._groups.running:
      self._endings.give_up_parked()
    counts = self._tally.counts
    if self._config.response_lengths:
      limits = (self._sampling(group).max_response_length for group in groups)
      counts['response_length/limit'] = max(limit for limit in limits if limit is not None)
    if self._delayed is not None:
      counts['awaiting/joined'] += 0  # Every batch has this key.
      counts['awaiting/open'] = len(self._groups.awaiting)
    return batch, self._tally.take_counts(self._groups)

  def record(self, uids: Sequence[str], experts: Sequence[Issue] = ()) -> None:
    """Records in the store that the batch that `next` returned last was trained on. May be called
    in any thread.

    Args:
      uids: uids of the rollouts that the batch trained on.
      experts: records of the expert rows that the batch trained on.
    """
    self._samples.record(uids, experts)

  def complete(self) -> None:
    """Completes the batch that `next` returned last, after `record`."""
    self._samples.advance(self._samples.step + 1)
    self._returned = set()
    # Later changes to the store belong to the next batch, and a commit of this batch does not
    # contain them. The explorer's state for that commit is therefore captured here.
    self._completed = self._now()

  def _next_batch(self) -> list[int] | None:
    """Returns the numbers of the groups that form the next batch, or None if the batch is not
    complete yet.
    """
    if self._waves is not None and self._groups.running:
      return None
    config = self._config
    batch = self._samples.step - config.first_step
    return POLICIES[config.batch_policy](self._groups.candidates, batch, config.groups_per_batch)

  async def _until(self, condition: Callable[[], bool]) -> None:
    while not condition():
      self._progress.clear()
      await self._progress.wait()  # Wait 'collect': bounded by the caller.

  async def _explore(self) -> None:
    try:
      async with asyncio.TaskGroup() as groups:
        await self._gate.opened()
        if self._delayed is not None:
          self._delayed.adopt(self._groups.running)
          groups.create_task(self._delayed.watch(self._progress.set))
        unfinished = [group for group in self._groups.all if not group.is_finished]
        await self._issue(self._samples.unknown(unfinished))
        await self._start(groups, self._groups.running)
        while True:
          admitted = await self._gate.admit()
          parked, count = self._scheduler.next(admitted)
          self._gate.unpark(len(parked))
          self._gate.give_back(admitted - len(parked) - count)
          if not parked and not count:
            self._progress.clear()
            # Wait 'collect': bounded: the loop cancels this task.
            await self._progress.wait()
            continue
          again = self._groups.proceed(parked, self._gate.last_batch)
          if self._delayed is not None:
            for group in again:
              self._delayed.join(group)
              self._progress.set()
            again = []
          elif again:
            self._tally.counts['partial/continued'] += len(again)
          new = self._groups.start(self._draw, count)
          if self._delayed is not None:
            new = self._delayed.adopt(new)
          await self._issue(new)
          await self._start(groups, again + new)
    except BaseExceptionGroup as group:
      raise first_cause(group) from None

  def _draw(self, number: int) -> StartedGroup:
    task, visit = self._sampler.next()
    visit = self._samples.visit(task.uid, visit)
    return self._new_group(number, task, visit, last_batch=self._gate.last_batch)

  def _new_group(self, number: int, task: Task, visit: int, **fields: int) -> StartedGroup:
    stage, size = self._config.stage, self._config.group_size
    return StartedGroup(stage=stage, number=number, task=task, visit=visit, size=size, **fields)

  async def _place(self, waves: Waves, number: int) -> bool:
    """Waits until it is decided whether the batch will contain this group, whose samples are
    finished. Returns True if the batch will contain the group.
    """
    waves.finish()
    while (taken := waves.takes(number)) is None:
      self._progress.clear()
      # Wait 'collect': bounded: the loop cancels this task.
      await self._progress.wait()
    return taken

  async def _issue(self, groups: Sequence[StartedGroup]) -> None:
    """Records the samples of groups that are about to start, in several transactions. The groups
    must already be among the started groups: after a kill between two transactions, a resumed run
    issues the samples that the store lacks.
    """
    for few in self._in_slices(groups):
      self._samples.issue(few)
      await asyncio.sleep(0)

  async def _start(self, tasks: asyncio.TaskGroup, groups: Sequence[StartedGroup]) -> None:
    for few in self._in_slices(groups):
      for group in few:
        self._events.message(Edge.TASK, group=group.name)
        tasks.create_task(self._run(group))
      await asyncio.sleep(0)

  def _in_slices(self, groups: Sequence[StartedGroup]) -> Iterator[Sequence[StartedGroup]]:
    """Yields the groups in slices of at most `_AT_ONCE` samples, or of one group."""
    size = max(1, _AT_ONCE // self._config.group_size)
    return (groups[start : start + size] for start in range(0, len(groups), size))

  def take_scoring(self) -> float:
    """Returns the seconds from the end of a batch's last rollout to the end of its scoring, summed
    over the batches since the previous call.
    """
    return self._tally.take_scoring()

  def take_tokens(self) -> dict[str, int]:
    """Returns counts of tokens since the previous call, keyed by outcome. The tokens of a sample
    are counted when it has finished and is stored.

    sampled: tokens of stored samples; trained: tokens that joined batches; dropped: tokens of
    stored samples that no batch will contain; discarded: tokens that no sample contains, such as
    those of groups that took too long; waiting: tokens in finished groups that wait for a batch
    now, and in groups that wait for delayed rewards; partial: tokens in the spans of groups that
    wait to be continued now. Summed over all calls, sampled = trained + dropped + the newest value
    of waiting. In a branch with an empty store, which generates the parent's waiting groups again,
    the sums restart.
    """
    return self._tally.take_tokens(self._groups.all if self._running is not None else [])

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
    flight = {
      **self._groups.state(),
      'outcomes': self._outcomes.state(),
      'counts': dict(self._tally.counts),
    }
    if (waves := self._scheduler.state()) is not None:
      flight['waves'] = waves
    return {'sampler': self._sampler.state(), 'gate': self._gate.state(), 'explorer': flight}

  def restore(self, state: Any) -> None:
    """Restores the state from a commit. Call this before `running`, with a store that has been
    recovered to the same commit.
    """
    self._sampler.restore(state['sampler'])
    self._gate.restore(state['gate'])
    flight = state['explorer']
    self._tally.restore(flight['counts'])
    self._outcomes.restore(flight['outcomes'])
    self._groups.restore(
      flight,
      lambda number, task, visit: self._new_group(number, self._sampler.task(task), visit),
      self._samples.recall_group,
      self._samples.awaiting if self._delayed is not None else lambda _: None,
    )
    if 'waves' in flight:
      self._scheduler.restore(flight['waves'])
    self._completed = state

  async def _run(self, group: StartedGroup) -> None:
    """Runs one group from rollout to admission, or drops it if it exceeds its time limits."""
    placed = None
    if self._waves is not None:
      placed = functools.partial(self._place, self._waves, group.number)
    with self._clock.busy():
      try:
        sampling, spans = self._sampling(group), await self._samples.spans(group)
        order = GroupOrder(group.name, group.task, group.visit, sampling, spans)
        judged = await self._runner.run(order, placed=placed)
        processed = None
        # If the trainer's reward model must still score the group, its rewards are not complete.
        if not self._needs_trainer(judged.members):
          processed = await self._processors.run(scorable_of(judged.members), self._samples.step)
      except GroupCut as cut:
        self._park(group, cut.spans)
        return
      except GroupExpired as expired:
        self._endings.expire(group, str(expired))
        self._progress.set()
        return
    group.rolled_out, group.scored = judged.rolled_out, judged.scored
    await self._admit(group, judged.members, processed)

  def _sampling(self, group: StartedGroup) -> Sampling:
    """Returns the group's sampling parameters. They depend on the number of batches on which the
    weights had been trained when the group started or was last continued, so a restart of the run
    does not change them.
    """
    return self._config.sampling_after(max(0, group.last_batch - self._config.bound))

  def _park(self, group: StartedGroup, spans: Mapping[int, Span]) -> None:
    """Stores the spans that a group has generated for this batch, and parks the group until a later
    batch continues it.
    """
    stored = group.partial_tokens + sum(len(span.tokens) for span in spans.values())
    self._tally.discard(group, stored)
    group.partial_tokens = stored
    self._samples.extend(group, spans)
    group.is_parked = True
    self._tally.counts['partial/cut' if spans else 'partial/returned'] += 1
    self._gate.park()
    self._progress.set()

  async def _admit(
    self, group: StartedGroup, members: list[Experience], processed: Processed | None
  ) -> None:
    """Takes a group whose samples are generated, and finishes it unless it must wait for delayed
    rewards or for the trainer's reward model.

    Args:
      processed: result of the processors. If None, they run when the group is finished.
    """
    if self._delayed is not None and self._delayed.park(group, members):
      self._tally.generated(group, members)
    elif self._needs_trainer(members):
      self._tally.generated(group, members)
      group.unscored = members
    else:
      await self._endings.admit(group, members, processed)
    self._progress.set()

  def _needs_trainer(self, members: Sequence[Experience]) -> bool:
    """Returns whether a group must wait for the trainer's reward model."""
    return self._trainer_scores is not None and self._trainer_scores.needs(members)
