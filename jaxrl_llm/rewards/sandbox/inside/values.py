"""Encodes Python values as JSON for the exchange between the program's process and the tests'
process.

Invariant: received values are rebuilt only from built-in types, a few standard-library types,
namedtuples, and NumPy arrays and scalars, so their methods (above all `__eq__`) are never the
sender's. Any other object stays in its process and is sent as a reference.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import functools
import math
import pathlib
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any

_PLAIN = (type(None), bool, str, float)
_BIG = 1 << 64
_BASES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
"""Built-in types. A value of a class that derives from one of them is converted to the built-in
type when it is sent, so methods that the class overrides, perhaps to cheat, have no effect.
"""

_MAKERS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple]]] = {
  'complex': (complex, lambda z: (z.real, z.imag)),
  'range': (range, lambda r: (r.start, r.stop, r.step)),
  'slice': (slice, lambda s: (s.start, s.stop, s.step)),
  'Fraction': (fractions.Fraction, lambda f: (f.numerator, f.denominator)),
  'Decimal': (decimal.Decimal, lambda d: (str(d),)),
  'deque': (collections.deque, lambda d: (list(d), d.maxlen)),
  'Counter': (collections.Counter, lambda c: (dict(c),)),
  'OrderedDict': (collections.OrderedDict, lambda o: (list(o.items()),)),
  'dict_keys': (lambda keys: dict.fromkeys(keys).keys(), lambda view: (list(view),)),
  'dict_values': (lambda values: dict(enumerate(values)).values(), lambda view: (list(view),)),
  'dict_items': (lambda items: dict(items).items(), lambda view: (list(view),)),
  'defaultdict': (collections.defaultdict, lambda d: (d.default_factory, dict(d))),
  'timezone': (datetime.timezone, lambda zone: (zone.utcoffset(None), zone.tzname(None))),
  'date': (datetime.date, lambda d: (d.year, d.month, d.day)),
  'time': (datetime.time, lambda t: (t.hour, t.minute, t.second, t.microsecond, t.tzinfo)),
  'datetime': (
    datetime.datetime,
    lambda d: (d.year, d.month, d.day, d.hour, d.minute, d.second, d.microsecond, d.tzinfo),
  ),
  'timedelta': (datetime.timedelta, lambda d: (d.days, d.seconds, d.microseconds)),
  'PosixPath': (pathlib.PosixPath, lambda path: (str(path),)),
  'UUID': (uuid.UUID, lambda number: (str(number),)),
}
_UNCOMMON = (pathlib.PosixPath, uuid.UUID)
"""Types that are left out of `STANDARD_TYPES`. `remote.is_suspect` forbids the method names of all
types in `STANDARD_TYPES`, but methods of these types have common names, such as `match` and `open`,
which a program's own objects may well use.
"""
_VIEWS = {type(getattr({}, name)()): f'dict_{name}' for name in ('keys', 'values', 'items')}
_KINDS = {maker: name for name, (maker, _) in _MAKERS.items() if isinstance(maker, type)} | _VIEWS

STANDARD_TYPES: Mapping[str, type] = {
  **{
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and not name.startswith('_')
  },
  **{kind.__name__: kind for kind in _KINDS if kind not in _VIEWS and kind not in _UNCOMMON},
}
"""Types that messages name instead of describing them: the public built-in types, including
exceptions, and the standard-library types that can be sent as values (`_MAKERS`), without those in
`_UNCOMMON`.
"""
TYPE_NAMES: Mapping[type, str] = {kind: name for name, kind in STANDARD_TYPES.items()}


@functools.lru_cache(maxsize=256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type:
  """Returns a namedtuple class with the sender's fields. Raises ValueError for invalid names."""
  return collections.namedtuple(name, fields)


def _fields(value: Any) -> tuple[str, ...] | None:
  """Returns the field names of a namedtuple, or None for a plain tuple."""
  fields = getattr(type(value), '_fields', None)
  if not isinstance(fields, tuple) or len(fields) != tuple.__len__(value):
    return None
  return (
    fields if all(type(field) is str and not field.startswith('_') for field in fields) else None
  )


def base_of(kind: type) -> type | None:
  """Returns the built-in type to which values of the class `kind` are converted when they are sent.

  The result is None for built-in types, classes of namedtuples and any class that derives from no
  built-in type.
  """
  if kind in _BASES or kind in _KINDS or hasattr(kind, '_fields'):
    return None
  return next((base for base in _BASES if issubclass(kind, base)), None)


_NUMPY_TYPES = ('bool', *(f'{sign}int{bits}' for sign in ('', 'u') for bits in (8, 16, 32, 64)),
                'float16', 'float32', 'float64', 'complex64', 'complex128', 'str')  # fmt: skip
"""Names of the types of NumPy arrays and scalars that are sent as values."""


def _numpy_type(value: Any) -> str | None:
  """Returns the name in `_NUMPY_TYPES` of an array's or scalar's type, or None for other values."""
  numpy = sys.modules.get('numpy')
  if numpy is None or type(value).__module__ != 'numpy':
    return None
  kind = type(value)
  if kind is not numpy.ndarray and not issubclass(kind, numpy.generic):
    return None
  name = 'str' if value.dtype.kind == 'U' else value.dtype.name
  return name if name in _NUMPY_TYPES else None


def is_array(value: Any) -> bool:
  """Returns whether the value is a NumPy array that is sent as a value."""
  return type(value).__name__ == 'ndarray' and _numpy_type(value) is not None


def _numpy_message(value: Any, kind: str) -> dict[str, Any]:
  items = value.reshape(-1).tolist()
  if kind.startswith('complex'):
    items = [part for item in items for part in (item.real, item.imag)]
  shape = [] if value.ndim == 0 else list(value.shape)
  form = 'array' if type(value).__name__ == 'ndarray' else 'scalar'
  return {form: kind, 'shape': shape, 'of': items}


def _numpy_value(kind: str, shape: list[Any], items: list[Any], *, scalar: bool) -> Any:
  """Rebuilds a NumPy array or scalar. Raises ValueError or TypeError if the type, the shape or an
  item is invalid.
  """
  numpy = sys.modules.get('numpy')
  wanted = {'bool': bool, 'str': str}.get(kind, int if 'int' in kind else float)
  if numpy is None or kind not in _NUMPY_TYPES or not all(type(item) is wanted for item in items):
    raise ValueError(f'no array of type {kind!r}')
  if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 32:
    raise ValueError(f'no array of shape {shape!r:.100}')
  if kind.startswith('complex'):
    items = [complex(*pair) for pair in zip(items[::2], items[1::2], strict=True)]
  if len(items) != math.prod(shape):
    raise ValueError(f'{len(items)} items in an array of shape {shape!r:.100}')
  array = numpy.array(items, dtype=kind).reshape(shape)
  return array[()] if scalar and not shape else array


class Undecodable(Exception):
  """Raised for a message that cannot be decoded."""


def encode(value: Any, refer: Callable[[Any], dict[str, Any]]) -> Any:
  """Encodes a value as JSON, which `decode` reads.

  `refer` returns the reference that is sent instead of an object that cannot be sent itself.
  """
  kind = type(value)
  if kind in _PLAIN:
    return value
  if (numpy_type := _numpy_type(value)) is not None:
    return _numpy_message(value, numpy_type)
  if kind in _KINDS:
    name = _KINDS[kind]
    if name in ('time', 'datetime') and type(value.tzinfo) not in (type(None), datetime.timezone):
      return refer(value)
    return {'make': name, 'of': [encode(part, refer) for part in _MAKERS[name][1](value)]}
  if kind not in _BASES:
    base = next((base for base in _BASES if issubclass(kind, base)), None)
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
    if kind is tuple and (fields := _fields(value)):
      return {'fields': [type(value).__name__, *fields], 'of': items}
    return items if kind is list else {kind.__name__: items}
  if kind is str:
    return str.__str__(value)
  if kind is float:
    return float.__float__(value)
  return {'make': 'complex', 'of': [float(value.real), float(value.imag)]}


_SEQUENCES = {'tuple': tuple, 'set': set, 'frozenset': frozenset}


def decode(message: Any, resolve: Callable[[dict[str, Any]], Any]) -> Any:
  """Decodes the output of `encode`; `resolve` turns references into values.

  Raises Undecodable for a malformed message.
  """
  if isinstance(message, list):
    return [decode(item, resolve) for item in message]
  if not isinstance(message, dict):
    return message
  try:
    match message:
      case {'make': str(name), 'of': list(parts)}:
        return _MAKERS[name][0](*(decode(part, resolve) for part in parts))
      case {'fields': [str(name), *fields], 'of': list(items)}:
        # References in fields are marked, so that their objects get `Origin.FIELD`. Tests read a
        # field like an attribute, so an object in a field could otherwise imitate a method.
        parts = [
          {**item, 'field': field} if isinstance(item, dict) and 'ref' in item else item
          for item, field in zip(items, fields, strict=True)
        ]
        return _named_tuple(name, tuple(fields))(*(decode(part, resolve) for part in parts))
      case {'array': str(kind), 'shape': list(shape), 'of': list(items)}:
        return _numpy_value(kind, shape, items, scalar=False)
      case {'scalar': str(kind), 'shape': [], 'of': list(items)}:
        return _numpy_value(kind, [], items, scalar=True)
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
    raise Undecodable(f'{type(error).__name__}: {error}') from None
