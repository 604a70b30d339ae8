"""Scorer for school questions of several kinds, such as choice, numeric and text.

The kind of a question decides how its answer is compared with the reference answer. Each kind is a
comparison mode of scorer `answer`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

from jaxrl_llm.core.extras import check_library
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, Scorer, Verdict, read_options
from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE, Mode
from jaxrl_llm.rewards.scorers.answer.extraction import Methods
from jaxrl_llm.rewards.scorers.answer.scorer import AnswerOptions, field_of, score_answer
from jaxrl_llm.rewards.scorers.answer.units import Units

LIBRARIES = ('math_verify',)
"""Libraries that the functions of this module import at their first call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class K12Options(AnswerOptions):
  mode: Mode | None = None
  """Comparison mode for tasks that state no kind. If None, such tasks cannot be scored."""
  kind_field: str = 'kind'
  """Field of the task's row, or of the row's `extra_info`, that states the kind of the question.
  The kinds are the modes of scorer `answer`.
  """
  extraction: Methods = ANYWHERE
  units: Units = 'stated'

  @property
  def libraries(self) -> tuple[str, ...]:
    return LIBRARIES  # A row may state any kind, and some kinds need these libraries.


def score_k12(
  attempt: Attempt, *, options: K12Options, by_kind: dict[str, AnswerOptions]
) -> Verdict:
  """Scores 1.0 if the answer agrees with the reference by the rules of the task's kind, else 0.0.
  The value is None if the kind is unknown.
  """
  kind = field_of(attempt.task, options.kind_field) or options.mode
  if not isinstance(kind, str) or kind not in by_kind:
    return Verdict(
      value=None, evidence={'reason': f'kind is {kind!r}, wanted one of {", ".join(by_kind)}'}
    )
  verdict = score_answer(attempt, options=by_kind[kind])
  return dataclasses.replace(verdict, evidence={'kind': kind, **verdict.evidence})


def k12_scorer(**options: Any) -> Scorer:
  """Returns a scorer for school questions, which compares an answer with the reference answer by
  the kind of the question (choice, numeric, text, …). The options are `K12Options`.
  """
  read = read_options(K12Options, options, 'k12')
  for library in LIBRARIES:
    check_library(library, "scorer 'k12'")
  by_kind = {kind: dataclasses.replace(read, mode=kind) for kind in typing.get_args(Mode)}
  scorer = functools.partial(score_k12, options=read, by_kind=by_kind)
  return OverrunIsZero(scorer) if read.on_timeout == 'zero' else scorer
