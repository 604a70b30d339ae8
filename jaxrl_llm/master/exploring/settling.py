"""Stores finished groups in a thread, because writing the bytes of long samples would block the
event loop. SQLite releases Python's global lock while it writes.

Invariant: groups are stored, and their results recorded, one after another in the order in which
they finished.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.core import background


class _Group(NamedTuple):
  """A group that is being stored."""

  stored: concurrent.futures.Future[None]
  """Result of the function that stores the group."""
  conclude: Callable[[], None]
  """Function that records the result in the event loop's thread."""
  concluded: asyncio.Future[None]


class Settling:
  """Queue of the groups that are being stored, for calls in the event loop's thread."""

  def __init__(self):
    self._groups: collections.deque[_Group] = collections.deque()
    self._cancelled: list[_Group] = []
    """Groups whose calls of `settle` were cancelled, and so did not raise the groups' errors."""
    self._thread: concurrent.futures.ThreadPoolExecutor | None = None

  async def settle(
    self, tokens: int, store: Callable[[], None], conclude: Callable[[], None]
  ) -> None:
    """Calls `store`, in a thread if the group has many tokens, and then `conclude`, in this thread.
    Raises their exceptions. If this call is cancelled, both functions are called nevertheless.

    Args:
      tokens: number of the group's tokens that `store` writes.
    """
    if background.is_short(tokens):
      self.finish()
      store()
      conclude()
      return
    loop = asyncio.get_running_loop()
    group = _Group(concurrent.futures.Future(), conclude, loop.create_future())
    self._groups.append(group)

    def work() -> None:
      try:
        group.stored.set_result(store())
      except BaseException as error:
        group.stored.set_exception(error)

    if self._thread is None:
      self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='settling')
    loop.run_in_executor(self._thread, work).add_done_callback(lambda _: self._conclude())
    try:
      # Wait 'stored': bounded by the writes of the transaction.
      await group.concluded
    except asyncio.CancelledError:
      self._cancelled.append(group)
      raise

  def finish(self) -> None:
    """Waits until all groups in the queue are stored, and records their results."""
    while self._groups:
      # Wait 'stored': bounded by the writes of the transaction.
      concurrent.futures.wait([self._groups[0].stored])
      self._conclude()

  def close(self) -> None:
    """Does the same as `finish`, and ends the thread. Raises the first error of a function `store`
    whose group's call was cancelled. Such a group's error of `conclude` is ignored, because it
    concerns a batch that is no longer collected.
    """
    self.finish()
    if self._thread is not None:
      self._thread.shutdown(wait=False)
      self._thread = None
    cancelled, self._cancelled = self._cancelled, []
    for group in cancelled:
      group.stored.result()  # Wait 'stored': already over.

  def _conclude(self) -> None:
    """Records the results of the groups at the head of the queue that are stored."""
    while self._groups and self._groups[0].stored.done():
      group = self._groups.popleft()
      try:
        group.stored.result()  # Wait 'stored': already over.
        group.conclude()
      except BaseException as error:
        if not group.concluded.done():
          group.concluded.set_exception(error)
      else:
        if not group.concluded.done():
          group.concluded.set_result(None)
