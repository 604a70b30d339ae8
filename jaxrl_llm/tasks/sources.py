"""Sources of rows: procedural tasks, files and Hugging Face datasets.

A source yields one `SourceRow` or `Corrupt` for each of its items, in a fixed order. The fields of
a row are JSON values. In rows of files and datasets, their nesting depth is limited.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet
from absl import logging

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.extras import check_library, defer
from jaxrl_llm.core.files import (
  check_depth,
  check_file_depth,
  check_regular,
  parse_json,
  path_inside,
  read_bytes,
)
from jaxrl_llm.core.types import Json

T = TypeVar('T')

SOURCES: Mapping[str, str] = {
  'reasoning_gym:<dataset>': 'procedural tasks by name, with their verifiers',
  '<path>.jsonl': (
    "one row per line: {prompt, answer}, {question, answer}, or verl's {data_source, prompt, ...}"
  ),
  '<path>.parquet': 'the same rows',
  'datasets:<directory or hub id>[#split]': 'a Hugging Face dataset with such rows',
}
"""Description of each form of source name, keyed by form."""

FORMS = (
  "'reasoning_gym:<dataset>', a path ending in .jsonl or .parquet, 'datasets:<directory or hub "
  "id>[#split]'"
)
MEDIA = ('media', 'images')
"""Names of the columns that may contain images (see `tasks.media`)."""
_PARQUET_ROWS = 1024
_CORRUPT_SHOWN = 20
"""Maximum number of corrupt rows that are logged per reader."""
MAX_ROW_BYTES = 64 << 20
"""Maximum length of a line in a .jsonl file, in bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceRow:
  """A row of a source, as JSON values."""

  where: str
  """Location of the row, for error messages: file and line, or dataset and index."""
  fields: Mapping[str, Json]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrupt:
  """An item of a source that is not a valid row."""

  where: str
  reason: str
  """Reason why the item is not a valid row, in one line."""

  def __post_init__(self):
    # The reason may quote the row's contents, which may have several lines.
    object.__setattr__(self, 'reason', one_line(self.reason))


def read_rows(
  source: str, *, options: Mapping[str, Any], size: int | None, seed: int
) -> Iterator[SourceRow | Corrupt]:
  """Reads the first `size` rows of a source, or all rows if `size` is None.

  Args:
    source: name in one of the forms in `SOURCES`.
    options: parameters of the source: the configuration of a reasoning-gym dataset, or arguments of
      `datasets.load_dataset`.
    size: number of items to generate with a procedural source, which is endless. For other sources,
      the maximum number of rows.
    seed: seed of a procedural source.

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
    raise UserError(f'taskset source {source!r} has an unknown form; wanted one of {FORMS}')
  if options:
    raise UserError(
      f'taskset source {source!r}: a file takes no options, got {sorted(options)}; remove them'
    )
  try:
    check_regular(path)
  except FileNotFoundError:
    raise UserError(missing_file(path)) from None
  except (OSError, ValueError) as error:
    raise UserError(f'taskset source {source!r} cannot be read: {one_line(error)}') from None
  return itertools.islice(readers[path.suffix](path), size)


def report_corrupt(corrupt: Corrupt, reader: str, on_corrupt: str, count: int) -> None:
  """Reports a corrupt row: raises UserError if `on_corrupt` is 'fail'. Otherwise, logs the row if
  `count` is at most `_CORRUPT_SHOWN`.

  Args:
    reader: name of the reader for messages, such as 'taskset train'.
    count: number of corrupt rows that this reader has found so far, including this one.
  """
  if on_corrupt == 'fail':
    raise UserError(
      f"{corrupt.where}: {corrupt.reason} ({reader}; on_corrupt='skip' skips such rows)"
    )
  if count <= _CORRUPT_SHOWN:
    logging.warning('%s: skipped %s: %s', reader, corrupt.where, corrupt.reason)


def converted(
  rows: Iterable[SourceRow | Corrupt],
  convert: Callable[[SourceRow], T],
  counts: dict[str, int],
  *,
  reader: str,
  on_corrupt: str,
) -> Iterator[tuple[str, T]]:
  """Converts rows. Yields (location of the row, converted value) for each row that is not corrupt.

  Args:
    convert: converts a row, or raises ValueError if the row is corrupt.
    counts: numbers of rows `read` and `corrupt`, which are increased here. `read` includes the row
      being converted.
    reader: name of the reader for messages, such as 'taskset train'.

  Raises:
    UserError: a row is corrupt and `on_corrupt` is 'fail'.
  """
  for row in rows:
    counts['read'] += 1
    try:
      if isinstance(row, Corrupt):
        raise ValueError(row.reason)
      check_text(row.fields)
      value = convert(row)
    except ValueError as error:
      counts['corrupt'] += 1
      corrupt = Corrupt(where=row.where, reason=str(error))
      report_corrupt(corrupt, reader, on_corrupt, counts['corrupt'])
    else:
      yield row.where, value


def listed(counts: Mapping[str, int]) -> str:
  """Returns the counts of a reader in one line. Counts of 0 are left out, except `read` and
  `kept`.
  """
  return ', '.join(
    f'{name} {count}' for name, count in counts.items() if count or name in ('read', 'kept')
  )


def directory(source: str) -> pathlib.Path | None:
  """Returns the directory to which paths in rows are relative, or None if the source has none."""
  scheme, _, rest = source.partition(':')
  if scheme in ('reasoning_gym', 'datasets'):
    path = pathlib.Path(rest.partition('#')[0])
    return path if scheme == 'datasets' and path.is_dir() else None
  return pathlib.Path(source).parent


def missing_file(path: pathlib.Path) -> str:
  """Describes a missing file in one line, and suggests the most similar name in its directory."""
  if not path.parent.is_dir():
    return f'{path}: no such file, and its directory {path.parent} does not exist either'
  near = difflib.get_close_matches(
    path.name, [p.name for p in path.parent.iterdir() if p.is_file()], n=1, cutoff=0.5
  )
  return f'{path}: no such file' + (f'; did you mean {path.parent / near[0]}?' if near else '')


def _procedural_rows(
  name: str, options: Mapping[str, Any], size: int | None, seed: int
) -> Iterator[SourceRow]:
  """Yields items 0 to size - 1 of a reasoning-gym dataset. Item i is generated with Random(seed +
  i), so a second reading yields the same items.
  """
  where = f'reasoning_gym:{name}'
  check_library('reasoning_gym', where)
  defer('cellpylib')  # As in `rewards/scorers/verifier/scorer.py`.
  # This import takes a second, so it is delayed until it is needed.
  from reasoning_gym.factory import DATASETS, create_dataset

  if name not in DATASETS:
    near = difflib.get_close_matches(name, DATASETS, n=1)
    raise UserError(
      f'{where}: no such dataset'
      + (f'; did you mean {near[0]!r}?' if near else f'; {sorted(DATASETS)}')
    )
  if size is None:
    raise UserError(
      f'{where}: a procedural source is endless; set size to the number of items to generate'
    )
  parameters = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {'seed', 'size'}
  for key in options:
    if key in ('seed', 'size'):
      raise UserError(f"{where}: options must not set {key!r}; set the taskset's own {key}")
    if key not in parameters:
      near = difflib.get_close_matches(key, parameters, n=1)
      hint = f'did you mean {near[0]!r}?' if near else f'it takes {sorted(parameters)}'
      raise UserError(f'{where}: unknown option {key!r}; {hint}')
  try:
    dataset = create_dataset(name, seed=seed, size=size, **options)
  except (AssertionError, TypeError, ValueError) as error:
    raise UserError(f'{where}: reasoning-gym refuses options {dict(options)}: {error}') from error
  _check_verifier(where, dataset)
  return (
    SourceRow(
      where=f'{where}[{index}]', fields={'reasoning_gym': name, 'entry': _plain(dataset[index])}
    )
    for index in range(size)
  )


def _check_verifier(where: str, dataset: Any) -> None:
  """Raises UserError if the dataset's verifier scores the answer of the first entry differently
  after the entry was stored as JSON, which turns tuples into lists.
  """
  entry = dataset[0]
  before = dataset.score_answer(entry['answer'], entry)
  after = dataset.score_answer(entry['answer'], _plain(entry))
  if before != after:
    raise UserError(
      f"{where}: its verifier scores an entry's own answer {before}, but {after} once the entry "
      'was stored as JSON, so it cannot judge stored tasks; choose another dataset'
    )


def _plain(value: Any) -> Any:
  """Returns the value after a JSON round trip. Raises TypeError or ValueError if JSON cannot
  represent it.
  """
  return json.loads(json.dumps(value, allow_nan=False))


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is not JSON')


def _finite(text: str) -> float:
  number = float(text)
  if not math.isfinite(number):
    raise ValueError(f'{text} is beyond the range of a float')
  return number


def _jsonl_rows(path: pathlib.Path) -> Iterator[SourceRow | Corrupt]:
  try:
    file = path.open('rb')
  except OSError as error:
    raise UserError(f'{path}: cannot be read ({error.strerror})') from None
  with file:
    for number in itertools.count(1):
      line = file.readline(MAX_ROW_BYTES)
      if not line:
        return
      where = f'{path}:{number}'
      if len(line) == MAX_ROW_BYTES and not line.endswith(b'\n'):
        while (rest := file.readline(MAX_ROW_BYTES)) and not rest.endswith(b'\n'):
          pass
        yield Corrupt(
          where=where, reason=f'the line has {MAX_ROW_BYTES:,} bytes or more; wanted a shorter row'
        )
      elif line.strip():
        yield _parsed(where, line)


def _parsed(where: str, line: bytes) -> SourceRow | Corrupt:
  try:
    fields = parse_json(line.decode(), parse_constant=_refuse_constant, parse_float=_finite)
    if not isinstance(fields, dict):
      raise ValueError(f'holds a JSON {type(fields).__name__}, wanted an object')
    return _row(where, fields)
  except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors.
    return Corrupt(where=where, reason=str(error))


def _row(where: str, fields: dict[str, Json]) -> SourceRow:
  """Creates a row. Raises ValueError if it has the field 'reasoning_gym' without an entry of a
  reasoning-gym dataset.
  """
  entry = fields.get('entry')
  if 'reasoning_gym' in fields and not (
    isinstance(entry, dict) and isinstance(entry.get('metadata'), dict)
  ):
    raise ValueError(
      "has 'reasoning_gym' without an entry {question, answer, metadata}; wanted both or neither"
    )
  return SourceRow(where=where, fields=fields)


def _parquet_rows(path: pathlib.Path) -> Iterator[SourceRow | Corrupt]:
  try:
    file = pyarrow.parquet.ParquetFile(path)
    number = 0
    for batch in file.iter_batches(_PARQUET_ROWS):
      for fields in batch.to_pylist():
        number += 1
        yield _checked(f'{path} row {number}', fields)
  except (pyarrow.ArrowException, OSError, RecursionError, UnicodeDecodeError) as error:
    raise UserError(f'{path}: not a readable Parquet file: {one_line(error)}') from error


def _dataset_rows(target: str, options: Mapping[str, Any]) -> Iterator[SourceRow | Corrupt]:
  where = f'datasets:{target}'
  check_library('datasets', where)
  import datasets  # Imported here, because the import takes 2 s.

  name, _, split = target.partition('#')
  try:
    _check_saved(pathlib.Path(name))
    if (pathlib.Path(name) / 'dataset_dict.json').is_file():
      loaded = _load_saved(name, split, options)
    elif (pathlib.Path(name) / 'state.json').is_file():
      if split:
        raise ValueError(f'it was saved without splits, so it has no split {split!r}')
      loaded = _load_saved(name, '', options)
    else:
      _check_json(datasets.load_dataset_builder(name, **options))
      loaded = datasets.load_dataset(name, split=split or None, **options)
  except Exception as error:  # A damaged file can make the library raise anything.
    # DatasetGenerationError only reports that an error occurred. Its cause contains the error
    # itself.
    cause = (
      isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__
    ) or error
    reason = (str(cause).splitlines() or [''])[0]
    raise UserError(
      f'{where}: cannot be loaded: {type(cause).__name__}: {one_line(reason)}'
    ) from error
  if isinstance(loaded, Mapping):
    if len(loaded) != 1 or split:
      raise UserError(f'{where}: has splits {sorted(loaded)}; name one as datasets:{name}#<split>')
    loaded = next(iter(loaded.values()))
  return _loaded_rows(where, loaded)


def _check_json(builder: Any) -> None:
  """Raises ValueError if a local JSON file for the builder is nested too deeply. Deep nesting would
  crash this process inside pyarrow.
  """
  listed = (builder.config.data_files or {}) if builder.name == 'json' else {}
  for path in itertools.chain.from_iterable(listed.values()):
    if os.path.isfile(path):
      check_file_depth(path)


def _load_saved(name: str, split: str, options: Mapping[str, Any]) -> Any:
  """Loads a saved dataset or one split of it.

  Raises ArrowInvalid for a damaged file, because reading it could access memory out of bounds. May
  also raise the library's own errors.
  """
  import datasets

  loaded = datasets.load_from_disk(name, **options)
  loaded = loaded[split] if split else loaded
  for part in loaded.values() if isinstance(loaded, Mapping) else (loaded,):
    part.data.table.validate(full=True)
  return loaded


def _check_saved(directory: pathlib.Path) -> None:
  """Raises ValueError if a saved dataset refers to a path that is not a regular file in its
  directory.
  """
  parts = [directory]
  if (directory / 'dataset_dict.json').is_file():
    parts = [
      path_inside(directory, split)
      for split in _read_listed(directory / 'dataset_dict.json', 'splits')
    ]
  for part in parts:
    for file in (
      _read_listed(part / 'state.json', '_data_files') if (part / 'state.json').is_file() else ()
    ):
      if not isinstance(file, dict) or not isinstance(file.get('filename'), str):
        raise ValueError(
          f'{part / "state.json"}: _data_files has {one_line(file, 100)}, wanted {{filename}}'
        )
      check_regular(path_inside(part, file['filename']))


def _read_listed(path: pathlib.Path, name: str) -> list[Json]:
  value = parse_json(read_bytes(path, MAX_ROW_BYTES).decode())
  listed = value.get(name) if isinstance(value, dict) else None
  if not isinstance(listed, list) or (
    name == 'splits' and not all(isinstance(entry, str) for entry in listed)
  ):
    raise ValueError(f'{path}: has no list {name}')
  return listed


def _loaded_rows(where: str, loaded: Any) -> Iterator[SourceRow | Corrupt]:
  rows = iter(loaded)
  if loaded.features and any(_names_files(field.type) for field in loaded.features.arrow_schema):
    # Images are not decoded here: to decode one, the library would open any file that a row names.
    tables = loaded.with_format('arrow').iter(_PARQUET_ROWS)
    rows = (fields for table in tables for fields in table.to_pylist())
  try:
    for index, fields in enumerate(rows):
      yield _checked(f'{where} row {index}', fields)
  except (pyarrow.ArrowException, OSError, RecursionError, UnicodeDecodeError) as error:
    raise UserError(
      f'{where}: cannot be read: {type(error).__name__}: {one_line(error)}'
    ) from error


def _names_files(kind: pyarrow.DataType) -> bool:
  """Returns whether a data type contains media that the library `datasets` would decode: images,
  audio or video.
  """
  if pyarrow.types.is_struct(kind):
    return {'bytes', 'path'} <= {field.name for field in kind} or any(
      _names_files(field.type) for field in kind
    )
  is_list = (
    pyarrow.types.is_list(kind)
    or pyarrow.types.is_large_list(kind)
    or pyarrow.types.is_fixed_size_list(kind)
  )
  return is_list and _names_files(kind.value_type)


def _with_text(items: Any) -> Any:
  """Converts the raw bytes in a media column to base64 text, so that rows are JSON."""
  if not isinstance(items, list):
    return items

  def as_text(value):
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value

  return [
    {k: as_text(v) for k, v in item.items()} if isinstance(item, dict) else item for item in items
  ]


def _checked(where: str, fields: Mapping[str, Any]) -> SourceRow | Corrupt:
  try:
    plain = _plain({k: _with_text(v) if k in MEDIA else v for k, v in fields.items()})
    check_depth(plain)
    return _row(where, plain)
  except RecursionError:
    return Corrupt(where=where, reason='nested too deep to be JSON')
  except (TypeError, ValueError) as error:
    return Corrupt(where=where, reason=str(error))


def check_text(fields: Mapping[str, Json]) -> None:
  """Raises ValueError if a row has text that UTF-8 cannot encode, such as a lone surrogate."""
  try:
    json.dumps(fields, ensure_ascii=False).encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'holds text that UTF-8 cannot encode, {error.object[error.start]!r}: {error.reason}; remove '
      'the lone surrogate'
    ) from None
