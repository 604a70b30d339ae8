"""Locks that scorer processes share, without names in the file system.

The locks that `multiprocessing` creates for a fork server are semaphores with names in /dev/shm. If
the whole process tree is killed, nothing removes these semaphores.
"""

from __future__ import annotations

import multiprocessing.context
import os
import select
import threading
import time


class PipeLock:
  """A reentrant lock that processes share.

  The lock is a pipe with a single byte. The thread that has read the byte holds the lock, and
  releases it by writing the byte back. A process receives the pickled lock when it starts. As with
  `multiprocessing.RLock`, the lock stays held if the process that holds it is killed.
  """

  def __init__(self, context: multiprocessing.context.BaseContext):
    self.__setstate__(context.Pipe(duplex=False))
    os.set_blocking(self._reader.fileno(), False)
    os.write(self._writer.fileno(), b'.')

  def __getstate__(self):
    return self._reader, self._writer

  def __setstate__(self, ends) -> None:
    self._reader, self._writer = ends
    self._holder: int | None = None
    """ID of the thread of this process that has the lock; None if no thread of this process
    has it.
    """
    self._depth = 0

  def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
    """Acquires the lock. Returns whether this thread now has it.

    Args:
      block: whether to wait if another thread or process has the lock.
      timeout: maximum wait in seconds. If None, the wait is unlimited.
    """
    if self._holder != threading.get_ident():
      deadline = None if timeout is None else time.monotonic() + timeout
      while not self._take():
        remaining = None if deadline is None else deadline - time.monotonic()
        if not block or (remaining is not None and remaining <= 0):
          return False
        poll = select.poll()
        poll.register(self._reader.fileno(), select.POLLIN)
        poll.poll(
          None if remaining is None else 1000 * remaining
        )  # Wait 'turn': bounded by `timeout`, which pebble passes.
      self._holder = threading.get_ident()
    self._depth += 1
    return True

  def release(self) -> None:
    """Releases the lock. Raises RuntimeError if this thread does not have it."""
    if self._holder != threading.get_ident():
      raise RuntimeError('release: the lock is not held by this thread')
    self._depth -= 1
    if not self._depth:
      self._holder = None
      os.write(self._writer.fileno(), b'.')

  def _take(self) -> bool:
    try:
      return bool(os.read(self._reader.fileno(), 1))
    except BlockingIOError:
      return False


class NamelessLocks(multiprocessing.context.ForkServerContext):
  """Fork-server context whose reentrant locks are `PipeLock`s."""

  def RLock(self) -> PipeLock:
    return PipeLock(self)
