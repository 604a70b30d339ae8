"""Values that the program chooses for fields that the configuration sets to 'auto': data types,
whether to scan over layers, and what a training step keeps in memory.

Invariant: a run keeps the values that were chosen at its start. A resumed run reads them from
config.json. On CPUs, and for small models, the values are always `SMALL`, regardless of the
available memory. If `learner.memory_bytes` is set, a memory plan determines the fields in `PLANNED`
instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.app.schema import AUTO, Config
from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.types import Json
from jaxrl_llm.models.flops import matmul_params
from jaxrl_llm.models.heads import is_tied
from jaxrl_llm.models.spec import ModelSpec

PLANNED = ('remat', 'chunks_per_rank', 'offload', 'logits_budget_bytes')
"""Names of the fields that a memory plan determines (`app.dry_run.memory_plan`)."""
_SIZED = {
  'dtype': {'cpu': 'float32', 'accelerator': 'bfloat16'},
  'scan_layers': {'cpu': False, 'accelerator': True},
  'sequence_shards': {'cpu': 'balanced', 'accelerator': 'balanced'},
}
SMALL: Mapping[str, Json] = {
  'dtype': 'float32',
  'scan_layers': False,
  'sequence_shards': 'balanced',
  'remat': 'none',
  'chunks_per_rank': 8,
  'offload': False,
  'logits_budget_bytes': 256 << 20,
}
"""Values for CPUs and for small models, keyed by the name of the field."""
_SPARING: Mapping[str, Json] = {
  'remat': 'full',
  'chunks_per_rank': 1,
  'offload': False,
  'logits_budget_bytes': SMALL['logits_budget_bytes'],
}
"""Values of the fields in `PLANNED` for a large model if no memory plan is made, for example if
the memory of the devices is unknown. They need little memory.
"""
_LOGITS_SHARE, _MOST_LOGITS = 16, 2 << 30
"""Logits may take a sixteenth of a device's memory, but at most 2 GiB. With Qwen2.5's vocabulary,
these are 1,700 tokens on a TPU v5e and 3,500 tokens on an H100. Each chunk of logits reads and
writes the gradient of the whole head once. For chunks of at least 1,000 tokens, this takes less
than a third of the time of their matrix products on either device.
"""
_HALVINGS = 4
"""Number of times that a memory plan may halve the memory of the logits."""
SMALL_PARAMETERS = 50_000_000
"""Number of parameters below which a model is small. Such a model and its optimizer take less than
a gigabyte.
"""
_PATHS = (
  *(('policy', name) for name in ('dtype', 'scan_layers', 'sequence_shards', 'remat')),
  ('learner', 'chunks_per_rank'),
  ('learner', 'logits_budget_bytes'),
  ('learner', 'optimizer', 'offload'),
  ('stages', '*', 'optimizer', 'offload'),
  ('stages', '*', 'critic', 'optimizer', 'offload'),
)
"""Paths of the configuration's fields that accept 'auto' and always get a value. '*' matches every
element of a tuple.
"""
ATTENTION = 'policy.attention'
"""Dotted key of the field that gets a value only if a fused kernel is chosen. Otherwise the choice
depends on the length of the rows, so the field keeps the value 'auto'.
"""


def open_fields(config: Config) -> tuple[str, ...]:
  """Returns the dotted keys of the fields that are 'auto'. `policy.attention` is never included,
  because it may remain 'auto' (see `ATTENTION`).
  """
  return tuple(
    key for key, value in values_of(to_json(config)).items() if value == AUTO and key != ATTENTION
  )


def values_of(written: Any) -> dict[str, Json]:
  """Returns the values, keyed by dotted key, of the fields that accept 'auto' in a configuration
  that is given as JSON.
  """
  return {'.'.join(map(str, path)): value for path, value in _fields(written)}


def with_recorded(config: Config, run: pathlib.Path | None) -> Config:
  """Returns the configuration with the values that were chosen when the run in directory `run`
  started. Returns it unchanged if `run` is None (a new run), or if config.json cannot be read;
  `Workdir.adopt` reports this error.
  """
  written: dict[str, Json] = {}
  if run is not None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
      written = values_of(parse_json((run / 'config.json').read_text()))
  return with_values(config, written)


def with_sized(
  config: Config, *, platform: str, spec: ModelSpec | None, plans: bool = True
) -> Config:
  """Returns the configuration with values for those 'auto' fields that the platform and the size of
  the model determine. The fields in `PLANNED` may remain open.

  Args:
    platform: platform of the devices that train.
    spec: architecture of the policy; None if it is not yet known. Values are then filled in only
      on CPUs.
    plans: whether a memory plan will determine the fields that remain open. If False, they get
      values with which large models usually fit.
  """
  limited, on_cpu = config.learner.memory_bytes is not None and plans, platform == 'cpu'
  small = on_cpu or (spec is not None and parameters(spec) < SMALL_PARAMETERS)
  if not small and spec is None:
    return config
  kind = 'cpu' if small else 'accelerator'
  values = {name: of[kind] for name, of in _SIZED.items()}
  if not limited and small:
    values |= {name: SMALL[name] for name in PLANNED}
  elif not plans:
    values |= _SPARING
  return with_named(config, values)


def logits_budget(memory: int) -> int:
  """Returns the maximum size in bytes of the logits on a device with `memory` bytes of memory."""
  return min(_MOST_LOGITS, max(SMALL['logits_budget_bytes'], memory // _LOGITS_SHARE))


def logits_budgets(memory: int) -> tuple[int, ...]:
  """Returns the values of `learner.logits_budget_bytes` among which a memory plan chooses, from the
  largest to the smallest. The largest is `logits_budget`.

  Args:
    memory: memory of a device in bytes.
  """
  most = logits_budget(memory)
  smaller = (min(most, memory // _LOGITS_SHARE) >> n for n in range(1, _HALVINGS + 1))
  return (most, *(budget for budget in smaller if budget > 0))


def with_named(config: Config, values: Mapping[str, Json]) -> Config:
  """Returns the configuration with values for its 'auto' fields.

  Args:
    values: values keyed by field name, such as 'remat'. Fields without a value stay 'auto'.
  """
  names = {key: key.rpartition('.')[2] for key in open_fields(config)}
  return with_values(config, {key: values[name] for key, name in names.items() if name in values})


def with_values(config: Config, values: Mapping[str, Json]) -> Config:
  """Returns the configuration with values for its 'auto' fields.

  Args:
    values: values keyed by dotted key, such as 'policy.remat'. Values for fields that are not
      'auto' are ignored.
  """
  written = to_json(config)
  chosen = {
    key: values[key]
    for key, value in values_of(written).items()
    if value == AUTO and values.get(key, AUTO) != AUTO
  }
  if not chosen:
    return config
  for key, value in chosen.items():
    *parents, name = key.split('.')
    place: Any = written
    for parent in parents:
      place = place[int(parent) if isinstance(place, list) else parent]
    place[name] = value
  # Parse the configuration to check the values, which may come from a file. Take only these values
  # from the parsed configuration, because the conversion to JSON turns tuples in options into
  # lists.
  checked = from_json(json.loads(json.dumps(written)), Config)
  for key in chosen:
    path = key.split('.')
    config = _with_value(config, path, _value_at(checked, path))
  return config


def _value_at(node: Any, path: Sequence[str]) -> Any:
  """Returns the value at `path` in a configuration. Names in the path select fields, and numbers
  select elements of tuples.
  """
  for name in path:
    node = node[int(name)] if isinstance(node, tuple) else getattr(node, name)
  return node


def _with_value(node: Any, path: Sequence[str], value: Any) -> Any:
  """Returns a copy of `node`, a configuration or a part of one, in which `value` replaces the value
  at `path`.
  """
  if not path:
    return value
  name, *rest = path
  if isinstance(node, tuple):
    index = int(name)
    return (*node[:index], _with_value(node[index], rest, value), *node[index + 1 :])
  return dataclasses.replace(node, **{name: _with_value(getattr(node, name), rest, value)})


def parameters(spec: ModelSpec) -> int:
  """Returns the number of a model's parameters in kernels and embeddings. These are nearly all
  parameters of the model.
  """
  return matmul_params(spec) + (0 if is_tied(spec) else spec.vocab_size * spec.hidden_size)


def _fields(written: Any) -> Iterator[tuple[tuple[str | int, ...], Json]]:
  """Yields (path, value) for each field that accepts 'auto' (`_PATHS` and `ATTENTION`) in a
  configuration that is given as JSON.
  """

  def within(node: Any, path: tuple[str, ...], at: tuple[str | int, ...]):
    if not path:
      yield at, node
    elif path[0] == '*':
      for index, element in enumerate(node):
        yield from within(element, path[1:], (*at, index))
    elif isinstance(node, dict) and path[0] in node:
      yield from within(node[path[0]], path[1:], (*at, path[0]))

  for path in (*_PATHS, tuple(ATTENTION.split('.'))):
    yield from within(written, path, ())
