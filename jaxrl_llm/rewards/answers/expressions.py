"""Mathematical expressions and LaTeX, compared by math-verify behind guards against hedged and hostile answers."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_llm.rewards.answers.effort import SPACES, explodes
from jaxrl_llm.rewards.answers.extraction import candidates, collapse
from jaxrl_llm.rewards.answers.numbers import MAGNITUDE, numbers_agree, parse_number


@functools.cache
def _math_verify() -> Callable[[str], list[Any]]:
  # Imported here: sympy takes a third of a second, which every launch script would pay. The workers preload it.
  import math_verify

  # It warns in each process that its own timeouts are off. They must be (they use SIGALRM); the pool's deadline kills.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  targets = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
  return functools.partial(math_verify.parse, extraction_config=targets, parsing_timeout=None)


@functools.lru_cache(maxsize=64)
def parse_latex(text: str) -> tuple[Any, ...]:
  """What math-verify makes of the text: an expression of sympy and the text that it was read from, or nothing."""
  return tuple(_math_verify()(rf'\boxed{{{text}}}'))


def _latex_equal(truth: str, answer: str) -> bool:
  import math_verify

  wanted, got = parse_latex(truth), parse_latex(answer)
  return math_verify.verify(list(wanted), list(got), timeout_seconds=None) and _confirmed(wanted[0], got[0])


_CLOSE = 1e-3
"""How far, of the truth, two numbers may be apart that math-verify calls equal: it rounds decimals to six places."""


def _evaluated(value: Any) -> Any:
  """As a number as far as it goes; None for what cannot be evaluated."""
  try:
    return value.doit().evalf()
  except Exception:  # sympy raises whatever it likes where it cannot reckon (the power of a matrix that is not square).
    return None


def _confirmed(truth: Any, answer: Any) -> bool:
  """Whether what math-verify calls equal can be: to it 0.0 is 10^{-19}, and 2^∞e, for sympy's sake, any number."""
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
    known = _evaluated(value)
    # An infinity that stands by itself, as the end of an interval, is a value; one that is reckoned with is none.
    if (value if known is None else known).has(*infinities) and not value.atoms() <= {*infinities, sympy.S(-1)}:
      return False
  wanted, got = _evaluated(truth), _evaluated(answer)
  if not (isinstance(wanted, sympy.Number) and isinstance(got, sympy.Number)) or not wanted.is_finite or wanted == 0:
    return True
  # 9 and 9% are the same to math-verify, and to us.
  return any(bool(abs(wanted - got * scale) <= abs(wanted) * _CLOSE) for scale in (1, 100, sympy.Rational(1, 100)))


_SEPARATORS = re.compile(
  r'\\(?:vee|wedge|lor|land|cup|cap|pm|mp|to|implies|iff|equiv|[a-zA-Z]*arrow|\\)|\b(?:or|and)\b|\.\s|[;\n|≡]'
)
_RELATIONS = re.compile(
  r'\\(?:geq?|leq?|geqslant|leqslant|geqq|leqq|n?(?:geq|leq|gtr|less)|neq?|lt|gt|ll|gg|approx|approxeq|sim|simeq|cong|'
  r'(?:less|gtr)(?:sim|approx)|prec|succ|preceq|succeq|propto|doteq|asymp|not|neg)(?![a-zA-Z])|[<>≤≥≠≈~¬≪≫⩽⩾≲≳≅≃]'
)
_DECIMAL = re.compile(r'\d+(?:,\d{3})*(?:\.\d+)?|\.\d+')
_ASIDE = re.compile(r'_\{[^{}]*\}|_\w|\\p?mod\s*\{[^{}]*\}')
"""Numbers that do not stand for themselves: subscripts, bases, moduli."""
_COMMANDS = re.compile(r'\\[a-zA-Z]+')
_BASE = re.compile(r'(?<![a-zA-Z])\d(?:\})*_\{?(\d+)')
_ARGUMENTS = re.compile(r'_\{[^{}]*\}|_\w|(?<=[a-zA-Z])(?:\\left)?\([^()]*\)')
_RECKONED = re.compile(r'(?=.*\d)(?=.*[a-zA-Z])|\\sqrt', re.DOTALL)
"""The left side of `2x = 42` or `x + 1 = 42`, which is not the name of what is on the right."""


def unboxed(answer: str) -> str:
  """`42` for `$\\boxed{42}$`; other text as it is."""
  inner = answer.strip().strip('$').strip()
  found = candidates(inner, 'boxed')
  return found[0] if len(found) == 1 and inner.startswith(r'\boxed') and inner.endswith('}') else answer


def _brackets(text: str) -> str:
  """The kind of bracket round a list: a set's or another; empty for what is no bracketed list."""
  text = re.sub(r'\\(?:left|right)(?![a-zA-Z])', '', text).strip()
  if ',' not in text:
    return ''
  return 'set' if text.startswith(r'\{') else 'tuple' if text.startswith(('(', '[', r'\langle')) else ''


def _picked(text: str) -> bool:
  """Whether math-verify could not read the text and took one number out of several, as 42 of `41 \\oplus 42`."""
  import sympy

  value, read = (*parse_latex(text.rpartition('=')[2]), None, None)[:2]
  if isinstance(value, sympy.Mul) and isinstance(value.args[-1], sympy.UnevaluatedExpr):  # 42%
    value = value.args[0]
  if not isinstance(value, sympy.Number) or not isinstance(read, str):
    return False
  written = {float(number.replace(',', '')) for number in _DECIMAL.findall(_ASIDE.sub('', read))}
  return len(written) > 1 and any(math.isclose(number, abs(value)) for number in written)


def latex_agree(truth: str, answer: str) -> bool:
  """Whether two pieces of LaTeX mean the same, by math-verify, behind guards against hedged answers.

  math-verify takes the last side of `41 = 42` and of `41 \\vee 42`, and `(1, 2)` for `\\{1, 2\\}`. Here a separator
  that the truth has not is a second answer, a relation (`\\geq 42`) is no value, each side of an equation that holds no
  variable has to agree, the first one is no sum with the unknown in it (`x + 1 = 42`), the base of a number counts
  (`101_3`), brackets tell, one number picked out of what it cannot read is no answer, and what it calls equal is looked
  at again (`_confirmed`).
  """
  truth, answer = (unboxed(text).strip().strip('$').strip() for text in (truth, answer))
  if collapse(truth) == collapse(answer):
    return True
  numbers = parse_number(truth), parse_number(answer)
  if numbers[0] is not None and numbers[1] is not None:
    # math-verify drops the word of `5 \text{ million}`.
    loose = not explodes(answer) and not MAGNITUDE.search(truth + answer)
    return numbers_agree(*numbers) or (loose and _latex_equal(truth, answer))
  if explodes(answer):
    return False
  if re.search(r'\$|\\[fb]?box', answer) or set(_SEPARATORS.findall(answer)) - set(_SEPARATORS.findall(truth)):
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
    sides = [side for side in answer.split('=') if not re.search('[a-zA-Z]', _COMMANDS.sub('', side))]
    if not all(side.strip() and _latex_equal(truth, side) for side in sides):
      return False
  return _latex_equal(truth, answer)
