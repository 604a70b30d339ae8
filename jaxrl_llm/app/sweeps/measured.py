"""Reads a trial's metrics as its run writes them."""

from __future__ import annotations

import json
import math
import pathlib

from jaxrl_llm.runtime.writers import METRICS_FILE, STEP


class Measurements:
  """New rows of a run's metrics.jsonl, whole lines only.

  A resumed run cuts the file to its last commit and writes the same rows again; they are then read
  again.

  Attributes:
    keys: names of the numbers seen so far.
  """

  def __init__(self, workdir: pathlib.Path, objective: str):
    self._path, self._objective = workdir / METRICS_FILE, objective
    self._offset = 0
    self.keys: set[str] = set()

  def read(self) -> tuple[int | None, list[tuple[int, float]]]:
    """Returns the last step of the new rows (None: there are none) and (step, objective) pairs."""
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
  """Returns the number of a row, nan for one that was not finite; None if the row has none."""
  value = row.get(key, '')
  if value is None:
    return math.nan
  if isinstance(value, int | float) and not isinstance(value, bool):
    return float(value)
  return None
