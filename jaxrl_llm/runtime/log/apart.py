"""Log writers that run in separate processes.

Invariant: a log writer cannot end or block the run. The run waits for a writer only at the end of
the run, and for a bounded time. The run reports the first error of a writer in one line, and counts
the rows that the writer loses. The writer's own log has all of its errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import sys

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.process import job
from jaxrl_llm.core.process.child import Child
from jaxrl_llm.runtime.log.api import DIRECTORY, LogRow
from jaxrl_llm.runtime.log.config import LogWriterConfig
from jaxrl_llm.runtime.log.follow import State

_MODULE = 'jaxrl_llm.runtime.log.follow'
_LOOK_S = 0.05
"""Seconds between checks whether the process has ended."""


class ProcessWriter:
  """A log writer in a separate process, which reads the rows from metrics.jsonl."""

  def __init__(self, config: LogWriterConfig, *, name: str, workdir: pathlib.Path, rows: int):
    """Starts the process.

    Args:
      config: configuration of the writer.
      name: name of the run.
      workdir: run directory.
      rows: number of rows that metrics.jsonl already has.
    """
    self.name = config.label
    self._rows = rows
    workdir = workdir.absolute()
    self._directory = workdir / DIRECTORY / self.name
    self._directory.mkdir(parents=True, exist_ok=True)
    self._state = dataclasses.replace(State.read(self._directory), error='')
    self._state.store(self._directory)
    self._lost = self._state.lost
    self._log = workdir / 'logs' / f'log-{self.name}.log'
    self._child = Child(f'log writer {self.name}', log=self._log, grace_s=1.0)
    ours, theirs = socket.socketpair()
    # Pass on the module search path, so that the process can import modules next to the
    # configuration.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    self._child.start(
      [sys.executable, '-m', _MODULE],
      {**job.outside(os.environ), 'PYTHONPATH': path},
      channel=theirs,
    )
    theirs.close()
    description = {
      'kind': config.kind,
      'options': dict(config.options),
      'name': name,
      'workdir': str(workdir),
      'directory': str(self._directory),
    }
    ours.sendall(json.dumps(description).encode() + b'\n')
    self._socket, self._noted = ours, ''

  def write(self, row: LogRow) -> None:
    """Records that metrics.jsonl contains the row. The writer's process reads the row from the
    file.
    """
    self._rows = row.index + 1

  def take_lost(self) -> int:
    """Returns the number of rows lost since the last call."""
    before, self._lost = self._lost, self._look().lost
    return self._lost - before

  def take_notes(self) -> list[str]:
    """Returns a list with one message if the writer has failed for the first time; else, an empty
    list.
    """
    problem = self._look().error
    if not problem and not self._child.is_running():
      last = ''.join(f' ({one_line(line, 200)})' for line in self._child.lines()[-1:])
      problem = f'its process ended with code {self._child.exit_code}{last}'
    if self._noted or not problem:
      return []
    self._noted = problem
    return [f'log writer {self.name}: {problem}; the run continues, see {self._log}']

  async def close(self, deadline_s: float) -> list[str]:
    """Waits until the process has written all rows, and ends the process at the deadline.

    Returns:
      A message if rows are missing or lost, if the process did not finish in time, or if the writer
      failed and `take_notes` has not reported it.
    """
    in_time = True
    try:
      self._socket.shutdown(socket.SHUT_WR)
      async with asyncio.timeout(deadline_s):
        while self._child.is_running():
          await asyncio.sleep(_LOOK_S)
    # The error is a TimeoutError at the deadline, or another OSError if the process has exited.
    except OSError as error:
      in_time = not isinstance(error, TimeoutError)
    await self._child.stop(owner='the run')
    self._socket.close()
    return self._missing(deadline_s, in_time=in_time)

  def _missing(self, deadline_s: float, *, in_time: bool) -> list[str]:
    state = self._look()
    behind = self._rows - state.rows
    parts = [f'{state.lost} of {self._rows} rows are lost'] if state.lost else []
    if behind > 0:
      parts.append(
        f'{behind} of {self._rows} rows are not written; starting the run again writes them'
      )
    if not in_time:
      parts.append(f'it did not finish within {deadline_s:g} s (logging.close_s)')
    if state.error and not self._noted:
      parts.append(state.error)
    return [f'log writer {self.name}: {"; ".join(parts)}; see {self._log}'] if parts else []

  def _look(self) -> State:
    """Returns the writer's state from its file, or the last known state if the file cannot be
    read.
    """
    with contextlib.suppress(UserError, OSError):
      self._state = State.read(self._directory)
    return self._state
