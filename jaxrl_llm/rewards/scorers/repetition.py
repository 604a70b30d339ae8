"""Repetition penalty.

penalty = −max · (1 − distinct n-grams / n-grams), over the completion's case-folded words; 0 for
fewer than n words.

Source: "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373) penalises repeated
n-grams; the formula for a whole answer is that of Open-R1's `get_repetition_penalty_reward`. The
computation takes linear time.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from jaxrl_llm.rewards.api import Attempt, Scorer, Verdict, read_options

_SINGLE = r'\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff'
_WORD = re.compile(rf'[{_SINGLE}]|[^\s{_SINGLE}]+')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepetitionOptions:
  ngram: int = 3
  """N-gram size in words; a Han or kana character counts as a word, as these have no spaces."""
  max_penalty: float = 1.0
  """Upper limit of the penalty; a completion that keeps repeating one n-gram approaches it."""

  def __post_init__(self):
    if self.ngram < 1:
      raise ValueError(f'option ngram is {self.ngram}, wanted at least 1')
    if not 0 < self.max_penalty < float('inf'):
      raise ValueError(f'option max_penalty is {self.max_penalty}, wanted a positive finite number')


def repeated(text: str, ngram: int) -> float:
  """Returns 1 − (distinct n-grams / all n-grams) of the text's words; 0 if there are no n-grams."""
  words = _WORD.findall(text.casefold())
  count = len(words) - ngram + 1
  if count < 1:
    return 0.0
  return 1.0 - len(set(zip(*(words[i : i + count] for i in range(ngram))))) / count


def score_repetition(attempt: Attempt, *, options: RepetitionOptions) -> Verdict:
  """Returns the penalty, in (−max, 0]."""
  rate = repeated(attempt.completion, options.ngram)
  return Verdict(value=-options.max_penalty * rate if rate else 0.0, evidence={'repeated': rate})


def repetition_scorer(**options: Any) -> Scorer:
  """Penalty in [-max, 0] for repeated n-grams; options: `RepetitionOptions`."""
  return functools.partial(
    score_repetition, options=read_options(RepetitionOptions, options, 'repetition')
  )
