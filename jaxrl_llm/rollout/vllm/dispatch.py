"""Dispatch of requests to the servers of a fleet.

Invariant: requests are dispatched in order of arrival, with one exception: if only busy servers may
serve a request, later requests may overtake it.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.server import VllmConfig

_BURST = 16
"""Maximum number of requests dispatched in one iteration of the event loop."""


class _Place(NamedTuple):
  """A request in the queue for a server."""

  future: asyncio.Future[tuple[Replica, int]]
  """Future that resolves to (replica, the replica's `life` at the time of dispatch)."""
  samples: bool
  """Whether the temperature of the request is above 0."""


class Dispatcher:
  """Queue of the requests that wait for a server."""

  def __init__(self, serving: Callable[[], Sequence[Replica]], config: VllmConfig):
    """
    Args:
      serving: returns the servers that currently take requests.
    """
    self._serving, self._config = serving, config
    self._waiting: collections.deque[_Place] = collections.deque()

  async def acquire(self, *, samples: bool) -> tuple[Replica, int]:
    """Waits for a server that can take another request, and counts the request as in flight on that
    server. Returns (replica, current `life` of the replica). The caller must `release` the replica.

    Args:
      samples: whether the temperature of the request is above 0.
    """
    future: asyncio.Future[tuple[Replica, int]] = asyncio.get_running_loop().create_future()
    self._waiting.append(_Place(future, samples))
    self.dispatch()
    try:
      # The wait ends when another request finishes, or when `Repairs.watch` ends the fleet.
      # Wait 'place': bounded by the deadlines of earlier requests and by `start_deadline_s`.
      return await future
    except asyncio.CancelledError:
      if future.done() and not future.cancelled() and future.exception() is None:
        self.release(future.result()[0])
      raise

  def release(self, replica: Replica) -> None:
    """Counts a request as no longer in flight on its server, and dispatches waiting requests."""
    replica.in_flight -= 1
    self.dispatch()

  def dispatch(self) -> None:
    """Dispatches waiting requests to servers that can take another request.

    At most `_BURST` requests are dispatched at a time, because starting hundreds of requests in one
    iteration of the event loop would block everything else.
    """
    for _ in range(_BURST):
      if not self._waiting:
        return
      free = {samples: self._choose(samples=samples) for samples in (False, True)}
      places = (i for i, place in enumerate(self._waiting) if free[place.samples])
      number = next(places, None) if any(free.values()) else None
      if number is None:
        return
      future, samples = self._waiting[number]
      del self._waiting[number]
      if not future.done():
        replica = free[samples]
        replica.in_flight += 1
        replica.assigned += 1
        future.set_result((replica, replica.life))
    asyncio.get_running_loop().call_soon(self.dispatch)

  def _choose(self, *, samples: bool) -> Replica | None:
    """Returns the server for the next request, or None if none can take it."""
    serving = [r for r in self._serving() if not (samples and r.sampling_fault is not None)]
    if not serving:
      return None
    is_uniform = self._config.dispatch == 'uniform'
    chosen = min(serving, key=lambda r: r.assigned if is_uniform else r.in_flight)
    return chosen if chosen.in_flight < self._config.max_in_flight else None

  def refuse_sampled(self, error: UserError) -> None:
    """Fails all waiting requests whose temperature is above 0 with `error`."""
    for future, samples in self._waiting:
      if samples and not future.done():
        future.set_exception(error)

  def fail(self, error: Exception) -> None:
    """Fails all waiting requests with `error`."""
    while self._waiting:
      future, _ = self._waiting.popleft()
      if not future.done():
        future.set_exception(error)
