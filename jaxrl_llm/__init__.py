"""RL post-training of language models on JAX. The public names are those of `jaxrl_llm.api`; both modules have them."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
  # Deferred, because importing a module of the package must not import what the public names need.
  if name.startswith('_') or name == 'api':
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  try:
    return getattr(importlib.import_module(f'{__name__}.api'), name)
  except AttributeError:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}') from None


def __dir__() -> list[str]:
  return sorted({*globals(), *importlib.import_module(f'{__name__}.api').__all__})
