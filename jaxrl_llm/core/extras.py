"""Optional libraries, and the extras of this package that install them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

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
