"""Detects expressions that are refused because evaluating them could take very long."""

from __future__ import annotations

import itertools
import re

SPACES = re.compile(r'\\(?:left|right)(?![a-zA-Z])|[,\s]')
"""Matches parts of an expression that do not affect its cost: spaces, commas, `\\left` and
`\\right`.
"""
MAX_DEPTH = 40
"""Maximum nesting depth of brackets. LaTeX parsers take seconds for a hundred levels."""
_EXPLOSIVE = re.compile(
  # The first line matches a power of numbers that is itself raised to a power.
  r'\d\s*[)}]*\s*(?:\^|\*\*)\s*[({]*\s*-?\d+\s*[)}]*\s*(?:\^|\*\*)'
  r'|(?:\^|\*\*)\s*[({]*\s*-?\d{5}|\d{5}\s*!|!\s*[)}]*\s*!|\d{400}|[eE][-+]?\d{4}'
)


def explodes(text: str) -> bool:
  """Returns whether evaluating a text could take hours.

  This is assumed if the text has power towers, numbers of at least 400 digits, brackets nested
  deeper than `MAX_DEPTH`, factorials of factorials, factorials of numbers with at least five
  digits, or exponents with at least five digits (four after `e`, as in `1e1000`).

  An answer with such a text counts as wrong unless it is written exactly like the truth. If the
  evaluation of any other text does not end, the pool's deadline stops it.
  """
  depths = itertools.accumulate(1 if mark in '([{' else -1 for mark in text if mark in '([{)]}')
  return max(depths, default=0) > MAX_DEPTH or _EXPLOSIVE.search(SPACES.sub('', text)) is not None
