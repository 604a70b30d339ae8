"""Groups that a stage has started and that are part of no batch yet.

Invariant: the groups are in order of start. A parked group that is continued moves to the end, as
if it started then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.exploring.batch_policy import Candidate
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.replay.tables import Issue


@dataclasses.dataclass(kw_only=True)
class StartedGroup:
  """A started group that is part of no batch yet."""

  stage: str
  number: int
  """Number of the group in the order of its first start."""
  task: Task
  visit: int
  size: int
  """Number of samples."""
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
  def name(self) -> str:
    """Id of the group in the store."""
    return f'{self.stage}/{self.task.uid}/{self.visit}'

  @property
  def issues(self) -> list[Issue]:
    """Records with which the store notes that the group's samples are about to be requested."""
    return [
      Issue(uid=uid, group_id=self.name, task_id=self.task.uid, visit=self.visit)
      for uid in self.uids
    ]

  @property
  def uids(self) -> list[str]:
    return [f'{self.name}/{i}' for i in range(self.size)]

  @property
  def is_finished(self) -> bool:
    return self.chosen is not None

  @property
  def is_running(self) -> bool:
    return not self.is_finished and not self.is_parked


class StartedGroups:
  """The started groups of a stage, keyed by number."""

  def __init__(self):
    self._groups: dict[int, StartedGroup] = {}
    self._started = 0
    """Number of groups that the stage has ever started."""

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
  def parked(self) -> list[int]:
    """Numbers of the parked groups, in order of their first start."""
    return sorted(number for number, group in self._groups.items() if group.is_parked)

  @property
  def candidates(self) -> list[Candidate]:
    """Groups that may form the next batch. Parked groups, which are continued first, are not among
    them.
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
    """Makes parked groups running groups again, as if they started now, so that the batches that
    take them keep the gate's bound. Returns these groups.
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
        'parked': group.is_parked,
        'last_batch': group.last_batch,
      }
      for number, group in self._groups.items()
    ]
    return {'started': self._started, 'groups': groups}

  def restore(
    self,
    state: Any,
    group_of: Callable[[int, str, int], StartedGroup],
    recall: Callable[[Sequence[str]], list[Experience]],
  ) -> None:
    """Restores the groups from a commit.

    Args:
      group_of: returns a new group with this number, task (its uid) and visit.
      recall: returns those samples with the given uids that were selected for training.
    """
    self._started = state['started']
    for row in state['groups']:
      group = group_of(row['number'], row['task'], row['visit'])
      group.chosen = recall(group.uids) if row['ended'] else None
      # Commits of older program versions lack these keys. Such commits have no parked groups, and
      # batches take their groups in order of start.
      group.is_parked, group.last_batch = row.get('parked', False), row.get('last_batch', 0)
      self._groups[group.number] = group
