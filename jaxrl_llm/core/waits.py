"""Waits that end: each blocking one has a name, a deadline and an owner, and some are cut short by a stop."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import sys
import time
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from jaxrl_llm.core.errors import RunError

T = TypeVar('T')


class WaitExpired(RunError):
  """A wait reached its deadline: somebody it depends on is dead or stuck."""


async def bounded(awaitable: Awaitable[T], *, name: str, owner: str, waits_for: str, deadline_s: float) -> T:
  """Awaits, at most `deadline_s` seconds; at the deadline dumps all stacks to stderr and raises WaitExpired.

  A TimeoutError of what is awaited is its own affair and goes through unchanged.

  Args:
    awaitable: what to wait for; it is cancelled at the deadline.
    name: what the wait is called in the message and in the documentation.
    owner: who waits.
    waits_for: whom it waits for, and what to look at.
    deadline_s: seconds.
  """
  try:
    async with asyncio.timeout(deadline_s) as limit:
      return await awaitable
  except TimeoutError:
    if not limit.expired():
      raise
    _dump_stacks()
    raise WaitExpired(
      f'wait {name}: {owner} waited {deadline_s:g} s for {waits_for}; stacks are above, '
      'raise the deadline in the configuration if the work is merely slow'
    ) from None


async def unless(stop: asyncio.Future, work: Awaitable[T]) -> T | None:
  """What `work` evaluates to; None when `stop` is set by then, and `work` has been cancelled and is over.

  Args:
    stop: wins over work that is done at the same time.
    work: bounded by its own deadlines; never evaluates to None.
  """
  task = asyncio.ensure_future(work)
  try:
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    return None if stop.done() else task.result()
  finally:
    task.cancel()  # without effect on one that is done
    await asyncio.gather(task, return_exceptions=True)


def _dump_stacks() -> None:
  """Of all threads, and of what is suspended in this event loop: no thread's stack shows that."""
  faulthandler.dump_traceback(file=sys.stderr)
  for task in asyncio.all_tasks():
    task.print_stack(limit=8, file=sys.stderr)
  sys.stderr.flush()


class IdleClock:
  """Seconds in which nothing was under way."""

  def __init__(self):
    self._under_way, self._since, self._idle = 0, time.monotonic(), 0.0

  @contextlib.contextmanager
  def busy(self) -> Iterator[None]:
    """Something is under way while the block runs; blocks may overlap."""
    if self._under_way == 0:
      self._idle += time.monotonic() - self._since
    self._under_way += 1
    try:
      yield
    finally:
      self._under_way -= 1
      if self._under_way == 0:
        self._since = time.monotonic()

  def take(self) -> float:
    """Idle seconds since the last call."""
    now = time.monotonic()
    if self._under_way == 0:
      self._idle += now - self._since
      self._since = now
    idle, self._idle = self._idle, 0.0
    return idle
