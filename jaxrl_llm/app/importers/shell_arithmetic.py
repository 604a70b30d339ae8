"""Computes the integer arithmetic of a shell script, as in `$((2 * 8))`.

Invariant: no intermediate result exceeds `_LARGEST_NUMBER` in magnitude, so a computation takes
bounded time and memory.
"""

from __future__ import annotations

import ast
import operator
import re

_LARGEST_NUMBER = 2**63


def _quotient(dividend: int, divisor: int) -> int:
  """Divides as a shell does, rounding towards zero."""
  quotient = abs(dividend) // abs(divisor)
  return quotient if (dividend < 0) == (divisor < 0) else -quotient


_BINARY = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: _quotient,
  ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def computed(text: str) -> int | None:
  """Returns the value of an arithmetic expression of integers; None for any other text, after a
  division by zero, and if a number is too large.
  """
  if not re.fullmatch(r'[\d\s()+\-*/%]+', text):
    return None
  try:
    return _evaluated(ast.parse(text.strip(), mode='eval').body)
  except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
    return None


def _evaluated(node: ast.expr) -> int:
  match node:
    case ast.Constant(value=int(value)):
      result = value
    case ast.UnaryOp(op=ast.USub(), operand=operand):
      result = -_evaluated(operand)
    case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
      result = _BINARY[type(op)](_evaluated(left), _evaluated(right))
    case _:
      raise ValueError('not whole-number arithmetic')
  if abs(result) > _LARGEST_NUMBER:
    raise ValueError('too large')
  return result
