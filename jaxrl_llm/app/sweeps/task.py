"""The process of a trial in a job step of Slurm.

Slurm itself sends signals to all processes of a step, and ends them. Outside of Slurm, a trial runs
under a guard, a process that forwards signals to the trial's run. In a step, the run would get each
signal twice, and a second signal ends a run without a commit. Hence no guard is used here.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Mapping, Sequence

_TAIL_BYTES = 1 << 16
"""Maximum number of bytes to read from the end of a log."""


def in_slurm_step() -> bool:
  """Returns whether this process runs in a job step of Slurm, whose signals also reach its
  children.
  """
  return 'SLURM_STEP_ID' in os.environ


class StepChild:
  """A child process without a guard. If this process dies, Slurm ends the child.

  It has the methods of `core.process.child.Child` that the runner of a sweep calls.
  """

  def __init__(self, name: str, *, log: pathlib.Path):
    self.name, self.log = name, log
    self._process: subprocess.Popen | None = None
    self._log_start = 0

  @property
  def exit_code(self) -> int | None:
    """Exit code of the process, or 128 + the signal's number if a signal ended it.

    It is None before the process has started and while it is running.
    """
    code = self._process.poll() if self._process else None
    return code if code is None or code >= 0 else 128 - code

  def is_running(self) -> bool:
    return self._process is not None and self._process.poll() is None

  def start(self, command: Sequence[str], env: Mapping[str, str], *, first_line: str = '') -> None:
    self.log.parent.mkdir(parents=True, exist_ok=True)
    with self.log.open('a') as log:
      log.write(f'{first_line}\n')
      log.flush()
      self._log_start = log.tell()
      self._process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
      )

  def lines(self) -> list[str]:
    """Returns the last lines that the process has printed, without blank lines."""
    with self.log.open('rb') as file:
      file.seek(max(self._log_start, self.log.stat().st_size - _TAIL_BYTES))
      lines = file.read().decode(errors='replace').splitlines()
    return [line.strip() for line in lines if line.strip()]

  def terminate(self) -> None:
    """Sends SIGTERM to the process if it is running, and returns without waiting for its end."""
    if self.is_running():
      self._process.terminate()
