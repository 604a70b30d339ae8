"""Chooses how answers are compared and where they are looked for, from the truths of a taskset.

Invariant: the same truths give the same choice, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from jaxrl_llm.rewards.scorers.answer.extraction import Methods, reference
from jaxrl_llm.rewards.scorers.answer.short_text import aliases
from jaxrl_llm.rewards.scorers.answer.units import parse_quantity

Mode = Literal['exact', 'numeric', 'latex', 'interval', 'set', 'tuple', 'choice', 'text']
"""exact: the same text but for white space; numeric: a number, with units as `AnswerOptions.units` says; latex: any
answer of mathematics; interval: intervals and their unions; set: order free; tuple: order counts; choice: letters;
text: words."""

ANYWHERE: Methods = ('boxed', 'tags', 'hashes', 'phrase', 'bold', 'whole')
"""From the most to the least explicit."""
HASHES_FIRST: Methods = ('hashes', 'boxed', 'tags', 'phrase', 'bold', 'whole')

_LETTER = re.compile(r'(?:\\text(?:bf|rm)?\s*\{)?\s*\(?[A-J]\)?\.?\s*\}?')
_MATHEMATICAL = re.compile(r'[\d\\=^+*/<>${}()\[\]|_]')


class Chosen(NamedTuple):
  options: Mapping[str, Any]
  """Options of the scorer `answer`."""
  why: str


def choose(truths: Iterable[str | None]) -> Chosen:
  """The options for tasks with these truths; None is a task without one."""
  given = sorted({truth for truth in truths if truth and truth.strip()})
  if not given:
    return Chosen({'mode': 'latex', 'extraction': ANYWHERE}, 'no task has a truth')
  hashed = sum('####' in truth for truth in given)
  extraction = HASHES_FIRST if 2 * hashed >= len(given) else ANYWHERE
  answers = [reference(truth) for truth in given]
  what = f'of {len(given):,} different truths'
  if hashed == len(given) and all(parse_quantity(answer) for answer in answers):
    return Chosen(
      {'mode': 'numeric', 'units': 'stated', 'extraction': extraction}, f'all {what} are numbers after ####'
    )
  if all(_LETTER.fullmatch(answer) for answer in answers):
    return Chosen({'mode': 'choice', 'extraction': extraction}, f'all {what} are letters of choices')
  if all(_is_words(text) for answer in answers for text in aliases(answer)):
    return Chosen({'mode': 'text', 'extraction': extraction}, f'all {what} are words')
  numbers = sum(parse_quantity(answer) is not None for answer in answers)
  why = (
    f'all {what} are numbers' if numbers == len(given) else f'{numbers:,} {what} are numbers, others have other forms'
  )
  return Chosen({'mode': 'latex', 'extraction': extraction}, why)


def _is_words(text: str) -> bool:
  """Whether the text has at least two letters and no mathematical symbol."""
  return sum(map(str.isalpha, text)) > 1 and not _MATHEMATICAL.search(text)
