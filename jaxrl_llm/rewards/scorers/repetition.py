"""Scorer `repetition`: penalises repeated n-grams of words.

The penalty is −max · (1 − distinct n-grams / all n-grams), where max is the option `max_penalty`.
Upper and lower case count as the same. If the completion has fewer than n words, the penalty is 0.

Source: "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373) penalises repeated
n-grams. The formula for a whole answer comes from Open-R1's `get_repetition_penalty_reward`. The
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
  """Number of words in an n-gram. Each Han or kana character counts as a word, since text in these
  scripts has no spaces between words.
  """
  max_penalty: float = 1.0
  """Largest magnitude of the penalty. A completion that keeps repeating a single n-gram approaches
  it.
  """

  def __post_init__(self):
    if self.ngram < 1:
      raise ValueError(f'option ngram is {self.ngram}, wanted at least 1')
    if not 0 < self.max_penalty < float('inf'):
      raise ValueError(f'option max_penalty is {self.max_penalty}, wanted a positive finite number')


def repeated(text: str, ngram: int) -> float:
  """Returns 1 − (distinct n-grams / all n-grams) of the text's words, or 0 if it has no n-grams."""
  words = _WORD.findall(text.casefold())
  count = len(words) - ngram + 1
  if count < 1:
    return 0.0
  return 1.0 - len(set(zip(*(words[i : i + count] for i in range(ngram))))) / count


def score_repetition(attempt: Attempt, *, options: RepetitionOptions) -> Verdict:
  """Returns the penalty of a completion, in (−max_penalty, 0]."""
  rate = repeated(attempt.completion, options.ngram)
  return Verdict(value=-options.max_penalty * rate if rate else 0.0, evidence={'repeated': rate})


def repetition_scorer(**options: Any) -> Scorer:
  """Returns a scorer that penalises repeated n-grams of words, with values in (−max_penalty, 0].
  The options are those of `RepetitionOptions`.
  """
  return functools.partial(
    score_repetition, options=read_options(RepetitionOptions, options, 'repetition')
  )
