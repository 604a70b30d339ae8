"""Reads and compares multiple-choice answers. An answer is a letter or, if the task lists the
choices, the text of a choice.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.scorers.answer.expressions import unboxed
from jaxrl_llm.rewards.scorers.answer.numbers import plain
from jaxrl_llm.rewards.scorers.answer.short_text import normalise

_PREFIX = re.compile(r'(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)s?\s*:?\s*', re.IGNORECASE)
_LETTER = r'(?:\(\s*[A-Za-z]\s*\)|\[\s*[A-Za-z]\s*\]|[A-Za-z](?![^\W_]))'
_ONE = re.compile(rf'(?P<letter>{_LETTER})(?:\s*[.,):\-–—]\s*|\s+(?=\S)|$)(?P<rest>.*)', re.DOTALL)
_SAID = re.compile(
  r'\s+is\s+(?:the\s+)?(?:correct|right)(?:\s+(?:answer|option|choice))?$', re.IGNORECASE
)
_SEVERAL = re.compile(
  rf'{_LETTER}[.)]?(?:\s*(?:,|;|&|\band\b)\s*(?:and\s+)?{_LETTER}[.)]?)+', re.IGNORECASE
)
_BARE = re.compile(rf'{_LETTER}\W*')
_TOGETHER = re.compile(r'[A-Z]{2,}')
_HEDGE = re.compile(
  r'(?<![^\W_])[B-HJ-Z](?![^\W_])|\b(?:or|not|wrong|incorrect|false|either)\b', re.IGNORECASE
)


def read_choices(value: Json) -> dict[str, str] | None:
  """Returns the texts of the choices, keyed by letter, or None if `value` is not a list of choices.
  Choices are listed as `[text, …]`, `{letter: text, …}` or `{'text': […], 'label': […]}`.
  """
  if (
    isinstance(value, Mapping)
    and isinstance(value.get('text'), list)
    and isinstance(value.get('label'), list)
  ):
    pairs = list(zip(value['label'], value['text']))
  elif isinstance(value, Mapping):
    pairs = list(value.items())
  elif isinstance(value, list):
    pairs = list(zip(string.ascii_uppercase, value))
  else:
    return None
  if not pairs or not all(
    isinstance(text, str | int | float) and str(letter).strip() for letter, text in pairs
  ):
    return None
  return {str(letter).strip().upper(): str(text) for letter, text in pairs}


def _letter(token: str) -> str:
  return token.strip('()[]., \t\n').upper()


def parse_choice(text: str, choices: Mapping[str, str] | None) -> frozenset[str] | None:
  """Returns the letters of the choices that the text as a whole names.

  Returns None if the text names no choice, if it leaves the choice open (`A or B`), or if a letter
  is followed by text that is not the text of that choice.

  Several letters (`A, C`, `A and C`, `AC`) are one answer to a question with several right choices.
  If the choices are unknown, text after a single letter is taken as the text of that choice, unless
  it contains the letter of another choice or a negation.
  """
  text = plain(unboxed(text)).replace('**', '').strip()
  prefix = _PREFIX.match(text)
  text = _SAID.sub('', text[prefix.end() :] if prefix else text)

  def allowed(letters):
    return choices is None or letters <= choices.keys()

  bare = text.rstrip('.):]').lstrip('([').strip()
  if len(bare) == 1 and bare.isascii() and bare.isalpha() and allowed({bare.upper()}):
    return frozenset(bare.upper())
  if choices and bare.upper() in choices:  # The label of a choice need not be a single letter.
    return frozenset({bare.upper()})
  if choices:
    same = [
      letter
      for letter, its in choices.items()
      if normalise(its) and normalise(its) == normalise(text)
    ]
    if same:
      return frozenset(same) if len(same) == 1 else None
  if _SEVERAL.fullmatch(text) or (_TOGETHER.fullmatch(text) and len(set(text)) == len(text)):
    letters = frozenset(text) if _TOGETHER.fullmatch(text) else _letters(text)
    return letters if allowed(letters) else None
  match = _ONE.fullmatch(text)
  if not match or not match['rest']:
    return None
  letter, rest = _letter(match['letter']), match['rest']
  if choices is not None:
    return (
      frozenset(letter)
      if letter in choices and normalise(rest) == normalise(choices[letter])
      else None
    )
  stopped = (
    text[match.end('letter') :].lstrip()[:1] in ('.', ')', ':', '-', '–', '—')
    or match['letter'][0] in '(['
  )
  return (
    frozenset(letter) if stopped and not _HEDGE.search(rest) and not _BARE.fullmatch(rest) else None
  )


def _letters(text: str) -> frozenset[str]:
  return frozenset(
    _letter(token)
    for token in re.findall(_LETTER, re.sub(r'\band\b', ',', text, flags=re.IGNORECASE))
  )


def choices_agree(truth: str, answer: str, choices: Mapping[str, str] | None) -> bool | None:
  """Returns whether the answer names exactly the letters that the truth names. Returns None if the
  truth names no letter.
  """
  wanted, got = parse_choice(truth, choices), parse_choice(answer, choices)
  return None if wanted is None else wanted == got
