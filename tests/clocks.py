"""An event loop whose clock is a test's own: what waits in it for a time does not take that time."""

from __future__ import annotations

import asyncio
import selectors
import types
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar('T')

_HASTE, _MOST_S = 50.0, 0.1
"""How much faster than real time a wait passes where sockets are open, and the most real seconds that it takes; in
these the kernel delivers what was sent."""
_PATIENCE_S = 30.0
"""Real seconds for a thread, when there is nothing else to wait for."""


LOOP_CLOCK = types.SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
"""In place of the module `time` where code on the loop measures: its clock is then the loop's."""


class SimulatedLoop(asyncio.SelectorEventLoop):
  """Its clock jumps to the next timer when nothing else is left to do.

  What its tasks say to each other over sockets and what the threads of its executor do takes no time of this clock. It
  does not serve tests that wait for another process, of which it does not know, nor tasks that try something again and
  again without a pause: while there is anything to do, no time passes.
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


class _Jumping(selectors.DefaultSelector):
  def __init__(self, loop):
    super().__init__()
    self._loop = loop

  def select(self, timeout=None):
    ready = super().select(0)
    if ready or timeout == 0:
      return ready
    if timeout is None or self._loop.in_threads:
      ready = super().select(_PATIENCE_S)
      assert ready, 'everything waits for something that will not come'
      return ready
    if len(self.get_map()) > 1:  # The loop itself has one, by which threads wake it.
      ready = super().select(min(timeout / _HASTE, _MOST_S))
    if not ready:
      self._loop.now += timeout
    return ready


def simulated(main: Coroutine[Any, Any, T], *, deadline_s: float = 60.0) -> T:
  """What it makes in at most so many seconds of simulated time."""
  with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
    return runner.run(asyncio.wait_for(main, deadline_s))
