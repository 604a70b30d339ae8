"""Type checks of configurations, and their conversion to and from JSON.

Invariant: for a configuration that `check_types` accepts, `from_json(to_json(config), type(config))
== config`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import typing
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config.annotations import (
  SCALARS,
  describe,
  element_types,
  enum_json,
  field_type,
  field_types,
  is_enum,
  is_json,
  is_mapping,
  is_record,
  is_tuple,
  members,
)
from jaxrl_llm.core.errors import UserError

TAG = '@type'
"""JSON key whose value is the name of a dataclass. It is written only where the annotation allows
several dataclasses.
"""


def check_types(config: Any, where: str = 'config') -> None:
  """Raises UserError, naming the field, if a value does not match its field's annotation."""
  _check(config, type(config), where)


def check_at_least(where: str, config: Any, **bounds: int) -> None:
  """Raises UserError if a field is below its lower bound. None is always permitted.

  Args:
    where: dotted key of `config` in messages, with a final dot; may be empty.
    bounds: lower bound of each field, keyed by the field's name.
  """
  for name, least in bounds.items():
    value = getattr(config, name)
    if value is not None and value < least:
      raise UserError(f'{where}{name}: {value}, wanted at least {least}')


def to_json(config: Any) -> Any:
  """Converts a configuration to JSON that shares no objects with it.

  Infinities become 'inf' and '-inf'.
  """
  return _write(config, type(config))


def from_json(value: Any, annotation: Any, where: str = 'config') -> Any:
  """Builds a value of the annotated type from JSON.

  Raises UserError if the JSON does not match the annotation. The message gives the key of the
  mismatch, which begins with `where`.
  """
  return _read(value, annotation, where)


def _mismatch(value: Any, annotation: Any, where: str) -> UserError:
  return UserError(
    f'{where}: got {value!r} ({type(value).__name__}), wanted {describe(annotation)}'
  )


def _member_of(value: Any, annotation: Any, where: str) -> Any:
  """Returns the first alternative of a union whose type matches a Python value."""
  for member in members(annotation):
    if _has_type(value, member):
      return member
  if isinstance(value, float) and math.isnan(value):
    raise UserError(f'{where}: got nan; wanted {describe(annotation)}')
  raise _mismatch(value, annotation, where)


def _has_type(value: Any, member: Any) -> bool:
  if member is float:  # As in Python's typing, a float field accepts an int, but not a bool.
    return (
      abs(value) <= sys.float_info.max
      if type(value) is int
      else type(value) is float and not math.isnan(value)
    )
  if member in SCALARS:
    return type(value) is member
  if typing.get_origin(member) is typing.Literal:
    return any(
      type(value) is type(choice) and value == choice for choice in typing.get_args(member)
    )
  if is_tuple(member):
    return type(value) is tuple
  if is_mapping(member):
    return isinstance(value, Mapping)
  describe(member)  # Raises TypeError for an unsupported annotation.
  return type(value) is member


def _check(value: Any, annotation: Any, where: str) -> None:
  if is_json(annotation):
    check_json(value, where)
    return
  member = _member_of(value, annotation, where)
  if is_record(member):
    for name, kind in field_types(member).items():
      _check(getattr(value, name), kind, f'{where}.{name}')
  elif is_tuple(member):
    for index, (element, kind) in enumerate(
      zip(value, element_types(member, len(value), where), strict=True)
    ):
      _check(element, kind, f'{where}.{index}')
  elif is_mapping(member):
    for key, element in value.items():
      _check(key, str, f'{where} (key)')
      _check(element, typing.get_args(member)[1], f'{where}.{key}')


def check_json(value: Any, where: str) -> None:
  """Raises UserError if JSON cannot represent a value.

  JSON lacks tuples, sets, other objects, nan, infinities and keys that are not strings.
  """
  if isinstance(value, dict):
    for key, element in value.items():
      _check(key, str, f'{where} (key)')
      check_json(element, f'{where}.{key}')
  elif isinstance(value, list):
    for index, element in enumerate(value):
      check_json(element, f'{where}.{index}')
  elif type(value) not in SCALARS or (isinstance(value, float) and not math.isfinite(value)):
    raise UserError(
      f'{where}: got {value!r} ({type(value).__name__}), wanted a JSON value (none, true or false, '
      'a finite number, text, a list or a dict)'
    )


def _write(value: Any, annotation: Any) -> Any:
  if is_json(annotation):
    return copy.deepcopy(value)
  member = _member_of(value, annotation, 'config')
  if is_record(member):
    fields = {
      name: _write(getattr(value, name), kind) for name, kind in field_types(member).items()
    }
    return {TAG: member.__name__, **fields} if len(records(annotation)) > 1 else fields
  if is_tuple(member):
    kinds = element_types(member, len(value), 'config')
    return [_write(element, kind) for element, kind in zip(value, kinds, strict=True)]
  if is_mapping(member):
    return {key: _write(element, typing.get_args(member)[1]) for key, element in value.items()}
  if is_enum(member):
    return enum_json(value)
  if member is float:
    return float(value) if math.isfinite(value) else str(float(value))
  return value


def default_json(cls: type) -> dict[str, Any]:
  """Returns a dataclass's defaults in the form that `to_json` writes. Fields without a default are
  omitted.
  """
  kinds = field_types(cls)
  written = {}
  for field in dataclasses.fields(cls):
    if field.init and field.default_factory is not dataclasses.MISSING:
      written[field.name] = _write(field.default_factory(), kinds[field.name])
    elif field.init and field.default is not dataclasses.MISSING:
      written[field.name] = _write(field.default, kinds[field.name])
  return written


def records(annotation: Any) -> dict[str, type]:
  """Returns the dataclasses among an annotation's alternatives, keyed by name."""
  return {member.__name__: member for member in members(annotation) if is_record(member)}


def record_type(value: Any, annotation: Any, where: str) -> type:
  """Returns the dataclass that a JSON object represents, among those that the annotation allows.

  If there are several, the entry `TAG` names one of them. Raises UserError if it names none.
  """
  classes = records(annotation)
  if len(classes) == 1:
    return next(iter(classes.values()))
  if value.get(TAG) not in classes:
    raise UserError(f'{where}: got {TAG} {value.get(TAG)!r}, wanted one of {", ".join(classes)}')
  return classes[value[TAG]]


def _read(value: Any, annotation: Any, where: str) -> Any:
  if is_json(annotation):
    check_json(value, where)
    return value
  if isinstance(value, dict) and records(annotation):
    return _read_record(value, record_type(value, annotation, where), where)
  for member in members(annotation):
    if isinstance(value, list) and is_tuple(member):
      kinds = element_types(member, len(value), where)
      return tuple(
        _read(v, kind, f'{where}.{i}') for i, (v, kind) in enumerate(zip(value, kinds, strict=True))
      )
    if isinstance(value, dict) and is_mapping(member):
      return {
        key: _read(v, typing.get_args(member)[1], f'{where}.{key}') for key, v in value.items()
      }
    if is_enum(member):
      choices = {enum_json(choice): choice for choice in member}
      if isinstance(value, str) and value in choices:
        return choices[value]
    elif member is float and value in ('inf', '-inf'):
      return float(value)
    elif not isinstance(value, (list, dict)) and _has_type(value, member):
      return float(value) if member is float else value
  raise _mismatch(value, annotation, where)


def _read_record(value: dict[str, Any], cls: type, where: str) -> Any:
  kinds = field_types(cls)
  fields = {}
  for key, element in value.items():
    if key != TAG:
      fields[key] = _read(element, field_type(cls, key, where), f'{where}.{key}')
  defaults = default_json(cls)
  missing = [name for name in kinds if name not in fields and name not in defaults]
  if missing:
    raise UserError(f'{where}: {cls.__name__} needs a value for {", ".join(missing)}')
  try:
    return cls(**fields)
  except (TypeError, ValueError) as error:
    raise UserError(f'{where}: {error}') from error
