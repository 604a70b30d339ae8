"""The logs of a run: metrics.jsonl, rollouts/ and evals/.

Invariant: the logs of a resumed run have the same rows as the logs of an uninterrupted run, apart
from values that are not reproducible, such as times. When a run is resumed, metrics.jsonl is
truncated to the length in bytes that the commit recorded. Each rollouts or evals file belongs to
one step and is replaced atomically. Files of steps after the commit are removed. `runtime.log`
copies the rows of metrics.jsonl to other places.

The logs are always valid JSON. In metrics.jsonl, a value that is NaN or infinite is written as
null, and the additional key `<key>/nonfinite` contains 'nan', 'inf' or '-inf'. In rollouts and
evals, such a value is just null. Arrays in rollouts and evals are written as lists, rounded to 8
decimals, which is finer than the precision of float32 near 1. The arrays of long rollouts are
packed instead (see `packed`).
"""

from __future__ import annotations

import base64
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxrl_llm.core.errors import RunError, UserError

METRICS_FILE = 'metrics.jsonl'
ROLLOUTS_DIR = 'rollouts'
EVALS_DIR = 'evals'
_LISTED = 256
"""Maximum number of tokens of a rollout whose arrays are written as JSON lists."""
_MAX_TOKENS = 1 << 21
"""Maximum number of values in a packed array that can be read."""
STAGE, STEP = 'stage', 'training/global_step'


def read_jsonl(path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
  """Returns the rows of a log and the number of invalid lines.

  A line that is not a JSON object, such as an incomplete last line, is invalid. Blank lines do not
  count.
  """
  rows, corrupt = [], 0
  with path.open('rb') as file:
    for line in file:
      try:
        row = json.loads(line)
      except ValueError:
        row = None
      if isinstance(row, dict):
        rows.append(row)
      else:
        corrupt += bool(line.strip())
  return rows, corrupt


def finite_row(values: Mapping[str, Any]) -> dict[str, float | int | str | None]:
  """Converts metrics to JSON values, sorted by key.

  NaN and infinity are converted as described in the module's docstring.
  """
  row: dict[str, float | int | str | None] = {}
  for key in sorted(values):
    value = np.asarray(values[key]).item()
    if isinstance(value, float) and not math.isfinite(value):
      row[key] = None
      row[f'{key}/nonfinite'] = str(value)
    else:
      row[key] = int(value) if isinstance(value, bool) else value
  return row


class MetricsWriter:
  """Appends rows to `<workdir>/metrics.jsonl`. Only one process of a run may use it."""

  def __init__(self, workdir: pathlib.Path | str, *, committed: int | None):
    """Opens the log.

    Args:
      workdir: run directory. It is created if it does not exist.
      committed: length of metrics.jsonl in bytes at the last commit. The file is truncated to this
        length. If None, only an incomplete last line is removed.

    Raises:
      RunError: metrics.jsonl is shorter than `committed`, or has no line end there.
    """
    self._path = pathlib.Path(workdir) / METRICS_FILE
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._path.touch()
    keep = _whole_lines(self._path) if committed is None else committed
    _check_offset(self._path, keep)
    self._file = self._path.open('r+b')
    self._file.truncate(keep)
    self._file.seek(keep)

  @property
  def offset(self) -> int:
    """Length of metrics.jsonl in bytes, including everything written so far."""
    return self._file.tell()

  def write(self, stage: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Appends a row, flushes the file, and returns the row as it was written."""
    row = {
      STAGE: stage,
      STEP: int(step),
      **finite_row({k: v for k, v in values.items() if k not in (STAGE, STEP)}),
    }
    self._file.write(json.dumps(row, allow_nan=False).encode() + b'\n')
    self._file.flush()
    return row

  def sync(self) -> int:
    """Forces everything written so far to disk and returns the length of metrics.jsonl in bytes.

    A commit records this length.
    """
    self._file.flush()
    os.fsync(self._file.fileno())
    return self.offset

  def close(self) -> None:
    self._file.close()


def _whole_lines(path: pathlib.Path) -> int:
  return path.read_bytes().rfind(b'\n') + 1


def _check_offset(path: pathlib.Path, offset: int) -> None:
  size = path.stat().st_size
  with path.open('rb') as file:
    file.seek(max(0, min(offset, size) - 1))
    ends_line = offset == 0 or file.read(1) == b'\n'
  if offset > size or not ends_line:
    problem = f'has {size} bytes' if offset > size else 'has no line end there'
    raise RunError(
      f'{path}: the checkpoint committed its first {offset} bytes, but it {problem}: the file was '
      'changed after the checkpoint; restore it, or start in a new --workdir with --init_from'
    )


class RolloutsWriter:
  """Writes `rollouts/<stage>/<step:06d>.jsonl`.

  There is one file for each step, with one row for each sample that the step trained on and that
  is transcribed (see `LoggingConfig.transcript_tokens`).
  """

  def __init__(self, workdir: pathlib.Path | str):
    self.directory = pathlib.Path(workdir) / ROLLOUTS_DIR

  def write(self, stage: str, step: int, rows: Iterable[Mapping[str, Any]]) -> pathlib.Path:
    path = self.directory / file_name(stage) / f'{step:06d}.jsonl'
    return write_rows(path, map(packed, rows))

  def discard_later(self, last_steps: Mapping[str, int]) -> int:
    """Removes the files of steps that are not committed, and returns the number of removed files.

    Args:
      last_steps: last committed step of each stage, keyed by stage. All files of other stages are
        removed.
    """
    return _discard_later(self.directory, last_steps)


def packed(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a rollout's row in the form in which it is written. If the rollout has more than
  `_LISTED` tokens, its arrays become base64 of compressed int32 or float32 values, and its `tokens`
  become a table `token_texts` from token id to text. Other rows are returned unchanged, so that
  people can read them.
  """
  ids = row.get('token_ids')
  if not isinstance(ids, np.ndarray) or len(ids) <= _LISTED:
    return dict(row)
  arrays = {name: _pack(value) for name, value in row.items() if isinstance(value, np.ndarray)}
  texts = {'token_texts': dict(zip(ids.tolist(), row['tokens']))}
  return {**{name: value for name, value in row.items() if name != 'tokens'}, **arrays, **texts}


def _pack(values: Shaped[np.ndarray, 'tokens']) -> dict[str, str]:
  dtype = '<f4' if np.issubdtype(values.dtype, np.floating) else '<i4'
  data = zlib.compress(values.astype(dtype).tobytes(), 1)
  return {'dtype': dtype, 'zlib': base64.b64encode(data).decode()}


def unpacked(row: dict[str, Any]) -> dict[str, Any]:
  """Returns a row of a rollouts file in which each array is a list and `tokens` is restored.
  Non-finite values become None. A row without packed arrays is returned unchanged.

  Raises ValueError if an array cannot be read, or if it has more than `_MAX_TOKENS` values.
  """
  arrays = {
    name: _unpack(value)
    for name, value in row.items()
    if isinstance(value, dict) and value.keys() == {'dtype', 'zlib'}
  }
  texts = row.get('token_texts')
  if not arrays or not isinstance(texts, dict):
    return row
  row = {name: value for name, value in row.items() if name != 'token_texts'}
  tokens = [texts.get(str(token), '') for token in arrays.get('token_ids', ())]
  return {**row, **arrays, 'tokens': tokens}


def _unpack(value: Mapping[str, Any]) -> list[int | float | None]:
  if value['dtype'] not in ('<f4', '<i4'):
    raise ValueError(f'array has dtype {value["dtype"]!r}, wanted <f4 or <i4')
  try:
    decompress = zlib.decompressobj()
    data = decompress.decompress(base64.b64decode(value['zlib'], validate=True), 4 * _MAX_TOKENS)
    array = np.frombuffer(data, value['dtype'])
  except (zlib.error, TypeError, ValueError) as error:
    raise ValueError(f'array cannot be read: {error}') from None
  if not decompress.eof:
    raise ValueError(f'array is cut off, or has more than {_MAX_TOKENS:,} values')
  if value['dtype'] == '<i4':
    return array.tolist()
  listed = array.astype(np.float64).tolist()
  return [x if math.isfinite(x) else None for x in listed]


class EvalsWriter:
  """Writes `evals/<stage>/<step:06d>-<suite>.jsonl`.

  There is one file for each evaluation of a suite, with one row for each response.
  """

  def __init__(self, workdir: pathlib.Path | str):
    self.directory = pathlib.Path(workdir) / EVALS_DIR

  def write(
    self, stage: str, step: int, suite: str, rows: Iterable[Mapping[str, Any]]
  ) -> pathlib.Path:
    return write_rows(
      self.directory / file_name(stage) / f'{step:06d}-{file_name(suite)}.jsonl', rows
    )

  def discard_later(self, last_steps: Mapping[str, int]) -> int:
    """Removes the files of steps that are not committed, and returns the number of removed files.

    Args:
      last_steps: last committed step of each stage, keyed by stage. All files of other stages are
        removed.
    """
    return _discard_later(self.directory, last_steps)


def file_name(name: str) -> str:
  """Checks the name of a stage or suite, which is part of file names, and returns it. Raises
  UserError if it contains characters that are not permitted in file names.
  """
  if not re.fullmatch(r'\w[\w.@+ -]*', name):
    raise UserError(
      f'stage or suite {name!r}: its name is part of file names: use only letters, digits and '
      '. _ - + @, starting with a letter'
    )
  return name


def write_rows(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> pathlib.Path:
  """Writes rows to a JSONL file. An existing file is replaced atomically."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix('.jsonl.tmp')
  with temporary.open('w', encoding='utf-8') as file:
    for row in rows:
      file.write(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + '\n')
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)
  return path


def _plain(value: Any) -> Any:
  """Converts a value to JSON: arrays become lists, and non-finite numbers become null."""
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, np.ndarray):
    if not np.issubdtype(value.dtype, np.floating):
      return value.tolist()
    rounded = np.round(value.astype(np.float64), 8).tolist()
    return rounded if np.isfinite(value).all() else _plain(rounded)
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, np.generic):
    return _plain(value.item())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _discard_later(directory: pathlib.Path, last_steps: Mapping[str, int]) -> int:
  removed = 0
  for path in sorted(directory.glob('*/*.jsonl*')):
    step = re.match(r'(\d+)', path.name)
    late = step is None or int(step[1]) > last_steps.get(path.parent.name, -1)
    if late or path.suffix == '.tmp':
      path.unlink()
      removed += 1
  return removed
