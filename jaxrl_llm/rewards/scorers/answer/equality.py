"""Compares formulas, equations and inequalities by value, at sample points if they have variables.

Invariant: the sample points are derived from both texts, so the same two texts always get the same
verdict.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from jaxrl_llm.rewards.scorers.answer.formula import Formula
from jaxrl_llm.rewards.scorers.answer.values import DIGITS, Undefined, Value, as_float, evaluate


def _close(a: Value, b: Value, relative: float) -> bool:
  if isinstance(a.number, Fraction) and isinstance(b.number, Fraction):
    return a.number == b.number
  import mpmath

  with mpmath.workdps(DIGITS):
    left, right = as_float(a.number), as_float(b.number)
    difference, size = abs(left - right), max(abs(left), abs(right))
    return bool(difference <= size * relative or size <= max(a.tiny, b.tiny))


def _points(names: Sequence[str], seed: str) -> list[tuple[dict[str, Fraction], bool]]:
  """Returns sample points derived from the seed, each with a flag that says whether all coordinates
  are positive.
  """

  def coordinate(name: str, index: int) -> Fraction:
    drawn = zlib.crc32(f'{seed}|{name}|{index}'.encode())
    value = Fraction(
      drawn % 99_991 + 1_000, 331 if index >= 6 else 101_111 if index % 2 else 29_989
    )
    return -value if index >= 5 and drawn >> 17 & 1 else value

  points = [{name: coordinate(name, index) for name in names} for index in range(8)]
  return [(point, all(value > 0 for value in point.values())) for point in points]


def _compared(
  a: Formula, b: Formula, seed: str, test: Callable[[Value, Value], bool]
) -> bool | None:
  """Returns whether `test` holds at every sample point at which both formulas have a value. Returns
  None if there are too few such points.

  A logarithm without a base may have base e or base 10: `test` must hold for at least one of them.
  """
  names = sorted(a.symbols | b.symbols)
  real = not (a.imaginary or b.imaginary)
  tested = 0
  for point, positive in _points(names, seed) if names else [({}, True)]:
    bases = (None, 10) if a.bare_log or b.bare_log else (None,)
    results = []
    for base in bases:
      try:
        values = evaluate(a, point, log_base=base), evaluate(b, point, log_base=base)
      except Undefined:
        continue
      if positive or not real or not (values[0].complex or values[1].complex):
        results.append(test(*values))
    if results and not any(results):
      return False
    tested += bool(results)
  return True if tested >= min(3, len(names) or 1) else None


MIN_DECIMALS = 6
"""Minimum number of digits after the point that a decimal must have to count as an approximation of
an exact value.
"""


def formulas_equal(truth: Formula, answer: Formula, seed: str) -> bool | None:
  """Returns whether two formulas are equal. Returns None if they cannot be evaluated at enough
  points.

  A decimal with at least `MIN_DECIMALS` digits after the point also counts as equal to an exact
  value with more digits if the two differ by less than one unit of the decimal's last digit, as
  after truncation or rounding, and by at most 0.1 %.
  """
  same = _compared(truth, answer, seed, lambda a, b: _close(a, b, 1e-30))
  if same is not False or truth.symbols or answer.symbols:
    return same
  decimals = [formula.decimals for formula in (truth, answer) if formula.decimals is not None]
  if len(decimals) != 1 or decimals[0] < MIN_DECIMALS:
    return False
  exact = truth if truth.decimals is None else answer
  import mpmath

  def rounded(a: Value, b: Value) -> bool:
    whole = (a if exact is truth else b).number
    # If the exact value has no more decimal places than the decimal, rounding cannot explain a
    # difference.
    if isinstance(whole, Fraction) and (whole * 10 ** decimals[0]).denominator == 1:
      return False
    with mpmath.workdps(DIGITS):
      left, right = as_float(a.number), as_float(b.number)
      return bool(
        abs(left - right) < mpmath.mpf(10) ** -decimals[0] and abs(left - right) <= abs(left) * 1e-3
      )

  return _compared(truth, answer, seed, rounded)


Sides = tuple[Formula, Formula]


def _proportion(truth: Sides, answer: Sides, seed: str) -> Any:
  """Returns the ratio of (left − right) of the truth to (left − right) of the answer.

  Returns 0 if the ratio is not constant, and None if the sides cannot be evaluated at enough
  points.
  """
  names = sorted(frozenset().union(*(side.symbols for side in (*truth, *answer))))
  if not names or frozenset().union(*(s.symbols for s in truth)) != frozenset().union(
    *(s.symbols for s in answer)
  ):
    return 0
  import mpmath

  ratios = []
  with mpmath.workdps(DIGITS):
    for point, positive in _points(names, seed):
      try:
        evaluated = [evaluate(side, point) for side in (*truth, *answer)]
      except Undefined:
        continue
      if not positive and any(value.complex for value in evaluated):
        continue
      values = [value.number for value in evaluated]
      if not all(isinstance(value, Fraction) for value in values):
        values = [as_float(value) for value in values]
      left, right = values[0] - values[1], values[2] - values[3]
      if abs(left) < 1e-40 or abs(right) < 1e-40:
        return 0
      ratios.append(left / right)
  if len(ratios) < 3:
    return None
  return (
    ratios[0]
    if all(abs(ratio - ratios[0]) <= abs(ratios[0]) * 1e-30 for ratio in ratios[1:])
    else 0
  )


def equations_equal(truth: Sides, answer: Sides, seed: str) -> bool | None:
  """Returns whether two equations are equivalent. Returns None if this is unknown.

  They are equivalent if the differences of their sides are nonzero and have a constant ratio.
  """
  factor = _proportion(truth, answer, seed)
  return None if factor is None else bool(factor)


def inequalities_equal(truth: Sides, answer: Sides, seed: str) -> int:
  """Compares two inequalities. Only their sides are given, not their relations.

  Returns 1 if the inequalities are equivalent when both have the same relation, such as `<`.
  Returns -1 if they are equivalent when they have opposite relations, such as `<` and `>`.
  Otherwise, returns 0.
  """
  factor = _proportion(truth, answer, seed) or 0
  if not isinstance(factor, int | Fraction) and factor.imag:
    return 0
  return (factor.real > 0) - (factor.real < 0)
