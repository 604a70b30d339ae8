"""RL post-training of language models on JAX. Exports the public names of `jaxrl_llm.api`."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
  # The import is deferred, because importing a module of this package must not import the
  # dependencies of all public names.
  if name == 'api' or (name.startswith('__') and name != '__all__'):
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  public = importlib.import_module(f'{__name__}.api')
  if name == '__all__':
    return public.__all__
  if name not in public.__all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(public, name)


def __dir__() -> list[str]:
  return sorted({*globals(), *importlib.import_module(f'{__name__}.api').__all__})
