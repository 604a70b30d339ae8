"""The process of a log writer: follows metrics.jsonl and hands each new row to the writer.

The process is started as `python -m jaxrl_llm.runtime.log.follow` with a socket as stdin. It reads
one line, which describes the writer, and ends after the other side has closed its half of the
socket. Its state is a file in the writer's directory.

Invariant: no row is handed over twice, also not after a resume, when the run writes rows again. The
number of rows that were handed over is stored before each of them. So a process that is killed at
that moment loses one row, which metrics.jsonl still has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import select
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.secret_values import hide_secrets
from jaxrl_llm.runtime.log.api import LogRun, LogWriter, log_row
from jaxrl_llm.runtime.writers import METRICS_FILE

_POLL_S = 0.25
"""Seconds between two looks at metrics.jsonl."""
_MAX_LINE = 1 << 26
"""Maximum length of a row in bytes."""
_OPEN_AGAIN_S = (1.0, 60.0)
"""Seconds until a writer that could not be opened is tried again; each time doubled, up to the
second number.
"""
_FILE = 'progress.json'


@dataclasses.dataclass
class State:
  """Progress of a log writer."""

  rows: int = 0
  """Rows of metrics.jsonl that were handed over, including lost ones."""
  lost: int = 0
  """Rows that the writer refused."""
  error: str = ''
  """The writer's last error in this start of the run; empty if there was none."""

  @classmethod
  def read(cls, directory: pathlib.Path) -> State:
    """Reads the state of the writer that has this directory; a new one has handed over no rows.

    Raises:
      UserError: the file is damaged.
    """
    file = directory / _FILE
    if not file.exists():
      return cls()
    try:
      state = cls(**json.loads(file.read_bytes()))
      if [type(value) for value in dataclasses.astuple(state)] != [int, int, str]:
        raise ValueError(f'{state}, wanted two numbers of rows and a text')
    except (ValueError, TypeError) as error:
      raise UserError(
        f'{file}: holds no progress of a log writer ({one_line(error, 100)}); restore it, or '
        f'remove {directory} to write all rows of the run again'
      ) from None
    return state

  def store(self, directory: pathlib.Path) -> None:
    """Replaces the file that `read` reads, atomically."""
    temporary = directory / f'{_FILE}.tmp'
    temporary.write_text(json.dumps(dataclasses.asdict(self)))
    temporary.replace(directory / _FILE)


class Follower:
  """Hands the rows of one run to one writer."""

  def __init__(self, job: Mapping[str, Any]):
    workdir = pathlib.Path(job['workdir'])
    self._kind, self._options = job['kind'], job['options']
    self._run = LogRun(
      name=job['name'],
      workdir=workdir,
      directory=pathlib.Path(job['directory']),
      config=json.loads((workdir / 'config.json').read_bytes()),
    )
    self._file = (workdir / METRICS_FILE).open('rb')
    self._index = 0
    self._writer: LogWriter | None = None
    self._open_at, (self._wait_s, _) = 0.0, _OPEN_AGAIN_S
    self._state = State.read(self._run.directory)

  def turn(self, *, last: bool) -> None:
    """Opens the writer, if it is closed and it is time to, and hands over all new rows."""
    if self._writer is None and (last or time.monotonic() >= self._open_at):
      try:
        self._writer = own_part(self._kind, 'log writer')(self._run, **self._options)
      except Exception as error:  # Whatever a writer or its library raises: tried again later.
        self._note(error)
        self._open_at = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _OPEN_AGAIN_S[1])
    if self._writer is not None:
      for index, line in self._new_lines():
        if index >= self._state.rows:
          self._hand_over(self._writer, index, line)

  def close(self) -> None:
    """Closes the writer, if it is open."""
    if self._writer is not None:
      try:
        self._writer.close()
      except Exception as error:  # The rows were handed over; what became of them is unknown.
        self._note(error)

  def _new_lines(self) -> Iterator[tuple[int, bytes]]:
    while line := self._file.readline(_MAX_LINE):
      if not line.endswith(b'\n'):
        self._file.seek(-len(line), os.SEEK_CUR)  # The rest is being written.
        return
      self._index += 1
      yield self._index - 1, line

  def _hand_over(self, writer: LogWriter, index: int, line: bytes) -> None:
    self._state.rows = index + 1
    self._state.store(self._run.directory)
    try:
      writer.write(log_row(index, json.loads(line)))
    except Exception as error:  # The row is lost, and counted; the next one may succeed.
      self._state.lost += 1
      self._note(error)

  def _note(self, error: Exception) -> None:
    self._state.error = one_line(hide_secrets(f'{type(error).__name__}: {error}'), 300)
    self._state.store(self._run.directory)
    print(f'row {self._state.rows}: {self._state.error}', flush=True)


def main() -> int:
  """Returns the exit code."""
  os.dup2(2, 1)  # What a writer prints goes to the log.
  # wait order: its owner's next order
  follower = Follower(json.loads(sys.stdin.readline()))
  last = False
  while not last:
    last = bool(select.select([0], [], [], _POLL_S)[0])
    follower.turn(last=last)
  follower.close()
  return 0


if __name__ == '__main__':
  sys.exit(main())
