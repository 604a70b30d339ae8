"""Detection of expressions that are refused because their evaluation may not terminate."""

from __future__ import annotations

import itertools
import re

SPACES = re.compile(r'\\(?:left|right)(?![a-zA-Z])|[,\s]')
"""Matches parts of an expression that do not matter here: spaces, commas, and bracket scaling."""
MAX_DEPTH = 40
"""Maximum nesting depth of brackets: LaTeX parsers take seconds for a hundred levels."""
_EXPLOSIVE = re.compile(
  # a power of numbers raised to a power
  r'\d\s*[)}]*\s*(?:\^|\*\*)\s*[({]*\s*-?\d+\s*[)}]*\s*(?:\^|\*\*)'
  r'|(?:\^|\*\*)\s*[({]*\s*-?\d{5}|\d{5}\s*!|!\s*[)}]*\s*!|\d{400}|[eE][-+]?\d{4}'
)


def explodes(text: str) -> bool:
  """Whether evaluating a text could take hours, because the text has power towers, exponents or
  factorials of five digits, nested factorials or deeply nested brackets.

  Such an answer is refused unless it equals the truth as written. The pool's deadline stops any
  other endless evaluation.
  """
  depths = itertools.accumulate(1 if mark in '([{' else -1 for mark in text if mark in '([{)]}')
  return max(depths, default=0) > MAX_DEPTH or _EXPLOSIVE.search(SPACES.sub('', text)) is not None
