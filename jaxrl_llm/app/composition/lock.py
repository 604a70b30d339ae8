"""Lock of a run directory, which at most one process holds."""

from __future__ import annotations

import fcntl
import os
import pathlib
from typing import TextIO

from jaxrl_llm.core.errors import UserError


class WorkdirInUse(UserError):
  """Raised when another live process uses the run directory."""


def lock(path: pathlib.Path, *, named: pathlib.Path) -> TextIO:
  """Locks the run directory `path`, which is created if necessary. The lock is released when the
  returned file is closed or the process ends.

  Args:
    named: path that error messages give for the directory. It differs from `path` while a branch is
      built under a temporary name.

  Raises:
    WorkdirInUse: another process holds the lock.
    UserError: the directory cannot be written or locked.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
    file = (path / 'lock').open('a+')
  except OSError as error:
    raise UserError(
      f'--workdir={named}: {error.strerror}; choose a directory that can be written'
    ) from error
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    owner = file.read().strip() or 'unknown'
    raise WorkdirInUse(
      f'--workdir={named}: in use by a live run (process {owner}); wait for it, stop it, or '
      'choose another --workdir'
    ) from None
  except OSError as error:
    raise UserError(
      f'--workdir={named}: cannot be locked ({error.strerror}); choose a directory on a file '
      'system with locks'
    ) from error
  file.truncate(0)
  file.write(str(os.getpid()))
  file.flush()
  return file
