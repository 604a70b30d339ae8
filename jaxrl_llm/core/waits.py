"""Bounded waits: each has a name, an owner and a deadline.

`docs/develop/waits.md` lists all waits. A wait runs under `bounded` or `limit`, has a timeout whose
expiry its caller handles, or carries a comment `# Wait 'NAME': …` that states what else ends
it. `tests/waits_test.py` rejects any other wait. `unless` makes a wait end early when the run is
stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from jaxrl_llm.core.errors import RunError

T = TypeVar('T')


class WaitExpired(RunError):
  """Raised when a wait reaches its deadline: the awaited party is dead, stuck or too slow, or the
  awaited event did not happen in time.
  """


async def bounded(
  awaitable: Awaitable[T],
  *,
  name: str,
  owner: str,
  waits_for: str | Callable[[], str],
  deadline_s: float,
) -> T:
  """Awaits `awaitable` within `limit` and returns its result.

  At the deadline, cancels `awaitable` and raises WaitExpired. For the other arguments, see `limit`.
  """
  async with limit(name=name, owner=owner, waits_for=waits_for, deadline_s=deadline_s):
    return await awaitable


async def gathered(
  work: Iterable[Coroutine[Any, Any, T]],
  *,
  name: str,
  owner: str,
  waits_for: str,
  deadline_s: float,
) -> list[T]:
  """Awaits all coroutines in `work` concurrently and returns their results in order.

  Each completion restarts the deadline, so WaitExpired is raised only if no coroutine completes for
  `deadline_s` seconds. For the other arguments, see `limit`.
  """
  async with limit(name=name, owner=owner, waits_for=waits_for, deadline_s=deadline_s) as running:

    def extend(_: asyncio.Task) -> None:
      if not running.expired():
        running.reschedule(asyncio.get_running_loop().time() + deadline_s)

    async with asyncio.TaskGroup() as group:
      tasks = [group.create_task(coroutine) for coroutine in work]
      for task in tasks:
        task.add_done_callback(extend)
  return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def limit(
  *, name: str, owner: str, waits_for: str | Callable[[], str], deadline_s: float
) -> AsyncIterator[asyncio.Timeout]:
  """Limits the duration of a block.

  At the deadline, cancels the block, dumps all stacks to stderr and raises WaitExpired. A
  TimeoutError that the block itself raises passes through unchanged.

  Args:
    name: name of the wait in the message and in `docs/develop/waits.md`.
    owner: the waiting party, for the message.
    waits_for: the party or event waited for, and what to inspect, for the message; or a function
      that returns it at the deadline.
    deadline_s: seconds from the start of the block to the deadline.
  """
  try:
    async with asyncio.timeout(deadline_s) as running:
      yield running
  except TimeoutError:
    if not running.expired():
      raise
    _dump_stacks()
    missing = waits_for() if callable(waits_for) else waits_for
    raise WaitExpired(f'{_line(name, owner, missing, deadline_s)}; stacks are above') from None


@contextlib.contextmanager
def watched(*, name: str, owner: str, waits_for: str, deadline_s: float) -> Iterator[None]:
  """Limits the duration of a block that cannot be interrupted, such as a call into a C library.

  At the deadline, dumps the stacks of all threads to stderr and ends the process. For the
  arguments, see `limit`.
  """

  def leave() -> None:
    faulthandler.dump_traceback(file=sys.stderr)
    sys.stderr.write(
      f'run stopped: {_line(name, owner, waits_for, deadline_s)}; stacks are above\n'
    )
    sys.stderr.flush()
    os._exit(WaitExpired.exit_code)

  timer = threading.Timer(deadline_s, leave)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


async def ended(
  process: subprocess.Popen, *, name: str, owner: str, waits_for: str, deadline_s: float
) -> int:
  """Waits for a process that was asked to end, and returns its exit code.

  At the deadline, kills the process and raises WaitExpired. For the other arguments, see `limit`.
  """
  try:
    return await asyncio.to_thread(process.wait, deadline_s)
  except subprocess.TimeoutExpired:
    process.kill()
    raise WaitExpired(f'{_line(name, owner, waits_for, deadline_s)}, and has killed it') from None


def _line(name: str, owner: str, waits_for: str, deadline_s: float) -> str:
  return f'wait {name}: {owner} waited {deadline_s:g} s for {waits_for}'


async def unless(stop: asyncio.Future, work: Awaitable[T]) -> T | None:
  """Returns the result of `work`, or cancels `work` and returns None if `stop` completes first.

  Args:
    stop: future that ends the wait. If `work` completes at the same time, the result is still None.
    work: awaitable that has its own deadlines and whose result is never None.
  """
  task = asyncio.ensure_future(work)
  try:
    # Wait 'work': bounded: every wait inside `work` has a deadline.
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    return None if stop.done() else task.result()
  finally:
    task.cancel()  # This has no effect on a completed task.
    await asyncio.gather(task, return_exceptions=True)


def _dump_stacks() -> None:
  """Dumps the stacks of all threads and of all asyncio tasks to stderr.

  Tasks are dumped separately, because the stack of a suspended task is not part of any thread's
  stack.
  """
  faulthandler.dump_traceback(file=sys.stderr)
  for task in asyncio.all_tasks():
    task.print_stack(limit=8, file=sys.stderr)
  sys.stderr.flush()


class IdleClock:
  """Measures the time during which no work is in progress."""

  def __init__(self):
    self._under_way, self._since, self._idle = 0, time.monotonic(), 0.0

  @contextlib.contextmanager
  def busy(self) -> Iterator[None]:
    """Marks the block as work in progress; blocks may overlap."""
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
    """Returns the idle seconds since the last call."""
    now = time.monotonic()
    if self._under_way == 0:
      self._idle += now - self._since
      self._since = now
    idle, self._idle = self._idle, 0.0
    return idle
