"""Locates the initial weights that a configuration names."""

from __future__ import annotations

import pathlib

from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime.writers import METRICS_FILE
from jaxrl_llm.weights.hf import resolve


def checkpoint_directory(config: Config) -> pathlib.Path | None:
  """Returns the directory of the policy's initial weights; None for random weights."""
  return None if config.policy.init_from is None else model_directory(config.policy.init_from)


def base_of(config: Config) -> str | None:
  """Returns the base model that exported adapters belong to: a directory or hub id, or None for
  random weights.
  """
  source = config.policy.init_from
  if source is None or not pathlib.Path(source).expanduser().is_dir():
    return source
  return str(model_directory(source).absolute())


def model_directory(source: str) -> pathlib.Path:
  """Resolves a directory, hub id or run directory to a model directory. The model directory of a
  run is the run's export (`hf/`). Raises UserError if the run is unfinished.
  """
  directory = resolve(source)
  if (directory / 'hf' / 'config.json').exists():
    return directory / 'hf'
  if (directory / METRICS_FILE).exists():
    raise UserError(f'{source}: an unfinished run, which has no export (hf/); finish it first')
  return directory
