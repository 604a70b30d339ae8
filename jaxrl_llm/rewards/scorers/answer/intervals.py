"""Parses and compares intervals and their unions.

An interval is written in brackets (`[1,2)`, `[1,2[`) or as an inequality. Half-lines and single
points are intervals, too.

Invariant: two sets of real numbers agree if they contain the same numbers, so open and closed ends
differ, and `(1,2] ∪ (2,3)` equals `(1,3)`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from jaxrl_llm.rewards.scorers.answer.effort import explodes
from jaxrl_llm.rewards.scorers.answer.expressions import latex_agree, parse_latex
from jaxrl_llm.rewards.scorers.answer.latex import canonical
from jaxrl_llm.rewards.scorers.answer.lists import MAX_ELEMENTS, inside, mathematical, named, split
from jaxrl_llm.rewards.scorers.answer.numbers import parse_number
from jaxrl_llm.rewards.scorers.answer.values import real_less, real_value


class End(NamedTuple):
  text: str
  value: Any
  """Endpoint: a Fraction, a real mpmath number or ±inf. None if the expression has no
  value, for example because it contains names, as in `[a, b)`.
  """

  def precedes(self, other: End) -> bool:
    if math.inf in (other.value, -self.value):
      return self.value != other.value
    if math.inf in (self.value, -other.value):
      return False
    return real_less(self.value, other.value)

  def equals(self, other: End) -> bool:
    if isinstance(self.value, Fraction) and isinstance(other.value, Fraction):
      return self.value == other.value
    return self.text == other.text or latex_agree(self.text, other.text)


class Interval(NamedTuple):
  low: End
  low_closed: bool
  high: End
  high_closed: bool


_NEGATIVE, _POSITIVE = End('-∞', -math.inf), End('∞', math.inf)
_ZERO = End('0', Fraction(0))
_VARIABLE = re.compile(r'\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([a-zA-Z]\))?')
_RELATION = re.compile(r'[<>≤≥≠=]')
_BUILDER = re.compile(r'\s*\\?[a-zA-Z]+\s*(?:∈\s*ℝ\s*)?[|:]\s*(?P<condition>.*)', re.DOTALL)


def _end(text: str) -> End | None:
  text = text.strip()
  bare = text.replace(' ', '')
  if bare in ('∞', '+∞', 'inf', '+inf', 'oo', '+oo'):
    return _POSITIVE
  if bare in ('-∞', '-inf', '-oo'):
    return _NEGATIVE
  number = parse_number(text)
  if number is not None:
    value = number.value / 100 if number.percent else number.value
    return End(str(value), value)
  if not bare or explodes(text) or _RELATION.search(text) or split(text) != [text]:
    return None
  value = real_value(canonical(text))
  return End(text, value) if value is not None or parse_latex(text) else None


def _bracketed(text: str) -> Interval | None:
  if len(text) < 2 or text[0] not in '[(]' or text[-1] not in '])[':
    return None
  parts = split(text[1:-1])
  if len(parts) != 2:
    return None
  low, high = _end(parts[0]), _end(parts[1])
  if low is None or high is None:
    return None
  return Interval(low, text[0] == '[', high, text[-1] == ']')


def _inequality(text: str) -> list[Interval] | None:
  sides = [side.strip() for side in _RELATION.split(text)]
  signs = _RELATION.findall(text)
  if (
    len(signs) == 2
    and (set(signs) <= {'<', '≤'} or set(signs) <= {'>', '≥'})
    and _VARIABLE.fullmatch(sides[1])
  ):
    if signs[0] in '>≥':
      sides, signs = sides[::-1], signs[::-1]
    low, high = _end(sides[0]), _end(sides[2])
    closed = [sign in '≤≥' for sign in signs]
    return [Interval(low, closed[0], high, closed[1])] if low and high else None
  if len(signs) != 1:
    return None
  (left, right), sign = sides, signs[0]
  if not _VARIABLE.fullmatch(left):
    left, right, sign = right, left, sign.translate(str.maketrans('<>≤≥', '><≥≤'))
  end = _end(right)
  if not _VARIABLE.fullmatch(left) or end is None:
    return None
  match sign:
    case '=':
      return [Interval(end, True, end, True)]
    case '≠':
      return [Interval(_NEGATIVE, False, end, False), Interval(end, False, _POSITIVE, False)]
    case '<' | '≤':
      return [Interval(_NEGATIVE, False, end, sign == '≤')]
  return [Interval(end, sign == '≥', _POSITIVE, False)]


def _without(text: str) -> list[Interval] | None:
  """Returns the intervals of all real numbers except those in `text`, a list such as `{1,2}`.
  Returns None if `text` has another form.
  """
  inner = inside(text.strip(), (r'\{', '{'), (r'\}', '}'))
  ends = [None] if inner is None else [_end(part) for part in split(inner)]
  if any(end is None or end.value is None for end in ends):
    return None
  ends = [
    _NEGATIVE,
    *sorted(ends, key=functools.cmp_to_key(lambda a, b: -1 if a.precedes(b) else 1)),
    _POSITIVE,
  ]
  return [Interval(low, False, high, False) for low, high in itertools.pairwise(ends)]


def _part(text: str) -> list[Interval] | None:
  _, text = named(text) if '∈' in text else ('', text.strip())
  whole, without, listed = text.partition('∖')
  if without:
    return _without(listed) if whole.strip() == 'ℝ' else None
  if text == 'ℝ':
    return [Interval(_NEGATIVE, False, _POSITIVE, False)]
  if sign := re.fullmatch(r'ℝ\s*[_^]\s*\{?([-+])\}?', text):
    return [
      Interval(_NEGATIVE, False, _ZERO, False)
      if sign[1] == '-'
      else Interval(_ZERO, False, _POSITIVE, False)
    ]
  if text == '∅':
    return []
  inner = inside(text, (r'\{', '{'), (r'\}', '}'))
  if inner is not None:
    if builder := _BUILDER.fullmatch(inner):
      return _pieces(builder['condition'])
    ends = [_end(part) for part in split(inner)]
    return None if None in ends else [Interval(end, True, end, True) for end in ends]
  if interval := _bracketed(text):
    return [interval]
  return _inequality(text)


def _pieces(text: str) -> list[Interval] | None:
  pieces: list[Interval] = []
  for part in re.split(r'∪|\bU\b|\bor\b', text):
    intervals = _part(part)
    if intervals is None:
      return None
    pieces += intervals
  return pieces if len(pieces) <= MAX_ELEMENTS else None


def _proper(piece: Interval) -> bool:
  if (piece.low_closed and piece.low == _NEGATIVE) or (
    piece.high_closed and piece.high == _POSITIVE
  ):
    return False
  if None in (piece.low.value, piece.high.value) or piece.low.precedes(piece.high):
    return True
  return piece.low.equals(piece.high) and piece.low_closed and piece.high_closed


def _order(a: Interval, b: Interval) -> int:
  if a.low.equals(b.low):
    return int(b.low_closed) - int(a.low_closed)
  return -1 if a.low.precedes(b.low) else 1


def _merged(pieces: list[Interval]) -> list[Interval]:
  """Sorts and merges intervals, so that no two overlap or touch."""
  merged: list[Interval] = []
  for piece in sorted(pieces, key=functools.cmp_to_key(_order)):
    last = merged[-1] if merged else None
    if last is None:
      merged.append(piece)
      continue
    same = last.high.equals(piece.low)
    if (same and not (last.high_closed or piece.low_closed)) or (
      not same and last.high.precedes(piece.low)
    ):
      merged.append(piece)
    elif last.high.equals(piece.high):
      merged[-1] = last._replace(high_closed=last.high_closed or piece.high_closed)
    elif last.high.precedes(piece.high):
      merged[-1] = last._replace(high=piece.high, high_closed=piece.high_closed)
  return merged


def parse_intervals(text: str) -> list[Interval] | None:
  """Parses a union of intervals, sorted and merged. Returns None if the text is not a set of real
  numbers.

  If an end contains a name, as in `[a, b)`, the order of the ends is unknown, and the intervals
  stay as written.
  """
  pieces = _pieces(mathematical(text))
  if pieces is None or not all(_proper(piece) for piece in pieces):
    return None
  if any(None in (piece.low.value, piece.high.value) for piece in pieces):
    return pieces
  return _merged(pieces)


def intervals_agree(truth: str, answer: str) -> bool | None:
  """Returns whether truth and answer are the same set of real numbers. Returns None if the truth is
  not such a set.
  """
  wanted, got = parse_intervals(truth), parse_intervals(answer)
  if wanted is None or got is None:
    return None if wanted is None else False
  return len(wanted) == len(got) and all(
    (w.low_closed, w.high_closed) == (g.low_closed, g.high_closed)
    and w.low.equals(g.low)
    and w.high.equals(g.high)
    for w, g in zip(wanted, got)
  )
