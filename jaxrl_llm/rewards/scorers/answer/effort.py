"""Expressions that are refused unseen because their evaluation may not end."""

from __future__ import annotations

import itertools
import re

SPACES = re.compile(r'\\(?:left|right)(?![a-zA-Z])|[,\s]')
"""Parts of an expression without a meaning here: spaces, commas, and the commands that scale a bracket."""
MAX_DEPTH = 40
"""Brackets within brackets of an expression: parsers of LaTeX take seconds for a hundred."""
_EXPLOSIVE = re.compile(
  r'\d\s*[)}]*\s*(?:\^|\*\*)\s*[({]*\s*-?\d+\s*[)}]*\s*(?:\^|\*\*)'  # a power of numbers raised to a power
  r'|(?:\^|\*\*)\s*[({]*\s*-?\d{5}|\d{5}\s*!|!\s*[)}]*\s*!|\d{400}|[eE][-+]?\d{4}'
)


def explodes(text: str) -> bool:
  """Whether evaluation could need hours: towers of numbers, exponents or factorials of five digits, nested factorials,
  brackets within brackets without end.

  Such an answer is none, unless it is the truth as written. What else never ends meets the pool's deadline.
  """
  depths = itertools.accumulate(1 if mark in '([{' else -1 for mark in text if mark in '([{)]}')
  return max(depths, default=0) > MAX_DEPTH or _EXPLOSIVE.search(SPACES.sub('', text)) is not None
