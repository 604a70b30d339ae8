"""A user's own part, by the name that a configuration gives it."""

from __future__ import annotations

import importlib
from typing import Any

from jaxrl_llm.core.errors import UserError


def own_part(name: str, what: str) -> Any:
  """A user's own part, named 'module:attribute'; the module is looked for as Python looks for any."""
  module, _, attribute = name.partition(':')
  try:
    found = importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise UserError(f'{what} {name!r}: no module {error.name!r}; is its directory in PYTHONPATH?') from None
  try:
    return getattr(found, attribute)
  except AttributeError:
    raise UserError(f'{what} {name!r}: module {module} has no {attribute!r}') from None
