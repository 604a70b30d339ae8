r"""Parses formulas in LaTeX or plain text into trees.

Invariants: Python and sympy never evaluate any part of a formula. Parsing takes linear time and is
limited to `MAX_DEPTH` levels and `MAX_NODES` nodes. A text is parsed as a whole or not at all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jaxrl_llm.rewards.scorers.answer.effort import MAX_DEPTH

MAX_NODES = 1_000
"""Maximum number of nodes in a formula's tree."""


class Unreadable(ValueError):
  """Raised if a text is not a formula that this module can parse."""


class Node(NamedTuple):
  kind: str
  """Kind of the node: `number`, `symbol`, `constant`, an operation, or the name of a function."""
  parts: tuple[Node, ...] = ()
  value: Any = None
  """Value of a `number`, or name of a `symbol`, a `constant` or an `opaque` function. None for all
  other kinds of nodes.
  """


class Formula(NamedTuple):
  root: Node
  symbols: frozenset[str]
  decimals: int | None
  """Number of digits after the point in the most precise decimal; None if there are no decimals."""
  imaginary: bool
  """Whether the imaginary unit occurs."""
  bases: frozenset[int]
  """Number bases that occur as subscripts, as in `101_2`."""
  bare_log: bool
  """Whether a logarithm without a base occurs."""


_FUNCTIONS = (
  'arcsin', 'arccos', 'arctan', 'arccot', 'arcsec', 'arccsc', 'asin', 'acos', 'atan', 'sinh',
  'cosh', 'tanh', 'coth', 'sin', 'cos', 'tan', 'cot', 'sec', 'csc', 'log', 'ln', 'lg', 'exp',
  'sqrt', 'cbrt', 'abs', 'floor', 'ceil', 'cis',
)  # fmt: skip
_SAME = {'asin': 'arcsin', 'acos': 'arccos', 'atan': 'arctan'}
_INVERSES = {name: f'arc{name}' for name in ('sin', 'cos', 'tan', 'cot', 'sec', 'csc')}
_GREEK = frozenset({
  'alpha', 'beta', 'gamma', 'delta', 'epsilon', 'varepsilon', 'zeta', 'eta', 'theta', 'vartheta',
  'iota', 'kappa', 'lambda', 'mu', 'nu', 'xi', 'rho', 'sigma', 'tau', 'upsilon', 'phi', 'varphi',
  'chi', 'psi', 'omega', 'Gamma', 'Delta', 'Theta', 'Lambda', 'Xi', 'Pi', 'Sigma', 'Upsilon', 'Phi',
  'Psi', 'Omega', 'ell',
})  # fmt: skip
_OPAQUE = frozenset('fghFGH')
"""Letters that name a function, rather than a factor, if a parenthesis follows. Such a function is
unknown, so `f(2x)` does not equal `2f(x)`.
"""
_SPACE = re.compile(r'\s*')
_NUMBER = re.compile(
  r'(?P<whole>[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|\d{1,3}(?: \d{3})+(?!\d)|\d*)(?:\.(?P<part>\d*))?'
  r'(?:\\overline\{(?P<again>\d+)\}|\\bar\{(?P<bar>\d+)\}|\\dot\{?(?P<dot>\d)\}?|'
  r'(?<=\.)\((?P<round>\d+)\)|(?<=\.\d)\((?P<round_1>\d+)\)|(?<=\.\d\d)\((?P<round_2>\d+)\))?',
  re.ASCII,
)
_MIXED = re.compile(r'\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))', re.ASCII)
_MIXED_PLAIN = re.compile(r' (\d+)\s*/\s*(\d+)', re.ASCII)
_BASE = re.compile(
  r'\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+)|\{\s*(two|three|four|five|six|seven|eight|nine|ten)\s*\})',
  re.ASCII,
)
_WORDS = {
  word: n
  for n, word in enumerate(
    ['two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten'], 2
  )
}
_SUBSCRIPT = re.compile(r'_\s*(?:\{([\w\s,+\-]*)\}|(\w))')
_COMMAND = re.compile(r'\\([a-zA-Z]+)')
_WORD = re.compile('|'.join(sorted(_FUNCTIONS, key=len, reverse=True)) + '|pi')
_DEGREE = re.compile(r'\s*\^\s*\{?\s*\\circ\s*\}?|\s*\\degree(?![a-zA-Z])|\s*°')
_CLOSING = {
  '(': ')',
  '[': ']',
  r'\{': r'\}',
  '{': '}',
  r'\lfloor': r'\rfloor',
  r'\lceil': r'\rceil',
  '|': '|',
}
_NAMED = {r'\lfloor': 'floor', r'\lceil': 'ceil', '|': 'abs'}
_LONG_WORD = re.compile(r'[a-zA-Z]{4}')


class _Reader:
  """Recursive-descent parser of one formula."""

  def __init__(self, text: str):
    self.text, self.at, self.depth, self.nodes = text, 0, 0, 0
    self.bars = [0]
    self.symbols: set[str] = set()
    self.bases: set[int] = set()
    self.decimals: int | None = None
    self.imaginary = self.bare_log = False

  def node(self, kind: str, *parts: Node, value: Any = None) -> Node:
    self.nodes += 1
    if self.nodes > MAX_NODES:
      raise Unreadable('too many parts')
    return Node(kind, parts, value)

  def skip(self) -> None:
    self.at = _SPACE.match(self.text, self.at).end()

  def peek(self, sign: str) -> bool:
    self.skip()
    return self.text.startswith(sign, self.at) and not (
      sign[-1].isalpha() and self.text[self.at + len(sign) : self.at + len(sign) + 1].isalpha()
    )

  def take(self, *signs: str) -> str:
    for sign in signs:
      if self.peek(sign):
        self.at += len(sign)
        return sign
    return ''

  def expect(self, sign: str) -> None:
    if not self.take(sign):
      raise Unreadable(f'no {sign} at {self.at}')

  def whole(self) -> Node:
    root = self.sum()
    self.skip()
    if self.at < len(self.text):
      raise Unreadable(f'{self.text[self.at : self.at + 10]!r} is left over')
    return root

  def sum(self) -> Node:
    terms = [self.signed()]
    while sign := self.take('+', '-'):
      term = self.signed()
      terms.append(term if sign == '+' else self.node('negative', term))
    return terms[0] if len(terms) == 1 else self.node('sum', *terms)

  def signed(self) -> Node:
    negative = False
    for _ in range(2):
      if sign := self.take('+', '-'):
        negative ^= sign == '-'
    product = self.product()
    return self.node('negative', product) if negative else product

  def product(self) -> Node:
    factors, quotients = [self.factor()], 0
    while True:
      if self.take(r'\cdot', r'\times', r'\ast', '*'):
        factors.append(self.factor_signed())
      elif self.take('/', r'\div'):
        quotients += 1
        if quotients > MAX_DEPTH:
          raise Unreadable('too many quotients')
        factors = [self.node('quotient', self.multiplied(factors), self.factor_signed())]
      elif self.starts_factor():
        if self.text[self.at].isdigit() or self.text[self.at] == '.':
          raise Unreadable('two numbers side by side')
        factors.append(self.factor())
      else:
        return self.multiplied(factors)

  def multiplied(self, factors: Sequence[Node]) -> Node:
    return factors[0] if len(factors) == 1 else self.node('product', *factors)

  def factor_signed(self) -> Node:
    return self.node('negative', self.factor()) if self.take('-') else self.factor()

  def starts_factor(self) -> bool:
    self.skip()
    if self.at >= len(self.text):
      return False
    if self.text[self.at] == '|':
      return not self.bars[-1]
    if match := _COMMAND.match(self.text, self.at):
      name = match[1]
      return (
        name in _GREEK
        or name in _FUNCTIONS
        or name in ('frac', 'binom', 'pi', 'lfloor', 'lceil', 'overline', 'infty', 'angle')
      )
    return (
      self.text[self.at].isalnum()
      or self.text[self.at] in '.([{'
      or self.text.startswith(r'\{', self.at)
    )

  def factor(self) -> Node:
    base = self.atom()
    for _ in range(MAX_DEPTH):
      if match := _DEGREE.match(self.text, self.at):
        self.at = match.end()
        base = self.node('degrees', base)
      elif self.take('!'):
        base = self.node('factorial', base)
      elif self.take('^', '**'):
        base = self.node('power', base, self.exponent())
        if self.peek('^'):
          raise Unreadable('two exponents')
      else:
        return base
    raise Unreadable('too deep')

  def exponent(self) -> Node:
    self.depth += 1
    if self.depth > MAX_DEPTH:
      raise Unreadable('too deep')
    node = self.raised()
    self.depth -= 1
    return node

  def raised(self) -> Node:
    if self.peek('{') or self.peek('('):
      return self.group()
    if self.take('-'):
      return self.node('negative', self.exponent())
    self.skip()
    if self.text[self.at : self.at + 1].isdigit():
      return self.number(mixed=False)
    return self.atom(argument=True)

  def group(self) -> Node:
    opening = self.take(r'\lfloor', r'\lceil', r'\{', '(', '[', '{', '|')
    self.bars.append(opening == '|')
    inner = self.sum()
    self.bars.pop()
    self.expect(_CLOSING[opening])
    return self.node(_NAMED[opening], inner) if opening in _NAMED else inner

  def argument(self) -> Node:
    """Parses a command's argument: a group in braces or, as in TeX, a single digit, letter or
    command.
    """
    self.skip()
    if self.peek('{'):
      return self.group()
    if self.text[self.at : self.at + 1].isdigit():
      self.at += 1
      return self.node('number', value=Fraction(int(self.text[self.at - 1])))
    return self.atom(argument=True)

  def atom(self, argument: bool = False) -> Node:
    self.depth += 1
    if self.depth > MAX_DEPTH:
      raise Unreadable('too deep')
    node = self.whole_atom(argument)
    self.depth -= 1
    return node

  def whole_atom(self, argument: bool) -> Node:
    self.skip()
    mark = self.text[self.at : self.at + 1]
    if not mark:
      raise Unreadable('ends early')
    if mark in '([{|' or self.text.startswith((r'\{', r'\lfloor', r'\lceil'), self.at):
      if mark == '[' and argument:
        raise Unreadable('a bracket for an argument')
      return self.group()
    if mark.isdigit() or mark == '.':
      return self.number(mixed=not argument)
    if mark == '\\':
      return self.command()
    if not (mark.isascii() and mark.isalpha()):
      raise Unreadable(f'{mark!r}')
    if match := _WORD.match(self.text, self.at):
      self.at = match.end()
      return self.node('constant', value='pi') if match[0] == 'pi' else self.function(match[0])
    if _LONG_WORD.match(self.text, self.at):
      raise Unreadable('a word')
    self.at += 1
    return self.letter(mark)

  def letter(self, name: str) -> Node:
    if match := _SUBSCRIPT.match(self.text, self.at):
      self.at = match.end()
      return self.symbol(f'{name}_{(match[1] or match[2] or "").replace(" ", "")}')
    if name == 'e':
      return self.node('constant', value='e')
    if name == 'i':
      self.imaginary = True
      return self.node('constant', value='i')
    if name in _OPAQUE and self.text.startswith('(', self.at):
      return self.node('opaque', self.group(), value=name)
    return self.symbol(name)

  def symbol(self, name: str) -> Node:
    self.symbols.add(name)
    return self.node('symbol', value=name)

  def command(self) -> Node:
    match = _COMMAND.match(self.text, self.at)
    if not match:
      raise Unreadable(self.text[self.at : self.at + 2])
    self.at, name = match.end(), match[1]
    if name == 'frac':
      numerator = self.argument()
      return self.node('quotient', numerator, self.argument())
    if name == 'binom':
      upper = self.argument()
      return self.node('binomial', upper, self.argument())
    if name == 'pi':
      return self.node('constant', value='pi')
    if name in _FUNCTIONS:
      return self.function(name)
    if name in _GREEK:
      return self.letter('\\' + name)
    if name in ('overline', 'angle'):
      mark = re.compile(r'\s*\{?\s*([A-Z]+)\s*\}?').match(self.text, self.at)
      if mark:
        self.at = mark.end()
        return self.symbol(f'{name} {mark[1]}')
    raise Unreadable(f'\\{name}')

  def function(self, name: str) -> Node:
    name = _SAME.get(name, name)
    if name == 'sqrt':
      degree = None
      if self.take('['):
        degree = self.sum()
        self.expect(']')
      radicand = self.group() if self.peek('(') else self.argument()
      return self.node('root', radicand, degree) if degree else self.node('root', radicand)
    base = power = None
    for _ in range(2):
      if name == 'log' and self.take('_'):
        base = self.script()
      elif self.take('^'):
        power = self.exponent()
    if (
      power is not None
      and power == Node('negative', (Node('number', (), Fraction(1)),))
      and name in _INVERSES
    ):
      name, power = _INVERSES[name], None
    if name == 'log' and base is None:
      self.bare_log = True
    if name == 'lg':
      name, base = 'log', self.node('number', value=Fraction(10))
    if name == 'ln':
      name, base = 'log', self.node('constant', value='e')
    inner = self.applied()
    call = self.node(name, inner) if base is None else self.node(name, inner, base)
    return call if power is None else self.node('power', call, power)

  def script(self) -> Node:
    self.skip()
    return (
      self.number(mixed=False) if self.text[self.at : self.at + 1].isdigit() else self.argument()
    )

  def applied(self) -> Node:
    """Parses a function's argument: a group in brackets, or all factors up to the next operator,
    function, number or parenthesis.
    """
    if self.peek('(') or self.peek('{') or self.peek('['):
      return self.group()
    self.skip()
    if self.starts_function():
      return self.factor()
    factors = [self.factor()]
    while self.starts_factor() and not self.starts_function() and not self.text[self.at].isdigit():
      if self.peek('('):
        break
      factors.append(self.factor())
    return self.multiplied(factors)

  def starts_function(self) -> bool:
    match = _COMMAND.match(self.text, self.at)
    name = match[1] if match else getattr(_WORD.match(self.text, self.at), 'group', lambda: '')()
    return name in _FUNCTIONS and name != 'sqrt'

  def number(self, mixed: bool) -> Node:
    match = _NUMBER.match(self.text, self.at)
    whole, part = re.sub('[ ,]', '', match['whole']), match['part']
    again = next((group for group in list(match.groups())[2:] if group), None)
    if not (whole or part or again) or len(match[0]) > 2000 or (again and part is None):
      raise Unreadable('no number')
    self.at = match.end()
    value = Fraction(int(whole or 0)) + Fraction(int(part or 0), 10 ** len(part or ''))
    if again:
      value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(part or ''))
    elif part:
      self.decimals = max(self.decimals or 0, len(part))
    if part is None and (base := _BASE.match(self.text, self.at)):
      self.at = base.end()
      return self.node(
        'number', value=self.in_base(whole, int(base[1] or base[2] or _WORDS[base[3]]))
      )
    fraction = _MIXED.match(self.text, self.at) or _MIXED_PLAIN.match(self.text, self.at)
    if part is None and mixed and fraction:
      above, below = (int(group) for group in fraction.groups() if group)
      if below:
        self.at = fraction.end()
        value += Fraction(above, below)
    return self.node('number', value=value)

  def in_base(self, digits: str, base: int) -> Fraction:
    self.bases.add(base)
    if not 2 <= base <= 10 or any(int(digit) >= base for digit in digits):
      raise Unreadable(f'{digits} in base {base}')
    return Fraction(int(digits, base))


@functools.lru_cache(maxsize=256)
def read_formula(text: str) -> Formula | None:
  """Parses a text in canonical LaTeX (`latex.canonical`). Returns None if the text is not a single
  formula.
  """
  reader = _Reader(text)
  try:
    root = reader.whole()
  except Unreadable:
    return None
  return Formula(
    root,
    frozenset(reader.symbols),
    reader.decimals,
    reader.imaginary,
    frozenset(reader.bases),
    reader.bare_log,
  )
