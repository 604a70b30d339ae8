"""Where rows come from: procedural tasks, files, Hugging Face datasets.

Every source yields, in a fixed order, one `Row` or one `Corrupt` for each thing it read: nothing is dropped here.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow
import pyarrow.parquet

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json

SOURCES: Mapping[str, str] = {
  'reasoning_gym:<dataset>': 'procedural tasks by name, with their verifiers',
  '<path>.jsonl': "one row a line: {prompt, answer}, {question, answer}, or the field's {data_source, prompt, ...}",
  '<path>.parquet': 'the same rows',
  'datasets:<directory or hub id>[#split]': 'a Hugging Face dataset with such rows',
}
"""How a source is named, and what it is."""

FORMS = "'reasoning_gym:<dataset>', a path ending .jsonl or .parquet, 'datasets:<directory or hub id>[#split]'"
MEDIA = ('media', 'images')
"""Columns of pictures, see `tasks.media`."""
_PARQUET_ROWS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row as its source has it, JSON only."""

  where: str
  """File and line, or dataset and index: for messages."""
  fields: Mapping[str, Json]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrupt:
  """Something in a source that is no row."""

  where: str
  reason: str


def read_rows(source: str, *, options: Mapping[str, Any], size: int | None, seed: int) -> Iterator[Row | Corrupt]:
  """The first `size` rows of a source (all of them for None).

  Args:
    source: one of `FORMS`.
    options: the source's own parameters: reasoning-gym's configuration, `datasets.load_dataset`'s arguments.
    size: items drawn from a procedural source, which has no end of its own; otherwise at most so many rows.
    seed: of a procedural source.

  Raises:
    UserError: the source does not exist, cannot be read, or does not take these options.
  """
  if size is not None and size < 1:
    raise UserError(f'taskset source {source!r}: size is {size}, wanted at least 1')
  scheme, _, rest = source.partition(':')
  if scheme == 'reasoning_gym':
    return _procedural_rows(rest, options, size, seed)
  if scheme == 'datasets':
    return itertools.islice(_dataset_rows(rest, options), size)
  path = pathlib.Path(source)
  readers = {'.jsonl': _jsonl_rows, '.parquet': _parquet_rows}
  if path.suffix not in readers:
    raise UserError(f'taskset source {source!r} is of no known form; wanted one of {FORMS}')
  if options:
    raise UserError(f'taskset source {source!r}: a file takes no options, got {sorted(options)}; remove them')
  if not path.is_file():
    raise UserError(missing_file(path))
  return itertools.islice(readers[path.suffix](path), size)


def directory(source: str) -> pathlib.Path | None:
  """Where paths in the source's rows begin; None for a source that is no file and no directory."""
  scheme, _, rest = source.partition(':')
  if scheme in ('reasoning_gym', 'datasets'):
    path = pathlib.Path(rest.partition('#')[0])
    return path if scheme == 'datasets' and path.is_dir() else None
  return pathlib.Path(source).parent


def missing_file(path: pathlib.Path) -> str:
  """One line about a file that is not there, with the nearest name in its directory."""
  if not path.parent.is_dir():
    return f'{path}: no such file, and its directory {path.parent} does not exist either'
  near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_file()], n=1, cutoff=0.5)
  return f'{path}: no such file' + (f'; did you mean {path.parent / near[0]}?' if near else '')


def _procedural_rows(name: str, options: Mapping[str, Any], size: int | None, seed: int) -> Iterator[Row]:
  """Items 0 … size-1 of a reasoning-gym dataset; item i draws from Random(seed + i), so items repeat."""
  from reasoning_gym.factory import DATASETS, create_dataset  # 1 s to import: only who uses it pays

  where = f'reasoning_gym:{name}'
  if name not in DATASETS:
    near = difflib.get_close_matches(name, DATASETS, n=1)
    raise UserError(f'{where}: no such dataset' + (f'; did you mean {near[0]!r}?' if near else f'; {sorted(DATASETS)}'))
  if size is None:
    raise UserError(f'{where}: a procedural source has no end; set size to the number of items to draw')
  known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {'seed', 'size'}
  for key in options:
    if key in ('seed', 'size'):
      raise UserError(f"{where}: options must not set {key!r}; set the taskset's own {key}")
    if key not in known:
      near = difflib.get_close_matches(key, known, n=1)
      hint = f'did you mean {near[0]!r}?' if near else f'it takes {sorted(known)}'
      raise UserError(f'{where}: unknown option {key!r}; {hint}')
  try:
    dataset = create_dataset(name, seed=seed, size=size, **options)
  except (AssertionError, TypeError, ValueError) as error:
    raise UserError(f'{where}: reasoning-gym refuses options {dict(options)}: {error}') from error
  _check_verifier(where, dataset)
  return (
    Row(where=f'{where}[{index}]', fields={'reasoning_gym': name, 'entry': _plain(dataset[index])})
    for index in range(size)
  )


def _check_verifier(where: str, dataset: Any) -> None:
  """Refuses datasets whose verifier judges an entry otherwise once it has been JSON (tuples become lists)."""
  entry = dataset[0]
  before = dataset.score_answer(entry['answer'], entry)
  after = dataset.score_answer(entry['answer'], _plain(entry))
  if before != after:
    raise UserError(
      f'{where}: its verifier gives its own answer {before} but {after} after the entry was stored as JSON, '
      'so it cannot judge stored tasks; choose another dataset'
    )


def _plain(value: Any) -> Any:
  """The value as JSON would give it back. Raises TypeError or ValueError for what JSON cannot hold."""
  return json.loads(json.dumps(value, allow_nan=False))


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is not JSON')


def _jsonl_rows(path: pathlib.Path) -> Iterator[Row | Corrupt]:
  with path.open('rb') as file:
    for number, line in enumerate(file, start=1):
      if not line.strip():
        continue
      where = f'{path}:{number}'
      try:
        fields = json.loads(line.decode(), parse_constant=_refuse_constant)
      except ValueError as error:  # covers UnicodeDecodeError and JSONDecodeError
        yield Corrupt(where=where, reason=str(error))
        continue
      if isinstance(fields, dict):
        yield Row(where=where, fields=fields)
      else:
        yield Corrupt(where=where, reason=f'holds a JSON {type(fields).__name__}, wanted an object')


def _parquet_rows(path: pathlib.Path) -> Iterator[Row | Corrupt]:
  try:
    file = pyarrow.parquet.ParquetFile(path)
    number = 0
    for batch in file.iter_batches(_PARQUET_ROWS):
      for fields in batch.to_pylist():
        number += 1
        yield _checked(f'{path} row {number}', fields)
  except (pyarrow.ArrowException, OSError) as error:
    raise UserError(f'{path}: not a readable Parquet file: {str(error).splitlines()[0]}') from error


def _dataset_rows(target: str, options: Mapping[str, Any]) -> Iterator[Row | Corrupt]:
  import datasets  # 2 s to import: only who uses it pays

  name, _, split = target.partition('#')
  where = f'datasets:{target}'
  try:
    if (pathlib.Path(name) / 'dataset_dict.json').is_file():
      loaded = datasets.load_from_disk(name, **options)
      loaded = loaded[split] if split else loaded
    elif (pathlib.Path(name) / 'state.json').is_file():
      if split:
        raise ValueError(f'it was saved without splits, so {split!r} names nothing')
      loaded = datasets.load_from_disk(name, **options)
    else:
      loaded = datasets.load_dataset(name, split=split or None, **options)
  except (OSError, ValueError, KeyError, TypeError) as error:  # datasets' own errors derive from these
    reason = (str(error).splitlines() or [''])[0]
    raise UserError(f'{where}: cannot be loaded: {type(error).__name__}: {reason}') from error
  if isinstance(loaded, Mapping):
    if len(loaded) != 1 or split:
      raise UserError(f'{where}: has splits {sorted(loaded)}; name one as datasets:{name}#<split>')
    loaded = next(iter(loaded.values()))
  return (_checked(f'{where} row {index}', fields) for index, fields in enumerate(loaded))


def _with_text(items: Any) -> Any:
  """A column of media, whose bytes Parquet has as they are, in the form of JSON: base64."""
  if not isinstance(items, list):
    return items
  as_text = lambda value: base64.b64encode(value).decode() if isinstance(value, bytes) else value
  return [{k: as_text(v) for k, v in item.items()} if isinstance(item, dict) else item for item in items]


def _checked(where: str, fields: Mapping[str, Any]) -> Row | Corrupt:
  try:
    return Row(where=where, fields=_plain({k: _with_text(v) if k in MEDIA else v for k, v in fields.items()}))
  except (TypeError, ValueError) as error:
    return Corrupt(where=where, reason=str(error))
