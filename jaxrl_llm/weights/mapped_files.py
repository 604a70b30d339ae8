"""Files in shared memory that are overwritten again and again, through maps of their pages.

Storing to mapped pages takes as long as any copy in memory. A write call takes more than twice as
long, because it looks up and locks each page, and only one thread at a time can write to a file.

Invariant: only pages that exist are mapped, so that no store needs memory that may be missing, for
which the kernel would end the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt8

from jaxrl_llm.core.disk import is_in_memory

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap does not name. It maps the pages of a
range in one call. Otherwise, the first store to each page would be interrupted.
"""
_BLOCK = 512
"""Unit of the size that `stat` reports for a file's pages, in bytes."""


class MappedFile:
  """Map of one file. As a sink of `TensorWriter`, it stores the bytes of tensors in the file."""

  def __init__(self, descriptor: int, size: int):
    self._descriptor = os.dup(descriptor)
    try:
      self._map = mmap.mmap(descriptor, size)
    except BaseException:
      os.close(self._descriptor)
      raise
    self._unpopulated = size
    """Number of bytes that have not been stored yet since the file was mapped. Several threads
    change it without a lock, so it may be too large, which costs time only.
    """

  def put(self, name: str, block: UInt8[np.ndarray, 'bytes'], offset: int) -> None:
    # Readers notice that a file changes by its time of change, which stores leave unchanged.
    os.utime(self._descriptor)
    if self._unpopulated > 0:
      start = offset - offset % mmap.PAGESIZE
      with contextlib.suppress(OSError):  # An older kernel. The stores map the pages themselves.
        self._map.madvise(_POPULATE_WRITE, start, offset + len(block) - start)
      self._unpopulated -= len(block)
    np.copyto(np.frombuffer(self._map, np.uint8, len(block), offset), block)

  @property
  def is_removed(self) -> bool:
    """Whether the file has no name any more, so that only the map keeps its memory."""
    return os.fstat(self._descriptor).st_nlink == 0

  def close(self) -> None:
    self._map.close()
    os.close(self._descriptor)


class MappedFiles:
  """Maps of the files that one writer overwrites. They stay until the files are removed."""

  def __init__(self) -> None:
    self._maps: dict[tuple[int, int, int], MappedFile] = {}
    """Maps keyed by device, inode and size of the file."""

  def map(self, file: BinaryIO, size: int) -> MappedFile | None:
    """Returns the map of a file of `size` bytes. Returns None if the file must be written with
    write calls, because it is not in shared memory, or because not all of its pages exist.

    Raises OSError if the file cannot be mapped.
    """
    self.prune()
    status = os.fstat(file.fileno())
    exists = status.st_size == size and status.st_blocks * _BLOCK >= size
    if not exists or not is_in_memory(file.fileno()):
      return None
    key = status.st_dev, status.st_ino, size
    if key not in self._maps:
      self._maps[key] = MappedFile(file.fileno(), size)
    return self._maps[key]

  def prune(self) -> None:
    """Closes the maps of files that were removed, so that their memory is freed."""
    for key, mapped in [*self._maps.items()]:
      if mapped.is_removed:
        self._maps.pop(key).close()
