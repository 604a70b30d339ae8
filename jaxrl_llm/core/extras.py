"""Optional libraries, and the extras of this package that install them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.core.errors import UserError

EXTRAS: Mapping[str, str] = {
  'datasets': 'datasets',
  'gcsfs': 'cloud',
  'gymnasium': 'gymnasium',
  'math_verify': 'math',
  'mcp': 'mcp',
  'optuna': 'sweep',
  'reasoning_gym': 'reasoning-gym',
  's3fs': 'cloud',
  'textworld': 'textworld',
  'wandb': 'logging',
}
"""Extra in `pyproject.toml` that installs each optional library, keyed by the library's module."""


def check_library(module: str, where: str) -> None:
  """Raises UserError, with the pip command, if an optional library is not installed.

  Args:
    module: key of `EXTRAS`.
    where: flag or field whose value needs the library, for the error message.
  """
  if importlib.util.find_spec(module) is None:
    raise UserError(
      f"{where}: needs {module}, which is not installed; pip install 'jaxrl_llm[{EXTRAS[module]}]'"
    )


class _Deferred(types.ModuleType):
  """A module that is imported when one of its attributes is read or a submodule is imported.

  Other attributes with two underscores, such as `__file__`, do not count, because some libraries
  read those of everything in `sys.modules`. With `importlib.util.LazyLoader`, such a library would
  import the module.
  """

  def __getattr__(self, attribute: str) -> Any:
    # An import of a submodule reads `__path__`.
    if attribute.startswith('__') and attribute != '__path__':
      raise AttributeError(attribute)
    if sys.modules.get(self.__name__) is self:
      del sys.modules[self.__name__]
    return getattr(importlib.import_module(self.__name__), attribute)


def defer(module: str) -> None:
  """Delays the import of a top-level module until something in it is used. Does nothing if the
  module has been imported already or is not installed.
  """
  if module in sys.modules or (spec := importlib.util.find_spec(module)) is None:
    return
  deferred = sys.modules[module] = _Deferred(module)
  deferred.__spec__ = spec
