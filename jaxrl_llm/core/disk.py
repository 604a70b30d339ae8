"""Durable file writes, and temporary directories that do not outlive their process.

Invariant: a file written with `write_durably` has either its complete old or its complete new
content, even if the write is interrupted. If a process is killed, its temporary directory is
removed by the next `scratch` call with the same prefix, unless the file system has no locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator

TOKEN = 'token'
"""Name of the file with the token of a directory; see `mark`."""
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
  """Replaces a file's content atomically. The new content is on disk when the function returns."""
  temporary = path.with_name(f'{path.name}.tmp')
  with temporary.open('w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)
  sync(path.parent)


def mark(directory: pathlib.Path) -> str:
  """Writes a new token into a directory, and returns the token. With the token, processes of other
  hosts can check whether they see the same directory (`is_seen`).
  """
  token = secrets.token_hex(16)
  (directory / TOKEN).write_text(token)
  return token


def is_seen(directory: pathlib.Path, token: str) -> bool:
  """Returns whether this process sees the directory into which `mark` has written a token."""
  try:
    return (directory / TOKEN).read_text() == token
  except OSError:
    return False


def is_in_memory(descriptor: int) -> bool:
  """Returns whether an open file is in shared memory (Linux's tmpfs)."""
  device = os.fstat(descriptor).st_dev
  number = f'{os.major(device)}:{os.minor(device)}'
  try:
    mounts = pathlib.Path('/proc/self/mountinfo').read_text().splitlines()
  except OSError:
    return False
  # "36 35 0:41 / /dev/shm rw,relatime shared:7 - tmpfs tmpfs rw,size=24684092k"
  kinds = [line.partition(' - ')[2].split()[0] for line in mounts if line.split()[2] == number]
  return 'tmpfs' in kinds


def link_or_copy(source: pathlib.Path, target: pathlib.Path) -> None:
  """Makes `source` available as `target`, and creates the directory of `target`.

  `target` becomes a hard link to `source`, so the file must not be modified in place. It becomes a
  durable copy instead if no hard link can be made, or if `source` is a symbolic link, because the
  file behind a symbolic link may belong to a program that modifies it.

  If copying fails, `target` does not exist. If the process is killed while it copies, `target` may
  be incomplete. To make the new directory entry durable, the caller syncs the directory of `target`
  after all of its files have been created.

  Raises FileExistsError if `target` exists.
  """
  target.parent.mkdir(parents=True, exist_ok=True)
  try:
    if not source.is_symlink():
      os.link(source, target)
      return
  except (FileNotFoundError, FileExistsError):
    raise
  except OSError:
    pass
  with source.open('rb') as old, target.open('xb') as new:
    try:
      shutil.copyfileobj(old, new)
      new.flush()
      os.fsync(new.fileno())
    except BaseException:
      target.unlink()
      raise


@contextlib.contextmanager
def scratch(prefix: str, parent: str | None = None) -> Iterator[pathlib.Path]:
  """Creates a temporary directory that only this user can enter, and removes it after the block.

  First, removes directories with the same prefix that killed processes have left. The directories
  of live processes and of other users are kept.

  Args:
    prefix: prefix of the directory's name. It should end with a hyphen: the prefix 'run' would also
      match directories with the prefix 'runner'.
    parent: directory in which the directory is created. If None, it is the system's directory for
      temporary files.
  """
  parent = parent or tempfile.gettempdir()
  _remove_orphans(prefix, parent)
  with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
    folder = pathlib.Path(name)
    unlocked = folder / f'{_OWNER}.tmp'
    with unlocked.open('w') as owner:
      # Lock the file before it gets its final name, since other processes treat an unlocked file as
      # the file of a killed process. No other process has the file open, so locking fails only on
      # file systems without locks. On such a file system, the file keeps its temporary name, and
      # the directory stays if this process is killed.
      with contextlib.suppress(OSError):
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / _OWNER)
      yield folder


def _remove_orphans(prefix: str, parent: str) -> None:
  for folder in pathlib.Path(parent).glob(f'{prefix}*'):
    # An OSError means that the owner may be alive, or that another process is removing the folder.
    with contextlib.suppress(OSError):
      status = folder.lstat()
      if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        continue
      with (folder / _OWNER).open('r+') as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
