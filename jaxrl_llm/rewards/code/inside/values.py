"""Python values as JSON, between the program's process and that of its tests.

Invariant: what arrives is rebuilt from built-in and a few standard types only, so the methods of a received value
(`__eq__` before all) are never the sender's. Anything else stays where it is, and a reference to it travels.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
from collections.abc import Callable
from typing import Any

_PLAIN = (type(None), bool, str, float)
_BIG = 1 << 64
_BASES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
"""Subclasses of these travel as these: a method that a subclass overrides is lost, and so is its lie."""

_MAKERS: dict[str, tuple[type, Callable[[Any], tuple]]] = {
  'complex': (complex, lambda z: (z.real, z.imag)),
  'range': (range, lambda r: (r.start, r.stop, r.step)),
  'slice': (slice, lambda s: (s.start, s.stop, s.step)),
  'Fraction': (fractions.Fraction, lambda f: (f.numerator, f.denominator)),
  'Decimal': (decimal.Decimal, lambda d: (str(d),)),
  'deque': (collections.deque, lambda d: (list(d), d.maxlen)),
  'Counter': (collections.Counter, lambda c: (dict(c),)),
  'OrderedDict': (collections.OrderedDict, lambda o: (list(o.items()),)),
  'date': (datetime.date, lambda d: (d.year, d.month, d.day)),
  'time': (datetime.time, lambda t: (t.hour, t.minute, t.second, t.microsecond)),
  'datetime': (
    datetime.datetime,
    lambda d: (d.year, d.month, d.day, d.hour, d.minute, d.second, d.microsecond),
  ),
  'timedelta': (datetime.timedelta, lambda d: (d.days, d.seconds, d.microseconds)),
}
_KINDS = {kind: name for name, (kind, _) in _MAKERS.items()}


class Unreadable(Exception):
  """A message that stands for no value."""


def encode(value: Any, refer: Callable[[Any], dict[str, Any]]) -> Any:
  """JSON that `decode` reads back; `refer` says what stands for a value that cannot travel."""
  kind = type(value)
  if kind in _PLAIN:
    return value
  if kind in _KINDS:
    name = _KINDS[kind]
    aware = name in ('time', 'datetime') and value.tzinfo is not None
    return refer(value) if aware else {'make': name, 'of': [encode(part, refer) for part in _MAKERS[name][1](value)]}
  if kind not in _BASES:
    base = next((base for base in _BASES if isinstance(value, base)), None)
    if base is None:
      return refer(value)
    kind = base
  if kind is int:
    number = int.__index__(value)
    return number if -_BIG < number < _BIG else {'int': hex(number)}
  if kind in (bytes, bytearray):
    return {kind.__name__: kind.hex(value)}
  if kind is dict:
    return {'dict': [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]}
  if kind in (list, tuple, set, frozenset):
    items = [encode(item, refer) for item in kind.__iter__(value)]
    return items if kind is list else {kind.__name__: items}
  if kind is str:
    return str.__str__(value)
  if kind is float:
    return float.__float__(value)
  return {'make': 'complex', 'of': [float(value.real), float(value.imag)]}


_SEQUENCES = {'tuple': tuple, 'set': set, 'frozenset': frozenset}


def decode(message: Any, resolve: Callable[[dict[str, Any]], Any]) -> Any:
  """The value of what `encode` made; `resolve` turns references into values. Raises Unreadable."""
  if isinstance(message, list):
    return [decode(item, resolve) for item in message]
  if not isinstance(message, dict):
    return message
  try:
    match message:
      case {'make': str(name), 'of': list(parts)}:
        return _MAKERS[name][0](*(decode(part, resolve) for part in parts))
      case {'int': str(digits)}:
        return int(digits, 16)
      case {'bytes': str(digits)}:
        return bytes.fromhex(digits)
      case {'bytearray': str(digits)}:
        return bytearray.fromhex(digits)
      case {'dict': list(items)}:
        return {decode(key, resolve): decode(item, resolve) for key, item in items}
    for name, kind in _SEQUENCES.items():
      if name in message:
        return kind(decode(item, resolve) for item in message[name])
    return resolve(message)
  except (KeyError, TypeError, ValueError, ArithmeticError) as error:
    raise Unreadable(f'{type(error).__name__}: {error}') from None
