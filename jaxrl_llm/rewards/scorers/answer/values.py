"""Evaluates formulas: exactly for rational numbers, otherwise in floating point with additional
digits.

Invariant: no number grows beyond `MAX_BITS`, so evaluation time is bounded by the size of the
formula.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jaxrl_llm.rewards.scorers.answer.formula import Formula, Node, read_formula

MAX_BITS = 20_000
"""Maximum number of bits in a numerator or denominator, and maximum magnitude of a binary exponent.
Larger numbers raise Undefined.
"""
DIGITS = 60
"""Number of decimal digits in floating-point values. If intermediate results are large, values have
additional digits: one for each digit before the decimal point of the largest intermediate result.
"""
_MAX_LOST = 1_000
"""Maximum number of digits before the decimal point of an intermediate result. The limit applies to
formulas whose value is not exact.
"""


def as_float(value: Any) -> Any:
  """Converts a value to an mpmath number with mpmath's current precision."""
  import mpmath

  return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


class Undefined(ArithmeticError):
  """Raised if a formula has no value at a point, or if a number in its evaluation exceeds
  `MAX_BITS`.
  """


class _Evaluation:
  """One evaluation of a formula, at one point and in one precision."""

  def __init__(self, symbols: Mapping[str, Fraction], digits: int, *, log_base: int | None):
    import mpmath  # Imported here, since the import would add 0.1 s to every launch script.

    self.mp, self.symbols, self.log_base = mpmath.mp, symbols, log_base
    self.digits = digits
    self.peak = 1.0
    """Binary exponent of the largest intermediate result."""
    self.complex = False
    self.lossy: float | None = None
    """Binary exponent of the largest operand of an operation in which digits may have cancelled.
    None if no digits can have cancelled.
    """

  def tiny(self) -> Any:
    """Returns the magnitude below which a value may be zero, given the rounding errors."""
    return (
      self.mp.mpf(0)
      if self.lossy is None
      else self.mp.ldexp(self.mp.mpf(10) ** (10 - self.digits), int(self.lossy))
    )

  def of(self, node: Node) -> Any:
    value = self.value(node)
    if isinstance(value, Fraction):
      if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Undefined('too large')
      self.peak = max(self.peak, value.numerator.bit_length() - value.denominator.bit_length())
      return value
    if not self.mp.isfinite(value):
      raise Undefined('not finite')
    if isinstance(value, self.mp.mpc):
      if value.imag == 0 or abs(value.imag) < abs(value.real) * self.mp.mpf(10) ** (
        -self.digits + 10
      ):
        value = value.real
      else:
        self.complex = True
    magnitude = self.mp.mag(value) if value else 0
    if abs(magnitude) > MAX_BITS:
      raise Undefined('too large')
    self.peak = max(self.peak, magnitude)
    return value

  def float(self, value: Any) -> Any:
    return (
      self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value
    )

  def value(self, node: Node) -> Any:
    match node.kind:
      case 'number':
        return node.value
      case 'symbol':
        return self.symbols[node.value]
      case 'constant':
        return {'pi': self.mp.pi, 'e': self.mp.e, 'i': self.mp.mpc(0, 1)}[node.value] * 1
    values = [self.of(part) for part in node.parts]
    if all(isinstance(value, Fraction) for value in values):
      exact = _exact(node.kind, values)
      if exact is not None:
        return exact
    floats = [self.float(value) for value in values]
    match node.kind:
      case 'negative':
        return -floats[0]
      case 'sum':
        self.may_cancel(floats)
        return self.mp.fsum(floats)
      case 'product':
        return self.mp.fprod(floats)
      case 'quotient':
        if abs(floats[1]) <= self.tiny():
          raise Undefined('division by zero')
        return floats[0] / floats[1]
      case 'power':
        return self.power(*floats)
      case 'root':
        return self.root(floats[0], values[1] if len(values) > 1 else Fraction(2))
      case 'degrees':
        return floats[0] * self.mp.pi / 180
      case 'opaque':
        seed = zlib.crc32(node.value.encode())
        return self.mp.sin(floats[0] * (1 + seed % 97) / 89 + seed % 13)
    if node.kind not in ('abs', 'factorial', 'binomial', 'exp'):
      self.may_cancel([*floats, 1])
    return self.call(node.kind, floats)

  def may_cancel(self, values: Sequence[Any]) -> None:
    exponents = [self.mp.mag(value) for value in values if value]
    self.lossy = max([*exponents, self.lossy or exponents[0]]) if exponents else self.lossy

  def is_zero(self, value: Any) -> bool:
    """Returns whether a value that was computed from numbers near 1 is zero, given the rounding
    errors.
    """
    return abs(value) < self.mp.mpf(10) ** (-self.digits + 15)

  def power(self, base: Any, exponent: Any) -> Any:
    if abs(base) <= self.tiny():
      if not isinstance(exponent, self.mp.mpf) or exponent <= 0:
        raise Undefined('a power of zero')
      return self.mp.mpf(0)
    if abs(exponent) * (abs(self.mp.mag(base)) + 1) > MAX_BITS:
      raise Undefined('too large')
    return base**exponent

  def root(self, radicand: Any, degree: Any) -> Any:
    if not isinstance(degree, Fraction):
      return self.power(radicand, 1 / degree)
    odd = degree.denominator == 1 and degree.numerator % 2 == 1
    if odd and isinstance(radicand, self.mp.mpf) and radicand < 0:
      return -self.power(-radicand, self.float(1 / degree))
    if not degree:
      raise Undefined('root of degree zero')
    return self.mp.mpf(0) if radicand == 0 else self.power(radicand, self.float(1 / degree))

  def call(self, name: str, values: Sequence[Any]) -> Any:
    mp, value = self.mp, values[0]
    if name in ('floor', 'ceil'):
      if not isinstance(value, mp.mpf):
        raise Undefined(name)
      nearest = mp.nint(value)
      return nearest if self.is_zero(value - nearest) else getattr(mp, name)(value)
    if name == 'cbrt':
      return self.root(value, Fraction(3))
    if name in ('factorial', 'binomial'):
      if any(abs(each) > 5_000 for each in values):
        raise Undefined('too large')
      return mp.gamma(value + 1) if name == 'factorial' else mp.binomial(*values)
    if name in ('exp', 'sinh', 'cosh', 'cis', 'sin', 'cos') and abs(value) > MAX_BITS / 2:
      raise Undefined('too large')
    if name == 'cis':
      return mp.cos(value) + mp.mpc(0, 1) * mp.sin(value)
    if name == 'abs':
      return abs(value)
    if name == 'log':
      if abs(value) <= self.tiny():
        raise Undefined('logarithm of zero')
      base = (
        values[1] if len(values) > 1 else None if self.log_base is None else mp.mpf(self.log_base)
      )
      if base is not None and (self.is_zero(base) or self.is_zero(base - 1)):
        raise Undefined('base of a logarithm')
      return mp.log(value) if base is None else mp.log(value) / mp.log(base)
    reciprocals = {'arccot': 'atan', 'arcsec': 'acos', 'arccsc': 'asin'}
    if name in reciprocals:
      if self.is_zero(value):
        raise Undefined(name)
      return getattr(mp, reciprocals[name])(1 / value)
    if name in ('tan', 'sec') and self.is_zero(mp.cos(value)):
      raise Undefined(name)
    if name in ('cot', 'csc', 'coth') and self.is_zero(
      mp.sinh(value) if name == 'coth' else mp.sin(value)
    ):
      raise Undefined(name)
    return getattr(mp, name.replace('arc', 'a'))(value)


def _folded(
  operation: Callable[[Fraction, Fraction], Fraction], values: Sequence[Fraction]
) -> Fraction:
  result = values[0]
  for value in values[1:]:
    result = operation(result, value)
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
      raise Undefined('too large')
  return result


def _exact(kind: str, values: Sequence[Fraction]) -> Fraction | None:
  """Applies an operation to rational numbers. Returns None if the result may be irrational."""
  first = values[0]
  match kind:
    case 'negative':
      return -first
    case 'sum':
      return _folded(operator.add, values)
    case 'product':
      return _folded(operator.mul, values)
    case 'quotient':
      if not values[1]:
        raise Undefined('division by zero')
      return first / values[1]
    case 'abs':
      return abs(first)
    case 'floor':
      return Fraction(math.floor(first))
    case 'ceil':
      return Fraction(math.ceil(first))
    case 'power' if values[1].denominator == 1:
      exponent = values[1].numerator
      if not first:
        if exponent <= 0:
          raise Undefined('a power of zero')
        return first
      if (
        abs(exponent) * max(first.numerator.bit_length(), first.denominator.bit_length()) > MAX_BITS
      ):
        if abs(first) != 1:
          raise Undefined('too large')
        return first ** (exponent % 2)
      return first**exponent
    case 'factorial' if first.denominator == 1:
      if not 0 <= first <= 2_000:
        raise Undefined('a factorial')
      return Fraction(math.factorial(first.numerator))
    case 'binomial' if first.denominator == values[1].denominator == 1 and first >= 0:
      if first > 10_000:
        raise Undefined('too large')
      return (
        Fraction(math.comb(first.numerator, values[1].numerator)) if values[1] >= 0 else Fraction(0)
      )
    case 'root' if len(values) == 1 and first >= 0:
      above, below = math.isqrt(first.numerator), math.isqrt(first.denominator)
      return (
        Fraction(above, below)
        if (above**2, below**2) == (first.numerator, first.denominator)
        else None
      )
  return None


class Value(NamedTuple):
  number: Any
  """A Fraction, or a real or complex mpmath number."""
  complex: bool
  """Whether any intermediate result was not real."""
  tiny: Any
  """Magnitude below which differences are rounding errors."""


def evaluate(
  formula: Formula, symbols: Mapping[str, Fraction], *, log_base: int | None = None
) -> Value:
  """Evaluates a formula at a point. Raises Undefined if the formula has no value at this point.

  Args:
    symbols: the point: value of each symbol in the formula, keyed by name.
    log_base: base of logarithms that state no base; None for e.
  """
  import mpmath

  digits = DIGITS
  for _ in range(2):
    with mpmath.workdps(digits):
      evaluation = _Evaluation(symbols, digits, log_base=log_base)
      try:
        number = evaluation.of(formula.root)
      except (
        ZeroDivisionError,
        OverflowError,
        ValueError,
        RecursionError,
        mpmath.libmp.ComplexResult,
      ) as error:
        raise Undefined(str(error)) from None
      lost = int(max(evaluation.peak, 0) * 0.302)
      if isinstance(number, Fraction) or digits - lost >= DIGITS - 15:
        break
      if lost > _MAX_LOST:
        raise Undefined('too large')
      digits = DIGITS + lost
  return Value(number, evaluation.complex, evaluation.tiny())


def real_value(text: str) -> Any:
  """Returns the real value of a text in canonical LaTeX, as a Fraction or an mpmath number. Returns
  None if the text has no real value.
  """
  formula = read_formula(text)
  if formula is None or formula.symbols or formula.bases:
    return None
  try:
    value = evaluate(formula, {})
  except Undefined:
    return None
  import mpmath

  return value.number if isinstance(value.number, Fraction | mpmath.mpf) else None


def exact_number(text: str) -> Fraction | None:
  """Parses a text in canonical LaTeX that is a single number, such as `0.\\overline{3}` or `{42}`.
  Returns None for other text.
  """
  formula = read_formula(text)
  if formula is None or formula.bases:
    return None
  sign, node = (-1, formula.root.parts[0]) if formula.root.kind == 'negative' else (1, formula.root)
  return sign * node.value if node.kind == 'number' else None


def real_less(a: Any, b: Any) -> bool:
  """Returns whether `a` is less than `b` by more than rounding errors."""
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return a < b
  import mpmath

  with mpmath.workdps(DIGITS):
    left, right = as_float(a), as_float(b)
    return bool(left < right - max(abs(left), abs(right)) * 1e-30)
