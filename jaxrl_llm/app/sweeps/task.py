"""The process of a trial within a step of Slurm, which signals and ends all processes of the step.

A guard there would pass on a signal that the run has got already, and a second one ends a run
without a commit.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Mapping, Sequence

_TAIL_BYTES = 1 << 16
"""Maximum number of bytes read from the end of a log."""


def in_slurm_step() -> bool:
  """Whether Slurm signals this process's children as it signals this process."""
  return 'SLURM_STEP_ID' in os.environ


class StepChild:
  """A child process whose end is Slurm's business; methods are those of `core.process.Child`."""

  def __init__(self, name: str, *, log: pathlib.Path):
    self.name, self.log = name, log
    self._process: subprocess.Popen | None = None
    self._log_start = 0

  @property
  def exit_code(self) -> int | None:
    """The exit code (128 + the number for a signal); None while it runs or before its start."""
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
    """Returns the last lines that are not blank of its output."""
    with self.log.open('rb') as file:
      file.seek(max(self._log_start, self.log.stat().st_size - _TAIL_BYTES))
      lines = file.read().decode(errors='replace').splitlines()
    return [line.strip() for line in lines if line.strip()]

  def terminate(self) -> None:
    """Sends SIGTERM, without waiting."""
    if self.is_running():
      self._process.terminate()
