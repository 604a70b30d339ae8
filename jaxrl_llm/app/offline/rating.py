"""Rates tasks with a judge, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.net.client import RemoteError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.scorers.judge.rating import Rating, RatingOptions, TaskRater

PREFIX = 'rated_'
"""Prefix of the names of the fields that contain ratings."""
PRIORITY = 'priority'


class Rated(NamedTuple):
  rows: list[dict[str, Json]]
  """Rows of the rated tasks, in task order, with added fields: one for each criterion, and the
  priority.
  """
  failures: dict[str, str]
  """Reasons why tasks could not be rated, keyed by task uid."""


async def rate(tasks: Sequence[Task], options: RatingOptions, *, deadline_s: float) -> Rated:
  """Rates tasks with a judge, many at a time.

  Args:
    deadline_s: time limit of each rating in seconds, from the start of its first request.

  Raises:
    UserError: a row already has one of the fields that would be added.
  """
  added = {PRIORITY, *(PREFIX + criterion.name for criterion in options.criteria)}
  for task in tasks:
    if taken := sorted(added & task.fields.keys()):
      raise UserError(
        f'task {task.uid}: its row has {taken} already; remove them, or name the criteria '
        'differently'
      )
  free = asyncio.Semaphore(options.concurrency)
  async with TaskRater(options) as rater:

    async def rating_of(task: Task) -> Rating | str:
      try:
        async with free, asyncio.timeout(deadline_s):
          return await rater.rate(task)
      except RemoteError as error:
        return one_line(error)
      except TimeoutError:
        return f'no rating within {deadline_s:g} s'

    # Wait 'judge': bounded by `deadline_s`.
    ratings = await asyncio.gather(*map(rating_of, tasks))
  rows, failures = [], {}
  for task, rating in zip(tasks, ratings, strict=True):
    if isinstance(rating, str):
      failures[task.uid] = rating
      continue
    scores = {PREFIX + name: score for name, score in rating.scores.items()}
    rows.append({**task.fields, **scores, PRIORITY: rating.priority})
  return Rated(rows, failures)
