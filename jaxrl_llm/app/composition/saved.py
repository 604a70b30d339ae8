"""Reads the config.json of a run, and converts it to the current form if an earlier version wrote
it.
"""

from __future__ import annotations

import pathlib
from typing import Any

from jaxrl_llm.app.schema import StageConfig
from jaxrl_llm.app.sources import Demonstrations, Pairs, Recorded, Rollouts
from jaxrl_llm.config.annotations import field_types
from jaxrl_llm.config.moved import moved_fields
from jaxrl_llm.config.values import TAG
from jaxrl_llm.core.files import parse_json

_SOURCES = {'demonstrations': Demonstrations, 'preferences': Pairs, 'recorded': Recorded}
"""Fields of a stage that selected its data in earlier versions, with the `source` classes that
replaced them. Stages without any of these fields trained on rollouts.
"""


def read_saved(file: pathlib.Path) -> Any:
  """Returns the content of a run's config.json in the form that `values.to_json` writes now. Values
  are not checked.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file does not contain JSON.
  """
  return with_sources(parse_json(file.read_text()))


def with_sources(saved: Any) -> Any:
  """Returns a saved configuration in which each stage has a `source`, as in the current version."""
  if isinstance(saved, dict) and isinstance(saved.get('stages'), list):
    return {**saved, 'stages': [_with_source(stage) for stage in saved['stages']]}
  return saved


def _with_source(stage: Any) -> Any:
  """Adds a `source` to a saved stage that has none. The stage's former fields move into the source.
  Former fields that this kind of source lacks are dropped.
  """
  if not isinstance(stage, dict) or 'source' in stage:
    return stage
  chosen = next((name for name in _SOURCES if stage.get(name) is not None), None)
  kind, inner = (_SOURCES[chosen], stage[chosen]) if chosen else (Rollouts, {})
  if not isinstance(inner, dict):
    return stage
  former = moved_fields(StageConfig)
  moved = {name: stage[name] for name in field_types(kind) if name in former and name in stage}
  if isinstance(experts := moved.get('experts'), dict) and isinstance(
    experts.get('demonstrations'), dict
  ):
    moved['experts'] = {**experts, **experts['demonstrations']}
    del moved['experts']['demonstrations']
  kept = {name: value for name, value in stage.items() if name not in former}
  return {**kept, 'source': {TAG: kind.__name__, **inner, **moved}}
