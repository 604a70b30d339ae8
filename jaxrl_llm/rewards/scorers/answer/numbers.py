"""Parses numbers exactly, as people write them.

Invariants: a text is a number only if all of it is a single number in a known form. The cost of all
arithmetic is bounded by the length of the text, since exponents have at most three digits.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple


class Number(NamedTuple):
  value: Fraction
  """Value as written: 42 for `42%`."""
  percent: bool


MAX_DIGITS = 200
"""Maximum length of a number in characters."""

_MAGNITUDES = {
  'dozen': 12,
  'hundred': 100,
  'thousand': 10**3,
  'million': 10**6,
  'billion': 10**9,
  'trillion': 10**12,
}
MAGNITUDE = re.compile(rf'\b(?:{"|".join(_MAGNITUDES)})\b')
_POWER = r'10\s*(?:\^|\*\*)\s*(?:\{{\s*(?P<{0}>[-+]?\d{{1,3}})\s*\}}|(?P<{1}>[-+]?\d{{1,3}}))'
_NUMBER = re.compile(
  rf"""(?P<sign>[-+])?\s* [$€£¥]?\s* (?P<inner>[-+])?\s*
  (?:
    {_POWER.format('tens', 'tens_bare')}
  | (?P<mixed>\d+(?=\s|\\))?\s* (?: (?P<a>\d+)\s*/\s*(?P<b>\d+)
      | \\[dt]?frac\s*
        (?: \{{\s*(?P<c>-?\d+)\s*\}}\s*\{{\s*(?P<d>\d+)\s*\}} | (?P<e>\d)\s*(?P<f>\d) ) )
  | (?P<whole>[1-9]\d{{0,2}}(?:,\d{{3}})+|\d{{1,3}}(?:\ \d{{3}})+(?!\d)|\d*) (?:\.(?P<part>\d*))?
    (?:[eE](?P<exponent>[-+]?\d{{1,3}}))?
    (?:\s*(?:\\times|\\cdot|[×·*x])\s*{_POWER.format('times', 'times_bare')})?
  )
  (?:\s*(?P<magnitude>{'|'.join(_MAGNITUDES)})\b)?
  (?:\s*(?P<percent>%|per\ ?cent\b))?
  \s*[$€£¥]?""",
  re.ASCII | re.VERBOSE,
)
_NOISE = (
  ('\u2212', '-'), ('{,}', ','), (r'\!', ''), (r'\,', ''), (r'\;', ''), (r'\:', ''), (r'\ ', ' '),
  ('~', ' '), (r'\%', '%'), (r'\$', '$'), ('\u00a0', ' '), ('\u202f', ' '),
)  # fmt: skip
_WORDS = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname|mbox|rm)\s*\{([^{}]*)\}'
)


def plain(text: str) -> str:
  """Strips math delimiters, LaTeX spaces, LaTeX text commands, bold marks and a final full stop."""
  for old, new in _NOISE:
    text = text.replace(old, new)
  text = _WORDS.sub(r'\1', text).strip()
  text = text.removeprefix('**').removesuffix('**').strip('`').rstrip('.').strip()
  for left, right in (('$$', '$$'), ('$', '$'), (r'\(', r'\)'), (r'\[', r'\]')):
    if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
      text = text[len(left) : -len(right)].strip()
  return text.rstrip('.').strip()


def split_number(text: str) -> tuple[Number, str] | None:
  """Splits a text that `plain` has returned into its leading number and the rest. Returns None if
  the text does not begin with a number.
  """
  match = _NUMBER.match(text)
  if not match or len(match.group()) > MAX_DIGITS or (match['sign'] and match['inner']):
    return None
  sign = -1 if '-' in (match['sign'], match['inner']) else 1
  scale = Fraction(_MAGNITUDES[match['magnitude']] if match['magnitude'] else 1) * sign
  percent = bool(match['percent'])
  if tens := match['tens'] or match['tens_bare']:
    return Number(scale * Fraction(10) ** int(tens), percent), text[match.end() :]
  if denominator := match['b'] or match['d'] or match['f']:
    if int(denominator) == 0:
      return None
    fraction = Fraction(int(match['a'] or match['c'] or match['e']), int(denominator))
    return Number(scale * (int(match['mixed'] or 0) + fraction), percent), text[match.end() :]
  if not (match['whole'] or match['part']):
    return None
  digits = re.sub('[ ,]', '', match['whole']) + (match['part'] or '')
  exponent = int(match['exponent'] or 0) - len(match['part'] or '')
  exponent += int(match['times'] or match['times_bare'] or 0)
  return Number(scale * int(digits) * Fraction(10) ** exponent, percent), text[match.end() :]


def parse_number(text: str) -> Number | None:
  """Parses a text that is a single number, exactly. Returns None for any other text, such as two
  numbers, a word or NaN.

  The number may have a sign, thousands separated by commas or spaces, decimals, an exponent of up
  to three digits (`1e3`, `10^3`, `2 \\times 10^{3}`), a magnitude (`3 million`), a percent sign and
  a currency sign. It may be a fraction or a mixed number, in plain text or LaTeX. Math delimiters,
  LaTeX text commands and spaces, bold marks and a final full stop are ignored.
  """
  leading = split_number(plain(text))
  return leading[0] if leading and not leading[1] else None


def numbers_agree(
  truth: Number, answer: Number, *, absolute: float = 0.0, relative: float = 0.0
) -> bool:
  """Returns whether the numbers are equal within the tolerance.

  p% means p/100. If only one of the two numbers has a percent sign, they may also agree as written,
  because references for questions like "what percentage …" often omit the sign. However, a truth
  below 1 without a percent sign is taken as a fraction, so 0.35 does not agree with 0.35%.
  """

  def close(t, a):
    return abs(t - a) <= max(Fraction(absolute), Fraction(relative) * abs(t))

  if truth.percent == answer.percent:
    return close(truth.value, answer.value)
  scaled = [number.value / 100 if number.percent else number.value for number in (truth, answer)]
  as_written = truth.percent or abs(truth.value) >= 1
  return (as_written and close(truth.value, answer.value)) or close(*scaled)
