"""Samples of a stage in the store: records what happens to them, and reads them again after a
restart of the run.

Invariant: each change is labelled with the number of batches that the run has completed, which is
kept here alone (`StageSamples.step`).
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Mapping, Sequence

from jaxrl_llm.core.records.span import Span
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.finished import FinishedGroup, store_samples
from jaxrl_llm.master.exploring.recall import read_members, recall
from jaxrl_llm.master.exploring.runner import GroupRunner
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.exploring.settling import Settling
from jaxrl_llm.master.exploring.started import StartedGroup, Waiting
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import Ref
from jaxrl_llm.replay.tables import AWAITED, Issue, State
from jaxrl_llm.replay.writer import StepWriter
from jaxrl_llm.runtime.events import Edge, Events
from jaxrl_llm.tasks.sampler import TaskSampler


class StageSamples:
  """Samples of the groups of a stage.

  Attributes:
    writer: writer of the store at the current step.
    settling: groups that are being stored in a thread. They belong to the current step.
  """

  def __init__(
    self,
    config: ExplorerConfig,
    runner: GroupRunner,
    sampler: TaskSampler,
    store: ReplayStore,
    events: Events,
  ):
    self._config, self._runner, self._sampler = config, runner, sampler
    self._store, self._events = store, events
    self.writer: StepWriter = store.at(0)
    self.settling = Settling()
    self._visits: dict[str, int] = {}
    """Number of times that each prompt was drawn before (see `_earlier_visits`), keyed by the
    result of `_prompt`. The stage continues this count, because the count is part of the random
    keys: a repeated count would repeat the random numbers.
    """

  @property
  def step(self) -> int:
    """Number of batches that the run has completed."""
    return self.writer.step

  @property
  def judged(self) -> pathlib.Path:
    """Directory of the journals of the processors that ask models."""
    return self._store.directory / 'judged'

  def advance(self, step: int) -> None:
    """Records that the run has completed `step` batches. First waits for the groups that are being
    stored. Otherwise, the store would have groups of the last step as finished that the state of
    that step's commit lacks.
    """
    self.settling.finish()
    self.writer = self._store.at(step)

  async def count_visits(self) -> None:
    """Reads the visits of earlier stages. Must be called before `visit`."""
    for uid, count in (await asyncio.to_thread(self._earlier_visits)).items():
      self._visits[_prompt(uid)] = max(count, self._visits.get(_prompt(uid), 0))

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

  def visit(self, uid: str, drawn: int) -> int:
    """Returns the number of times that a task's prompt was drawn before in the run.

    Args:
      drawn: number of times that the stage has drawn the task before.
    """
    return drawn + self._visits.get(_prompt(uid), 0)

  def issue(self, groups: Sequence[StartedGroup]) -> None:
    """Records the samples of groups that are about to start."""
    with self._store.transaction():
      self.writer.offer([group.task for group in groups])
      self.writer.issue([row for group in groups for row in group.issues])

  def unknown(self, unfinished: Sequence[StartedGroup]) -> list[StartedGroup]:
    """Returns the unfinished groups whose samples are not in the store, because the samples were
    lost when a process was killed, or because the run is a branch with a new store. These groups
    start again from their prompts.
    """
    stored = {entry.group_id for entry in self._store.live()} if unfinished else set()
    return [group for group in unfinished if group.name not in stored]

  async def spans(self, group: StartedGroup) -> list[list[Span]]:
    """Returns the spans (runs of tokens) that earlier batches generated for each sample of a group.
    The result is empty without partial rollouts.
    """
    if self._config.partial is None:
      return []
    return [*(await asyncio.to_thread(self._store.spans, group.uids)).values()]

  def extend(self, group: StartedGroup, spans: Mapping[int, Span]) -> None:
    """Stores further spans of a group's samples, keyed by sample index."""
    self.writer.extend({group.uids[index]: span for index, span in spans.items()})

  def store_awaiting(
    self, group: str, awaited: Awaited, texts: Mapping[str, str], store: Callable[[], None]
  ) -> None:
    """Stores the samples of a group that waits for delayed rewards.

    Args:
      group: name of the group.
      texts: completions, keyed by uid.
      store: stores the samples.
    """
    request = self._events.request(Edge.STORE, group=group, count=len(texts))
    with self._store.transaction():
      store()
      self.writer.wait_for_rewards(texts, awaited)
    self._events.reply(request, admitted=0)

  def settle(self, group: str, finished: FinishedGroup, store: Callable[[], None]) -> None:
    """Stores a finished group, and records which of its samples are admitted to training.

    Args:
      group: name of the group.
      store: adds to the store those of the group's samples and scores that are not stored yet.
    """
    self.settling.finish()
    request = self._events.request(Edge.STORE, group=group, count=len(finished.members))
    with self._store.transaction():
      store()
      finished.settle(self.writer)
    self._events.reply(request, admitted=len(finished.uids))

  async def settle_new(
    self, group: str, finished: FinishedGroup, conclude: Callable[[], None]
  ) -> None:
    """Does the same as `settle` for a finished group whose samples are not stored yet, in a thread
    if they are long, and then calls `conclude`. See `Settling.settle`.

    Args:
      group: name of the group.
    """
    request = self._events.request(Edge.STORE, group=group, count=len(finished.members))
    writer = self.writer

    def store() -> None:
      with self._store.transaction():
        store_samples(writer, finished.members)
        finished.settle(writer)

    def reply() -> None:
      self._events.reply(request, admitted=len(finished.uids))
      conclude()

    tokens = sum(len(step.tokens) for member in finished.members for step in member.steps)
    await self.settling.settle(tokens, store, reply)

  def drop_live(self, groups: Sequence[StartedGroup], reason: str) -> int:
    """Drops those samples of groups that the store has as live. A group that has not run yet has
    none. Returns the number of the dropped samples.
    """
    live: dict[str, list[str]] = {}
    for entry in self._store.live() if groups else ():
      live.setdefault(entry.group_id, []).append(entry.uid)
    dropped = 0
    for group in groups:
      uids = live.get(group.name, [])
      self.writer.drop(uids, reason)
      dropped += len(uids)
      self._events.message(Edge.DROP, group=group.name, reason=reason)
    return dropped

  def give_up(self, groups: set[str]) -> None:
    """Drops the live samples of groups, given by their names, at the end of the exploration."""
    # Samples of earlier attempts (starts of the run) can be unfinished only if they are partial
    # or wait for delayed rewards.
    live = [
      entry
      for entry in self._store.live()
      if entry.attempt == self._store.attempt or entry.state in (State.PARTIAL, State.AWAITING)
    ]
    unfinished = [entry for entry in live if entry.group_id in groups]
    self.writer.drop([entry.uid for entry in unfinished], 'given up')
    for group in dict.fromkeys(entry.group_id for entry in unfinished):
      self._events.message(Edge.DROP, group=group, reason='given up')

  async def seal(self, batch: Sequence[Experience]) -> dict[str, Ref]:
    """Moves the samples of a batch to a sealed (immutable) segment file of the store. Returns their
    places, keyed by uid.
    """
    request = self._events.request(Edge.FETCH, source='rollouts')
    uids = [*dict.fromkeys(step.uid for choice in batch for step in choice.steps)]
    places = await asyncio.to_thread(self.writer.seal, uids)
    self._events.reply(request, count=len(places))
    return places

  def record(self, uids: Sequence[str], experts: Sequence[Issue]) -> None:
    """Records that a batch was trained on. For the arguments, see `Explorer.record`."""
    with self._store.transaction():
      self.writer.trained(uids)
      self.writer.join(experts)
      self.writer.trained([row.uid for row in experts])

  def past(self) -> tuple[list[Experience], int]:
    """Draws groups of earlier batches by the rule `past`. Returns their selected trajectories, and
    the number of the groups.
    """
    groups = self._config.past.draw(self._store, self.step)
    return self.recall([uid for group in groups for uid in group.uids]), len(groups)

  def recall_group(self, name: str) -> list[Experience]:
    """Reads the selected trajectories of the group with this name."""
    return self.recall(self._store.members(name))

  def recall(self, uids: Sequence[str]) -> list[Experience]:
    """Reads the samples of whole groups from the store, and returns the trajectories that were
    selected for training.
    """
    text, rewards = self._runner.workflow.text, self._runner.scorers.config
    return recall(self._store, uids, tasks=self._sampler.task, text=text, rewards=rewards)

  def awaiting(self, uids: Sequence[str]) -> Waiting | None:
    """Reads from the store the samples of a group that waits for delayed rewards. Returns None if
    the store has no such samples, as in a branch with a new store.
    """
    record = self._store.derived(uids[:1], AWAITED)
    if not record:
      return None
    text, rewards = self._runner.workflow.text, self._runner.scorers.config
    members = read_members(
      self._store, uids, {}, tasks=self._sampler.task, text=text, rewards=rewards
    )
    attempt = self._store.entries(uids)[uids[0]].attempt
    return Waiting(members, Awaited.from_json(record[uids[0]]), attempt)


def _prompt(uid: str) -> str:
  """Returns the part of a task's uid after `<taskset>:`, which is a digest of the prompt. Tasks
  with the same prompt share this part even if they are in different tasksets.
  """
  return uid.rpartition(':')[2]
