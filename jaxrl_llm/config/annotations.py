"""Inspects the annotations of configuration fields: alternatives, element types and descriptions.

Supported annotations: bool, int, float, str, None, Literal, enums, tuple[T, ...] and tuple[A, B],
Mapping[str, T], Any or Json (any JSON value), dataclasses, and unions of these. Any other
annotation is a programming error and raises TypeError. A mistake in a configuration raises
UserError.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import functools
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.config.moved import check_moved
from jaxrl_llm.core.errors import UserError

SCALARS = {
  bool: 'true or false',
  int: 'an integer',
  float: 'a number',
  str: 'text',
  types.NoneType: 'none',
}


def nearest(word: str, choices: Iterable[str]) -> str:
  """Returns a hint for an unknown name: the most similar choice, or all choices if none is
  similar.
  """
  choices = [str(choice) for choice in choices]
  close = difflib.get_close_matches(word, choices, n=1)
  if close:
    return f'did you mean {close[0]!r}?'
  return f'available: {", ".join(choices)}' if choices else 'none is available'


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
  """Returns the annotations of the fields that a dataclass's constructor takes, keyed by name."""
  annotations: dict[str, Any] = {}
  for base in reversed(cls.__mro__):
    if dataclasses.is_dataclass(base):
      annotations.update(inspect.get_annotations(base, eval_str=True))
  return types.MappingProxyType(
    {field.name: annotations[field.name] for field in dataclasses.fields(cls) if field.init}
  )


def members(annotation: Any) -> tuple[Any, ...]:
  """Returns the alternatives of a union, or the annotation itself if it is not a union."""
  if typing.get_origin(annotation) in (types.UnionType, typing.Union):
    return typing.get_args(annotation)
  return (types.NoneType,) if annotation is None else (annotation,)


@functools.cache
def is_json(annotation: Any) -> bool:
  """Returns whether an annotation allows any JSON value.

  Such annotations are Any, and unions that have a list or dict as a member.
  """
  origins = {typing.get_origin(member) or member for member in members(annotation)}
  return annotation is Any or (len(origins) > 1 and bool(origins & {list, dict}))


def is_mapping(annotation: Any) -> bool:
  return typing.get_origin(annotation) is collections.abc.Mapping


def is_tuple(annotation: Any) -> bool:
  return typing.get_origin(annotation) is tuple


def is_record(annotation: Any) -> bool:
  return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def is_enum(annotation: Any) -> bool:
  return isinstance(annotation, type) and issubclass(annotation, enum.Enum)


def describe(annotation: Any) -> str:
  """Describes in words, for error messages, what an annotation accepts."""
  if is_json(annotation):
    return 'a JSON value'
  if len(members(annotation)) > 1:
    return ' or '.join(describe(member) for member in members(annotation))
  if annotation in SCALARS:
    return SCALARS[annotation]
  if typing.get_origin(annotation) is typing.Literal:
    return 'one of ' + ', '.join(str(choice) for choice in typing.get_args(annotation))
  if is_enum(annotation):
    return 'one of ' + ', '.join(str(enum_json(choice)) for choice in annotation)
  if is_tuple(annotation):
    kinds = [kind for kind in typing.get_args(annotation) if kind is not Ellipsis]
    return (
      'a tuple of '
      f'({", ".join(describe(kind) for kind in kinds)}{", ..." if repeats(annotation) else ""})'
    )
  if is_mapping(annotation):
    return f'a mapping from text to {describe(typing.get_args(annotation)[1])}'
  if is_record(annotation):
    return f'a {annotation.__name__}'
  if annotation is None:
    return SCALARS[types.NoneType]
  raise TypeError(f'configuration fields cannot be annotated with {annotation!r}')


def field_type(cls: type, name: str, where: str) -> Any:
  """Returns the annotation of a dataclass's field.

  Raises UserError if the dataclass has no such field. If the field has moved, the message gives its
  new place; otherwise, it suggests existing fields.
  """
  kinds = field_types(cls)
  if name not in kinds:
    check_moved(cls, name, where)
    raise UserError(f'{where}.{name}: {cls.__name__} has no field {name!r}; {nearest(name, kinds)}')
  return kinds[name]


def element_types(annotation: Any, count: int, where: str) -> tuple[Any, ...]:
  """Returns the annotations of a tuple's `count` elements.

  Raises UserError if the tuple's annotation requires another number of elements.
  """
  kinds = typing.get_args(annotation)
  if repeats(annotation):
    return (kinds[0],) * count
  if count != len(kinds):
    raise UserError(f'{where}: got {count} elements, wanted {len(kinds)}: {describe(annotation)}')
  return kinds


def repeats(annotation: Any) -> bool:
  kinds = typing.get_args(annotation)
  return len(kinds) == 2 and kinds[1] is Ellipsis


def enum_json(choice: enum.Enum) -> str:
  return choice.value if isinstance(choice.value, str) else choice.name
