"""Started groups of a stage that are not part of a batch yet.

Invariant: the groups are in order of start. A parked group that continues moves to the end, as if
it had just started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.exploring.batch_policy import Candidate
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.tables import Issue
from jaxrl_llm.replay.writer import oldest_version


class Waiting(NamedTuple):
  """Samples of a group that wait for delayed rewards."""

  members: list[Experience]
  """Samples, ordered by sample index, with the scores that they have so far."""
  awaited: Awaited
  attempt: int
  """Attempt (start of the run) that issued the samples."""

  @property
  def scorable(self) -> list[str]:
    """uids of the samples that need verdicts. A sample that another scorer could not score needs no
    verdicts.
    """
    return [
      member.sample.uid
      for member in self.members
      if all(score.value is not None for score in member.scores)
    ]

  @property
  def oldest_version(self) -> int:
    """Step of the oldest weights that generated any of the samples."""
    return min(oldest_version(member.sample) for member in self.members)


@dataclasses.dataclass(kw_only=True)
class StartedGroup:
  """A started group that is not part of a batch yet."""

  stage: str
  number: int
  """Number of the group. Groups are numbered from 0 in the order in which they first started."""
  task: Task
  visit: int
  size: int
  """Number of trajectories in the group."""
  chosen: list[Experience] | None = None
  """Samples selected for training; None until the group has finished."""
  rolled_out: float = 0.0
  """Monotonic time at which the group's last sample was generated; 0 if an earlier attempt (start
  of the run) generated it.
  """
  scored: float = 0.0
  last_batch: int = 0
  """Last batch that may train on the group within the gate's bound, as an index within the
  stage.
  """
  waiting: Waiting | None = None
  """The group's samples if they wait for delayed rewards, otherwise None. The group is parked as
  long as it waits.
  """
  is_parked: bool = False
  """Whether the group waits for delayed rewards, or has used up its token budget and waits to be
  continued (usually for a later batch).
  """

  unscored: list[Experience] | None = None
  """The group's samples if they wait for the trainer's reward model, otherwise None."""
  partial_tokens: int = 0
  """Number of tokens in the spans that are stored for the group's next continuation."""

  @property
  def name(self) -> str:
    """Id of the group in the store."""
    return f'{self.stage}/{self.task.uid}/{self.visit}'

  @property
  def issues(self) -> list[Issue]:
    """Store records of the samples that are about to be requested. There is one record per
    trajectory, for its first step, because the number of later steps is not known yet.
    """
    return [
      Issue(uid=uid, group_id=self.name, task_id=self.task.uid, visit=self.visit)
      for uid in self.uids
    ]

  @property
  def uids(self) -> list[str]:
    """uids of the first steps of the trajectories."""
    return [f'{self.name}/{i}' for i in range(self.size)]

  @property
  def stored(self) -> list[Experience]:
    """Generated samples that may be trained on: those selected, or those that wait for rewards."""
    if self.is_awaiting:
      return self.waiting.members
    return self.unscored or self.chosen or []

  @property
  def is_finished(self) -> bool:
    return self.chosen is not None

  @property
  def is_awaiting(self) -> bool:
    """Whether the group's samples are generated and wait for delayed rewards."""
    return self.waiting is not None and self.is_parked

  @property
  def is_running(self) -> bool:
    return not self.is_finished and not self.is_parked


class StartedGroups:
  """The started groups of a stage, keyed by number."""

  def __init__(self):
    self._groups: dict[int, StartedGroup] = {}
    self._started = 0
    """Number of groups that the stage has started so far, including groups that a batch has taken
    or that were dropped.
    """

  def __len__(self) -> int:
    return len(self._groups)

  def __contains__(self, number: int) -> bool:
    return number in self._groups

  def __getitem__(self, number: int) -> StartedGroup:
    return self._groups[number]

  @property
  def all(self) -> list[StartedGroup]:
    """All groups in order of start."""
    return [*self._groups.values()]

  @property
  def running(self) -> list[StartedGroup]:
    return [group for group in self._groups.values() if group.is_running]

  @property
  def finished(self) -> list[StartedGroup]:
    return [group for group in self._groups.values() if group.is_finished]

  @property
  def unscored(self) -> list[StartedGroup]:
    """Groups that wait for the trainer's reward model, in order of their first start."""
    groups = [group for group in self._groups.values() if group.unscored is not None]
    return sorted(groups, key=lambda group: group.number)

  @property
  def parked(self) -> list[int]:
    """Numbers of the parked groups, in order of their first start."""
    return sorted(number for number, group in self._groups.items() if group.is_parked)

  @property
  def awaiting(self) -> list[StartedGroup]:
    """Groups that wait for delayed rewards, in order of their first start."""
    groups = [group for group in self._groups.values() if group.is_awaiting]
    return sorted(groups, key=lambda group: group.number)

  @property
  def candidates(self) -> list[Candidate]:
    """Groups that may form the next batch. Parked groups are not among them, because they must be
    continued first.
    """
    return [
      Candidate(number, group.is_finished, group.last_batch)
      for number, group in self._groups.items()
      if not group.is_parked
    ]

  def start(self, draw: Callable[[int], StartedGroup], count: int) -> list[StartedGroup]:
    """Adds `count` new groups, and returns them. `draw` returns the group with the given number."""
    new = [draw(self._started + i) for i in range(count)]
    self._started += count
    self._groups |= {group.number: group for group in new}
    return new

  def proceed(self, numbers: Iterable[int], last_batch: int) -> list[StartedGroup]:
    """Continues the parked groups with the given numbers, and returns them.

    Args:
      last_batch: last batch that may train on these groups. It is the same as for groups that start
        now, which keeps the groups within the gate's bound on staleness.
    """
    groups = []
    for number in numbers:
      group = self._groups[number] = self._groups.pop(number)
      group.is_parked, group.last_batch = False, last_batch
      groups.append(group)
    return groups

  def take(self, numbers: Sequence[int]) -> list[StartedGroup]:
    """Removes groups, and returns them."""
    return [self._groups.pop(number) for number in numbers]

  def state(self) -> Any:
    groups = [
      {
        'number': number,
        'task': group.task.uid,
        'visit': group.visit,
        'ended': group.is_finished,
        'parked': group.is_parked and not group.is_awaiting,
        'awaiting': group.is_awaiting,
        'last_batch': group.last_batch,
        'partial_tokens': group.partial_tokens,
      }
      for number, group in self._groups.items()
    ]
    return {'started': self._started, 'groups': groups}

  def restore(
    self,
    state: Any,
    group_of: Callable[[int, str, int], StartedGroup],
    recall: Callable[[str], list[Experience]],
    waiting: Callable[[Sequence[str]], Waiting | None],
  ) -> None:
    """Restores the groups from a commit.

    Args:
      group_of: returns a new group with the given number, task uid and visit.
      recall: takes the id of a group, and returns its trajectories that were selected for training.
      waiting: returns the samples with the given uids, which wait for delayed rewards. If it
        returns None, because they no longer wait, the group is left out.
    """
    self._started = state['started']
    for row in state['groups']:
      group = group_of(row['number'], row['task'], row['visit'])
      group.chosen = recall(group.name) if row['ended'] else None
      # Commits of older program versions lack these keys. Such commits have no parked groups, and
      # batches take their groups in order of start.
      group.is_parked, group.last_batch = row.get('parked', False), row.get('last_batch', 0)
      group.partial_tokens = row.get('partial_tokens', 0)
      if row.get('awaiting', False):
        group.waiting, group.is_parked = waiting(group.uids), True
        if group.waiting is None:
          continue
      self._groups[group.number] = group
