"""Batches of rollouts that other runs generate and share while this run trains on them.

The other runs are only read (`replay.shared`). The groups that this run admits are copied into its
own store, in the order in which they were shared, and keep their tokens, logprobs and rewards. A
copied segment names the version of this run whose exported weights generated it, so staleness is
counted in this run's versions. The batches of several runs are read in turns.

Invariants:
- Which groups a batch contains depends only on the shared batches, their order, and which of them
  were void when they were read. A killed run therefore repeats its batches and weights bit for bit,
  unless another run made groups void meanwhile, or several runs are read in the order of arrival.
  After a restart, the run leaves out groups generated with weights that it exported before the
  restart and has not trained again.
- The position in the shared batches of each run is part of this run's commits.
- Each copied group ends in the state trained, expired or dropped. Groups that are left out are
  counted.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from absl import logging

from jaxrl_llm.batching.plan import Row, StepPlan, with_prefixes
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Sample, step_uid
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json, Version
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.master.batches import step_rows, with_digests
from jaxrl_llm.master.exploring.selection import Experience, experience_rows
from jaxrl_llm.master.followed_run import FollowedRun, Place
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import SegmentError
from jaxrl_llm.replay.shared import (
  SharedBatch,
  SharedBatches,
  SharedGroup,
  SharedTrajectory,
  SharedVersion,
  next_batch,
)
from jaxrl_llm.replay.tables import Issue
from jaxrl_llm.rewards.api import Reward
from jaxrl_llm.runtime.events import SILENT, Edge, Events

FOLLOWED = 'followed'
"""Operator name of the rows in the store's table `derived` that contain the origin and reward of a
copied trajectory.
"""
VOIDED = 'voided'
"""Reason for dropping a copied group that another run made void before this run trained on it."""
POLL_S = 0.5
"""Seconds between checks for new shared batches."""
_COUNTERS = ('voided', 'voided_trained', 'expired', 'left_out')


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowedConfig:
  """Parameters of a stage that follows other runs."""

  stage: str
  where: str
  """Dotted configuration key of the stage's source, such as 'stages.NAME.source', for messages."""
  groups_per_batch: int
  group_size: int
  """Maximum number of trajectories in a group."""
  bound: int
  """Maximum staleness in versions of this run."""
  longest: int
  """Maximum length of a sequence in tokens."""
  max_steps: int
  """Maximum number of steps of a trajectory."""
  vocabulary: str
  """Digest of the tokenizer's vocabulary."""
  deadline_s: float
  """Maximum seconds to wait for a batch."""
  order: Literal['turns', 'arrival'] = 'turns'
  """Order in which the batches of several runs are read; see `app.sources.Followed.order`."""


@dataclasses.dataclass(frozen=True)
class _Group:
  """A copied group that has not been trained on."""

  uids: tuple[tuple[str, ...], ...]
  """uids of the steps of each trajectory."""
  place: Place
  key: str
  version: int
  """Step of the oldest weights that generated a trained token of the group."""
  members: tuple[Experience, ...]

  def to_json(self) -> Json:
    uids, place = [*map(list, self.uids)], self.place
    return [uids, place.attempt, place.step, self.key, self.version, place.run]


class FollowedBatches:
  """Batches of whole groups, copied from the batches that other runs share.

  Attributes:
    clock_decisions: number of batches that were read before their turn, because they arrived first.
  """

  explores = False
  held_out: tuple[Row, ...] = ()

  def __init__(
    self,
    config: FollowedConfig,
    shared: Sequence[SharedBatches],
    *,
    store: ReplayStore,
    tasks: Mapping[str, Task],
    render: Callable[[Task], Sequence[int]],
    text: Callable[[Sample], str],
    exported: Callable[[int], str | None],
    events: Events = SILENT,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
  ):
    """
    Args:
      shared: shared batches of each followed run.
      store: store of this run.
      tasks: tasks of the stage, keyed by uid.
      render: returns the tokens of a task's prompt.
      text: returns a sample's completion.
      exported: takes a step, and returns the digest of the weights that this run has exported at
        this step; None if it has exported none, or has undone the step since.
      sleep: function that waits for the given number of seconds; called between checks for new
        batches.
    """
    self.clock_decisions = 0
    key = f'{config.where}.run'
    self._runs = [
      FollowedRun(number, batches, key if len(shared) == 1 else f'{key}, {batches.directory}')
      for number, batches in enumerate(shared)
    ]
    self._config, self._store = config, store
    self._tasks, self._render, self._text = tasks, render, text
    self._exported, self._events, self._sleep = exported, events, sleep
    self._writer = store.at(0)
    self._visits: dict[str, int] | None = None
    """Number of copied groups of each task, keyed by the task's uid."""
    self._waiting: list[_Group] = []
    self._recent: dict[str, Place] = {}
    """Place of each trained group, keyed by the group's key. Contains only groups that another run
    may still make void.
    """
    self._batch: list[_Group] = []
    self._counts: collections.Counter[str] = collections.Counter()
    self._warned = ''
    self._completed = self._now()

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    try:
      yield
    finally:
      # A batch that was recorded is not completed if the run ends in between.
      live = {entry.uid for entry in self._store.live()}
      given_up = [uid for uid in _uids(self._waiting) if uid in live]
      self._writer.drop(given_up, 'given up')
      for run in self._runs:
        run.shared.close()

  def advance(self, step: int, served: int) -> None:
    self._writer = self._store.at(step)
    if self._visits is None:
      self._visits = self._store.visits([self._config.stage])

  async def next(self) -> tuple[list[Row], dict[str, int]]:
    """Returns the next batch. Of the groups that are not too old, it contains those that were
    shared first.

    Raises:
      WaitExpired: the other runs did not share enough groups in time.
      UserError: the runs do not match, for example in vocabulary, prompts or group size.
    """
    config = self._config
    asked = self._events.request(Edge.FETCH, source='followed')
    self._batch = await bounded(
      self._collect(),
      name='collect',
      owner='the loop',
      waits_for=self._awaited,
      deadline_s=config.deadline_s,
    )
    members = [member for group in self._batch for member in group.members]
    steps = [step for member in members for step in member.steps]
    places = await asyncio.to_thread(self._writer.seal, [step.uid for step in steps])
    rows = [row for member in members for row in step_rows(member, places)]
    self._events.reply(asked, count=len(rows))
    counts = {f'explore/{name}': self._counts[name] for name in _COUNTERS}
    counts['perf/unread_batches'] = await asyncio.to_thread(
      lambda: sum(run.unread() for run in self._runs)
    )
    counts['explore/open'] = len(self._waiting) - len(self._batch)
    return with_digests(with_prefixes(rows, steps), steps), counts

  def taken(self) -> dict[str, Experience]:
    members = [member for group in self._batch for member in group.members]
    return {step.uid: member for member in members for step in member.steps}

  def record(self, plan: StepPlan) -> None:
    self._writer.trained(_uids(self._batch))

  def trained(self, plan: StepPlan) -> None:
    self._waiting = self._waiting[len(self._batch) :]
    self._recent |= {group.key: group.place for group in self._batch}
    self._counts.clear()
    self._writer = self._store.at(self._writer.step + 1)
    self._completed = self._now()

  def state(self) -> Any:
    return self._completed

  def restore(self, state: Any) -> None:
    """Restores the state from a commit. The store must have been recovered to the same commit."""
    # Commits written when only one run could be followed contain the position as `cursor`.
    cursors = state['cursors'] if 'cursors' in state else [state['cursor']]
    if len(cursors) > len(self._runs):
      raise UserError(
        f'{self._config.where}.run: names {len(self._runs)} runs, but this run has followed '
        f'{len(cursors)}; keep their directories in their order, and add others at the end'
      )
    for run, cursor in zip(self._runs, cursors):
      run.restore(*cursor)
    self._recent = {key: Place(*place) for key, place in state['recent'].items()}
    self._waiting = [self._recall(*group) for group in state['waiting']]
    self._completed = state

  def _now(self) -> Json:
    return {
      'cursors': [run.to_json() for run in self._runs],
      'waiting': [group.to_json() for group in self._waiting],
      'recent': {key: [*dataclasses.astuple(place)] for key, place in self._recent.items()},
    }

  async def _collect(self) -> list[_Group]:
    while True:
      new = await asyncio.to_thread(self._follow)
      if len(self._waiting) >= self._config.groups_per_batch:
        return self._waiting[: self._config.groups_per_batch]
      if not new:
        await self._sleep(POLL_S)

  def _follow(self) -> bool:
    """Drops groups that became void, expires groups that are too old, and reads the next shared
    batch if too few groups remain. Returns whether it has read a batch.
    """
    try:
      for run in self._runs:
        self._locate(run)
      self._check_draws()
      self._expire()
      if len(self._waiting) >= self._config.groups_per_batch:
        return False
      turns = sorted(self._runs, key=lambda run: run.latest)
      readable = turns[:1] if self._config.order == 'turns' else turns
      run = next(filter(FollowedRun.has_next, readable), None)
      if run is None:
        return False
      self._copy(run, self._read(run))
      self.clock_decisions += run is not turns[0]
    except (SegmentError, _Unreadable) as error:
      # The other run may be restarting, or someone may still restore the file.
      if str(error) != self._warned:
        self._warned = str(error)
        logging.warning('%s: waiting, because %s', self._config.where, error)
      return False
    return True

  def _read(self, run: FollowedRun) -> SharedBatch:
    try:
      return run.shared.read(run.attempt, run.step)
    except UserError as error:
      raise _Unreadable(str(error)) from None

  def _awaited(self) -> str:
    """Returns what the next batch waits for, and what to inspect, for the message."""
    where, count = f'{self._config.where}.run', self._config.groups_per_batch
    if len(self._runs) == 1:
      runs = f'of the run that {where} names'
    elif self._config.order == 'turns':
      directory = min(self._runs, key=lambda run: run.latest).shared.directory
      runs = f'of the runs that {where} names, next of the run with the store {directory}'
    else:
      runs = f'of any of the runs that {where} names'
    return (
      f'{count} groups {runs} (rollout.collect_deadline_s); is it running, and does it follow this '
      'run?'
    )

  def _locate(self, run: FollowedRun) -> None:
    """Finds the next batch of a run to read, and drops its groups that became void.

    Raises UserError if the run's store has been replaced or its vocabulary differs.
    """
    attempt = run.attempt
    try:
      openings = run.shared.openings()
    except UserError as error:
      raise _Unreadable(str(error)) from None
    for opening in openings:
      run.store = run.store or opening.store
      if opening.store != run.store:
        raise UserError(
          f'{run.where}: has store {opening.store}, but this run has followed store '
          f'{run.store}; restore that run directory, or branch from a commit with --reset_data'
        )
      if opening.vocabulary != self._config.vocabulary:
        raise UserError(
          f'{run.where}: has another vocabulary; start both runs from the same checkpoint, '
          'or use the same tasksets and policy.tokenizer'
        )
    run.opening = openings[-1] if openings else None
    place = next_batch(openings, attempt, run.step)
    if place is None:
      return
    run.attempt, run.step, voids = place
    if voids:
      starts = [(o.attempt, o.step) for o in openings if attempt < o.attempt <= run.attempt]
      self._drop_voided(run, attempt, starts)

  def _check_draws(self) -> None:
    """Raises UserError if two runs draw the same tasks with the same random numbers, because they
    would share the same rollouts.
    """
    for other, run in itertools.combinations(self._runs, 2):
      if run.draws_as(other):
        raise UserError(
          f'{run.where}: draws the same tasks as {other.shared.directory} (both have seed '
          f'{run.opening.seed}, and their shares are {run.opening.share} and '
          f'{other.opening.share}); give each explorer another source.follow.share, such as (0, 2) '
          'and (1, 2), or another seed'
        )

  def _drop_voided(self, run: FollowedRun, before: int, starts: Sequence[tuple[int, int]]) -> None:
    """Drops the waiting groups of void batches, and counts the groups of void batches that this run
    has already trained on.

    Args:
      before: attempt (start of the other run) whose batches were being read.
      starts: (attempt, first step) of each later start of the other run.
    """

    def void(place: Place) -> bool:
      return place.run == run.number and any(
        later > place.attempt and begin <= place.step for later, begin in starts
      )

    voided = [group for group in self._waiting if void(group.place)]
    self._waiting = [group for group in self._waiting if not void(group.place)]
    self._writer.drop(_uids(voided), VOIDED)
    self._counts['voided'] += len(voided)
    # Void groups of attempts before `before` were counted when reading advanced to attempt
    # `before`.
    self._counts['voided_trained'] += sum(
      place.attempt >= before and void(place) for place in self._recent.values()
    )

  def _expire(self) -> None:
    """Expires the waiting groups that are too old for this batch and all later ones."""
    old = [group for group in self._waiting if self._is_old(group.version)]
    if old:
      self._waiting = [group for group in self._waiting if not self._is_old(group.version)]
      self._writer.expire(_uids(old))
      self._counts['expired'] += len(old)

  def _is_old(self, version: int) -> bool:
    return self._writer.step - version > self._config.bound

  def _copy(self, run: FollowedRun, batch: SharedBatch) -> None:
    """Copies those groups of a shared batch that this run can train on, in one transaction."""
    # Everything is read before anything changes, so that an unreadable batch can be read again.
    read = [(group, run.shared.samples(group)) for group in batch.groups if self._wants(group)]
    self._counts['left_out'] += len(batch.groups) - len(read)
    copies = []
    with self._store.transaction():
      for group, trajectories in read:
        if (copy := self._own_group(run, batch, group, trajectories)) is not None:
          self._admit(batch, group, copy)
          copies.append(copy)
    run.step += 1
    run.latest = max(other.latest for other in self._runs) + 1
    self._waiting += copies
    self._recent = {
      key: place
      for key, place in self._recent.items()
      if place.run != run.number or place.step >= batch.committed or place.attempt > batch.attempt
    }

  def _wants(self, group: SharedGroup) -> bool:
    """Returns whether the group's task belongs to the stage, and this run has not trained on the
    group already.
    """
    return group.task in self._tasks and group.key not in self._recent

  def _own_group(
    self,
    run: FollowedRun,
    batch: SharedBatch,
    group: SharedGroup,
    trajectories: Sequence[Sequence[Sample]],
  ) -> _Group | None:
    """Converts a shared group to a group of this run. Returns None if the group is left out or too
    old.
    """
    config = self._config
    if len(group.trajectories) > config.group_size:
      raise UserError(
        f'{config.where}.group_size: {config.group_size}, but {run.where} shares groups of '
        f'{len(group.trajectories)}; raise group_size'
      )
    self._check(run, group, trajectories)
    versions = [self._versions(run, batch, steps) for steps in trajectories]
    longest = max(len(step.tokens) for steps in trajectories for step in steps)
    if longest > config.longest or None in versions:
      self._counts['left_out'] += 1
      return None
    task = self._tasks[group.task]
    visit = self._visits.get(task.uid, 0)
    members = tuple(
      self._own(task, visit, steps, by_attempt, shared)
      for steps, by_attempt, shared in zip(trajectories, versions, group.trajectories, strict=True)
    )
    version = min(_oldest(step) for member in members for step in member.steps)
    if self._is_old(version):
      self._counts['expired'] += 1
      return None
    self._visits[task.uid] = visit + 1
    uids = tuple(tuple(step.uid for step in member.steps) for member in members)
    place = Place(batch.attempt, batch.step, run.number)
    return _Group(uids, place, group.key, version, members)

  def _check(
    self, run: FollowedRun, group: SharedGroup, trajectories: Sequence[Sequence[Sample]]
  ) -> None:
    """Raises UserError if the group's prompt differs from the task's prompt in this run, if a
    trajectory has too many steps, or if the indices of trajectories or steps are inconsistent.
    """
    config, task = self._config, self._tasks[group.task]
    what = f'{run.where}: group {group.group}'
    first = trajectories[0][0]
    if [*self._render(task)] != first.tokens[: first.prompt_len].tolist():
      raise UserError(
        f"{what}: its prompt is not this run's prompt of task {task.uid}; use the same tokenizer "
        'and template (policy.init_from, or the same tasksets and policy.tokenizer)'
      )
    for steps in trajectories:
      if len(steps) > config.max_steps:
        raise UserError(
          f'{what} has a trajectory of {len(steps)} steps, wanted at most {config.max_steps}; '
          f'set rollout.max_steps={len(steps)}'
        )
      for number, step in enumerate(steps):
        index = (step.sample_index, step.step_index)
        if step.task_id != task.uid or index != (steps[0].sample_index, number):
          raise UserError(
            f'{what} has step {index} of a sample of task {step.task_id}, wanted '
            f'{(steps[0].sample_index, number)} of task {task.uid}'
          )
    indices = [steps[0].sample_index for steps in trajectories]
    if len(set(indices)) < len(indices):
      raise UserError(f'{what} has two trajectories with the same index: {sorted(indices)}')

  def _versions(
    self, run: FollowedRun, batch: SharedBatch, steps: Sequence[Sample]
  ) -> dict[int, SharedVersion] | None:
    """Returns the exported versions that generated a trajectory, keyed by the attempt number in the
    trajectory's segments. Returns None if a version is unknown, or if this run was killed and has
    not trained the version's weights again.

    Raises UserError if the other run follows a third run instead of this run.
    """
    found = {}
    for attempt in {segment.version.attempt for step in steps for segment in step.segments}:
      version = batch.versions.get(str(attempt))
      if version is None:
        return None
      if version.run != self._store.name:
        raise UserError(
          f'{run.where}: follows the weights of another run (store {version.run}; '
          f'the store of this run is {self._store.name}); set its source.follow.run to this run '
          'directory'
        )
      if self._exported(version.step) != version.digest:
        return None
      found[attempt] = version
    return found

  def _own(
    self,
    task: Task,
    visit: int,
    steps: Sequence[Sample],
    versions: Mapping[int, SharedVersion],
    shared: SharedTrajectory,
  ) -> Experience:
    """Converts a shared trajectory to a trajectory of this run."""
    group = f'{self._config.stage}/{task.uid}/{visit}'
    trajectory = f'{group}/{steps[0].sample_index}'

    def own(step: Sample) -> Sample:
      return dataclasses.replace(
        step,
        uid=step_uid(trajectory, step.step_index),
        group_id=group,
        trajectory_id=trajectory,
        visit=visit,
        segments=tuple(
          dataclasses.replace(segment, version=_version(versions[segment.version.attempt]))
          for segment in step.segments
        ),
      )

    first, *later = map(own, steps)
    return Experience(
      sample=first,
      later=tuple(later),
      task=task,
      completion=self._text((first, *later)[-1]),
      scores=tuple(score.score(trajectory) for score in shared.scores),
      reward=_reward(dataclasses.asdict(shared)),
      masked=shared.masked,
    )

  def _admit(self, batch: SharedBatch, group: SharedGroup, copy: _Group) -> None:
    """Records a copied group in the store, in the caller's transaction."""
    members, writer = copy.members, self._writer
    samples = [step for member in members for step in member.steps]
    writer.offer([members[0].task])
    writer.issue(
      [
        Issue(uid=step.uid, group_id=step.group_id, task_id=step.task_id, visit=step.visit)
        for step in samples
      ]
    )
    writer.append(samples)
    writer.score([score for member in members for score in member.scores])
    origin = {'store': batch.store, 'attempt': batch.attempt, 'step': batch.step}
    rows = [
      (
        member.sample.uid,
        FOLLOWED,
        {
          **origin,
          'group': group.group,
          **dataclasses.asdict(member.reward),
          'masked': member.masked,
        },
      )
      for member in members
    ]
    writer.derive([*experience_rows(members), *rows])
    writer.admit([step.uid for step in samples])

  def _recall(self, uids, attempt: int, step: int, key: str, version: int, run: int = 0) -> _Group:
    """Reads a copied group from this run's store.

    Args:
      uids: uids of the steps of each trajectory. The other arguments are fields of `_Group` and of
        its place.
    """
    samples = iter(self._store.read([uid for steps in uids for uid in steps]))
    firsts = [first for first, *_ in uids]
    scores, rewards = self._store.scores(firsts), self._store.derived(firsts, FOLLOWED)
    members = []
    for steps in uids:
      first, *later = (next(samples) for _ in steps)
      if first.task_id not in self._tasks:
        raise UserError(
          f'sample {first.uid}: its task {first.task_id} is no longer in a taskset of the stage; '
          f'restore the source of taskset {first.taskset}'
        )
      members.append(
        Experience(
          sample=first,
          later=tuple(later),
          task=self._tasks[first.task_id],
          completion=self._text((first, *later)[-1]),
          scores=tuple(scores[first.uid]),
          reward=_reward(rewards[first.uid]),
          masked=rewards[first.uid]['masked'],
        )
      )
    place = Place(attempt, step, run)
    return _Group(tuple(map(tuple, uids)), place, key, version, tuple(members))


class _Unreadable(RunError):
  """Raised when a file of the other run cannot be read now."""


def _uids(groups: Sequence[_Group]) -> list[str]:
  return [uid for group in groups for steps in group.uids for uid in steps]


def _version(shared: SharedVersion) -> Version:
  return Version(shared.attempt, shared.step)


def _oldest(sample: Sample) -> int:
  """Returns the step of the oldest weights that generated a trained token of a sample. If the
  sample has no trained tokens, all its segments count.
  """
  trained = [s for s in sample.segments if sample.loss_mask[s.start : s.end].any()]
  return min(segment.version.step for segment in trained or sample.segments)


def _reward(record: Mapping[str, Any]) -> Reward:
  return Reward(
    value=record['value'],
    parts=dict(record['parts']),
    correct=record['correct'],
    turn_values=tuple(record['turn_values']),
  )
