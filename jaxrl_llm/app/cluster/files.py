"""Files that a launcher writes on this machine before it submits a job."""

from __future__ import annotations

import os
import pathlib
import stat

from jaxrl_llm.app.cluster.job import Job
from jaxrl_llm.core.errors import UserError

LAUNCHES = 'launch'
"""Folder in the run directory for the scripts that launchers submit, and for their output."""


def write_files(job: Job, *, script: tuple[str, str] | None = None) -> None:
  """Writes `job.files`, which only this user can then read, and optionally a script.

  Files in `job.files` that already exist are kept, so that a restarted job has the same key (the
  secret that its services share).

  Args:
    script: name and content of a file to write in the run directory's folder `LAUNCHES`. An
      existing file of that name is overwritten.

  Raises:
    UserError: if a directory or file cannot be written, or if an existing file of the job belongs
      to another user or is accessible to other users.
  """
  launches, private = pathlib.Path(job.workdir, LAUNCHES), {}
  try:
    for name, content in job.files.items():
      if os.path.lexists(path := pathlib.Path(name)):
        check_private(path)
      else:
        private[path] = content
    launches.mkdir(parents=True, exist_ok=True)
    for path, content in private.items():
      _write_private(path, content)
    if script is not None:
      name, content = script
      (launches / name).write_text(content)
  except OSError as error:
    raise UserError(f'{error.filename}: cannot be written ({error.strerror})') from None


def _write_private(path: pathlib.Path, content: str) -> None:
  path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
  try:
    descriptor = os.open(path, flags, 0o600)
  except FileExistsError:
    check_private(path)
    return
  with open(descriptor, 'w') as file:
    file.write(content)


def check_private(path: pathlib.Path) -> None:
  """Raises UserError unless `path` is a file of this user that no other user can read or write."""
  status = path.lstat()
  if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
    raise UserError(f'{path}: wanted a regular file of this user; remove it')
  if status.st_mode & 0o077:
    raise UserError(
      f'{path}: other users can read or write it (mode {stat.S_IMODE(status.st_mode):03o}); wanted '
      '600: remove it, and a new key will be made'
    )
