"""Compares expressions with math-verify. Guards reject hostile answers, and answers that do not say
which of several values they mean.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_llm.rewards.scorers.answer.effort import SPACES, explodes
from jaxrl_llm.rewards.scorers.answer.equality import equations_equal, formulas_equal
from jaxrl_llm.rewards.scorers.answer.extraction import candidates
from jaxrl_llm.rewards.scorers.answer.formula import Formula, read_formula
from jaxrl_llm.rewards.scorers.answer.latex import canonical
from jaxrl_llm.rewards.scorers.answer.numbers import MAGNITUDE, numbers_agree, parse_number, plain
from jaxrl_llm.rewards.scorers.answer.units import (
  Unit,
  parse_quantity,
  parse_unit,
  quantities_agree,
)
from jaxrl_llm.rewards.scorers.answer.values import as_float, real_value

LIBRARIES = ('math_verify',)
"""Libraries that the functions of this module import at their first call."""


@functools.cache
def _math_verify() -> Callable[[str], list[Any]]:
  # The import is here, because sympy would add a third of a second to every launch script. Workers
  # import the library when they start.
  import math_verify

  # Hides math-verify's warning that its timeouts are off. They are off because they need SIGALRM;
  # the pool's deadline applies instead.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  targets = [
    math_verify.LatexExtractionConfig(boxed_match_priority=0),
    math_verify.ExprExtractionConfig(),
  ]
  return functools.partial(math_verify.parse, extraction_config=targets, parsing_timeout=None)


@functools.lru_cache(maxsize=64)
def parse_latex(text: str) -> tuple[Any, ...]:
  """Parses a text with math-verify. Returns the sympy expression and the text from which it was
  read, or an empty tuple if math-verify cannot read the text.
  """
  return tuple(_math_verify()(rf'\boxed{{{text}}}'))


def _latex_equal(truth: str, answer: str) -> bool:
  import math_verify

  wanted, got = parse_latex(truth), parse_latex(answer)
  return math_verify.verify(list(wanted), list(got), timeout_seconds=None) and _confirmed(
    wanted[0], got[0]
  )


_CLOSE = 1e-3
"""Relative tolerance in `_confirmed`. It is needed because math-verify rounds decimals to six
places.
"""


def _evaluated(value: Any) -> Any:
  """Evaluates a sympy value numerically, as far as possible. Returns None if that fails."""
  try:
    return value.doit().evalf()
  # sympy raises exceptions of any type, for instance for the power of a matrix that is not square.
  except Exception:
    return None


def _confirmed(truth: Any, answer: Any) -> bool:
  """Returns whether two values that math-verify considers equal are really equal. math-verify also
  considers 0.0 equal to 10^{-19}, and 2^∞e equal to any number.
  """
  import sympy

  infinities = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)

  def values(of: Any) -> Iterator[Any]:
    if isinstance(of, sympy.MatrixBase):
      yield from of
    elif isinstance(of, sympy.Expr):
      yield of
    elif isinstance(of, sympy.Basic):
      for part in of.args:
        yield from values(part)

  for value in values(answer):
    evaluated = _evaluated(value)
    # An infinity on its own, such as the end of an interval, is a value. An infinity within a
    # computation is not a value.
    if (value if evaluated is None else evaluated).has(*infinities) and not value.atoms() <= {
      *infinities,
      sympy.S(-1),
    }:
      return False
  wanted, got = _evaluated(truth), _evaluated(answer)
  if (
    not (isinstance(wanted, sympy.Number) and isinstance(got, sympy.Number))
    or not wanted.is_finite
    or wanted == 0
  ):
    return True
  # Like math-verify, this function treats 9 and 9% as equal.
  return any(
    bool(abs(wanted - got * scale) <= abs(wanted) * _CLOSE)
    for scale in (1, 100, sympy.Rational(1, 100))
  )


_SEPARATORS = re.compile(
  r'\\(?:vee|wedge|lor|land|cup|cap|pm|mp|to|implies|iff|equiv|[a-zA-Z]*arrow|\\)'
  r'|\b(?:or|and)\b|\.\s|[;\n|≡]'
)
_RELATIONS = re.compile(
  r'\\(?:geq?|leq?|geqslant|leqslant|geqq|leqq|n?(?:geq|leq|gtr|less)|neq?|lt|gt|ll|gg|'
  r'approx|approxeq|sim|simeq|cong|'
  r'(?:less|gtr)(?:sim|approx)|prec|succ|preceq|succeq|propto|doteq|asymp|not|neg)'
  r'(?![a-zA-Z])|[<>≤≥≠≈~¬≪≫⩽⩾≲≳≅≃]'
)
_DECIMAL = re.compile(r'\d+(?:,\d{3})*(?:\.\d+)?|\.\d+')
_ASIDE = re.compile(r'_\{[^{}]*\}|_\w|\\p?mod\s*\{[^{}]*\}')
"""Matches subscripts (including number bases) and moduli, because numbers in them are not
values.
"""
_COMMANDS = re.compile(r'\\[a-zA-Z]+')
_BASE = re.compile(r'(?<![a-zA-Z])\d(?:\})*_\{?(\d+)')
_ARGUMENTS = re.compile(r'_\{[^{}]*\}|_\w|(?<=[a-zA-Z])(?:\\left)?\([^()]*\)')
_UNIT_WORDS = re.compile(
  r'(?<=[\w})])\s+(?:square |cubic |sq |cu )?[a-zA-Z]{2,}(?:\s*\^\s*\{?\d\}?)?(?:\s+[a-zA-Z]+)*$'
)
_SIMPLE = re.compile(r'[a-zA-Z](?:_\{?\w+\}?)?')
_RECKONED = re.compile(r'(?=.*\d)(?=.*[a-zA-Z])|\\sqrt', re.DOTALL)
"""Matches the left side of an equation if it is a computation (`2x` in `2x = 42`), not a name for
the right side (`x = 42`).
"""


def unboxed(answer: str) -> str:
  """Returns the content of a text that is a single box: `42` for `$\\boxed{42}$`. Other text is
  returned unchanged.
  """
  inner = answer.strip().strip('$').strip()
  boxes = candidates(inner, 'boxed')
  return (
    boxes[0]
    if len(boxes) == 1 and inner.startswith((r'\boxed', r'\fbox')) and inner.endswith('}')
    else answer
  )


def _brackets(text: str) -> str:
  """Returns the kind of a list according to its brackets, `set` or `tuple`. Returns an empty string
  if the text is not a list in brackets.
  """
  text = re.sub(r'\\(?:left|right)(?![a-zA-Z])', '', text).strip()
  if ',' not in text:
    return ''
  return (
    'set' if text.startswith(r'\{') else 'tuple' if text.startswith(('(', '[', r'\langle')) else ''
  )


def _picked(text: str) -> bool:
  r"""Returns whether math-verify could not read the whole text and used only one of several numbers
  in it, such as 42 in `41 \oplus 42`.
  """
  import sympy

  value, read = (*parse_latex(text.rpartition('=')[2]), None, None)[:2]
  # math-verify parses 42% as a product of 42 and an unevaluated factor.
  if isinstance(value, sympy.Mul) and isinstance(value.args[-1], sympy.UnevaluatedExpr):
    value = value.args[0]
  if not isinstance(value, sympy.Number) or not isinstance(read, str):
    return False
  written = {float(number.replace(',', '')) for number in _DECIMAL.findall(_ASIDE.sub('', read))}
  return len(written) > 1 and any(math.isclose(number, abs(value)) for number in written)


def tight(text: str) -> str:
  """Removes all spaces, except those between two word characters."""
  return re.sub(r'(?<!\w) | (?!\w)', '', text)


def is_name(left: str) -> bool:
  """Returns whether the left side of an equation is a name for the right side, such as `x`, `f(2)`
  or `AB`. `2x` and `x + 1` are not names.
  """
  bare = _ARGUMENTS.sub('', re.sub(r"\^\s*\{\s*-1\s*\}|\^\s*-1|'", '', left))
  return re.search(
    '[a-zA-Z]', _COMMANDS.sub('', bare) or bare
  ) is not None and not _RECKONED.search(bare)


def _quantity(text: str) -> tuple[str, Unit | None] | None:
  r"""Splits a text into a value and a unit. The unit is None if the text has none.

  For `2\pi \text{ cm}`, the value is `2\pi` and the unit is `cm`. Returns None if the text after
  the value is not a unit.
  """
  at = text.find(r'\text')
  if at < 0 and read_formula(text) is None:
    plain_words = _UNIT_WORDS.search(text)
    at = plain_words.start() if plain_words else -1
  if at < 0:
    return text, None
  unit = parse_unit(plain(text[at:]))
  if unit is None or not text[:at].strip():
    return None
  return text[:at].strip(), None if unit.words <= {
    'unit'
  } and not unit.factor.numerator > 1 and unit.words else unit


def _values_agree(truth: str, answer: str) -> bool | None:
  """Returns whether two values, with or without units, are equal. Returns None for forms that are
  not handled here.
  """
  numbers = parse_number(truth), parse_number(answer)
  if all(number is not None for number in numbers):
    if numbers_agree(*numbers):
      return True
  else:
    quantities = parse_quantity(truth), parse_quantity(answer)
    if all(quantity is not None for quantity in quantities):
      return quantities_agree(*quantities, units='stated')
  sides = _quantity(truth), _quantity(answer)
  if None in sides:
    return None
  (wanted, unit), (got, stated) = sides
  if unit and stated and (unit.dimensions, unit.factor) != (stated.dimensions, stated.factor):
    return False
  formulas = read_formula(wanted), read_formula(got)
  if None in formulas:
    return False if all(number is not None for number in numbers) else None
  if not _bases_agree(*formulas, wanted, got):
    return False
  if formulas[0].bases and not formulas[1].bases:
    return True
  # If a formula cannot be evaluated, `formulas_equal` returns None, and the values count as
  # different. The decision is not left to math-verify, which would evaluate them without limits.
  return bool(formulas_equal(*formulas, seed=truth + '|' + answer))


def _bases_agree(truth: Formula, answer: Formula, wanted: str, got: str) -> bool:
  """Returns whether the numbers in the answer have the same bases as those in the truth. If the
  answer states no base, it is read in the base of the truth.
  """
  if truth.bases and not answer.bases:
    return re.sub(r'\s*_\s*(?:\{\w+\}|\d+)', '', wanted) == got
  return answer.bases == truth.bases or (not truth.bases and answer.bases == {10})


def _sides_agree(truth: str, answer: str) -> bool | None:
  """Returns whether two equations or two values are equivalent, where values may have names (`x =
  3`). Returns None for forms not handled here.
  """
  wanted, got = ([side.strip() for side in text.split('=')] for text in (truth, answer))
  if '' in wanted + got or _RELATIONS.search(truth) or _RELATIONS.search(answer):
    return None
  if len(wanted) == len(got) == 2:
    sides = [read_formula(side) for side in (*wanted, *got)]
    if None in sides and not (is_name(wanted[0]) and is_name(got[0])):
      return None
    if None not in sides and equations_equal(
      (sides[0], sides[1]), (sides[2], sides[3]), seed=truth + '|' + answer
    ):
      return True
  if len(wanted) > 1 and not is_name(wanted[0]):
    return False if len(wanted) == 2 else None
  value, name = wanted[-1], got[0] if len(got) > 1 and is_name(got[0]) else ''
  if len(got) > 1 and name:
    if (
      len(wanted) > 1
      and _SIMPLE.fullmatch(name)
      and _SIMPLE.fullmatch(wanted[0])
      and name != wanted[0]
    ):
      return False
    got = got[1:]
  formula = read_formula(value)
  if (
    len(got) > 1
    and not name
    and not (formula and formula.symbols)
    and re.search('[a-zA-Z]', _COMMANDS.sub('', got[0]))
  ):
    return False  # For example, `2x = 42` does not state the value 42.
  lettered = bool(formula and formula.symbols)
  stated = [
    side for side in got[:-1] if lettered or not re.search('[a-zA-Z]', _COMMANDS.sub('', side))
  ]
  verdicts = [_values_agree(value, side) for side in [*stated, got[-1]]]
  return False if False in verdicts else None if None in verdicts else True


def _exact_part(truth: str, answer: str) -> str:
  """Returns the part of the answer before `\\approx` if the decimals after `\\approx` are near the
  truth, else the whole answer.
  """
  exact, *near = re.split(r'\s*\\approx(?![a-zA-Z])\s*', answer)
  wanted, numbers = (
    real_value(truth.rpartition('=')[2].strip()),
    [parse_number(text) for text in near],
  )
  if not near or not exact or wanted is None or None in numbers:
    return answer
  wanted = as_float(wanted)
  close = all(abs(as_float(number.value) - wanted) <= _NEAR * abs(wanted) for number in numbers)
  return exact if close else answer


_NEAR = 0.005
"""Maximum relative difference between the truth and the decimals after `\\approx` in an answer."""


def latex_agree(truth: str, answer: str) -> bool:
  r"""Returns whether two pieces of LaTeX mean the same.

  Numbers, quantities, formulas and equations are compared by their values (`formula.py`), other
  expressions by math-verify. math-verify alone is too lenient: it reads `41 = 42` and `41 \vee 42`
  as 42, and considers `(1, 2)` equal to `\{1, 2\}`. These rules therefore apply:

  - A separator that the truth lacks means a second answer.
  - A relation (`\geq 42`) is not a value.
  - In an equation, every side without a variable must agree with the truth, and the first side must
    not compute with the unknown (`x + 1 = 42`).
  - The base of a number (`101_3`) and the kind of brackets count.
  - A number that math-verify picked from text that it could not read is not an answer.
  - Two values that math-verify considers equal are checked again (`_confirmed`).
  """
  truth, answer = (canonical(unboxed(text)) for text in (truth, answer))
  if tight(truth) == tight(answer):
    return True
  if explodes(answer):
    return False
  if r'\approx' not in truth:
    answer = _exact_part(truth, answer)
  decided = _sides_agree(truth, answer)
  if decided is not None:
    return decided
  if (parse_number(truth) and parse_number(answer)) or MAGNITUDE.search(truth + answer):
    return False
  if re.search(r'\$|\\[fb]?box', answer) or set(_SEPARATORS.findall(answer)) - set(
    _SEPARATORS.findall(truth)
  ):
    return False
  if _RELATIONS.search(answer) and not _RELATIONS.search(truth):
    return False
  if {_brackets(truth), _brackets(answer)} == {'set', 'tuple'}:
    return False
  bases = set(_BASE.findall(SPACES.sub('', answer)))
  if bases and bases != (set(_BASE.findall(SPACES.sub('', truth))) or {'10'}):
    return False
  if _picked(answer) and not _picked(truth):
    return False
  if '=' in answer and '=' not in truth:
    if _RECKONED.search(_ARGUMENTS.sub('', answer.partition('=')[0])):
      return False
    sides = [
      side for side in answer.split('=') if not re.search('[a-zA-Z]', _COMMANDS.sub('', side))
    ]
    if not all(side.strip() and _latex_equal(truth, side) for side in sides):
      return False
  return _latex_equal(truth, answer)
