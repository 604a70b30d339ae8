"""All log writers of a run. TensorBoard runs in the trainer's process, and each other writer in a
separate process.
"""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import Mapping, Sequence

from absl import logging

from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.types import Json
from jaxrl_llm.runtime.log.apart import ProcessWriter
from jaxrl_llm.runtime.log.api import LogRow, LogWriter, log_row
from jaxrl_llm.runtime.log.config import LoggingConfig
from jaxrl_llm.runtime.log.tensorboard import TensorBoard
from jaxrl_llm.runtime.writers import METRICS_FILE, read_jsonl


class LocalWriter:
  """A log writer that runs in this process. This class is only for writers of this package that
  just write files.
  """

  def __init__(self, name: str, writer: LogWriter):
    self.name, self._writer = name, writer
    self._lost = 0
    self._error = self._noted = ''

  def write(self, row: LogRow) -> None:
    """Writes a row. If this fails, the row counts as lost."""
    try:
      self._writer.write(row)
    except OSError as error:
      self._lost += 1
      self._error = one_line(error)

  def take_lost(self) -> int:
    """Returns the number of rows lost since the last call."""
    lost, self._lost = self._lost, 0
    return lost

  def take_notes(self) -> list[str]:
    """Returns a list with one message if the writer has failed for the first time; else, an empty
    list.
    """
    if self._noted or not self._error:
      return []
    self._noted = self._error
    return [f'log writer {self.name}: {self._error}; the run continues']

  async def close(self, deadline_s: float) -> list[str]:
    """Closes the writer. Returns a message about the failure, if there is one."""
    try:
      self._writer.close()
    except OSError as error:
      return [f'log writer {self.name}: {one_line(error)}']
    return []


class LogWriters:
  """All log writers of a run. Each gets a copy of each row of metrics.jsonl."""

  def __init__(
    self, writers: Sequence[LocalWriter | ProcessWriter] = (), *, rows: int = 0, close_s: float = 60
  ):
    """
    Args:
      rows: number of rows that metrics.jsonl already has.
      close_s: maximum time in seconds for which `close` waits for the writers.
    """
    self._writers, self._rows, self._close_s = writers, rows, close_s
    self._failed: set[str] = set()

  def write(self, row: Mapping[str, Json]) -> list[str]:
    """Passes a row, which is already in metrics.jsonl, to all writers.

    Returns:
      A message for each writer that has failed for the first time.
    """
    if not self._writers:
      return []
    copy, self._rows = log_row(self._rows, row), self._rows + 1
    for writer in self._writers:
      writer.write(copy)
    return [line for writer in self._writers for line in writer.take_notes()]

  def take_metrics(self) -> dict[str, float]:
    """Returns the number of rows that each writer has lost since the last call, as metrics. Writers
    that have never lost a row are omitted.
    """
    lost = {writer.name: writer.take_lost() for writer in self._writers}
    self._failed |= {name for name, count in lost.items() if count}
    return {f'run/logging/{name}/lost_rows': float(lost[name]) for name in sorted(self._failed)}

  async def close(self) -> None:
    """Waits for all writers to finish, for a bounded time. Logs a message for each writer that
    could not write all rows.
    """
    closed = await asyncio.gather(*(writer.close(self._close_s) for writer in self._writers))
    for line in itertools.chain(*closed):
      logging.warning('%s', line)


def open_writers(config: LoggingConfig, workdir: pathlib.Path, *, name: str) -> LogWriters:
  """Opens the log writers of a run. metrics.jsonl must contain only committed rows.

  Args:
    workdir: run directory.
    name: name of the run.
  """
  apart = tuple(config.apart())
  if not config.tensorboard and not apart:
    return LogWriters()
  rows, invalid = read_jsonl(workdir / METRICS_FILE)
  count = len(rows) + invalid
  writers: list[LocalWriter | ProcessWriter] = []
  if config.tensorboard:
    writers.append(LocalWriter('tensorboard', TensorBoard(workdir, rows)))
  for writer in apart:
    writers.append(ProcessWriter(writer, name=name, workdir=workdir, rows=count))
  return LogWriters(writers, rows=count, close_s=config.close_s)
