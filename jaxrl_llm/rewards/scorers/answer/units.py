"""Parses quantities (numbers with units), converts their units exactly, and compares them.

A unit is a product of powers of known units (`km/h`, `square centimetres`, `kg m^{-3}`). Other
words name what is counted (`42 red apples`). Some units are not converted: tons and bytes are
ambiguous, temperature scales have different zeros, and months have different numbers of days.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from fractions import Fraction
from typing import Literal, NamedTuple

from jaxrl_llm.rewards.scorers.answer.numbers import Number, numbers_agree, plain, split_number

Units = Literal['refused', 'ignored', 'stated', 'required']
"""Treatment of words and units after a number. refused: a number followed by text cannot be read;
ignored: words and units do not count; stated: if both the answer and the truth state a unit, the
units must agree, after conversion if they are known; required: like stated, but the answer must
have a unit if the truth has one.
"""


class Unit(NamedTuple):
  factor: Fraction
  """Size of the unit, expressed in base units."""
  dimensions: frozenset[tuple[str, int]]
  """Pairs of a base unit and its power, which is not zero. Empty if the text contains no known
  units, or if they cancel.
  """
  words: frozenset[str]
  """Words in the text that are not units, in the singular."""


class Quantity(NamedTuple):
  number: Number
  unit: Unit | None


_DIMENSIONS: dict[str, dict[str, int]] = {
  'length': {'m': 1},
  'volume': {'m': 3},
  'area': {'m': 2},
  'mass': {'kg': 1},
  'time': {'s': 1},
  'speed': {'m': 1, 's': -1},
  'force': {'kg': 1, 'm': 1, 's': -2},
  'energy': {'kg': 1, 'm': 2, 's': -2},
  'power': {'kg': 1, 'm': 2, 's': -3},
  'pressure': {'kg': 1, 'm': -1, 's': -2},
  'frequency': {'s': -1},
  'current': {'A': 1},
  'voltage': {'kg': 1, 'm': 2, 's': -3, 'A': -1},
  'resistance': {'kg': 1, 'm': 2, 's': -3, 'A': -2},
  'amount': {'mol': 1},
}
_PREFIXED = {
  'length': {'m meter metre': '1'},
  'mass': {'g gram gramme': '0.001'},
  'volume': {'L l liter litre': '0.001'},
  'time': {'s sec second': '1'},
  'force': {'N newton': '1'},
  'energy': {'J joule': '1', 'cal calorie': '4.184', 'eV': '1.602176634e-19', 'Wh': '3600'},
  'power': {'W watt': '1'},
  'pressure': {'Pa pascal': '1'},
  'frequency': {'Hz hertz': '1'},
  'current': {'A amp ampere': '1'},
  'voltage': {'V volt': '1'},
  'resistance': {'Ω ohm': '1'},
  'amount': {'mol mole': '1'},
}
_PLAIN = {
  'length': {
    'in inch inche': '0.0254',
    'ft foot feet': '0.3048',
    'yd yard': '0.9144',
    'mi mile': '1609.344',
  },
  'area': {'ha hectare': '10000', 'acre': '4046.8564224'},
  'mass': {'t tonne': '1000', 'lb pound': '0.45359237', 'oz ounce': '0.028349523125'},
  'volume': {
    'gal gallon': '0.003785411784',
    'qt quart': '0.000946352946',
    'pt pint': '0.000473176473',
  },
  'time': {'min minute': '60', 'h hr hour': '3600', 'd day': '86400', 'week': '604800'},
  'pressure': {'atm atmosphere': '101325', 'bar': '100000'},
}
_OWN = {
  '$': {'$ dollar usd': '1', '¢ cent': '0.01'},
  '€': {'€ euro eur': '1'},
  '£': {'£ gbp': '1'},
  '¥': {'¥ yen jpy': '1'},
  '°': {'° deg degree': '1'},
  'rad': {'rad radian': '1'},
  '°C': {'°C celsius': '1'},
  '°F': {'°F fahrenheit': '1'},
  'K': {'K kelvin': '1'},
  'month': {'month': '1', 'yr year': '12'},
}
_SYMBOL_PREFIXES = {
  'p': -12, 'n': -9, 'µ': -6, 'μ': -6, 'u': -6, 'm': -3,
  'c': -2, 'd': -1, 'h': 2, 'k': 3, 'M': 6, 'G': 9, 'T': 12,
}  # fmt: skip
_NAME_PREFIXES = {
  'pico': -12, 'nano': -9, 'micro': -6, 'milli': -3, 'centi': -2, 'deci': -1, 'hecto': 2, 'kilo': 3,
  'mega': 6, 'giga': 9, 'tera': 12,
}  # fmt: skip
_SHORT = {'mph': 'mi/h', 'kph': 'km/h', 'kmh': 'km/h', 'kmph': 'km/h', 'rpm': '/min'}
_NO_UNIT = re.compile(
  'or|and|not|no|nor|to|plus|minus|times|over|divided|but|maybe|approximately|about|than|else|'
  'except|is|was|then|half|quarter|point|zero|one|two|three|four|five|six|seven|eight|nine|ten|'
  'eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|'
  '(?:twen|thir|for|fif|six|seven|eigh|nine)ty|'
  '(?:hundred|thousand|million|billion|trillion|dozen|lakh|crore|third|fourth|fifth|sixth|seventh|'
  'eighth|ninth|tenth|hundredth|thousandth)s?|halves|quarters|double|triple|squared|cubed|'
  'factorial|root|sqrt|pi|negative|below|mod|modulo|if|wrong|incorrect|false'
)
"""Matches words after a number that are neither units nor things that are counted: connectives,
numerals and operations.
"""
_TOKEN = re.compile(
  r'\s*(?:(?P<word>°[CF]?(?![^\W\d_])|[^\W\d_²³]+|[$€£¥¢])\.?'
  r'(?P<power>\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d\s*\}|[-+]?\d)|[²³]|[23](?!\d))?'
  r'|(?P<over>/)|(?P<times>[·*\-,]|\\cdot|\\times))'
)
_DEGREES = re.compile(r'\s*\^\s*\{?\s*\\circ\s*\}?|\s*\\degree|\s+°')
_SCALES = re.compile(r'(?:°|\bdegrees?)\s*(C|F)(?:elsius|ahrenheit)?\b', re.IGNORECASE)
_PARTS = re.compile(r'(?<=[^\W\d_.])(?<!\\times)(?<!\\cdot)(?<!\sx)\.?(?:\s+and)?\s+(?=\d)')
_MAX_LENGTH = 300


@functools.cache
def _table() -> dict[str, Unit]:
  """Returns the known units, keyed by spelling in the singular."""
  table: dict[str, Unit] = {}

  def add(spelling: str, factor: Fraction, dimensions: dict[str, int]) -> None:
    table.setdefault(spelling, Unit(factor, frozenset(dimensions.items()), frozenset()))

  for base, units in _OWN.items():
    for names, factor in units.items():
      for name in names.split():
        add(name, Fraction(factor), {base: 1})
  for of in (_PLAIN, _PREFIXED):
    for dimension, units in of.items():
      for names, factor in units.items():
        for name in names.split():
          add(name, Fraction(factor), _DIMENSIONS[dimension])
  for dimension, units in _PREFIXED.items():
    for names, factor in units.items():
      for name in names.split():
        prefixes = _NAME_PREFIXES if len(name) > 3 or name == 'ohm' else _SYMBOL_PREFIXES
        for prefix, exponent in prefixes.items():
          add(prefix + name, Fraction(factor) * Fraction(10) ** exponent, _DIMENSIONS[dimension])
  return table


def _singular(word: str) -> str:
  return word[:-1] if len(word) > 3 and word.endswith('s') and not word.endswith('ss') else word


def _known(word: str) -> Unit | None:
  table = _table()
  for spelling in (word, word.lower(), _singular(word), _singular(word.lower())):
    if spelling in table:
      return table[spelling]
  return None


def parse_unit(text: str) -> Unit | None:
  """Parses the text after a number as a unit. Returns None if the text is not a unit, for example
  another number, a connective or an unknown single letter.
  """
  position, factor, powers, words = 0, Fraction(1), {}, set()
  sign, exponent, last = 1, 1, None
  for short, written in _SHORT.items():
    text = re.sub(rf'\b{short}\b', written, text)
  text = text.rstrip()
  while position < len(text):
    match = _TOKEN.match(text, position)
    if not match:
      return None
    position = match.end()
    word = match['word']
    if match['over'] or word == 'per':
      sign = -1
    elif word and word.lower() in ('square', 'sq', 'cubic', 'cu'):
      exponent = 2 if word.lower() in ('square', 'sq') else 3
    elif word and word.lower() in ('squared', 'cubed') and last:
      more = 1 if word.lower() == 'squared' else 2
      factor *= last[0].factor ** (last[1] * more)
      for base, power in last[0].dimensions:
        powers[base] = powers.get(base, 0) + power * last[1] * more
    elif word:
      unit = _known(word)
      if _NO_UNIT.fullmatch(word.lower()) or (
        unit is None and len(word) == 1 and word.lower() != word.upper()
      ):
        return None
      if unit is None:
        words.add(_singular(word.casefold()))
      else:
        raised = sign * exponent * _power(match['power'])
        factor *= unit.factor**raised
        for base, power in unit.dimensions:
          powers[base] = powers.get(base, 0) + power * raised
        last = unit, sign
      sign, exponent = 1, 1
  return Unit(
    factor, frozenset((base, power) for base, power in powers.items() if power), frozenset(words)
  )


def _power(written: str | None) -> int:
  if not written:
    return 1
  return {'²': 2, '³': 3}.get(written) or int(re.sub(r'[\^*{}\s]', '', written))


def parse_quantity(text: str) -> Quantity | None:
  """Parses a text that is a single quantity, with or without a unit, such as `1 hour 30 minutes`.
  Returns None for other text.
  """
  text = plain(text)
  if len(text) > _MAX_LENGTH:
    return None
  text = _SCALES.sub(lambda match: f'°{match[1].upper()}', _DEGREES.sub('°', text))
  parts = [_one(part) for part in _PARTS.split(text)]
  if not all(parts):
    return None
  first, *rest = parts
  for part in rest:
    if not (
      first.unit
      and part.unit
      and first.unit.dimensions
      and first.unit.dimensions == part.unit.dimensions
    ):
      return None
    if part.unit.factor >= first.unit.factor or first.number.value < 0:
      return None
    more = part.number.value * part.unit.factor / first.unit.factor
    first = first._replace(number=first.number._replace(value=first.number.value + more))
  return first


def _one(text: str) -> Quantity | None:
  leading = split_number(text)
  if leading is None:
    return None
  number, rest = leading
  head = text[: len(text) - len(rest)]
  currency = next((sign for sign in '$€£¥' if sign in head), '')
  if not rest.strip() and not currency:
    return Quantity(number, None)
  if rest.lstrip().startswith(('-', ',', '*', '·')):
    return None
  unit = parse_unit(currency + rest)
  return None if unit is None else Quantity(number, unit)


def quantities_agree(
  truth: Quantity, answer: Quantity, *, units: Units, absolute: float = 0.0, relative: float = 0.0
) -> bool:
  """Returns whether the quantities are equal within the tolerances. The tolerance `absolute` is in
  the truth's unit.
  """
  number = answer.number
  if units in ('refused', 'ignored') or truth.unit is None:
    return numbers_agree(truth.number, number, absolute=absolute, relative=relative)
  if answer.unit is None:
    return units == 'stated' and numbers_agree(
      truth.number, number, absolute=absolute, relative=relative
    )
  if truth.unit.dimensions != answer.unit.dimensions:
    return False
  if truth.unit.dimensions:
    number = number._replace(value=number.value * answer.unit.factor / truth.unit.factor)
  elif not (truth.unit.words <= answer.unit.words or answer.unit.words <= truth.unit.words):
    return False
  return numbers_agree(truth.number, number, absolute=absolute, relative=relative)


def quantity_key(quantity: Quantity, units: Units) -> Hashable:
  """Returns a key that quantities share if they are the same answer."""
  number, unit = quantity
  if units in ('refused', 'ignored') or unit is None:
    return number
  if unit.dimensions:
    return number.value * unit.factor, number.percent, unit.dimensions
  return number, unit.words
