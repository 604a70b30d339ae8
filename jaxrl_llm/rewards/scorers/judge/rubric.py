"""Rubrics for judges. A rubric is a list of weighted criteria. The value of an answer is computed
from its scores for the criteria.

Invariant: only numbers from 0 to 1 under the names of the rubric's criteria count. Nothing else in
a judge's answer can change the value.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.scorers.http import is_number
from jaxrl_llm.rewards.scorers.judge.texts import MAX_REASONING, read_answer

_NAME = re.compile(r'[A-Za-z0-9_-]{1,64}')
_MAX_CRITERIA, _MAX_TEXT, _MAX_WEIGHT = 64, 4000, 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Criterion:
  """One criterion of a rubric."""

  name: str
  """Name in the judge's answers and in the parts of the score. It consists of letters, digits,
  underscores and dashes.
  """
  text: str
  """Description for the judge: what to assess, and what earns a 1 and a 0."""
  weight: float = 1.0
  """Weight in the value. A criterion with a negative weight is a penalty."""

  def __post_init__(self):
    if not _NAME.fullmatch(self.name):
      raise UserError(
        f'criterion {self.name!r:.80}: wanted a name of up to 64 letters, digits, underscores and '
        'dashes'
      )
    if not 0 < len(self.text.strip()) <= len(self.text) <= _MAX_TEXT:
      raise UserError(
        f'criterion {self.name}: its text has {len(self.text)} characters, wanted 1 to {_MAX_TEXT}'
      )
    if not 0 < abs(self.weight) <= _MAX_WEIGHT:
      raise UserError(
        f'criterion {self.name}: weight is {self.weight}, wanted a number other than 0, within '
        f'±{_MAX_WEIGHT:g}'
      )


Rubric = tuple[Criterion, ...]


def check_rubric(rubric: Rubric) -> None:
  """Raises UserError if the rubric is empty or too long, repeats a name, or consists only of
  penalties.
  """
  names = [criterion.name for criterion in rubric]
  if not 0 < len(names) <= _MAX_CRITERIA:
    raise UserError(f'a rubric has {len(names)} criteria, wanted 1 to {_MAX_CRITERIA}')
  if repeated := sorted({name for name in names if names.count(name) > 1}):
    raise UserError(f'a rubric has several criteria {repeated}; give each a unique name')
  if not any(criterion.weight > 0 for criterion in rubric):
    raise UserError('a rubric has penalties only; give a criterion a positive weight')


def rubric_of(rows: Json) -> Rubric:
  """Reads the rubric in a task's row: a list of `{text, weight?, name?}`. Criteria without a name
  are called c1, c2, … in order. Raises UserError if the value is not a rubric.
  """
  if not isinstance(rows, Sequence) or isinstance(rows, str) or len(rows) > _MAX_CRITERIA:
    raise UserError(f'the rubric is {rows!r:.80}, wanted a list of {{text, weight, name}}')
  criteria = []
  for number, row in enumerate(rows, 1):
    if not isinstance(row, Mapping) or not row.keys() <= {'name', 'text', 'weight'}:
      raise UserError(f'criterion {number} is {row!r:.80}, wanted {{text, weight, name}}')
    name, text, weight = row.get('name', f'c{number}'), row.get('text'), row.get('weight', 1.0)
    if not isinstance(name, str) or not isinstance(text, str) or not is_number(weight):
      raise UserError(f'criterion {number} is {row!r:.80}, wanted {{text, weight, name}}')
    criteria.append(Criterion(name=name, text=text, weight=float(weight)))
  check_rubric(tuple(criteria))
  return tuple(criteria)


def rubric_form(rubric: Rubric) -> str:
  """Returns the description of the criteria and of the answer's format, for the judge's prompt."""
  scores = ', '.join(f'"{criterion.name}": a number from 0 to 1' for criterion in rubric)
  criteria = '\n'.join(
    f'- {criterion.name}: {" ".join(criterion.text.split())}' for criterion in rubric
  )
  return (
    f'{{"reasoning": "why, in a few sentences", "scores": {{{scores}}}}}\n\n'
    'Score each of these criteria by itself; 1 says that it is met in full, 0 that it is not met '
    f'at all:\n{criteria}'
  )


class Incomplete(Malformed):
  """Raised if a judge's answer lacks scores for some criteria.

  Attributes:
    answer: scores and reasoning that the answer does contain, in the form that `read_scores`
      returns.
  """

  def __init__(self, message: str, answer: dict[str, Json]):
    super().__init__(message)
    self.answer = answer


def read_scores(text: str, rubric: Rubric) -> dict[str, Json]:
  """Parses `{scores, reasoning}`. Raises Incomplete if criteria are missing, and Malformed for any
  other answer.
  """
  answer = read_answer(text, 'scores')
  scores = answer['scores']
  if not isinstance(scores, dict):
    raise Malformed(f'"scores" is {json.dumps(scores):.80}, wanted an object')
  kept: dict[str, Any] = {}
  for criterion in rubric:
    if criterion.name not in scores:
      continue
    score = scores[criterion.name]
    if not is_number(score) or not 0 <= score <= 1:
      raise Malformed(f'"{criterion.name}" is {json.dumps(score):.80}, wanted a number from 0 to 1')
    kept[criterion.name] = float(score)
  reasoning = str(answer.get('reasoning', ''))[:MAX_REASONING]
  read: dict[str, Json] = {'scores': kept, 'reasoning': reasoning}
  if missing := [criterion.name for criterion in rubric if criterion.name not in kept]:
    raise Incomplete(f'"scores" lacks {missing}', read)
  return read


def rubric_value(rubric: Rubric, scores: Mapping[str, float]) -> float:
  """Returns max(0, Σ wᵢ sᵢ / Σ max(0, wᵢ)) over the criteria that have scores; 0 if none of them
  has a positive weight.
  """
  scored = [criterion for criterion in rubric if criterion.name in scores]
  most = math.fsum(max(0.0, criterion.weight) for criterion in scored)
  earned = math.fsum(criterion.weight * scores[criterion.name] for criterion in scored)
  return max(0.0, earned / most) if most else 0.0
