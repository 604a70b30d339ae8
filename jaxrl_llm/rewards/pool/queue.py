"""Queue of the calls that wait for a scorer worker. Cheap calls of one scorer share a batch.

Sending a call to another process and receiving its outcome costs the event loop more time than many
scorers need to compute a score.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
from collections.abc import Awaitable, Callable, Sequence

from jaxrl_llm.core.records.score import Score
from jaxrl_llm.rewards.api import Attempt, ScorerConfig
from jaxrl_llm.rewards.pool.outcome import CallOutcome

BATCH_S = 5e-3
"""Maximum time in seconds that the calls of a batch are expected to take together. It is short, so
that batches leave no worker idle for long.
"""
MAX_BATCH = 64
"""Maximum number of calls in a batch."""
_DECAY = 0.95
"""Factor by which the recorded duration of a scorer's longest call decays with each further call.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
  """A call of scorer `config.name` on one attempt, or on the attempts of a group."""

  config: ScorerConfig
  attempts: tuple[Attempt, ...]
  scores: tuple[tuple[Score, ...], ...]
  """Per-sample scores of each attempt; empty unless the scorer is a `PerGroup`."""
  number: int
  """Position in the order of arrival."""
  outcome: asyncio.Future[CallOutcome]


class CallQueue:
  """Gives calls to workers in batches. At most `limit` batches are in flight.

  A batch has several calls only if the scorer's recent calls were so fast that the batch should
  take at most `BATCH_S`. If the worker dies or takes too long, each call of the batch is repeated
  alone, so that no call's outcome depends on another call.
  """

  def __init__(
    self, make: Callable[[Sequence[Call]], Awaitable[Sequence[CallOutcome] | None]], *, limit: int
  ):
    """
    Args:
      make: makes the calls of a batch in one worker, and returns their outcomes. Returns None if
        each call must be repeated alone.
    """
    self._make, self._limit = make, limit
    self._waiting: dict[tuple[str, float], collections.deque[Call]] = {}
    """Waiting calls, keyed by scorer and deadline, in the order of arrival."""
    self._alone: collections.deque[Call] = collections.deque()
    """Calls that must not share a batch. They precede those in `_waiting`."""
    self._seconds: dict[str, float] = {}
    """Longest recent duration of a call in seconds, keyed by scorer."""
    self._numbers = itertools.count()
    self._in_flight: set[asyncio.Task] = set()
    self._is_scheduled = False

  async def call(
    self, config: ScorerConfig, attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...]
  ) -> CallOutcome:
    call = Call(
      config=config,
      attempts=attempts,
      scores=scores,
      number=next(self._numbers),
      outcome=asyncio.get_running_loop().create_future(),
    )
    self._waiting.setdefault((config.name, config.deadline_s), collections.deque()).append(call)
    self._schedule()
    # Wait 'score': every batch in flight has a deadline, and waiting calls follow in turn.
    return await call.outcome

  def set_limit(self, limit: int) -> None:
    self._limit = limit
    self._schedule()

  def _schedule(self) -> None:
    """Dispatches calls after the event loop has run the asyncio tasks that are ready now, so that
    calls of these tasks can share a batch.
    """
    if not self._is_scheduled:
      self._is_scheduled = True
      asyncio.get_running_loop().call_soon(self._dispatch)

  def _dispatch(self) -> None:
    self._is_scheduled = False
    while len(self._in_flight) < self._limit and (calls := self._take()):
      batch = asyncio.create_task(self._run(calls))
      self._in_flight.add(batch)
      batch.add_done_callback(self._ended)
      for call in calls:
        call.outcome.add_done_callback(functools.partial(_cancel_if_unwanted, batch, calls))

  def _take(self) -> list[Call]:
    """Takes the calls of the next batch from the queue. Calls that were cancelled are skipped."""
    while self._alone:
      call = self._alone.popleft()
      if not call.outcome.done():
        return [call]
    while queues := [queue for queue in self._waiting.values() if queue]:
      queue = min(queues, key=lambda calls: calls[0].number)
      size = self._batch_size(queue[0])
      calls = [queue.popleft() for _ in range(min(size, len(queue)))]
      if calls := [call for call in calls if not call.outcome.done()]:
        return calls
    return []

  def _batch_size(self, first: Call) -> int:
    longest = self._seconds.get(first.config.name)
    if longest is None or len(first.attempts) > 1:
      return 1
    return max(1, min(MAX_BATCH, int(BATCH_S / max(longest, 1e-6))))

  async def _run(self, calls: Sequence[Call]) -> None:
    """Makes the calls of a batch, and passes their outcomes or an exception to the callers. If the
    calls must be repeated alone, they are queued again instead.
    """
    try:
      outcomes = await self._make(calls)
    except Exception as error:
      for call in calls:
        if not call.outcome.done():
          call.outcome.set_exception(error)
      return
    if outcomes is None:
      self._alone.extend(calls)
      return
    for call, outcome in zip(calls, outcomes, strict=True):
      name = call.config.name
      self._seconds[name] = max(outcome.seconds, _DECAY * self._seconds.get(name, 0.0))
      if not call.outcome.done():
        call.outcome.set_result(outcome)

  def _ended(self, batch: asyncio.Task) -> None:
    self._in_flight.discard(batch)
    self._schedule()


def _cancel_if_unwanted(batch: asyncio.Task, calls: Sequence[Call], _: asyncio.Future) -> None:
  """Cancels a batch if all its calls have been cancelled. This frees the batch's worker."""
  if all(call.outcome.cancelled() for call in calls):
    batch.cancel()
