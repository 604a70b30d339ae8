"""Moves work on long sequences off the event loop's thread: to worker threads, for functions that
release Python's global lock most of the time, or to a second event loop.

Only the work that takes the longest per token is moved: receiving and parsing servers' responses,
receiving messages of explorers and checking what they deliver, decoding text, writing samples to
the store's index (`master.exploring.settling`), making the rows of a batch, computing metrics,
writing transcripts, and recording a batch as complete. Building the lists of prompt tokens in
requests also grows with the length of sequences, but stays on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar('T')
P = ParamSpec('P')

_SHORT = 1024
"""Number of tokens up to which a function is called directly, because handing the call to a thread
would take as long as the call.
"""
_END_S = 5.0
"""Maximum seconds that a cancelled call waits for its coroutine to end."""


def is_short(tokens: int) -> bool:
  """Returns whether work on this many tokens is done directly, and not in a thread."""
  return tokens <= _SHORT


async def by_length(tokens: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
  """Returns `function(*args, **kwargs)`. The function is called in a thread if it works on many
  tokens, and directly otherwise.

  Args:
    tokens: number of tokens that the function works on.
  """
  if is_short(tokens):
    return function(*args, **kwargs)
  return await asyncio.to_thread(function, *args, **kwargs)


async def by_length_to_end(
  tokens: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
  """Does the same as `by_length`, but if this call is cancelled, it first waits until the function
  has returned. Use it for a function whose changes must not take place after the caller has ended.
  """
  if is_short(tokens):
    return function(*args, **kwargs)
  work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
  try:
    # Wait 'stored': bounded by the function.
    return await asyncio.shield(work)
  except asyncio.CancelledError:
    while not work.done():
      with contextlib.suppress(asyncio.CancelledError):  # Cancelled once more.
        # Wait 'stored': bounded by the function.
        await asyncio.wait([work])
    raise


def in_daemon_thread(
  function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
  """Starts `function(*args, **kwargs)` in a new thread, and returns a future of the result.

  Unlike a thread of `asyncio.to_thread`, this thread delays neither the closing of the event loop
  nor the exit of the process.
  """
  result: concurrent.futures.Future[T] = concurrent.futures.Future()
  # From now on, the future cannot be cancelled: the thread could not set the result any more.
  result.set_running_or_notify_cancel()

  def work() -> None:
    try:
      result.set_result(function(*args, **kwargs))
    except BaseException as error:
      result.set_exception(error)

  threading.Thread(target=work, name=function.__name__, daemon=True).start()
  return asyncio.wrap_future(result)


class BackgroundLoop:
  """An event loop in a daemon thread.

  Attributes:
    loop: the event loop.
  """

  def __init__(self, name: str):
    self.loop = asyncio.new_event_loop()
    threading.Thread(target=self.loop.run_forever, name=name, daemon=True).start()

  async def run(self, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the background loop and returns its result; see `run_in`."""
    return await run_in(self.loop, work)

  def call_soon(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls a function in the background loop, without waiting for the call. May be called in any
    thread.
    """
    self.loop.call_soon_threadsafe(functools.partial(function, *args, **kwargs))

  @contextlib.asynccontextmanager
  async def entered(self, manager: contextlib.AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enters and exits a context manager in the background loop, and yields its value. Exceptions
    of the block are not passed to the manager.
    """
    value = await self.run(manager.__aenter__())
    try:
      yield value
    finally:
      await self.run(manager.__aexit__(None, None, None))


async def run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
  """Runs a coroutine in an event loop, which may be that of another thread, and returns its result.
  Cancelling this call also cancels the coroutine, and waits up to `_END_S` seconds for it to end.
  If the coroutine is cancelled in its loop, this call raises CancelledError.
  """
  if loop is asyncio.get_running_loop():
    # Wait 'background': bounded: every wait in the coroutine has a deadline.
    return await work
  caller = asyncio.get_running_loop()
  tasks: list[asyncio.Task[T]] = []
  result: asyncio.Future[T] = caller.create_future()
  ended: asyncio.Future[None] = caller.create_future()

  def begin() -> None:
    tasks.append(loop.create_task(work))
    tasks[0].add_done_callback(lambda task: _call_soon(caller, pass_on, task))

  def pass_on(task: asyncio.Task[T]) -> None:
    ended.set_result(None)
    error = None if task.cancelled() else task.exception()
    if result.done():  # The caller was cancelled.
      return
    if task.cancelled():
      result.cancel()
    elif error is not None:
      result.set_exception(error)
    else:
      # Wait 'background': already over, because the task has ended.
      result.set_result(task.result())

  loop.call_soon_threadsafe(begin)
  try:
    # Wait 'background': bounded: every wait in the coroutine has a deadline.
    return await result
  except asyncio.CancelledError:
    if not ended.done():
      loop.call_soon_threadsafe(lambda: tasks[0].cancel())
      await asyncio.wait([ended], timeout=_END_S)
    raise


async def call_in(
  loop: asyncio.AbstractEventLoop, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
  """Calls a function in an event loop, which may be that of another thread, and returns its
  result. If this call is cancelled, the function may be called nevertheless.
  """
  caller = asyncio.get_running_loop()
  if loop is caller:
    return function(*args, **kwargs)
  result: asyncio.Future[T] = caller.create_future()

  def call() -> None:
    try:
      value = function(*args, **kwargs)
    except Exception as error:
      _call_soon(caller, pass_on, None, error)
    else:
      _call_soon(caller, pass_on, value, None)

  def pass_on(value: T, error: Exception | None) -> None:
    if result.done():  # The caller was cancelled.
      return
    if error is None:
      result.set_result(value)
    else:
      result.set_exception(error)

  loop.call_soon_threadsafe(call)
  # Wait 'background': bounded: the function does not wait.
  return await result


def _call_soon(
  loop: asyncio.AbstractEventLoop, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> None:
  """Calls a function in an event loop, unless the loop has been closed."""
  with contextlib.suppress(RuntimeError):
    loop.call_soon_threadsafe(functools.partial(function, *args, **kwargs))


@functools.cache
def responses() -> BackgroundLoop:
  """Returns the event loop in which this process receives large responses. The loop runs as long as
  the process.
  """
  return BackgroundLoop('responses')


@functools.cache
def messages() -> BackgroundLoop:
  """Returns the event loop in which this process receives the messages of explorers. The loop runs
  as long as the process.
  """
  return BackgroundLoop('messages')
