"""Dispatch of requests to the servers of a fleet.

Servers with the same maximum sequence length form a group. A request goes to the group with the
least maximum length that holds its prompt and longest answer, and of which any server serves.

Invariant: requests are dispatched in order of arrival, with one exception: if only busy servers may
serve a request, later requests may overtake it.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.api import Request
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.workload import Prefix, prefixes

_SPREAD = 1.1
"""Maximum ratio of the tokens outstanding at a server that is preferred for its cached prefix to
the least tokens outstanding at any server, apart from the tokens of one request.
"""
_BURST = 16
"""Maximum number of requests dispatched in one iteration of the event loop."""


class Assignment(NamedTuple):
  """Assignment of a request to a server."""

  replica: Replica
  life: int
  """The replica's `life` at the time of dispatch."""
  tokens: int
  """Number of tokens that the request adds to the server's `outstanding` until it is released."""


class _Place(NamedTuple):
  """A request for one sample in the queue for a server."""

  future: asyncio.Future[Assignment]
  samples: bool
  """Whether the temperature of the request is above 0."""
  length: int
  """Length in tokens of the prompt and the longest answer."""
  prefixes: Sequence[Prefix]
  """Prefixes of the prompt; empty unless requests are dispatched by tokens."""


class Dispatcher:
  """Queue of the requests that wait for a server."""

  def __init__(self, serving: Callable[[], Sequence[Replica]], config: VllmConfig):
    """
    Args:
      serving: returns the servers that currently take requests.
    """
    self._serving, self._config = serving, config
    self._waiting: collections.deque[_Place] = collections.deque()
    self._hashed: tuple[tuple[int, ...], Sequence[Prefix]] = (), ()
    """Prompt and prefixes of the last request. Its other samples have the same prompt."""

  async def acquire(self, request: Request) -> Assignment:
    """Waits for a server that can take another sample of a request, and counts the sample as in
    flight on that server. The caller must `release` the assignment.
    """
    place = _Place(
      future=asyncio.get_running_loop().create_future(),
      samples=request.sampling.temperature > 0,
      length=len(request.prompt) + request.max_tokens,
      prefixes=self._prefixes(request.prompt),
    )
    self._waiting.append(place)
    self.dispatch()
    try:
      # The wait ends when another request finishes, or when `Repairs.watch` ends the fleet.
      # Wait 'place': bounded by the deadlines of earlier requests and by `start_deadline_s`.
      return await place.future
    except asyncio.CancelledError:
      future = place.future
      if future.done() and not future.cancelled() and future.exception() is None:
        self.release(future.result())
      raise

  def _prefixes(self, prompt: tuple[int, ...]) -> Sequence[Prefix]:
    if self._config.dispatch != 'least_tokens':
      return ()
    if prompt is not self._hashed[0]:
      self._hashed = prompt, prefixes(prompt)
    return self._hashed[1]

  def release(self, assignment: Assignment) -> None:
    """Counts a sample as no longer in flight on its server, and dispatches waiting requests."""
    assignment.replica.in_flight -= 1
    assignment.replica.workload.outstanding -= assignment.tokens
    self.dispatch()

  def dispatch(self) -> None:
    """Dispatches waiting requests to servers that can take another request.

    At most `_BURST` requests are dispatched at a time, because starting hundreds of requests in one
    iteration of the event loop would block everything else.
    """
    for _ in range(_BURST):
      if not self._waiting:
        return
      groups = {samples: self._groups(samples=samples) for samples in (False, True)}
      if not any(free for each in groups.values() for _, free in each):
        return
      candidates = (_group(groups[place.samples], place.length) for place in self._waiting)
      number, free = next(((i, free) for i, free in enumerate(candidates) if free), (None, ()))
      if number is None:
        return
      place = self._waiting[number]
      del self._waiting[number]
      if not place.future.done():
        place.future.set_result(self._assign(place, free))
    asyncio.get_running_loop().call_soon(self.dispatch)

  def _groups(self, *, samples: bool) -> list[tuple[int, list[Replica]]]:
    """Returns (maximum sequence length, servers that can take another request) of each group of
    servers that serve, in ascending order of length.
    """
    groups: dict[int, list[Replica]] = {}
    for replica in self._serving():
      if not (samples and replica.sampling_fault is not None):
        groups.setdefault(replica.max_length, []).append(replica)
    return [(length, self._free(groups[length])) for length in sorted(groups)]

  def _free(self, servers: Sequence[Replica]) -> list[Replica]:
    """Returns the servers of a group to which the next request may go."""
    if self._config.dispatch == 'uniform':
      servers = [min(servers, key=lambda r: r.workload.assigned)]
    return [r for r in servers if r.in_flight < self._config.max_in_flight]

  def _assign(self, place: _Place, free: Sequence[Replica]) -> Assignment:
    """Assigns a request to one of the servers that can take it."""
    tokens = {r: place.length - r.workload.recent.shared(place.prefixes) for r in free}
    if self._config.dispatch == 'least_tokens':
      most = min(r.workload.outstanding for r in free) * _SPREAD + place.length
      near = [r for r in free if r.workload.outstanding <= most]
      replica = min(near, key=lambda r: (tokens[r], r.workload.outstanding))
    else:
      replica = min(free, key=lambda r: r.in_flight)
    assignment = Assignment(replica, replica.life, tokens[replica])
    replica.in_flight += 1
    replica.workload.assigned += 1
    replica.workload.outstanding += assignment.tokens
    replica.workload.recent.add(place.prefixes)
    return assignment

  def refuse_sampled(self, error: UserError) -> None:
    """Fails all waiting requests whose temperature is above 0 with `error`."""
    for place in self._waiting:
      if place.samples and not place.future.done():
        place.future.set_exception(error)

  def fail(self, error: Exception) -> None:
    """Fails all waiting requests with `error`."""
    while self._waiting:
      place = self._waiting.popleft()
      if not place.future.done():
        place.future.set_exception(error)


def _group(groups: Sequence[tuple[int, list[Replica]]], length: int) -> list[Replica]:
  """Returns the servers that can take a sequence of `length` tokens, of the first group that holds
  it; an empty list if there are none.
  """
  return next((free for longest, free in groups if longest >= length), [])
