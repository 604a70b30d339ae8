"""The logs of a run: metrics.jsonl with its TensorBoard copy, rollouts/ and evals/.

Invariant: the logs of a resumed run equal those of an uninterrupted run. At a resume, metrics.jsonl
is truncated to the length in bytes that the commit recorded, and the TensorBoard files are written
again from it. Each rollouts or evals file belongs to one step and is replaced atomically. Files of
steps after the commit are removed.

The logs are always valid JSON. In metrics.jsonl, a value that is NaN or infinite is written as
null, and the additional key `<key>/nonfinite` contains 'nan', 'inf' or '-inf'. In rollouts and
evals, such a value is just null. Arrays in rollouts and evals are rounded to 8 decimals, which is
finer than the precision of float32 near 1.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.runtime.tensorboard import EventFile, row_times

METRICS_FILE = 'metrics.jsonl'
TENSORBOARD_DIR = 'tensorboard'
ROLLOUTS_DIR = 'rollouts'
EVALS_DIR = 'evals'
STAGE, STEP = 'stage', 'training/global_step'


def read_jsonl(path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
  """Returns the rows of a log and the number of invalid lines.

  A line is invalid if it is not a JSON object, such as an incomplete last line. Blank lines do not
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
  """Appends rows to `<workdir>/metrics.jsonl` and to files in `<workdir>/tensorboard/<stage>/`.

  Only one process of a run may use it.
  """

  def __init__(
    self, workdir: pathlib.Path | str, *, committed: int | None, tensorboard: bool = True
  ):
    """Opens the log.

    Args:
      workdir: Run directory. It is created if it does not exist.
      committed: Length of metrics.jsonl in bytes at the last commit. The file is truncated to it.
        If None, all complete lines are kept, and only an incomplete last line is removed.
      tensorboard: Whether to write TensorBoard files, too.
    """
    self._path = pathlib.Path(workdir) / METRICS_FILE
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._path.touch()
    keep = _whole_lines(self._path) if committed is None else committed
    _check_offset(self._path, keep)
    self._file = self._path.open('r+b')
    self._file.truncate(keep)
    self._file.seek(keep)
    self._boards: _Boards | None = None
    if tensorboard:
      self._boards = _Boards(self._path.parent / TENSORBOARD_DIR, read_jsonl(self._path)[0])

  @property
  def offset(self) -> int:
    """Length of metrics.jsonl in bytes, including everything written so far."""
    return self._file.tell()

  def write(self, stage: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Appends a row to the logs, flushes them, and returns the row as it was written."""
    row = {
      STAGE: stage,
      STEP: int(step),
      **finite_row({k: v for k, v in values.items() if k not in (STAGE, STEP)}),
    }
    self._file.write(json.dumps(row, allow_nan=False).encode() + b'\n')
    self._file.flush()
    if self._boards is not None:
      self._boards.write(row, time.time())
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
    if self._boards is not None:
      self._boards.close()


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


class _Boards:
  """TensorBoard event files, one for each stage, with one event for each row of metrics.jsonl."""

  def __init__(self, directory: pathlib.Path, rows: list[dict[str, Any]]):
    self._directory = directory
    self._writers: dict[str, EventFile] = {}
    times: dict[str, list[float]] = {}
    old = sorted(directory.glob('*/events.out.tfevents.*'))
    for path in old:
      times.setdefault(path.parent.name, []).extend(row_times(path))
    self._serial = 1 + max((int(p.suffix[1:]) for p in old if p.suffix[1:].isdigit()), default=-1)
    now = time.time()
    for row in rows:
      kept = times.get(_file_name(str(row.get(STAGE))), [])
      self.write(row, kept.pop(0) if kept else now)
    for path in old:
      path.unlink()

  def write(self, row: Mapping[str, Any], when: float) -> None:
    stage = _file_name(str(row.get(STAGE)))
    if stage not in self._writers:
      path = self._directory / stage / f'events.out.tfevents.{int(when)}.{self._serial}'
      self._writers[stage] = EventFile(path, when)
    scalars = {
      key: value for key, value in row.items() if key != STEP and isinstance(value, int | float)
    }
    self._writers[stage].write(row.get(STEP, 0), scalars, when)

  def close(self) -> None:
    for writer in self._writers.values():
      writer.close()


class RolloutsWriter:
  """Writes `rollouts/<stage>/<step:06d>.jsonl`.

  There is one file for each step, with one row for each sample that the step trained on.
  """

  def __init__(self, workdir: pathlib.Path | str):
    self.directory = pathlib.Path(workdir) / ROLLOUTS_DIR

  def write(self, stage: str, step: int, rows: Iterable[Mapping[str, Any]]) -> pathlib.Path:
    return write_rows(self.directory / _file_name(stage) / f'{step:06d}.jsonl', rows)

  def discard_later(self, last_steps: Mapping[str, int]) -> int:
    """Removes the files of steps that are not committed, and returns the number of removed files.

    Args:
      last_steps: last committed step of each stage, keyed by stage. All files of other stages are
        removed.
    """
    return _discard_later(self.directory, last_steps)


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
      self.directory / _file_name(stage) / f'{step:06d}-{_file_name(suite)}.jsonl', rows
    )

  def discard_later(self, last_steps: Mapping[str, int]) -> int:
    """Removes the files of steps that are not committed, and returns the number of removed files.

    Args:
      last_steps: last committed step of each stage, keyed by stage. All files of other stages are
        removed.
    """
    return _discard_later(self.directory, last_steps)


def _file_name(name: str) -> str:
  if not re.fullmatch(r'\w[\w.@+ -]*', name):
    raise UserError(
      f'stage or suite {name!r} names a file: use letters, digits and . _ - + @ only, starting '
      'with a letter'
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
