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

  Args:
    awaitable: what to wait for; it is cancelled at the deadline.
    name: what the wait is called in the message and in the documentation.
    owner: who waits.
    waits_for: whom it waits for, and what to look at.
    deadline_s: seconds.
  """
  try:
    return await asyncio.wait_for(awaitable, deadline_s)
  except TimeoutError:
    faulthandler.dump_traceback(file=sys.stderr)
    raise WaitExpired(
      f'wait {name}: {owner} waited {deadline_s:g} s for {waits_for}; stacks are above, '
      'raise the deadline in the configuration if the work is merely slow'
    ) from None
