"""Former fields of configuration dataclasses: naming one is an error that gives its new place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

from jaxrl_llm.core.errors import UserError

_PLACES = '_moved_fields'
_Class = TypeVar('_Class', bound=type)


def moved(places: Mapping[str, str]) -> Callable[[_Class], _Class]:
  """Decorates a dataclass with moved fields: their names raise errors that give the new place.

  As an argument, or as a key of JSON or of an override (`check_moved`), a former name raises
  UserError; as an attribute it raises AttributeError.

  Args:
    places: new places, keyed by former name: the dotted key below the dataclass, optionally
      followed by a remark.
  """

  def decorate(cls: _Class) -> _Class:
    make = cls.__init__

    @functools.wraps(make)
    def init(self, *args, **fields):
      for name in fields:
        check_moved(cls, name, cls.__name__)
      make(self, *args, **fields)

    def absent(self, name: str):
      try:
        check_moved(cls, name, cls.__name__)
      except UserError as error:
        raise AttributeError(str(error)) from None
      raise AttributeError(f'{cls.__name__!r} object has no attribute {name!r}')

    cls.__init__, cls.__getattr__ = init, absent
    setattr(cls, _PLACES, places)
    return cls

  return decorate


def check_moved(cls: type, name: str, where: str) -> None:
  """Raises UserError if `name` is a former field of the dataclass, whose key is `where`."""
  place = moved_fields(cls).get(name)
  if place is not None:
    raise UserError(f'{where}.{name}: moved to {where}.{place}')


def moved_fields(cls: type) -> Mapping[str, str]:
  """Returns the new places of a dataclass's former fields, keyed by former name."""
  return getattr(cls, _PLACES, {})
