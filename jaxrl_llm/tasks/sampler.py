"""Which task next. The whole state is one position, so a restored sampler continues exactly.

Pass v over the tasks draws each of them once, so v is how often the task had been drawn before: its visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import grain
import xxhash

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json
from jaxrl_llm.experience.task import Task
from jaxrl_llm.tasks.taskset import Taskset


class TaskSampler:
  """Draws the tasks of several tasksets, one after the other, without end."""

  def __init__(self, tasksets: Sequence[Taskset], *, order: Literal['sequential', 'shuffled'], seed: int):
    """'sequential' keeps the tasksets' order; 'shuffled' permutes all tasks anew in every pass, from `seed`."""
    names = [taskset.name for taskset in tasksets]
    if len(set(names)) != len(names):
      raise UserError(f'task sampler: tasksets are named {names}; give each its own name')
    self._tasks = tuple(task for taskset in tasksets for task in taskset.tasks)
    if not self._tasks:
      raise UserError(f'task sampler: tasksets {names} hold no task')
    indices = grain.MapDataset.range(len(self._tasks))
    self._indices = (indices.shuffle(seed=seed) if order == 'shuffled' else indices).repeat()
    self._position = 0
    self._identity: dict[str, Json] = {'order': order, 'seed': seed, 'tasks': _fingerprint(self._tasks)}

  def __len__(self) -> int:
    """Tasks in one pass."""
    return len(self._tasks)

  def next(self) -> tuple[Task, int]:
    """The next task and how often it had been drawn before."""
    task = self._tasks[self._indices[self._position]]
    visit = self._position // len(self._tasks)
    self._position += 1
    return task, visit

  def state(self) -> dict[str, Json]:
    """JSON; `restore` of it continues with the task that `next` would have given."""
    return {**self._identity, 'position': self._position}

  def restore(self, state: dict[str, Json]) -> None:
    """Raises UserError if the state belongs to other tasks, another order or another seed."""
    differing = [key for key, value in self._identity.items() if state.get(key) != value]
    if differing:
      told = ', '.join(f'{key} {state.get(key)!r} in the checkpoint, {self._identity[key]!r} now' for key in differing)
      raise UserError(f'task sampler: the state belongs to other tasksets: {told}; resume with the same configuration')
    self._position = int(state['position'])


def _fingerprint(tasks: Sequence[Task]) -> str:
  digest = xxhash.xxh3_128()
  for task in tasks:
    digest.update(f'{task.taskset}:{task.digest}\n'.encode())
  return digest.hexdigest()
