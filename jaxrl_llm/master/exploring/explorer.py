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
import collections
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from jaxrl_llm.core.errors import RunError, first_cause
from jaxrl_llm.core.records.span import Span
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.waits import IdleClock, bounded
from jaxrl_llm.master.exploring.awaiting import POLL_S, TOO_LATE, Awaiting, store_verdicts
from jaxrl_llm.master.exploring.batch_policy import POLICIES, batches_ahead, passed_over
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.finished import (
  finish,
  scorable_of,
  store_samples,
  why_dropped,
)
from jaxrl_llm.master.exploring.gate import Gate
from jaxrl_llm.master.exploring.judging import judge_by_trainer
from jaxrl_llm.master.exploring.outcomes import Outcomes
from jaxrl_llm.master.exploring.partial import GroupCut
from jaxrl_llm.master.exploring.processors import Processed, Processors
from jaxrl_llm.master.exploring.recall import read_members, recall
from jaxrl_llm.master.exploring.runner import GroupExpired, GroupOrder, GroupRunner
from jaxrl_llm.master.exploring.scheduling import Immediate, Rounds, Scheduler, ScoringRounds
from jaxrl_llm.master.exploring.selection import Experience, sampled_tokens
from jaxrl_llm.master.exploring.started import StartedGroup, StartedGroups, Waiting
from jaxrl_llm.master.exploring.waves import Waves
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import Ref
from jaxrl_llm.replay.tables import AWAITED, Issue, State
from jaxrl_llm.rewards.api import Verdict, drops_group
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.sampler import TaskSampler

SPLIT = 'split_trajectories'
"""Name of the counter that holds the number of trajectories with several steps in a batch. The
counter is absent if `max_steps` is 1.
"""
_MAX_FAILURES = 60
"""Number of consecutive failures to read the inbox after which the run ends."""


class NothingToLearn(RunError):
  """Raised when too many groups were dropped while one batch was collected."""


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
    self._config, self._runner, self._sampler, self._store = config, runner, sampler, store
    self._groups = StartedGroups()
    self._waves: Waves | None = None
    """Scheduler if groups start in waves, otherwise None."""
    self._scheduler: Scheduler = Immediate()
    self._awaiting: Awaiting | None = None
    """Groups that wait for delayed rewards; None if the run has no delayed scorer."""
    if runner.scorers.delayed:
      self._scheduler = self._awaiting = Awaiting(
        self._groups,
        runner.scorers,
        store,
        newest=lambda: self._config.first_step + self._gate.last_batch,
      )
    self._rounds: ScoringRounds | None = None
    """Scheduler if the trainer's reward model scores samples, otherwise None."""
    if runner.scorers.by_trainer & {scorer.name for scorer in runner.scorers.config.scorers}:
      self._scheduler = self._rounds = ScoringRounds(
        self._groups, groups_per_batch=config.groups_per_batch
      )
    spare = 0
    if config.partial is not None:
      most = config.partial.max_groups(config.groups_per_batch, config.bound)
      if config.bound:
        self._scheduler = Rounds(self._groups, max_groups=most)
      else:
        spare = most - config.groups_per_batch
        self._scheduler = self._waves = Waves(
          self._groups, groups_per_batch=config.groups_per_batch, max_groups=most
        )
    self._gate = Gate(
      bound=config.bound,
      ahead=batches_ahead(config.batch_policy, config.bound),
      groups_per_batch=config.groups_per_batch,
      batches=config.batches,
      spare=spare,
    )
    self._events = events
    self._writer = store.at(0)
    """Writer of the store. It labels each change with the number of batches that the run has
    completed.
    """
    self._visits: dict[str, int] = {}
    """Number of times that each prompt was drawn before (see `_earlier_visits`), keyed by the
    result of `_prompt`. The stage continues this count, because the count is part of the random
    keys: a repeated count would repeat the random numbers.
    """
    self._returned: set[str] = set()
    """Ids of the groups in the last batch that `next` returned. Empty once `complete` has been
    called for that batch.
    """
    self._outcomes = Outcomes(
      sampler,
      in_order=config.partial is None
      and self._awaiting is None
      and config.batch_policy == 'in_order',
    )
    self._scoring_s = 0.0
    self._passed_over = 0
    self._tokens: collections.Counter[str] = collections.Counter()
    """Counts of tokens since the last call of `take_tokens`, with the same keys as its result."""
    self._clock = IdleClock()
    self._progress = asyncio.Event()
    self._counts: collections.Counter[str] = collections.Counter()
    self._running: asyncio.Task | None = None
    self._processors = Processors(config.processors)
    self._completed = self._now()
    """State as of the last completed batch."""

  @property
  def clock_decisions(self) -> int:
    """Number of decisions that depended on a clock: those of the runner
    (`GroupRunner.clock_decisions`), groups that a batch passed over because later groups finished
    first, and groups whose delayed rewards arrived in time or too late.
    """
    waited = self._awaiting.decisions if self._awaiting is not None else 0
    return self._runner.clock_decisions + self._passed_over + waited

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Runs the exploration in the background while the block is active. At the end of the block,
    drops the unfinished samples with the reason 'given up'.

    If a signal stops the run, the run commits before the block ends. A resumed run undoes all
    changes after that commit, so it still has these samples.
    """
    self._clock = IdleClock()
    for uid, count in (await asyncio.to_thread(self._earlier_visits)).items():
      self._visits[_prompt(uid)] = max(count, self._visits.get(_prompt(uid), 0))
    models = contextlib.AsyncExitStack()
    journals = self._store.directory / 'judged'
    await models.enter_async_context(self._processors.opened(journals, self._config.stage))
    self._running = asyncio.create_task(self._explore())
    try:
      yield
    finally:
      self._running.cancel()
      await asyncio.gather(self._running, return_exceptions=True)
      self._running = None
      await models.aclose()
      for group in self._groups.all:
        self._tokens['dropped'] += sampled_tokens(group.stored)
        self._discard(group, 0)
      unfinished_groups = {group.name for group in self._groups.all} | self._returned
      if self._awaiting is not None:
        unfinished_groups |= self._awaiting.kept(self._config.stage)
      # Samples of earlier attempts (starts of the run) can be unfinished only if they are partial
      # or wait for delayed rewards.
      live = [
        entry
        for entry in self._store.live()
        if entry.attempt == self._store.attempt or entry.state in (State.PARTIAL, State.AWAITING)
      ]
      unfinished = [entry for entry in live if entry.group_id in unfinished_groups]
      self._writer.drop([entry.uid for entry in unfinished], 'given up')
      for group in dict.fromkeys(entry.group_id for entry in unfinished):
        self._events.message(Edge.DROP, group=group, reason='given up')

  def _earlier_visits(self) -> dict[str, int]:
    """Returns the number of times that each task was drawn in earlier stages, and in this stage
    before a branch reset its position in the data. The numbers are keyed by task uid.
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
    self._give_up_surplus()
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
    if (past := self._config.past) is not None:
      groups = await asyncio.to_thread(past.draw, self._store, self._writer.step)
      chosen += await asyncio.to_thread(
        self._recall, [uid for group in groups for uid in group.uids]
      )
      counts['past_groups'] = len(groups)
    asked = self._events.request(Edge.FETCH, source='rollouts')
    uids = [*dict.fromkeys(step.uid for choice in chosen for step in choice.steps)]
    places = await asyncio.to_thread(self._writer.seal, uids)
    self._events.reply(asked, count=len(places))
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
    rounds = self._rounds
    if rounds is None:
      return []
    await self._wait_until(lambda: rounds.is_due or self._next_batch() is not None)
    if not rounds.is_due:
      return []
    rounds.begin_round()
    members = [member for group in self._groups.unscored for member in group.unscored]
    return sorted(members, key=lambda member: member.sample.uid)

  async def score(self, verdicts: Mapping[str, Verdict]) -> bool:
    """Finishes the groups whose samples `unscored` returned. Returns True if the batch needs more
    groups, because some of these groups were dropped.

    Args:
      verdicts: verdicts of the trainer's reward model, keyed by uid.

    Raises:
      NothingToLearn: more than `max_dropped_groups` groups were dropped, or the batch needs more
        than `max_rounds` further rounds of rollouts.
    """
    scorers = self._runner.scorers
    for group in self._groups.unscored:
      members = judge_by_trainer(group.unscored, verdicts, scorers, scorers.config)
      processed = await self._processors.run(scorable_of(members), self._writer.step)
      group.unscored, group.scored = None, time.monotonic()
      self._finish(
        group, members, functools.partial(store_samples, self._writer, members), processed
      )
    if self._next_batch() is not None:
      return False
    if self._rounds.rounds > self._config.max_rounds:
      raise NothingToLearn(
        f'stage {self._config.stage}: {self._counts["dropped/groups"]} groups were dropped in '
        f'{self._rounds.rounds} rounds of rollouts for one batch, reward_model.max_rounds permits '
        f'{self._config.max_rounds} after the first; relax the processors or the selection, or '
        'raise max_rounds'
      )
    return True

  def proceed(self) -> None:
    """Lets groups start again after `unscored`, once the engine serves again."""
    self._rounds.end_round()
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
        + (self._awaiting.max_age_s if self._awaiting is not None else 0),
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
      self._counts['passed_over'] = passed_over(self._groups.candidates, numbers)
      self._passed_over += self._counts['passed_over']
    groups = self._groups.take(numbers)
    self._scheduler.close_batch()
    self._outcomes.report(numbers[-1], self._groups)
    batch = [member for group in groups for member in group.chosen]
    if self._config.max_steps > 1:
      self._counts[SPLIT] = sum(len(member.steps) > 1 for member in batch)
    self._tokens['trained'] += sampled_tokens(batch)
    self._scoring_s += max(group.scored for group in groups) - max(
      group.rolled_out for group in groups
    )
    self._returned = {group.name for group in groups}
    if self._gate.is_full and not self._groups.running:
      self._give_up_parked()
    if self._config.response_lengths:
      limits = (self._sampling(group).max_response_length for group in groups)
      self._counts['response_length/limit'] = max(limit for limit in limits if limit is not None)
    if self._config.partial is not None:
      for name in ('cut', 'continued', 'returned'):  # Every batch has these keys.
        self._counts[f'partial/{name}'] += 0
      self._counts['partial/open'] = len(self._groups.parked)
    if self._awaiting is not None:
      self._counts['awaiting/joined'] += 0
      self._counts['awaiting/open'] = len(self._groups.awaiting)
    counts, self._counts = dict(self._counts), collections.Counter()
    return batch, counts

  def complete(self, uids: Sequence[str], experts: Sequence[Issue] = ()) -> None:
    """Records that the run has completed the batch that `next` returned last.

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

  def _give_up_parked(self) -> None:
    """Drops the parked groups, because the stage has no later batch to continue them."""
    if parked := self._groups.parked:
      self._counts['dropped/given_up'] += self._abandon(parked)

  def _give_up_surplus(self) -> None:
    """Drops the newest groups if the stage was shortened and more groups have started than its
    batches need. This happens before any group runs, so the choice does not depend on timing.
    """
    if surplus := self._gate.surplus:
      newest = [candidate.number for candidate in self._groups.candidates][-surplus:]
      for number in newest:
        self._outcomes.forget(number)
        self._gate.drop()
      self._abandon(newest)

  def _abandon(self, numbers: Sequence[int]) -> int:
    """Drops groups that no batch will train on. Returns the number of their samples that were
    dropped in the store. A group that has not run yet has no samples in the store.
    """
    live: dict[str, list[str]] = {}
    for entry in self._store.live() if numbers else ():
      live.setdefault(entry.group_id, []).append(entry.uid)
    dropped = 0
    for group in self._groups.take(numbers):
      self._tokens['dropped'] += sampled_tokens(group.stored)
      self._discard(group, 0)
      uids = live.get(group.name, [])
      self._writer.drop(uids, 'given up')
      dropped += len(uids)
      self._events.message(Edge.DROP, group=group.name, reason='given up')
    return dropped

  def _next_batch(self) -> list[int] | None:
    """Returns the numbers of the groups that form the next batch, or None if the batch is not
    complete yet.
    """
    if self._waves is not None and self._groups.running:
      return None
    config = self._config
    batch = self._writer.step - config.first_step
    return POLICIES[config.batch_policy](self._groups.candidates, batch, config.groups_per_batch)

  async def _until(self, condition: Callable[[], bool]) -> None:
    while not condition():
      self._progress.clear()
      await self._progress.wait()  # Wait 'collect': bounded by the caller.

  async def _explore(self) -> None:
    try:
      async with asyncio.TaskGroup() as groups:
        await self._gate.opened()
        if self._awaiting is not None:
          self._adopt(self._groups.running)
          groups.create_task(self._watch_inbox(self._awaiting))
        self._issue(self._unknown())
        self._start(groups, self._groups.running)
        while True:
          admitted = await self._gate.admit()
          parked, count = self._scheduler.next(admitted)
          self._gate.unpark(len(parked))
          again = self._groups.proceed(parked, self._gate.last_batch)
          if self._awaiting is not None:
            for group in again:
              self._join(self._awaiting, group)
          elif again:
            self._start(groups, again)
            self._counts['partial/continued'] += len(again)
          new = self._adopt(self._groups.start(self._draw, count))
          self._issue(new)
          self._start(groups, new)
          if unused := admitted - len(parked) - count:
            self._gate.give_back(unused)
            self._progress.clear()
            # Wait 'collect': bounded: the loop cancels this task.
            await self._progress.wait()
    except BaseExceptionGroup as group:
      raise first_cause(group) from None

  async def _watch_inbox(self, awaiting: Awaiting) -> None:
    """Processes delayed rewards as they arrive, and drops groups that have waited too long."""
    failures = 0
    while True:
      try:
        late, failures = awaiting.update(await awaiting.verdicts()), 0
      except RunError as error:
        late, failures = [], failures + 1
        if failures == _MAX_FAILURES:
          raise
        logging.log_first_n(logging.WARNING, '%s', 5, error)
      for group in late:
        self._writer.drop(group.uids, TOO_LATE)
        self._counts[f'dropped/{TOO_LATE.replace(" ", "_")}'] += group.size
        self._tokens['dropped'] += sampled_tokens(group.stored)
        self._drop_group(group, TOO_LATE, f'its rewards were not complete within {awaiting.limits}')
      self._progress.set()
      await asyncio.sleep(POLL_S)

  def _await_rewards(self, group: StartedGroup, waiting: Waiting) -> None:
    """Stores the samples of a group, and parks the group until its delayed rewards are complete."""
    asked = self._events.request(Edge.STORE, group=group.name, count=len(waiting.members))
    with self._store.transaction():
      store_samples(self._writer, waiting.members)
      texts = {member.sample.uid: member.completion for member in waiting.members}
      self._writer.wait_for_rewards(texts, waiting.awaited)
    self._events.reply(asked, admitted=0)
    group.waiting, group.is_parked = waiting, True
    self._gate.park()
    self._progress.set()

  def _adopt(self, groups: Sequence[StartedGroup]) -> list[StartedGroup]:
    """Parks the groups whose samples already wait for rewards according to the store, because they
    began to wait after the last commit before a crash. Returns the other groups.
    """
    kept = self._awaiting.kept(self._config.stage) if self._awaiting is not None else set()
    for group in groups:
      if group.name in kept:
        group.waiting, group.is_parked = self._read_waiting(group.uids), True
        self._tokens['sampled'] += sampled_tokens(group.stored)
        self._gate.park()
    return [group for group in groups if not group.is_parked]

  def _join(self, awaiting: Awaiting, group: StartedGroup) -> None:
    """Finishes a group whose delayed rewards are complete, so that a batch can contain it."""
    self._counts['awaiting/joined'] += 1
    members = awaiting.take(group)
    self._finish(group, members, lambda: store_verdicts(self._writer, group, members))

  def _draw(self, number: int) -> StartedGroup:
    task, visit = self._sampler.next()
    visit += self._visits.get(_prompt(task.uid), 0)
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

  def _unknown(self) -> list[StartedGroup]:
    """Returns the unfinished groups whose samples are not in the store, because the samples were
    lost when a process was killed, or because the run is a branch with a new store. These groups
    start again from their prompts.
    """
    unfinished = [group for group in self._groups.all if not group.is_finished]
    stored = {entry.group_id for entry in self._store.live()} if unfinished else set()
    return [group for group in unfinished if group.name not in stored]

  def _start(self, tasks: asyncio.TaskGroup, groups: Sequence[StartedGroup]) -> None:
    for group in groups:
      self._events.message(Edge.TASK, group=group.name)
      tasks.create_task(self._run(group))

  def _issue(self, groups: Sequence[StartedGroup]) -> None:
    with self._store.transaction():
      self._writer.offer([group.task for group in groups])
      self._writer.issue([row for group in groups for row in group.issues])

  def take_scoring(self) -> float:
    """Returns the seconds from the end of a batch's last rollout to the end of its scoring, summed
    over the batches since the previous call.
    """
    seconds, self._scoring_s = self._scoring_s, 0.0
    return seconds

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
    groups = self._groups.all if self._running is not None else []
    waiting = [group.stored for group in groups]
    tokens, self._tokens = self._tokens, collections.Counter()
    return {
      **{name: tokens[name] for name in ('sampled', 'trained', 'dropped', 'discarded')},
      'waiting': sum(map(sampled_tokens, waiting)),
      'partial': sum(group.partial_tokens for group in groups),
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
    flight = {
      **self._groups.state(),
      'outcomes': self._outcomes.state(),
      'counts': dict(self._counts),
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
    self._counts = collections.Counter(flight['counts'])
    self._outcomes.restore(flight['outcomes'])
    self._groups.restore(
      flight,
      lambda number, task, visit: self._new_group(number, self._sampler.task(task), visit),
      lambda group: self._recall(self._store.members(group)),
      self._read_waiting,
    )
    if 'waves' in flight:
      self._scheduler.restore(flight['waves'])
    self._completed = state

  def _recall(self, uids: Sequence[str]) -> list[Experience]:
    """Reads the samples of whole groups from the store, and returns the trajectories that were
    selected for training.
    """
    text, rewards = self._runner.workflow.text, self._runner.scorers.config
    return recall(self._store, uids, tasks=self._sampler.task, text=text, rewards=rewards)

  def _read_waiting(self, uids: Sequence[str]) -> Waiting | None:
    """Reads from the store the samples of a group that waits for delayed rewards. Returns None if
    the run has no delayed scorer, or if the store has no such samples, as in a branch with a new
    store.
    """
    if self._awaiting is None or not self._store.derived(uids[:1], AWAITED):
      return None
    text, rewards = self._runner.workflow.text, self._runner.scorers.config
    members = read_members(
      self._store, uids, {}, tasks=self._sampler.task, text=text, rewards=rewards
    )
    return self._awaiting.restore(uids, members)

  async def _run(self, group: StartedGroup) -> None:
    """Runs one group from rollout to admission, or drops it if it exceeds its time limits."""
    placed = None
    if self._waves is not None:
      placed = functools.partial(self._place, self._waves, group.number)
    with self._clock.busy():
      try:
        order = GroupOrder(
          group.name, group.task, group.visit, self._sampling(group), await self._spans(group)
        )
        judged = await self._runner.run(order, placed=placed)
        processed = None
        # If the trainer's reward model must still score the group, its rewards are not complete.
        if not self._needs_trainer(judged.members):
          processed = await self._processors.run(scorable_of(judged.members), self._writer.step)
      except GroupCut as cut:
        self._park(group, cut.spans)
        return
      except GroupExpired as expired:
        self._give_up(group, str(expired))
        return
    group.rolled_out, group.scored = judged.rolled_out, judged.scored
    self._admit(group, judged.members, processed)

  def _sampling(self, group: StartedGroup) -> Sampling:
    """Returns the group's sampling parameters. They depend on the number of batches on which the
    weights had been trained when the group started or was last continued, so a restart of the run
    does not change them.
    """
    return self._config.sampling_after(max(0, group.last_batch - self._config.bound))

  async def _spans(self, group: StartedGroup) -> list[list[Span]]:
    """Returns the spans (runs of tokens) that earlier batches generated for each sample of a group.
    The result is empty without partial rollouts.
    """
    if self._config.partial is None:
      return []
    return [*(await asyncio.to_thread(self._store.spans, group.uids)).values()]

  def _park(self, group: StartedGroup, spans: Mapping[int, Span]) -> None:
    """Stores the spans that a group has generated for this batch, and parks the group until a later
    batch continues it.
    """
    uids = group.uids
    stored = group.partial_tokens + sum(len(span.tokens) for span in spans.values())
    self._discard(group, stored)
    group.partial_tokens = stored
    self._writer.extend({uids[index]: span for index, span in spans.items()})
    group.is_parked = True
    self._counts['partial/cut' if spans else 'partial/returned'] += 1
    self._gate.park()
    self._progress.set()

  def _give_up(self, group: StartedGroup, reason: str) -> None:
    self._discard(group, 0)
    self._writer.drop(group.uids, reason)
    self._counts[f'dropped/{reason}'] += group.size
    limits = self._config.limits
    self._drop_group(
      group, reason, f'task {group.task.uid} took too long ({reason}, limits {limits})'
    )
    self._progress.set()

  def _admit(
    self, group: StartedGroup, members: list[Experience], processed: Processed | None
  ) -> None:
    """Takes a group whose samples are generated, and finishes it unless it must wait for delayed
    rewards or for the trainer's reward model.

    Args:
      processed: result of the processors. If None, they run when the group is finished.
    """
    sampled = sampled_tokens(members)
    self._discard(group, sampled)
    self._tokens['sampled'] += sampled
    if self._awaiting is not None and (waiting := self._awaiting.wait_of(members)) is not None:
      self._await_rewards(group, waiting)
      return
    if self._needs_trainer(members):
      group.unscored = members
      self._progress.set()
      return
    self._finish(group, members, lambda: store_samples(self._writer, members), processed)

  def _needs_trainer(self, members: Sequence[Experience]) -> bool:
    """Returns whether a group must wait for the trainer's reward model. A group that will be
    dropped in any case does not wait.
    """
    scorers = self._runner.scorers
    if self._rounds is None or not scorers.is_scored_by_trainer(members[0].task):
      return False
    return not drops_group((score for m in members for score in m.scores), scorers.config)

  def _finish(
    self,
    group: StartedGroup,
    members: list[Experience],
    store: Callable[[], None],
    processed: Processed | None = None,
  ) -> None:
    """Admits a group that has its final rewards, or drops it if none of its samples will be trained
    on.

    Args:
      store: adds to the store those of the group's samples and scores that are not stored yet.
      processed: result of the processors. If None, they run now.
    """
    config = self._config
    finished = finish(
      config,
      members,
      self._runner.scorers.config,
      step=self._writer.step,
      processed=processed,
    )
    if finished.outcome is not None:
      self._outcomes.record(group.number, finished.outcome)
    self._tokens['dropped'] += sampled_tokens(members) - sampled_tokens(finished.chosen)
    asked = self._events.request(Edge.STORE, group=group.name, count=len(members))
    with self._store.transaction():
      store()
      finished.settle(self._writer)
    self._events.reply(asked, admitted=len(finished.uids))
    self._counts.update(
      {f'dropped/{reason}': len(uids) for reason, uids in finished.dropped.items()}
    )
    self._counts.update({f'processors/{name}': count for name, count in finished.counts.items()})
    if finished.chosen:
      group.chosen = finished.chosen
    else:
      reason = 'scorer failed' if finished.scorer_failed else 'nothing to learn from'
      self._drop_group(group, reason, why_dropped(finished, config))
    self._progress.set()

  def _discard(self, group: StartedGroup, kept: int) -> None:
    """Adds to the count of discarded tokens those tokens that were generated for a group but are
    not kept.

    Args:
      kept: number of the group's tokens that are kept, in samples or as spans.
    """
    if self._runner.take_tokens is not None and not group.is_finished:
      generated = group.partial_tokens + self._runner.take_tokens(group.name)
      self._tokens['discarded'] += generated - kept
      group.partial_tokens = 0

  def _drop_group(self, group: StartedGroup, reason: str, why: str) -> None:
    self._groups.take([group.number])
    self._events.message(Edge.DROP, group=group.name, reason=reason)
    self._counts['dropped/groups'] += 1
    if self._counts['dropped/groups'] > self._config.max_dropped_groups:
      raise NothingToLearn(
        f'stage {self._config.stage}: {self._counts["dropped/groups"]} groups were dropped while '
        f'one batch was collected, max_dropped_groups permits {self._config.max_dropped_groups}; '
        f'the last group: {why}'
      )
    if not group.is_parked:  # A parked group has already returned its capacity.
      self._gate.drop()


def _prompt(uid: str) -> str:
  """Returns the part of a task's uid after `<taskset>:`, which is a digest of the prompt. Tasks
  with the same prompt share this part even if they are in different tasksets.
  """
  return uid.rpartition(':')[2]
