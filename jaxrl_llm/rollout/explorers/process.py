"""Starts a local explorer process, restarts it after a crash, and stops it."""

from __future__ import annotations

import os
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.process import job
from jaxrl_llm.core.process.child import Child

_MAX_FAILURES = 3
_AGAIN_WITHIN_S = 60.0
_LAST_LINE = 400

ExplorerCommand = Callable[[str, str], Sequence[str]]
"""Function of (master's address, explorer's identity) that returns the command line of an explorer
process.
"""


class ExplorerProcess:
  """A local explorer process. A guard process ends it if this process dies."""

  def __init__(self, name: str, address: str, logs: pathlib.Path, command: ExplorerCommand):
    """
    Args:
      name: name in the log and in messages.
      address: address of the master, `unix:PATH`; the guard removes the socket's directory if this
        process dies.
      logs: directory of the explorer's log.
      command: returns the explorer's command line.
    """
    self.name, self._address, self._log = name, address, logs / f'{name}.log'
    self.identity = f'{name}.{secrets.token_hex(4)}'
    """Unique name that the explorer uses in its messages to the master."""
    self._command = command(address, self.identity)
    folder = pathlib.Path(address.removeprefix('unix:')).parent
    self._child = Child(f'explorer {name}', log=self._log, remove=(folder,), grace_s=1.0)
    self._started: list[float] = []

  def start(self) -> None:
    self._started.append(time.monotonic())
    # The explorer inherits this process's module search path, so that it can import the modules in
    # the directory of the configuration file.
    self._child.start(
      self._command,
      {**job.outside(os.environ), 'PYTHONPATH': os.pathsep.join(path for path in sys.path if path)},
    )

  def start_again(self) -> None:
    """Restarts an explorer that has ended. Raises RunError if this has happened several times in a
    short time.
    """
    if (
      len(self._started) > _MAX_FAILURES
      and time.monotonic() - self._started[-_MAX_FAILURES] < _AGAIN_WITHIN_S
    ):
      raise RunError(
        f'explorers: {self.name} ended {_MAX_FAILURES + 1} times within {_AGAIN_WITHIN_S:g} s; the '
        f'last line of {self._log}: {self.last_line()}'
      )
    self.start()

  def is_running(self) -> bool:
    return self._child.is_running()

  def terminate(self) -> None:
    """Asks the guard process to end the explorer."""
    self._child.terminate()

  def last_line(self) -> str:
    """Returns the last line that the explorer has printed since it was last started."""
    lines = self._child.lines()
    return lines[-1][-_LAST_LINE:] if lines else 'no output'

  async def stop(self) -> None:
    """Ends the explorer. Raises WaitExpired if the guard process does not end."""
    await self._child.stop(owner='the run')
