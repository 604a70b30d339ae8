"""Parses command-line text into configuration values, guided by the fields' annotations.

Invariant: `parse_text` returns JSON that `values.from_json` accepts for the same annotation.
"""

from __future__ import annotations

import decimal
import difflib
import math
import re
import types
import typing
from typing import Any

from jaxrl_llm.config.annotations import (
  describe,
  element_types,
  enum_json,
  is_enum,
  is_json,
  is_mapping,
  is_record,
  is_tuple,
  members,
  nearest,
)
from jaxrl_llm.config.values import check_json, from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json

_NONE_WORDS = ('none', 'None', 'null')
_BOOL_WORDS = {'true': True, 'True': True, 'false': False, 'False': False}
# Maximum length of an integer in characters. Python itself rejects more than 4300 digits.
_LONGEST_NUMBER = 1000
# Maximum decimal exponent of an integer in scientific notation, such as 6 in 1e6. A larger integer
# is probably a typo and could exhaust memory, so it is rejected.
_INT_DIGITS_LIMIT = 18


def parse_text(text: str, annotation: Any, where: str) -> Any:
  """Parses command-line text into a JSON value of the annotated type.

  Integers are written as 1000 or 1_000, or as 1e3 if the value is whole; booleans as true or false;
  None as none; tuples as 1,2 or [1, 2]; mappings and dataclasses as JSON objects. Strings are the
  text itself. If a field allows other types besides strings, a text in double quotes, such as
  "none", is a string.
  """
  if is_json(annotation):
    return _parse_json(text, where)
  kinds = members(annotation)
  # str accepts any text, so it is tried after the other types. For example, with `int | str`, the
  # text 7 becomes an integer.
  for kind in sorted(kinds, key=lambda kind: (kind is str, kind is types.NoneType)):
    value = _parse_scalar(text, kind, unquote=len(kinds) > 1)
    if value is not _UNREAD:
      return value
  for kind in kinds:
    if is_tuple(kind):
      return _parse_tuple(text, kind, where)
    if (is_mapping(kind) or is_record(kind)) and text.startswith('{'):
      value = _parse_json(text, where)
      from_json(value, annotation, where)
      return value
  choices = [choice for kind in kinds for choice in _choices(kind)]
  hint = f'; {nearest(text, choices)}' if difflib.get_close_matches(text, choices, n=1) else ''
  raise UserError(f'{where}: got {text!r}, wanted {describe(annotation)}{hint}')


_UNREAD = object()  # Result for text that cannot be parsed. It differs from None, a valid value.


def _parse_scalar(text: str, kind: Any, *, unquote: bool) -> Any:
  if kind is types.NoneType:
    return None if text in _NONE_WORDS else _UNREAD
  if kind is bool:
    return _BOOL_WORDS.get(text, _UNREAD)
  if kind is int:
    return _parse_int(text)
  if kind is float:
    return _parse_float(text)
  if kind is str:
    return text[1:-1] if unquote and len(text) >= 2 and text[0] == text[-1] == '"' else text
  return _choices(kind).get(text, _UNREAD)


def _choices(kind: Any) -> dict[str, Any]:
  """Returns the JSON values of a Literal or an enum, keyed by the text that selects them."""
  if typing.get_origin(kind) is typing.Literal:
    return {str(choice): choice for choice in typing.get_args(kind)}
  if is_enum(kind):
    return {choice.name: enum_json(choice) for choice in kind} | {
      enum_json(choice): enum_json(choice) for choice in kind
    }
  return {}


def _parse_int(text: str) -> Any:
  if len(text) > _LONGEST_NUMBER:
    return _UNREAD
  if re.fullmatch(r'[+-]?\d+(_\d+)*', text):
    return int(text)
  if re.fullmatch(r'[+-]?\d+(\.\d+)?[eE]\+?\d{1,4}', text):
    number = decimal.Decimal(text)
    if number.adjusted() <= _INT_DIGITS_LIMIT and number == number.to_integral_value():
      return int(number)
  return _UNREAD


def _parse_float(text: str) -> Any:
  try:
    number = float(text)
  except ValueError:
    return _UNREAD
  if math.isnan(number):
    return _UNREAD
  return number if math.isfinite(number) else str(number)


def _parse_tuple(text: str, kind: Any, where: str) -> Any:
  if text.startswith('['):
    value = _parse_json(text, where)
    from_json(value, kind, where)
    return value
  inner = text[1:-1] if text.startswith('(') and text.endswith(')') else text
  parts = [part.strip() for part in inner.split(',')]
  if parts[-1] == '':  # The text is empty or has a trailing comma, as in (1,).
    parts.pop()
  kinds = element_types(kind, len(parts), where)
  return [
    parse_text(part, element, f'{where}.{i}')
    for i, (part, element) in enumerate(zip(parts, kinds, strict=True))
  ]


def _parse_json(text: str, where: str) -> Any:
  """Parses JSON. In place of true, false and null, a text may also be True, False, None or none.

  Text that is not JSON is returned as a string. If it begins like a JSON object, list or string,
  UserError is raised instead.
  """
  if text in _BOOL_WORDS or text in _NONE_WORDS:
    return _BOOL_WORDS.get(text)
  try:
    value = parse_json(text)
  except ValueError as error:
    if text[:1] in ('{', '[', '"'):
      raise UserError(f'{where}: got {text!r}, which is not JSON: {error}') from None
    return text
  check_json(value, where)
  return value
