"""TensorBoard event files of a run, in `<workdir>/tensorboard/<stage>/`.

Invariant: the files contain one event for each row of metrics.jsonl. Each start of the run rewrites
the files from metrics.jsonl, so that rows of steps that were not committed disappear. The other
rows keep their wall times.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping, Sequence

from jaxrl_llm.core.types import Json
from jaxrl_llm.runtime.log.api import LogRow, log_row
from jaxrl_llm.runtime.log.event_file import EventFile, row_times
from jaxrl_llm.runtime.writers import STAGE, file_name

TENSORBOARD_DIR = 'tensorboard'


class TensorBoard:
  """TensorBoard log writer, which implements `LogWriter` in the trainer's process."""

  def __init__(self, workdir: pathlib.Path, rows: Sequence[Mapping[str, Json]]):
    """
    Args:
      rows: rows that metrics.jsonl has at the start of the run.
    """
    self._directory = workdir / TENSORBOARD_DIR
    self._files: dict[str, EventFile] = {}
    times: dict[str, list[float]] = {}
    old = sorted(self._directory.glob('*/events.out.tfevents.*'))
    for path in old:
      times.setdefault(path.parent.name, []).extend(row_times(path))
    self._serial = 1 + max((int(p.suffix[1:]) for p in old if p.suffix[1:].isdigit()), default=-1)
    now = time.time()
    for index, row in enumerate(rows):
      kept = times.get(str(row.get(STAGE)), [])
      self._write(log_row(index, row), kept.pop(0) if kept else now)
    for path in old:
      path.unlink()

  def write(self, row: LogRow) -> None:
    self._write(row, time.time())

  def _write(self, row: LogRow, when: float) -> None:
    if row.stage not in self._files:
      path = (
        self._directory / file_name(row.stage) / f'events.out.tfevents.{int(when)}.{self._serial}'
      )
      self._files[row.stage] = EventFile(path, when)
    self._files[row.stage].write(row.step, row.metrics, when)

  def close(self) -> None:
    for file in self._files.values():
      file.close()
