"""Quarantine: a start moves files in `segments/` that the index does not name, but deletes none.

Such files are seals undone by a crash, unfinished seals, and foreign files. They stay in
`quarantine/` until `clear`, which only `jaxrl buffer --clear_quarantine` calls.
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
  """Returns the size in bytes of each entry of a store's `segments/` or `quarantine/`, keyed by
  name.

  Args:
    directory: directory of the store.
    kind: `SEGMENTS` or `QUARANTINE`.
  """
  folder = pathlib.Path(directory) / kind
  if not folder.is_dir():
    return {}
  sizes = {}
  for path in sorted(folder.iterdir()):
    # A run that writes to the store may just have renamed the file.
    with contextlib.suppress(FileNotFoundError):
      sizes[path.name] = _size(path)
  return sizes


def set_aside(directory: pathlib.Path, named: Collection[str]) -> int:
  """Moves `segments/` entries not in `named` to `quarantine/` and returns their number.

  An entry whose name is already taken there gets a numeric suffix.
  """
  unnamed = [path for path in sorted((directory / SEGMENTS).iterdir()) if path.name not in named]
  if unnamed:
    (directory / QUARANTINE).mkdir(exist_ok=True)
    for path in unnamed:
      shutil.move(path, _free(directory / QUARANTINE / path.name))
    logging.warning(
      'replay: moved %s, which the index does not name, to %s; jaxrl buffer --clear_quarantine '
      'removes it',
      listed([path.name for path in unnamed]),
      directory / QUARANTINE,
    )
  return len(unnamed)


def clear(directory: str | os.PathLike) -> dict[str, int]:
  """Deletes `quarantine/`; returns the size in bytes of each removed entry, keyed by name."""
  sizes = files(directory, QUARANTINE)
  if sizes:
    shutil.rmtree(pathlib.Path(directory) / QUARANTINE)
  return sizes


def listed(names: Sequence[str]) -> str:
  """Returns text with the number of files and the first few names."""
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
