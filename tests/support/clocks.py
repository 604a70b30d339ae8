"""Simulated time for asyncio: an event loop whose clock jumps to the next timer instead of waiting
for it.
"""

from __future__ import annotations

import asyncio
import selectors
import types
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

from jaxrl_llm.core import background

T = TypeVar('T')

_SPEEDUP, _MAX_WAIT_S = 50.0, 0.1
"""If sockets are open, a jump over t simulated seconds waits min(t / _SPEEDUP, _MAX_WAIT_S) real
seconds for data that is being transferred.
"""
_THREAD_DEADLINE_S = 120.0
"""Real seconds to wait for a thread if no timer is set."""


LOOP_CLOCK = types.SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
"""Replaces the module `time` in code that runs on the loop, so that it measures simulated time."""


class SimulatedLoop(asyncio.SelectorEventLoop):
  """An event loop whose clock jumps to the next timer when nothing else is left to do.

  Communication between its tasks and calls in its executor take no simulated time. The loop is
  unsuitable for tests that wait for another process, because it cannot see that process. It is also
  unsuitable for tasks that retry without a pause, because time stands still while there is work.
  """

  def __init__(self):
    super().__init__(_Jumping(self))
    self.now = 0.0
    self.in_threads: set[asyncio.Future] = set()

  def time(self) -> float:
    return self.now

  def run_in_executor(self, executor, func, *args):
    call = super().run_in_executor(executor, func, *args)
    self.in_threads.add(call)
    call.add_done_callback(self.in_threads.discard)
    return call


class _Here:
  """Replaces `BackgroundLoop`: runs the work in the calling loop."""

  async def run(self, work: Coroutine[Any, Any, T]) -> T:
    return await work

  def entered(self, manager):
    return manager


class _Jumping(selectors.DefaultSelector):
  def __init__(self, loop):
    super().__init__()
    self._loop = loop

  def select(self, timeout=None):
    ready = super().select(0)
    if ready or timeout == 0:
      return ready
    if timeout is None or self._loop.in_threads:
      ready = super().select(_THREAD_DEADLINE_S)
      assert ready, f'nothing happened in {_THREAD_DEADLINE_S:g} s, and no timer is set'
      return ready
    if len(self.get_map()) > 1:  # One socket belongs to the loop: threads use it to wake the loop.
      ready = super().select(min(timeout / _SPEEDUP, _MAX_WAIT_S))
    if not ready:
      self._loop.now += timeout
    return ready


def simulated(main: Coroutine[Any, Any, T], *, deadline_s: float = 60.0) -> T:
  """Runs `main` on a SimulatedLoop and returns its result. Raises TimeoutError after `deadline_s`
  simulated seconds. Responses and messages are received in that loop too, because a loop in another
  thread has another clock.
  """
  with (
    mock.patch.object(background, 'responses', _Here),
    mock.patch.object(background, 'messages', _Here),
    asyncio.Runner(loop_factory=SimulatedLoop) as runner,
  ):
    return runner.run(asyncio.wait_for(main, deadline_s))
