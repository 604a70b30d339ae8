"""Files that survive a power loss, and temporary directories that do not survive their process.

Invariant: `write_durably` leaves the old content or the new one, never a part; a directory of `scratch` whose process
was killed is removed by the next `scratch` of the same prefix.
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
"""Locked by the process that a directory of `scratch` belongs to."""


def sync(path: pathlib.Path) -> None:
  """Returns once a file's content, or a directory's entries, are on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_durably(path: pathlib.Path, text: str) -> None:
  """Replaces a file, whole or not at all; the new content is on the disk when this returns."""
  temporary = path.with_name(f'{path.name}.tmp')
  with temporary.open('w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)
  sync(path.parent)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[pathlib.Path]:
  """A new temporary directory that only this user can enter, removed with the block.

  Removes first what killed processes left under the same prefix; directories of live processes, and of other users,
  stay.

  Args:
    prefix: how its name begins; ends with a hyphen, so that no other prefix begins with it.
  """
  _remove_orphans(prefix)
  with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
    folder = pathlib.Path(name)
    unlocked = folder / f'{_OWNER}.tmp'
    with unlocked.open('w') as owner:
      # Under its final name the file is locked from the start: a look in between would take it for an orphan's.
      fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Nobody else has it open.
      unlocked.rename(folder / _OWNER)
      yield folder


def _remove_orphans(prefix: str) -> None:
  for folder in pathlib.Path(tempfile.gettempdir()).glob(f'{prefix}*'):
    with contextlib.suppress(OSError):  # Another process removes it, or its owner lives.
      status = folder.lstat()
      if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        continue
      with (folder / _OWNER).open('r+') as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
