"""Configuration fields that have moved: using a former name raises an error with the new place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

from jaxrl_llm.core.errors import UserError

_PLACES = '_moved_fields'
_Class = TypeVar('_Class', bound=type)


def moved(places: Mapping[str, str]) -> Callable[[_Class], _Class]:
  """Returns a decorator for a dataclass whose fields have moved; using a former name is an error.

  As a constructor argument, a JSON key or an override key (`check_moved`), a former name raises
  UserError. Reading it as an attribute raises AttributeError. Both messages give the new place.

  Args:
    places: new place of each field, keyed by its former name. A place is a dotted key relative to
      the dataclass, optionally followed by a remark.
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
  """Raises UserError if `name` is a former field of `cls`.

  The message gives the former and the new key, both below `where`, the dotted key of the dataclass.
  """
  place = moved_fields(cls).get(name)
  if place is not None:
    raise UserError(f'{where}.{name}: moved to {where}.{place}')


def moved_fields(cls: type) -> Mapping[str, str]:
  """Returns the new places of a dataclass's former fields, keyed by former name."""
  return getattr(cls, _PLACES, {})
