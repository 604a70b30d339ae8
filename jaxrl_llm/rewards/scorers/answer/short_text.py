"""Compares short answers in words, ignoring case, articles, punctuation and spacing.

Punctuation that changes the meaning does count: within numbers (`3.5`), as a sign (`-5`), and in
symbols (`C++`, `50%`).
"""

from __future__ import annotations

import json
import re
import unicodedata

from jaxrl_llm.rewards.scorers.answer.expressions import unboxed
from jaxrl_llm.rewards.scorers.answer.numbers import plain

_THOUSANDS = re.compile(r'(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])')
_DOTTED = re.compile(r'(?<=[^\W\d_])\.(?=[^\W\d_](?:\.|\W|$))')
_APOSTROPHES = re.compile(r"(?<=[^\W\d_])['’](?=[^\W\d_])|(?<=s)['’](?=\s|$)")
_KEPT = re.compile(r'(?<=\d)[.,:/\-](?=\d)|(?<![\w)])[-+](?=[\d.])|(?<![\d.])\.(?=\d)|[%#/@°]')
_ARTICLES = ('a', 'an', 'the')


def normalise(text: str) -> str:
  """Returns the normal form of a short text. Texts with equal normal forms are the same answer.

  The steps, in order: remove LaTeX text commands and bold marks; convert full-width characters;
  fold case; replace `&` with `and`; remove thousands separators, the dots in abbreviations
  (`U.S.A.`) and apostrophes; replace other punctuation with spaces; remove a leading article, and
  every `the` that is not the last word.
  """
  text = plain(unboxed(text))

  def wide(c):
    return unicodedata.decomposition(c).startswith(('<wide>', '<narrow>'))

  text = unicodedata.normalize(
    'NFC', ''.join(unicodedata.normalize('NFKC', c) if wide(c) else c for c in text)
  )
  text = text.casefold().replace('\u2212', '-').replace('&', ' and ')
  text = _THOUSANDS.sub(lambda match: match.group().replace(',', ''), text)
  text = _APOSTROPHES.sub('', _DOTTED.sub('', text))
  kept = {match.start() for match in _KEPT.finditer(text)}

  def mark(c):
    return unicodedata.category(c).startswith('P')

  text = ''.join(' ' if mark(c) and i not in kept else c for i, c in enumerate(text))
  words = text.split()
  if len(words) > 1 and words[0] in _ARTICLES:
    words = words[1:]
  return ' '.join([word for word in words[:-1] if word != 'the'] + words[-1:])


def aliases(truth: str) -> list[str]:
  """Returns the accepted answers: the elements of the truth if it is a JSON list of texts, else the
  truth itself.
  """
  if truth.lstrip().startswith('['):
    try:
      several = json.loads(truth)
    except ValueError:
      return [truth]
    if isinstance(several, list) and several and all(isinstance(alias, str) for alias in several):
      return several
  return [truth]


def texts_agree(accepted: list[str], answer: str) -> bool | None:
  """Returns whether the answer is one of the accepted answers. Returns None if all of these are
  empty after normalisation.
  """
  wanted = {normalise(text) for text in accepted} - {''}
  return normalise(answer) in wanted if wanted else None
