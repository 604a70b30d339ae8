"""Rollouts that another run stored, as static data of this one: taken over once, then drawn in passes.

A run that learns from them is whole without the other: `data/<stage>.arrayrecord` has the samples, and beside it a JSON
file has the groups, with the rewards that processors had made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jaxrl_llm.batching.plan import Row, StepPlan
from jaxrl_llm.experience.sample import Finish, Sample, encode
from jaxrl_llm.experience.task import Task
from jaxrl_llm.master.selection import Chosen, Scored
from jaxrl_llm.replay.segments import open_segment_reader, write_segment
from jaxrl_llm.rewards.api import Reward
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.selectors import Passes


def write_recorded(workdir: pathlib.Path, file: str, groups: Sequence[Sequence[Chosen]]) -> None:
  """Takes groups over into `file`, relative to the run directory; it is there whole or not at all."""
  path = workdir / file
  rows, samples = [], []
  for group in groups:
    rows.append([])
    for choice in group:
      rows[-1].append(_recorded(choice.scored, file, len(samples)))
      samples.append(encode(choice.scored.sample))
  path.parent.mkdir(parents=True, exist_ok=True)
  _groups_file(path).write_text(json.dumps(rows))
  write_segment(path.parent, path.name, samples)


def _groups_file(path: pathlib.Path) -> pathlib.Path:
  return path.with_suffix('.groups.json')


def _recorded(scored: Scored, file: str, index: int) -> dict[str, Any]:
  sample, reward = scored.sample, scored.reward
  row = Row(
    uid=sample.uid,
    source=file,
    index=index,
    length=len(sample.tokens),
    prompt_len=sample.prompt_len,
    group=sample.group_id,
    reward=reward.value,
    is_expert=False,
    truncated=sample.finish_reason == Finish.LENGTH,
    version_step=-1,  # None of this run's.
    correct=reward.correct,
    turn_rewards=reward.turn_values,
    trajectory=sample.trajectory_id if sample.trajectory_id != sample.uid else '',
    step_index=sample.step_index,
    masked=scored.masked,
  )
  return {'row': dataclasses.asdict(row), 'parts': reward.parts}


class RecordedBatches:
  """Implements `Batches`: whole groups, each once in every pass, in a new order each time."""

  explores = False
  held_out: tuple[Row, ...] = ()

  def __init__(
    self,
    workdir: pathlib.Path,
    file: str,
    *,
    groups: int,
    seed: int,
    task: Callable[[str], Task],
    text: Callable[[Sample], str],
    events: Events = SILENT,
  ):
    """
    Args:
      file: of `write_recorded`.
      groups: of a batch.
      task, text: the task of a uid; what the policy said in a sample.
    """
    recorded = json.loads(_groups_file(workdir / file).read_text())
    self._groups = [
      [(Row(**{**one['row'], 'turn_rewards': tuple(one['row']['turn_rewards'])}), one['parts']) for one in group]
      for group in recorded
    ]
    self._reader, self._name = open_segment_reader((workdir / file).parent), pathlib.Path(file).name
    self._count, self._task, self._text, self._events = groups, task, text, events
    self._order = Passes(range(len(self._groups)), seed=seed)
    self._taken: dict[str, Scored] = {}
    self._completed = self._order.state()

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    yield

  def advance(self, step: int, served: int) -> None:
    pass

  async def next(self, step: int) -> tuple[list[Row], dict[str, int]]:
    asked = self._events.request(Edge.FETCH, source='recorded')
    # The end of a pass and the beginning of the next may have a group in common: it is drawn once.
    numbers = dict.fromkeys(self._order.next()[0] for _ in range(self._count))
    members = [member for number in numbers for member in self._groups[number]]
    samples = self._reader.read([(self._name, row.index) for row, _ in members])
    self._taken = {
      row.uid: Scored(
        sample=sample,
        task=self._task(sample.task_id),
        completion=self._text(sample),
        scores=(),
        reward=Reward(value=row.reward, parts=parts, correct=row.correct, turn_values=row.turn_rewards),
        masked=row.masked,
      )
      for (row, parts), sample in zip(members, samples, strict=True)
    }
    self._events.reply(asked, count=len(members))
    return [row for row, _ in members], {}

  def taken(self) -> dict[str, Scored]:
    return self._taken

  def trained(self, plan: StepPlan) -> None:
    self._completed = self._order.state()

  def state(self) -> Any:
    return self._completed

  def restore(self, state: Any) -> None:
    self._order.restore(state)
    self._completed = state
