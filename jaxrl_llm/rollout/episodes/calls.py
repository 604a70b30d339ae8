"""Calls of user code, such as tools and environments, with a deadline.

Coroutine functions run on the event loop. Plain functions may block, so each of their calls runs in
a separate thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl_llm.core.errors import UserError, one_line

MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Maximum number of calls that run in threads at a time, in this process. A call that has exceeded
its deadline does not count.
"""
MAX_OVERDUE = 64
"""Maximum number of threads whose calls have exceeded their deadline and still run. If there are
more, further calls in threads fail at once.
"""
_overdue: set[threading.Thread] = set()


class CallFailed(Exception):
  """Raised when a call raised an exception, exceeded its deadline, or was not started because too
  many earlier calls hang. An exception of the call is the `__cause__`. The message is one line.
  """


async def call_within(deadline_s: float, call: Callable[[], Any]) -> Any:
  """Calls a function or coroutine function and returns its result.

  Python cannot end a thread, so a function that exceeds its deadline keeps its thread.

  Args:
    deadline_s: maximum seconds for the call. The wait until fewer than `MAX_THREADS` calls run in
      threads does not count.
    call: function without arguments, or a `functools.partial`.

  Raises:
    CallFailed: the call raised an exception or exceeded the deadline, or too many threads hang.
  """
  if inspect.iscoroutinefunction(call):
    return await _result(call, deadline_s)
  async with _free_threads(asyncio.get_running_loop()):
    _overdue.intersection_update([thread for thread in _overdue if thread.is_alive()])
    if len(_overdue) > MAX_OVERDUE:
      raise CallFailed('too many calls hang')
    thread, future = _in_thread(call)
    try:
      return await _result(lambda: future, deadline_s)
    finally:
      if thread.is_alive():
        _overdue.add(thread)


async def _result(call: Callable[[], Awaitable[Any]], deadline_s: float) -> Any:
  try:
    async with asyncio.timeout(deadline_s) as limit:
      result = await call()
      # Plain functions may return an awaitable, for example if they wrap a coroutine function.
      return await result if inspect.isawaitable(result) else result
  except Exception as error:
    if isinstance(error, TimeoutError) and limit.expired():
      raise CallFailed(f'no result within {deadline_s:g} s') from None
    kind = '' if isinstance(error, UserError) else f'{type(error).__name__}: '
    raise CallFailed(one_line(f'{kind}{error}')) from error


@functools.lru_cache(maxsize=1)
def _free_threads(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
  """Returns the event loop's semaphore that limits the calls running in threads. A call holds the
  semaphore while it runs in a thread.
  """
  return asyncio.Semaphore(MAX_THREADS)


def _in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, asyncio.Future[Any]]:
  """Starts a call in a new thread. Returns the thread and the future of the call's result.

  The thread is a daemon, so a hanging call does not keep the process from exiting.
  """
  result: concurrent.futures.Future[Any] = concurrent.futures.Future()
  result.set_running_or_notify_cancel()  # A call that has started cannot be cancelled.

  def run() -> None:
    try:
      result.set_result(call())
    except Exception as error:
      result.set_exception(error)
    # sys.exit() in user code, for example, must not end the event loop.
    except BaseException as error:
      result.set_exception(RuntimeError(f'{type(error).__name__}: {error}'))

  thread = threading.Thread(target=run, name='call', daemon=True)
  thread.start()
  return thread, asyncio.wrap_future(result)
