"""Compares a program's outputs with the expected ones, outside the sandbox, and computes the
weighted share of the tests that it passed.

Invariant: the cost of a comparison is linear in the length of the two texts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from jaxrl_llm.core.errors import UserError

_NUMBER = re.compile(
  r'[-+]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][-+]?[0-9]{1,4})?'
)
_INTEGER = re.compile(r'[-+]?[0-9]+')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
  """Maximum permitted difference between numbers in an output and the expected numbers."""

  absolute: float = 0.0
  relative: float = 0.0
  """Maximum difference as a fraction of the expected number's magnitude."""

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if not 0 <= value < math.inf:
        raise UserError(f'tolerance: {name} is {value}, wanted a finite number of at least 0')

  def matches(self, actual: str, expected: str) -> bool:
    """Returns whether a word of an output matches the expected word. Integers must be equal; other
    numbers may differ within the tolerance.
    """
    if actual == expected:
      return True
    if not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
      return False
    if _INTEGER.fullmatch(actual) and _INTEGER.fullmatch(expected):
      return int(actual) == int(expected)
    left, right = float(actual), float(expected)
    if not (math.isfinite(left) and math.isfinite(right)):
      return False
    return abs(left - right) <= max(self.absolute, self.relative * abs(right))


def lines(text: str) -> list[str]:
  """Splits text into lines. Removes white space at line ends, and empty lines at the end of the
  text.
  """
  return [line.rstrip() for line in text.rstrip().split('\n')]


def same_output(actual: str, expected: str, tolerance: Tolerance | None = None) -> bool:
  """Returns whether an output equals the expected one.

  Without a tolerance, the lines must be equal. With a tolerance, each line must have the same words
  in the same order, regardless of the white space between them, and numbers may differ within the
  tolerance.
  """
  if tolerance is None:
    return lines(actual) == lines(expected)
  ours, theirs = ([line.split() for line in lines(text)] for text in (actual, expected))
  return [len(line) for line in ours] == [len(line) for line in theirs] and all(
    itertools.starmap(
      tolerance.matches,
      (pair for pairs in zip(ours, theirs, strict=True) for pair in zip(*pairs, strict=True)),
    )
  )


def read_credit(printed: str) -> float | None:
  """Returns the number in the last line of a checker's output if it is between 0 and 1, else
  None.
  """
  last = printed.rstrip().rpartition('\n')[2].strip()
  credit = float(last) if _NUMBER.fullmatch(last) else math.nan
  return credit if 0 <= credit <= 1 else None


def share(credits: Sequence[float], weights: Sequence[float]) -> float:
  """Returns the weighted mean of the credits, Σ wᵢ · cᵢ / Σ wᵢ. It is exactly 1 if every test with
  a positive weight has credit 1.
  """
  if all(credit == 1 for credit, weight in zip(credits, weights, strict=True) if weight):
    return 1.0
  earned = math.fsum(credit * weight for credit, weight in zip(credits, weights, strict=True))
  return earned / math.fsum(weights)
