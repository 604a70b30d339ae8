"""Quarantine: files in `segments/` that the index does not list are moved aside instead of deleted.

Each start of a run moves these files to `quarantine/`. They are segments that were sealed after the
commit from which the run resumes, segments that were not completely written, and foreign files.
Only `jaxrl buffer --clear_quarantine` deletes them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Collection, Sequence

from absl import logging

from jaxrl_llm.replay.tables import QUARANTINE, SEGMENTS

_NAMED_AT_MOST = 5


def files(directory: str | os.PathLike, kind: str) -> dict[str, int]:
  """Returns the size in bytes of each file or directory in a store's `segments/` or `quarantine/`,
  keyed by name.

  Args:
    directory: directory of the store.
    kind: `SEGMENTS` or `QUARANTINE`.
  """
  folder = pathlib.Path(directory) / kind
  if not folder.is_dir():
    return {}
  sizes = {}
  for path in sorted(folder.iterdir()):
    # A run may have moved the file since it was listed.
    with contextlib.suppress(FileNotFoundError):
      sizes[path.name] = _size(path)
  return sizes


def set_aside(directory: pathlib.Path, named: Collection[str]) -> int:
  """Moves the files in `segments/` whose names are not in `named` to `quarantine/`. Returns their
  number.

  If `quarantine/` already has a file of the same name, the moved file gets a numeric suffix.
  """
  unnamed = [path for path in sorted((directory / SEGMENTS).iterdir()) if path.name not in named]
  if unnamed:
    (directory / QUARANTINE).mkdir(exist_ok=True)
    for path in unnamed:
      shutil.move(path, _free(directory / QUARANTINE / path.name))
    logging.warning(
      'replay: moved %s, which the index does not list, to %s; jaxrl buffer --clear_quarantine '
      'removes it',
      listed([path.name for path in unnamed]),
      directory / QUARANTINE,
    )
  return len(unnamed)


def clear(directory: str | os.PathLike) -> dict[str, int]:
  """Deletes `quarantine/`. Returns the size in bytes of each deleted entry, keyed by name."""
  sizes = files(directory, QUARANTINE)
  if sizes:
    shutil.rmtree(pathlib.Path(directory) / QUARANTINE)
  return sizes


def listed(names: Sequence[str]) -> str:
  """Formats a list of files as their number and the first few names."""
  more = f', … ({len(names) - _NAMED_AT_MOST} more)' if len(names) > _NAMED_AT_MOST else ''
  count = f'{len(names):,} file{"s" if len(names) > 1 else ""}'
  return f'{count}: {", ".join(names[:_NAMED_AT_MOST])}{more}'


def _size(path: pathlib.Path) -> int:
  inside = [path] if not path.is_dir() or path.is_symlink() else path.rglob('*')
  return sum(file.lstat().st_size for file in inside if not file.is_dir())


def _free(path: pathlib.Path) -> pathlib.Path:
  number, free = 1, path
  while os.path.lexists(free):
    free, number = path.with_name(f'{path.name}.{number}'), number + 1
  return free
