"""Durable file writes, and temporary directories that do not outlive their process.

Invariant: a file written with `write_durably` has either its complete old or its complete new
content, even if the write is interrupted. If a process is killed, the next `scratch` with the same
prefix removes its temporary directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Iterator

_OWNER = '.owner'
"""Name of the file that the owner of a `scratch` directory keeps locked."""


def sync(path: pathlib.Path) -> None:
  """Flushes a file's content, or a directory's entries, to disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_durably(path: pathlib.Path, text: str) -> None:
  """Replaces a file atomically; the new content is on disk when this returns."""
  temporary = path.with_name(f'{path.name}.tmp')
  with temporary.open('w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)
  sync(path.parent)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[pathlib.Path]:
  """Creates a temporary directory that only this user can enter, and removes it after the block.

  First removes directories with the same prefix that killed processes left; those of live processes
  and of other users stay.

  Args:
    prefix: prefix of the directory's name. It ends with a hyphen, so that it does not also match
      the directories of a longer prefix.
  """
  _remove_orphans(prefix)
  with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
    folder = pathlib.Path(name)
    unlocked = folder / f'{_OWNER}.tmp'
    with unlocked.open('w') as owner:
      # Lock before renaming: another process would take an unlocked file for that of a killed
      # process.
      fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # No other process has it open.
      unlocked.rename(folder / _OWNER)
      yield folder


def _remove_orphans(prefix: str) -> None:
  for folder in pathlib.Path(tempfile.gettempdir()).glob(f'{prefix}*'):
    with contextlib.suppress(OSError):  # Another process is removing it, or its owner is alive.
      status = folder.lstat()
      if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        continue
      with (folder / _OWNER).open('r+') as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
