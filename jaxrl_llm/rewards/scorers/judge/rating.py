"""Rates tasks with a judge. A rating has a number from 0 to 1 for each criterion, such as quality
or difficulty, and their weighted sum, the task's priority.

Invariant: if there is a cache file (`cache_file`), the judge is not asked again about a task that
it has rated with the same options.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rewards.scorers.judge.rubric import Criterion, read_scores, rubric_form
from jaxrl_llm.rewards.scorers.judge.scorer import Judge, JudgeOptions, task_texts
from jaxrl_llm.rewards.scorers.judge.texts import fill

_RATE = """Rate a task that is meant for the training of a language model. Do not solve it in your \
answer.

Task:
{question}"""
_RATE_WITH_TRUTH = f"""{_RATE}

Reference answer:
{{truth}}"""
CRITERIA = (
  Criterion(
    name='quality',
    text='The task is clear, complete and free of errors, it can be solved with what it states, '
    'and whether an answer is right can be decided.',
  ),
  Criterion(
    name='difficulty',
    text='How hard the task is: 0 is a task that a beginner solves at once, 1 one that an expert '
    'needs hours for.',
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatingOptions(JudgeOptions):
  """Options of a judge that rates tasks."""

  mode: Literal['rubric'] = 'rubric'
  criteria: tuple[Criterion, ...] = CRITERIA
  """Criteria by which tasks are rated. Their weights determine the priority."""
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Weights that replace those of the criteria in the priority, keyed by criterion name. A weight
  of 0 excludes the criterion from the priority.
  """

  def check(self, where: str) -> None:
    super().check(where)
    names = [criterion.name for criterion in self.criteria]
    for name in ('template', 'rubric_field', 'discover'):
      if getattr(self, name) is not None:
        raise UserError(f'{where}: {name} is not available for ratings; remove it')
    if self.missing == 'skip':
      raise UserError(f"{where}: missing 'skip' would compare sums of different criteria")
    for name, weight in self.weights.items():
      if name not in names or not math.isfinite(weight):
        raise UserError(
          f'{where}: weights has {name!r}: {weight}; wanted finite numbers for {names}'
        )


class Rating(NamedTuple):
  scores: dict[str, float]
  """Number from 0 to 1 for each criterion, keyed by name."""
  priority: float
  """Weighted sum of the scores, Σ wᵢ sᵢ over the criteria."""
  reasoning: str


class TaskRater(Judge):
  """Judge that rates tasks."""

  def __init__(self, options: RatingOptions):
    super().__init__(options)
    self._weights = {c.name: c.weight for c in options.criteria} | dict(options.weights)

  async def rate(self, task: Task) -> Rating:
    """Returns the rating of a task. Raises RemoteError if the judge returns no rating."""
    rubric = self.options.criteria
    template = _RATE if task.truth is None else _RATE_WITH_TRUTH
    prompt = fill(template, 'rubric', task_texts(task, template), rubric_form(rubric))
    reply = await self.ask(prompt, functools.partial(read_scores, rubric=rubric))
    scores = dict(reply.answer['scores'])
    if missing := [criterion.name for criterion in rubric if criterion.name not in scores]:
      if self.options.missing == 'unscorable':
        raise Malformed(f'the judge gave no number for {missing}')
      scores |= dict.fromkeys(missing, 0.0)
    priority = math.fsum(self._weights[name] * score for name, score in scores.items())
    return Rating(scores, priority, str(reply.answer['reasoning']))
