"""Process of a log writer: follows metrics.jsonl and passes each new row to the writer.

The run starts the process as `python -m jaxrl_llm.runtime.log.follow` with a socket as stdin. The
process reads one line, which describes the writer, and ends after the run has closed its half of
the socket. The process stores its state in the writer's directory.

Invariant: no row is passed to the writer twice, even if the run is resumed and writes the row
again. Before each row, the process stores the number of rows that it has passed on. If it is killed
after storing the number and before passing the row on, the writer misses this row, which is still
in metrics.jsonl.
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
"""Seconds between checks of metrics.jsonl for new rows."""
_MAX_LINE = 1 << 26
"""Maximum length of a row in bytes."""
_OPEN_AGAIN_S = (1.0, 60.0)
"""Seconds before the first retry to open a writer, and maximum seconds before a later one. The wait
doubles with each retry.
"""
_FILE = 'progress.json'


@dataclasses.dataclass
class State:
  """Progress of a log writer, with its lost rows and its last error."""

  rows: int = 0
  """Number of rows of metrics.jsonl that were passed to the writer, including lost rows."""
  lost: int = 0
  """Number of rows for which the writer raised an error."""
  error: str = ''
  """Last error of the writer since the start of the run; empty if there was none."""

  @classmethod
  def read(cls, directory: pathlib.Path) -> State:
    """Reads the state of the writer from its own directory. If there is no file yet, returns the
    state of a new writer.

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
        f'{file}: contains no valid state of a log writer ({one_line(error, 100)}); restore it, or '
        f'remove {directory} to write all rows of the run again'
      ) from None
    return state

  def store(self, directory: pathlib.Path) -> None:
    """Writes the state to the file from which `read` reads it. The file is replaced atomically."""
    temporary = directory / f'{_FILE}.tmp'
    temporary.write_text(json.dumps(dataclasses.asdict(self)))
    temporary.replace(directory / _FILE)


class Follower:
  """Passes the rows of one run to one writer."""

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
    """Opens the writer if it is not open and its next retry is due, and passes all new rows to it.

    Args:
      last: whether this is the last call before the process ends. The last call opens the writer
        even if the retry is not due.
    """
    if self._writer is None and (last or time.monotonic() >= self._open_at):
      try:
        self._writer = own_part(self._kind, 'log writer')(self._run, **self._options)
      except Exception as error:  # A writer or its library may raise anything.
        self._note(error)
        self._open_at = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _OPEN_AGAIN_S[1])
    if self._writer is not None:
      for index, line in self._new_lines():
        if index >= self._state.rows:
          self._hand_over(self._writer, index, line)

  def close(self) -> None:
    """Closes the writer if it is open."""
    if self._writer is not None:
      try:
        self._writer.close()
      except Exception as error:  # The rows were passed on, but may not have been written.
        self._note(error)

  def _new_lines(self) -> Iterator[tuple[int, bytes]]:
    while line := self._file.readline(_MAX_LINE):
      if not line.endswith(b'\n'):
        self._file.seek(-len(line), os.SEEK_CUR)  # The run is still writing the line.
        return
      self._index += 1
      yield self._index - 1, line

  def _hand_over(self, writer: LogWriter, index: int, line: bytes) -> None:
    self._state.rows = index + 1
    self._state.store(self._run.directory)
    try:
      writer.write(log_row(index, json.loads(line)))
    except Exception as error:  # The row is lost and counted. The next row may succeed.
      self._state.lost += 1
      self._note(error)

  def _note(self, error: Exception) -> None:
    self._state.error = one_line(hide_secrets(f'{type(error).__name__}: {error}'), 300)
    self._state.store(self._run.directory)
    print(f'row {self._state.rows}: {self._state.error}', flush=True)


def main() -> int:
  """Runs the process until the run closes the socket; returns the exit code."""
  os.dup2(2, 1)  # Output of the writer goes to the log.
  # Wait 'order': unbounded: it lasts until the owner of this process sends a line or ends.
  follower = Follower(json.loads(sys.stdin.readline()))
  last = False
  while not last:
    last = bool(select.select([0], [], [], _POLL_S)[0])
    follower.turn(last=last)
  follower.close()
  return 0


if __name__ == '__main__':
  sys.exit(main())
