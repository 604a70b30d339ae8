"""Chooses the comparison mode and the extraction methods from the truths of a taskset.

The truth of a task is its reference answer.

Invariant: the choice depends only on the set of truths, not on their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from jaxrl_llm.rewards.scorers.answer.extraction import Methods, reference
from jaxrl_llm.rewards.scorers.answer.short_text import aliases
from jaxrl_llm.rewards.scorers.answer.units import parse_quantity

Mode = Literal['exact', 'numeric', 'latex', 'interval', 'set', 'tuple', 'choice', 'text']
"""Comparison of an answer with the truth. exact: the same text up to white space; numeric: a
number, with units as in `AnswerOptions.units`; latex: any mathematical answer; interval: intervals
and their unions; set: elements in any order; tuple: entries in order; choice: letters of choices;
text: words.
"""

ANYWHERE: Methods = ('boxed', 'tags', 'hashes', 'phrase', 'bold', 'whole')
"""Default extraction methods, from the most to the least explicit."""
HASHES_FIRST: Methods = ('hashes', 'boxed', 'tags', 'phrase', 'bold', 'whole')

_LETTER = re.compile(r'(?:\\text(?:bf|rm)?\s*\{)?\s*\(?[A-J]\)?\.?\s*\}?')
_MATHEMATICAL = re.compile(r'[\d\\=^+*/<>${}()\[\]|_]')


class ChosenOptions(NamedTuple):
  options: Mapping[str, Any]
  """The chosen options of scorer `answer`, keyed by name."""
  why: str


def choose(truths: Iterable[str | None]) -> ChosenOptions:
  """Chooses the options for tasks with these truths. A truth of None belongs to a task without a
  truth.
  """
  given = sorted({truth for truth in truths if truth and truth.strip()})
  if not given:
    return ChosenOptions({'mode': 'latex', 'extraction': ANYWHERE}, 'no task has a truth')
  hashed = sum('####' in truth for truth in given)
  extraction = HASHES_FIRST if 2 * hashed >= len(given) else ANYWHERE
  answers = [reference(truth) for truth in given]
  noun = f'of {len(given):,} different truths'
  if hashed == len(given) and all(parse_quantity(answer) for answer in answers):
    return ChosenOptions(
      {'mode': 'numeric', 'units': 'stated', 'extraction': extraction},
      f'all {noun} are numbers after ####',
    )
  if all(_LETTER.fullmatch(answer) for answer in answers):
    return ChosenOptions(
      {'mode': 'choice', 'extraction': extraction}, f'all {noun} are letters of choices'
    )
  if all(_is_words(text) for answer in answers for text in aliases(answer)):
    return ChosenOptions({'mode': 'text', 'extraction': extraction}, f'all {noun} are words')
  numbers = sum(parse_quantity(answer) is not None for answer in answers)
  why = (
    f'all {noun} are numbers'
    if numbers == len(given)
    else f'{numbers:,} {noun} are numbers, others have other forms'
  )
  return ChosenOptions({'mode': 'latex', 'extraction': extraction}, why)


def _is_words(text: str) -> bool:
  """Returns whether the text has at least two letters and no mathematical symbol."""
  return sum(map(str.isalpha, text)) > 1 and not _MATHEMATICAL.search(text)
