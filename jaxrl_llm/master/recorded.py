"""Rollouts of another run as static data of this run.

The rollouts are imported once. Batches are then drawn from them in passes, and each pass contains
all groups in a new random order.

After the import, the other run is no longer needed. `data/<stage>.arrayrecord` holds the samples,
and a JSON file in the same directory holds the groups with their processed rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.batching.plan import Row, StepPlan, with_prefixes
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample, encode
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.batches import step_rows, with_digests
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.replay.segments import open_segment_reader, write_segment
from jaxrl_llm.rewards.api import Reward
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.selectors import Passes


def write_recorded(
  workdir: pathlib.Path, file: str, groups: Sequence[Sequence[Experience]]
) -> None:
  """Writes the samples of groups to `file`, a path relative to the run directory, and everything
  else to a JSON file in the same directory. If the process dies, `file` is either complete or
  absent.
  """
  path = workdir / file
  choices = [choice for group in groups for choice in group]
  steps = [step for choice in choices for step in choice.steps]
  places = {step.uid: (file, i) for i, step in enumerate(steps)}
  members = [row for choice in choices for row in step_rows(choice, places)]
  rows = iter(with_digests(with_prefixes(members, steps), steps))
  recorded = [
    [_recorded(next(rows), choice, file) for choice in group for _ in choice.steps]
    for group in groups
  ]
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_suffix('.tmp')
  with open(unfinished, 'w') as out:
    json.dump(recorded, out)
    out.flush()
    os.fsync(out.fileno())
  unfinished.replace(_groups_file(path))
  # The samples are written last, so if their file exists, the groups' file does too.
  write_segment(path.parent, path.name, [encode(step) for step in steps])


def _groups_file(path: pathlib.Path) -> pathlib.Path:
  return path.with_suffix('.groups.json')


def _recorded(row: Row, scored: Experience, file: str) -> dict[str, Any]:
  row = dataclasses.replace(row, source=file, version_step=None)
  return {'row': row.to_json(), 'parts': scored.reward.parts}


class RecordedGroups:
  """Imported groups of rollouts, numbered from 0."""

  def __init__(
    self,
    workdir: pathlib.Path,
    file: str,
    *,
    tasks: Mapping[str, Task],
    text: Callable[[Sample], str],
  ):
    """
    Args:
      workdir: the run directory.
      file: file that `write_recorded` wrote, relative to `workdir`.
      tasks: tasks of the stage, keyed by uid.
      text: returns a sample's completion.
    """
    recorded = json.loads(_groups_file(workdir / file).read_text())
    self._members = [
      (Row.from_json(member['row']), member['parts']) for group in recorded for member in group
    ]
    numbers = iter(range(len(self._members)))
    self._groups = [[next(numbers) for _ in group] for group in recorded]
    self._reader, self._name = open_segment_reader((workdir / file).parent), pathlib.Path(file).name
    self._tasks, self._text = tasks, text

  def __len__(self) -> int:
    return len(self._groups)

  def rows(self, group: int) -> list[Row]:
    return [self._members[i][0] for i in self._groups[group]]

  def recall(self, rows: Sequence[Row]) -> dict[str, Experience]:
    """Returns the rollouts of these rows, keyed by uid. A trajectory of several steps is listed
    under the uid of each step. Raises UserError if the task of a rollout is no longer in a taskset
    of the stage.
    """
    samples = self._reader.read([(self._name, row.index) for row in rows])
    trajectories: dict[str, list[tuple[Row, Sample]]] = {}
    for row, sample in zip(rows, samples, strict=True):
      trajectories.setdefault(sample.trajectory_id, []).append((row, sample))
    known = {}
    for steps in trajectories.values():
      known |= dict.fromkeys([row.uid for row, _ in steps], self._experience(steps))
    return known

  def _experience(self, steps: Sequence[tuple[Row, Sample]]) -> Experience:
    """Returns the trajectory that consists of these steps, given in order."""
    (first, sample), (last, end) = steps[0], steps[-1]
    if sample.task_id not in self._tasks:
      raise UserError(
        f'recorded sample {sample.uid}: its task {sample.task_id} is no longer in a taskset of '
        f'the stage; restore the source of taskset {sample.taskset}'
      )
    return Experience(
      sample=sample,
      later=tuple(later for _, later in steps[1:]),
      task=self._tasks[sample.task_id],
      completion=self._text(end),
      scores=(),
      reward=Reward(
        value=last.reward,
        parts=self._members[first.index][1],
        correct=last.correct,
        turn_values=tuple(value for row, _ in steps for value in row.turn_rewards),
      ),
      masked=last.masked,
    )


class RecordedBatches:
  """Batches of whole imported groups. Each pass over the groups draws every group once, in a new
  random order.
  """

  explores = False
  held_out: tuple[Row, ...] = ()

  def __init__(self, groups: RecordedGroups, *, count: int, seed: int, events: Events = SILENT):
    """
    Args:
      groups: imported groups, at least `count` of them.
      count: number of groups per batch.
    """
    self._groups, self._count, self._events = groups, count, events
    self._order = Passes(range(len(groups)), seed=seed)
    self._taken: dict[str, Experience] = {}
    self._completed = self._order.state()

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    yield

  def advance(self, step: int, served: int) -> None:
    pass

  async def next(self) -> tuple[list[Row], dict[str, int]]:
    asked = self._events.request(Edge.FETCH, source='recorded')
    numbers: dict[int, None] = {}
    # A batch may contain the end of one pass and the beginning of the next. A group drawn in both
    # is in the batch only once.
    while len(numbers) < self._count:
      numbers[self._order.next()[0]] = None
    rows = [row for number in numbers for row in self._groups.rows(number)]
    self._taken = await asyncio.to_thread(self._groups.recall, rows)
    self._events.reply(asked, count=len(rows))
    return rows, {}

  def taken(self) -> dict[str, Experience]:
    return self._taken

  def record(self, plan: StepPlan) -> None:
    pass

  def trained(self, plan: StepPlan) -> None:
    self._completed = self._order.state()

  def state(self) -> Any:
    return self._completed

  def restore(self, state: Any) -> None:
    self._order.restore(state)
    self._completed = state
