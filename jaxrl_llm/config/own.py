"""Import of user-defined components named in a configuration."""

from __future__ import annotations

import dataclasses
import importlib
import re
import traceback
from collections.abc import Callable
from typing import Any

from jaxrl_llm.core.errors import UserError, one_line


def own_part(name: str, what: str) -> Any:
  """Imports a user-defined component named 'module:attribute'; Python's usual import path applies."""
  module, _, attribute = name.partition(':')
  if not re.fullmatch(r'[\w-]+(\.[\w-]+)*', module):
    raise UserError(f"{what} {name!r}: {module!r} is not a module name; wanted 'module:attribute'")
  try:
    imported = importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise UserError(f'{what} {name!r}: no module {error.name!r}; is its directory in PYTHONPATH?') from None
  except Exception as error:
    if isinstance(error, SyntaxError):
      place, text = f'{error.filename}:{error.lineno}', error.msg
    else:
      frame, text = traceback.extract_tb(error.__traceback__)[-1], error
      place = f'{frame.filename}:{frame.lineno}'
    reason = f'{place}: {type(error).__name__}: {one_line(text)}'
    raise UserError(f'{what} {name!r}: cannot be imported: {reason}') from error
  try:
    return getattr(imported, attribute)
  except AttributeError:
    raise UserError(f'{what} {name!r}: module {module} has no {attribute!r}') from None


def own_pair(name: str, what: str) -> tuple[type, Callable[..., Any]]:
  """Imports a user-defined pair of an options dataclass and a function of it."""
  pair = own_part(name, what)
  if not (isinstance(pair, tuple) and len(pair) == 2 and dataclasses.is_dataclass(pair[0]) and callable(pair[1])):
    raise UserError(f'{what} {name!r}: wanted a pair of an options dataclass and a function of it, got {pair!r}')
  return pair
