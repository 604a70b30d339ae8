"""Ends groups: admits finished ones to batches, and drops those that no batch will train on.

Invariant: a group that is dropped leaves the started groups, its live samples are dropped in the
store with a reason, and, unless it is parked, its capacity returns to the gate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.master.exploring.awaiting import TOO_LATE
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.finished import FinishedGroup, finish, why_dropped
from jaxrl_llm.master.exploring.gate import Gate
from jaxrl_llm.master.exploring.outcomes import Outcomes
from jaxrl_llm.master.exploring.processors import Processed
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.exploring.stage_samples import StageSamples
from jaxrl_llm.master.exploring.started import StartedGroup, StartedGroups
from jaxrl_llm.master.exploring.tally import Tally
from jaxrl_llm.rewards.api import RewardsConfig
from jaxrl_llm.runtime.events import Edge, Events


class NothingToLearn(RunError):
  """Raised when too many groups were dropped while one batch was collected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endings:
  """Ends the groups of a stage, and records the end in all parts that know a group."""

  config: ExplorerConfig
  rewards: RewardsConfig
  groups: StartedGroups
  gate: Gate
  samples: StageSamples
  tally: Tally
  outcomes: Outcomes
  """Outcomes of groups that the task sampler has not seen yet."""
  events: Events

  def finish(
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

    Raises:
      NothingToLearn: too many groups were dropped.
    """
    finished = self._selected(group, members, processed)
    self.samples.settle(group.name, finished, store)
    self._conclude(group, finished)

  async def admit(
    self, group: StartedGroup, members: list[Experience], processed: Processed | None
  ) -> None:
    """Does the same as `finish` for a group whose samples have just been generated, and also counts
    and stores the samples. If this call is cancelled, the group ends nevertheless.
    """
    finished = self._selected(group, members, processed)

    def conclude() -> None:
      self.tally.generated(group, members)
      self._conclude(group, finished)

    await self.samples.settle_new(group.name, finished, conclude)

  def _selected(
    self, group: StartedGroup, members: list[Experience], processed: Processed | None
  ) -> FinishedGroup:
    """Decides which samples of a group are trained on, and records the group's outcome."""
    finished = finish(
      self.config, members, self.rewards, step=self.samples.step, processed=processed
    )
    if finished.outcome is not None:
      self.outcomes.record(group.number, finished.outcome)
    return finished

  def _conclude(self, group: StartedGroup, finished: FinishedGroup) -> None:
    """Completes the end of a group whose samples the store has as admitted or dropped. Raises
    NothingToLearn if too many groups were dropped.
    """
    self.tally.finished(finished)
    if finished.chosen:
      group.chosen = finished.chosen
    else:
      reason = 'scorer failed' if finished.scorer_failed else 'nothing to learn from'
      self._drop(group, reason, why_dropped(finished, self.config))

  def expire(self, group: StartedGroup, reason: str) -> None:
    """Drops a group that has exceeded a time limit, which `reason` names. Raises NothingToLearn if
    too many groups were dropped.
    """
    self.tally.discard(group, 0)
    self.samples.writer.drop(group.uids, reason)
    self.tally.counts[f'dropped/{reason}'] += group.size
    limits = self.config.limits
    self._drop(group, reason, f'task {group.task.uid} took too long ({reason}, limits {limits})')

  def drop_late(self, group: StartedGroup, limits: str) -> None:
    """Drops a group whose delayed rewards did not arrive within `limits`. Raises NothingToLearn if
    too many groups were dropped.
    """
    self.samples.writer.drop(group.uids, TOO_LATE)
    self.tally.counts[f'dropped/{TOO_LATE.replace(" ", "_")}'] += group.size
    self.tally.dropped(group.stored)
    self._drop(group, TOO_LATE, f'its rewards were not complete within {limits}')

  def give_up_parked(self) -> None:
    """Drops the parked groups, because the stage has no later batch to continue them."""
    if parked := self.groups.parked:
      self.tally.counts['dropped/given_up'] += self._abandon(parked)

  def give_up_surplus(self) -> None:
    """Drops the newest groups if the stage was shortened and more groups have started than its
    batches need. This happens before any group runs, so the choice does not depend on timing.
    """
    if surplus := self.gate.surplus:
      newest = [candidate.number for candidate in self.groups.candidates][-surplus:]
      for number in newest:
        self.outcomes.forget(number)
        self.gate.drop()
      self._abandon(newest)

  def give_up(self, others: set[str]) -> None:
    """Drops the live samples of all started groups, at the end of the exploration.

    Args:
      others: names of further groups whose live samples are dropped.
    """
    for group in self.groups.all:
      self.tally.dropped(group.stored)
      self.tally.discard(group, 0)
    self.samples.give_up({group.name for group in self.groups.all} | others)

  def _abandon(self, numbers: Sequence[int]) -> int:
    """Drops groups that no batch will train on. Returns the number of their samples that were
    dropped in the store. A group that has not run yet has no samples in the store.
    """
    groups = self.groups.take(numbers)
    for group in groups:
      self.tally.dropped(group.stored)
      self.tally.discard(group, 0)
    return self.samples.drop_live(groups, 'given up')

  def _drop(self, group: StartedGroup, reason: str, why: str) -> None:
    """Removes a group whose samples the store has as dropped. Raises NothingToLearn if too many
    groups were dropped; a commit may follow nevertheless, so the group is removed first.

    Args:
      reason: reason of the drop, for the log of events.
      why: the same in more detail, for the error message.
    """
    config, counts = self.config, self.tally.counts
    self.groups.take([group.number])
    if not group.is_parked:  # A parked group has already returned its capacity.
      self.gate.drop()
    self.events.message(Edge.DROP, group=group.name, reason=reason)
    counts['dropped/groups'] += 1
    if counts['dropped/groups'] > config.max_dropped_groups:
      raise NothingToLearn(
        f'stage {config.stage}: {counts["dropped/groups"]} groups were dropped while one batch was '
        f'collected, max_dropped_groups permits {config.max_dropped_groups}; the last group: {why}'
      )
