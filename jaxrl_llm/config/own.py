"""Imports user-defined components that a configuration names."""

from __future__ import annotations

import dataclasses
import importlib
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.core.errors import UserError, one_line


def own_part(name: str, what: str) -> Any:
  """Imports and returns a user-defined component.

  Args:
    name: 'module:attribute'. The module must be on Python's import path.
    what: kind of the component, for messages.

  Raises:
    UserError: the module cannot be imported, or has no such attribute.
  """
  module, _, attribute = name.partition(':')
  if not re.fullmatch(r'[\w-]+(\.[\w-]+)*', module):
    raise UserError(f"{what} {name!r}: {module!r} is not a module name; wanted 'module:attribute'")
  try:
    imported = importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise UserError(
      f'{what} {name!r}: no module {error.name!r}; is its directory in PYTHONPATH?'
    ) from None
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


def named_pair(
  name: str, what: str, catalogue: Mapping[str, tuple[type, Any]]
) -> tuple[type, Callable[..., Any]]:
  """Returns the pair (options dataclass, function that takes the options) that `name` selects.

  `name` is a key of the catalogue, or 'module:attribute' for a user-defined pair.
  """
  if ':' not in name and name not in catalogue:
    raise UserError(
      f"{what} {name!r}: unknown; {nearest(name, catalogue)}; a custom one is 'module:attribute'"
    )
  pair = own_part(name, what) if ':' in name else catalogue[name]
  if not (
    isinstance(pair, tuple)
    and len(pair) == 2
    and dataclasses.is_dataclass(pair[0])
    and callable(pair[1])
  ):
    raise UserError(
      f'{what} {name!r}: wanted (options dataclass, function that takes the options), got {pair!r}'
    )
  return pair
