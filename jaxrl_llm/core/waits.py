"""Bounded waits: each has a name, an owner and a deadline, and a stop can cut some of them short.

`docs/waits.md` lists them. A wait runs under `bounded` or `limit`, has a timeout whose expiry its caller
handles, or carries a comment `# wait NAME: BOUND` that says what else ends it; `tests/waits_test.py` rejects any other.
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
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from jaxrl_llm.core.errors import RunError

T = TypeVar('T')


class WaitExpired(RunError):
  """A wait reached its deadline: somebody it depends on is dead or stuck."""


async def bounded(awaitable: Awaitable[T], *, name: str, owner: str, waits_for: str, deadline_s: float) -> T:
  """The value of `awaitable`, which is cancelled at the deadline; see `limit`."""
  async with limit(name=name, owner=owner, waits_for=waits_for, deadline_s=deadline_s):
    return await awaitable


async def gathered(
  work: Iterable[Coroutine[Any, Any, T]], *, name: str, owner: str, waits_for: str, deadline_s: float
) -> list[T]:
  """The values of all, in their order. WaitExpired when none of them ends for `deadline_s` seconds; see `limit`."""
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
async def limit(*, name: str, owner: str, waits_for: str, deadline_s: float) -> AsyncIterator[asyncio.Timeout]:
  """Ends the block at the deadline: dumps all stacks to stderr and raises WaitExpired.

  A TimeoutError that the block itself raises passes through unchanged.

  Args:
    name: the wait's name in the message and in `docs/waits.md`.
    owner: who waits.
    waits_for: whom it waits for, and what to look at.
    deadline_s: seconds.
  """
  try:
    async with asyncio.timeout(deadline_s) as running:
      yield running
  except TimeoutError:
    if not running.expired():
      raise
    _dump_stacks()
    raise WaitExpired(f'{_line(name, owner, waits_for, deadline_s)}; stacks are above') from None


@contextlib.contextmanager
def watched(*, name: str, owner: str, waits_for: str, deadline_s: float) -> Iterator[None]:
  """Like `limit`, for a block that cannot be interrupted: at the deadline it prints the line and ends the process."""

  def leave() -> None:
    faulthandler.dump_traceback(file=sys.stderr)
    sys.stderr.write(f'run stopped: {_line(name, owner, waits_for, deadline_s)}; stacks are above\n')
    sys.stderr.flush()
    os._exit(WaitExpired.exit_code)

  timer = threading.Timer(deadline_s, leave)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


async def ended(process: subprocess.Popen, *, name: str, owner: str, waits_for: str, deadline_s: float) -> int:
  """Exit code of a process that was asked to end. At the deadline it is killed, and WaitExpired raised; see `limit`."""
  try:
    return await asyncio.to_thread(process.wait, deadline_s)
  except subprocess.TimeoutExpired:
    process.kill()
    raise WaitExpired(f'{_line(name, owner, waits_for, deadline_s)}, and has killed it') from None


def _line(name: str, owner: str, waits_for: str, deadline_s: float) -> str:
  return f'wait {name}: {owner} waited {deadline_s:g} s for {waits_for}'


async def unless(stop: asyncio.Future, work: Awaitable[T]) -> T | None:
  """The value of `work`; None when `stop` is set by then, and `work` has been cancelled and is over.

  Args:
    stop: wins over work that is done at the same time.
    work: bounded by its own deadlines; never evaluates to None.
  """
  task = asyncio.ensure_future(work)
  try:
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)  # wait work: the deadlines of `work`
    return None if stop.done() else task.result()
  finally:
    task.cancel()  # without effect on one that is done
    await asyncio.gather(task, return_exceptions=True)


def _dump_stacks() -> None:
  """Dumps the stacks of all threads and of suspended tasks, which no thread's stack shows."""
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
