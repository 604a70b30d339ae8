"""Bounded waits: every blocking wait has a name, a deadline and an owner, and says so when it expires."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Awaitable
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


def _dump_stacks() -> None:
  """Of all threads, and of what is suspended in this event loop: no thread's stack shows that."""
  faulthandler.dump_traceback(file=sys.stderr)
  for task in asyncio.all_tasks():
    task.print_stack(limit=8, file=sys.stderr)
  sys.stderr.flush()
