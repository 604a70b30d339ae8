"""Runs scorers that wait for another process. They run on the event loop instead of in worker
processes.

Invariants: at most `concurrency` calls to a scorer are in flight. A call ends at its deadline even
if the scorer ignores its cancellation. An exception of a scorer is returned as a `CallOutcome`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.rewards.api import Addressed, Attempt, Awaited, AwaitedGroup
from jaxrl_llm.rewards.pool.outcome import CallOutcome, checked, failed, timed_out

OPEN_DEADLINE_S = 120.0
"""Time limit in seconds for opening a scorer. It includes the first reply from its server."""
CLOSE_DEADLINE_S = 10.0
"""Time limit in seconds for closing a scorer. After that, the scorer is left open and the run
continues.
"""


class AwaitedScorer:
  """Opens, calls and closes one `Awaited` or `AwaitedGroup` scorer."""

  def __init__(self, name: str, scorer: Awaited | AwaitedGroup):
    if scorer.concurrency < 1:
      raise UserError(f'scorer {name!r}: concurrency is {scorer.concurrency}, wanted at least 1')
    self._name, self._scorer = name, scorer
    self._free = asyncio.Semaphore(scorer.concurrency)
    self._closing = asyncio.Event()
    self._call: Callable[..., Awaitable[Any]] | None = None
    self._open: asyncio.Task | None = None
    self._under_way: set[asyncio.Task] = set()

  async def start(self) -> None:
    """Opens the scorer.

    Raises RunError if the scorer cannot be opened. A UserError that the scorer raises is passed on.
    """
    ready: asyncio.Future = asyncio.get_running_loop().create_future()
    self._open = asyncio.create_task(self._hold(ready))
    try:
      self._call = await bounded(
        ready,
        name='scorer_open',
        owner='scorer pool',
        waits_for=f'scorer {self._name} to open',
        deadline_s=OPEN_DEADLINE_S,
      )
    except UserError:
      raise
    except Exception as error:
      raise RunError(
        f'scorer {self._name}: could not be opened ({type(error).__name__}: {error}); is its '
        'server running?'
      ) from error

  async def _hold(self, ready: asyncio.Future) -> None:
    """Enters the scorer's context, waits until `close` is called, and leaves the context.

    A single asyncio task does all of this, because a cancel scope must be left in the task that
    entered it.
    """
    try:
      async with self._scorer.open() as call:
        if not ready.done():  # `ready` is done if `start` has stopped waiting.
          ready.set_result(call)
        # Wait 'scorer_closed': unbounded: the scorer stays open until `close`.
        await self._closing.wait()
    except (KeyboardInterrupt, GeneratorExit):
      raise
    except BaseException as error:
      if not ready.done():
        # The exception is replaced: a SystemExit in `ready` would end the event loop, and a
        # CancelledError would look like a cancellation of the task that awaits `ready`.
        failure = RuntimeError(f'{type(error).__name__}: {error}')
        ready.set_exception(error if isinstance(error, Exception) else failure)
      elif isinstance(error, asyncio.CancelledError):
        raise
      else:
        logging.warning(
          'Scorer %s failed to close: %s: %s', self._name, type(error).__name__, error
        )

  async def close(self) -> None:
    """Closes the scorer. Calls in flight raise RunError."""
    self._call = None
    self._closing.set()
    for task in self._under_way:
      task.cancel()
    if self._open is not None:
      _, late = await asyncio.wait({self._open}, timeout=CLOSE_DEADLINE_S)
      for task in late:
        task.cancel()
        logging.warning(
          'Scorer %s did not close within %g s: left open', self._name, CLOSE_DEADLINE_S
        )

  @property
  def addressed(self) -> bool:
    """Whether the scorer's server addresses can be changed. False until the scorer is open."""
    return isinstance(self._call, Addressed)

  def set_addresses(self, addresses: Sequence[str]) -> None:
    """Sets the scorer's addresses.

    Raises UserError if the scorer refuses an address, or has no addresses that can be changed.
    """
    if not isinstance(self._call, Addressed):
      raise UserError(f'scorer {self._name!r} has no addresses to change')
    try:
      self._call.set_addresses(addresses)
    except UserError:
      raise
    except Exception as error:
      raise UserError(
        f'scorer {self._name!r}: refused {addresses} ({type(error).__name__}: {error})'
      ) from error

  async def call(
    self, attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...], deadline_s: float
  ) -> CallOutcome:
    """Scores one attempt or one group.

    The call first waits until fewer than `concurrency` calls are in flight. This wait does not
    count towards the deadline.
    """
    async with self._free:
      if self._call is None:
        raise RunError('scorer pool: score() was called before start() or after close()')
      per_group = isinstance(self._scorer, AwaitedGroup)
      task = asyncio.create_task(_call_scorer(self._call, attempts, scores, per_group=per_group))
      self._under_way.add(task)
      task.add_done_callback(self._under_way.discard)
      try:
        await asyncio.wait({task}, timeout=deadline_s)
      finally:
        late = not task.done()
        task.cancel()  # This has no effect if the task is done.
    if self._call is None:
      raise RunError(f'scorer {self._name}: was closed while a call was in progress')
    return timed_out(deadline_s) if late else task.result()


async def _call_scorer(
  call: Callable[..., Awaitable[Any]],
  attempts: tuple[Attempt, ...],
  scores: tuple[tuple[Score, ...], ...],
  *,
  per_group: bool,
) -> CallOutcome:
  """Calls the scorer. An exception of the scorer, even CancelledError or SystemExit, is returned as
  the outcome of the call.

  A SystemExit would otherwise end the event loop. Only KeyboardInterrupt and GeneratorExit are
  raised.
  """
  start = time.perf_counter()
  try:
    returned = await call(attempts, scores) if per_group else [await call(attempts[0])]
    verdicts = checked(returned, len(attempts))
    return CallOutcome(verdicts=verdicts, seconds=time.perf_counter() - start)
  except (KeyboardInterrupt, GeneratorExit):
    raise
  except BaseException as raised:
    return failed(raised, time.perf_counter() - start)
