"""Drafts of configurations (values keyed by dotted names), and their conversion to a `Config`."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.parquet

from jaxrl_llm.app.composition.stages import build_algorithm
from jaxrl_llm.app.importers.table import Import, Unreadable, integer, number
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.annotations import field_types
from jaxrl_llm.config.values import default_json, from_json
from jaxrl_llm.core.files import check_regular
from jaxrl_llm.core.types import Json
from jaxrl_llm.learner.algorithm import Setting
from jaxrl_llm.learner.catalogue import ALGORITHMS
from jaxrl_llm.models.spec import PROJECTIONS

UNKNOWN_STEPS = 100
"""Number of steps to write if the number of training rows is unknown."""
_MODULES = {
  'q_proj': 'query',
  'k_proj': 'key',
  'v_proj': 'value',
  'o_proj': 'output',
  'gate_proj': 'gate',
  'up_proj': 'up',
  'down_proj': 'down',
}
"""Names of projections in this package, keyed by PyTorch module name."""


def base_name(name: Json) -> str:
  """Converts a text to a valid name of a run, taskset or scorer."""
  return re.sub(r'[^A-Za-z0-9_.-]+', '_', str(name)).strip('_.-')[:80] or 'imported'


def taskset_names(sources: Sequence[str]) -> list[str]:
  """Returns a distinct taskset name for each path: the file's name without its ending. If several
  files have the same name, the name of their directory is put before it; if the result is still not
  unique, a number is appended.
  """
  stems = [base_name(pathlib.PurePath(source).stem) for source in sources]
  files = collections.Counter(stems)
  counts: collections.Counter[str] = collections.Counter()
  names: dict[str, None] = {}
  for stem, source in zip(stems, sources):
    name = stem
    if files[stem] > 1:
      name = base_name(f'{pathlib.PurePath(source).parent.name}_{stem}')
    numbered = name
    while numbered in names:
      counts[name] += 1
      numbered = f'{name}_{counts[name] + 1}'
    names[numbered] = None
  return list(names)


def lora_targets(value: Json) -> list[str]:
  """Converts PyTorch module names to this package's names of projections."""
  names = value.replace(',', ' ').split() if isinstance(value, str) else value
  if names in (['all-linear'], 'all-linear'):
    return list(PROJECTIONS)
  if not isinstance(names, list) or not names or not set(map(str, names)) <= set(_MODULES):
    raise Unreadable(f'wanted all-linear, or some of {", ".join(_MODULES)}')
  return [ours for theirs, ours in _MODULES.items() if theirs in names]


def row_count(source: str) -> int | None:
  """Returns the number of rows of a Parquet file; None if `source` cannot be read as one, for
  example because the file is on another machine.
  """
  try:
    check_regular(source)
    return pyarrow.parquet.read_metadata(source).num_rows
  except (OSError, ValueError, pyarrow.ArrowException):
    return None


def step_count(
  keys: Import, steps_key: str, epochs_key: str, *, batch: int, rows: int | None
) -> int:
  """Returns the number of steps of the stage: as given, or computed from epochs and rows.

  If the number of rows is unknown, reports the epochs as not supported and returns UNKNOWN_STEPS.

  Args:
    steps_key: key of the number of steps.
    epochs_key: key of the number of epochs.
    batch: number of rows per step.
    rows: number of training rows. If None, the rows in the files of the training tasksets are
      counted.
  """
  steps = keys.read(steps_key, integer)
  if steps is not None and steps > 0:
    keys.spare(epochs_key, f'{steps_key} is set')
    return steps
  keys.spare(steps_key, f'{epochs_key} determines the number of steps')
  if rows is None:
    counts = [row_count(t['source']) for t in keys.draft['tasksets'] if _trains(keys, t['name'])]
    rows = None if None in counts or not counts else sum(counts)
  epochs = keys.read(epochs_key, number)
  if rows is not None:
    return max(1, int(epochs * (rows // batch)) if rows >= batch else int(epochs))
  keys.comments['StageConfig', 'steps'] = (
    f'{epochs:g} epochs are {epochs:g} * (rows // {batch}) steps'
  )
  keys.refuse(
    epochs_key,
    f'the number of training rows is unknown: pass --rows=N, or set stages.NAME.steps to '
    f'{epochs:g} * (rows // {batch}); {UNKNOWN_STEPS} is written instead',
  )
  return UNKNOWN_STEPS


def _trains(keys: Import, name: str) -> bool:
  return name in keys.draft.get('stages.NAME.source.tasksets', ())


def assemble(draft: Mapping[str, Json]) -> Config:
  """Builds a configuration with one stage from a draft. Raises UserError for contradictory
  values.
  """
  tree: dict[str, Any] = {'learner': {}}
  options: dict[str, Json] = {}
  roots = field_types(Config)
  for name, value in draft.items():
    first, *rest = name.split('.')
    if first not in roots:
      options[name] = value
      continue
    place = tree
    for part in (first, *rest)[:-1]:
      place = place.setdefault(part, {})
    place[(first, *rest)[-1]] = value
  stage = tree.pop('stages')['NAME']
  algorithm = stage['algorithm']['name']
  defaults = default_json(ALGORITHMS[algorithm][0])
  stage['algorithm']['options'] = {
    key: value for key, value in options.items() if key not in defaults or defaults[key] != value
  }
  stage['name'] = algorithm
  for key in ('tasksets', 'examples', 'evaluation', 'preferences'):
    tree[key] = [_set(item) for item in tree.get(key, ())]
  if 'scorers' in tree.get('rewards', {}):
    tree['rewards']['scorers'] = [_set(item) for item in tree['rewards']['scorers']]
  config = from_json({**tree, 'stages': [stage]}, Config, 'imported configuration')
  build_algorithm(
    config.stages[0].algorithm, Setting(max_response_length=config.rollout.max_response_length)
  )
  return config


def _set(item: Mapping[str, Json]) -> dict[str, Json]:
  return {key: value for key, value in item.items() if value is not None}
