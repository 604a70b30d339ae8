"""Reads a trial's metrics while its run writes them."""

from __future__ import annotations

import json
import math
import pathlib

from jaxrl_llm.runtime.writers import METRICS_FILE, STEP


class Measurements:
  """Reads the new rows of a run's metrics.jsonl. A line is read only when it is complete.

  A resumed run truncates the file to the length at its last commit. If the file is shorter than the
  part that has been read, it is read again from the start.

  Attributes:
    keys: names of all metrics for which a floating-point value has been read so far.
  """

  def __init__(self, workdir: pathlib.Path, objective: str):
    self._path, self._objective = workdir / METRICS_FILE, objective
    self._offset = 0
    self.keys: set[str] = set()

  def read(self) -> tuple[int | None, list[tuple[int, float]]]:
    """Reads the rows that were written since the last call.

    Returns the largest step in these rows, or None if there are none, and the pairs (step,
    objective) of the rows that contain the objective.
    """
    try:
      with self._path.open('rb') as file:
        if file.seek(0, 2) < self._offset:
          self._offset = 0
        file.seek(self._offset)
        data = file.read()
    except FileNotFoundError:
      return None, []
    data = data[: data.rfind(b'\n') + 1]
    self._offset += len(data)
    last, measured = None, []
    for line in data.splitlines():
      try:
        row = json.loads(line)
      except ValueError:
        continue
      step = row.get(STEP) if isinstance(row, dict) else None
      if not isinstance(step, int):
        continue
      last = step if last is None else max(last, step)
      self.keys |= {key for key, value in row.items() if isinstance(value, float)}
      if (value := _value(row, self._objective)) is not None:
        measured.append((step, value))
    return last, measured


def _value(row: dict, key: str) -> float | None:
  """Returns the number under `key` of a row; None if the row has no number there.

  The result is NaN if the value is null, because a run writes null for a number that is not finite.
  """
  value = row.get(key, '')
  if value is None:
    return math.nan
  if isinstance(value, int | float) and not isinstance(value, bool):
    return float(value)
  return None
