"""Worker processes for scorers. A worker that dies is replaced, and the number of workers can
change.

Invariants: every call ends in exactly one `CallOutcome`. A scorer that hangs, raises an exception
or crashes its process affects only the outcome of its own call. No worker outlives the process that
owns it.

Start-up: a fork server imports the libraries of the scorers once and forks each worker, so a killed
worker is replaced in milliseconds. A process has only one fork server, with the libraries of the
first pool. When workers of a later pool start, they import the libraries that the fork server
lacks, before the deadline of a call begins. `multiprocessing` executes the top level of the main
module in every new worker, so a launch script should keep its heavy imports under
`if __name__ == '__main__':`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pebble
from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.process import job
from jaxrl_llm.core.process_clock import ProcessClock
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.core.waits import WaitExpired, bounded
from jaxrl_llm.rewards.api import Attempt, PerGroup, Scorer, ScorerConfig
from jaxrl_llm.rewards.pool import worker
from jaxrl_llm.rewards.pool.locks import NamelessLocks
from jaxrl_llm.rewards.pool.outcome import CallOutcome, timed_out
from jaxrl_llm.rewards.pool.queue import Call, CallQueue

START_DEADLINE_S = 120.0
"""Time limit in seconds for the fork server and the workers to start, including their imports, or
to end. The limit is long enough for a busy machine.
"""
_STOPPING = threading.Lock()
"""Lock that a thread holds while it stops a pool."""
_TO_START = 'scorer workers to start (can their modules be imported?)'

BATCH_DEADLINE_S = 1.0
"""Time limit in seconds for a batch of several calls, unless the deadline of a call is shorter. The
calls of a batch that takes longer are repeated one by one, each with its own deadline.
"""

CHECK_S = 1.0
"""Seconds between checks that the pool is alive, while a call is in flight."""

MAX_BREAKS = 5
"""Maximum number of consecutive failures of the whole pool, without a finished call in between.
Each failure restarts all workers. One more failure stops the run.
"""


class Workers:
  """Calls scorers in `count` processes. If there are no scorers, no processes are started.

  Attributes:
    count: number of processes.
  """

  def __init__(
    self,
    scorers: Mapping[str, Scorer | PerGroup],
    *,
    count: int,
    memory_limit_bytes: int,
    environment: Sequence[str],
    longest_s: float,
    counts: collections.Counter[str],
  ):
    """
    Args:
      environment: environment variables that workers keep although their names suggest secrets.
      longest_s: longest call deadline of any scorer, in seconds.
      counts: counters. `breaks` is incremented whenever all processes are restarted.
    """
    self._scorers, self._memory_limit_bytes, self._longest_s = (
      dict(scorers),
      memory_limit_bytes,
      longest_s,
    )
    self._withheld = tuple(name for name in worker.secrets(os.environ) if name not in environment)
    self._places = tuple(
      name for name in os.environ if job.is_place(name) and name not in environment
    )
    """Environment variables that state this process's place in a job, such as its rank. Workers
    must not inherit them.
    """
    self.count, self._counts = count, counts
    # Up to two batches are in flight for each worker, so a worker can start its next batch even if
    # the event loop is busy elsewhere.
    self._queue = CallQueue(self._make, limit=2 * count)
    self._batches = 0
    """Number of batches of calls in flight."""
    self.clock = ProcessClock()
    """Clock of the time that the workers spend in each activity: 'score', 'idle' or 'start'."""
    self._changing = asyncio.Lock()
    self._breaks_in_a_row = 0
    self._pool: pebble.ProcessPool | None = None
    self._old: dict[asyncio.Task, pebble.ProcessPool] = {}
    """Pools that `resize` has replaced and that still finish their last calls, keyed by the asyncio
    task that waits for their end.
    """

  async def start(self) -> None:
    """Starts the workers. Returns when they respond."""
    if not self._scorers:
      return
    for name, scorer in self._scorers.items():
      _check_travels(name, scorer)
    if self._withheld:
      logging.info(
        'Scorer workers do not inherit %s; list those that they need in rewards.environment',
        ', '.join(self._withheld),
      )
    self._pool = self._new_pool(self.count)
    self.clock.exist(self.count)
    self._measure(are_starting=True)
    try:
      heavy = await _started(self._pool)
    except WaitExpired:
      self._pool = None
      raise
    except BrokenProcessPool:
      await self.close()
      raise RunError(
        f'scorer pool: waited for {_TO_START}, but they died; their errors are in the log above'
      ) from None
    self._measure()
    if heavy:
      logging.warning(
        'Scorer workers import %s: each new one costs that time and memory. Keep the heavy imports '
        'of the launch '
        "script under `if __name__ == '__main__':`.",
        ', '.join(heavy),
      )

  async def close(self) -> None:
    """Kills the workers. Calls in flight raise RunError.

    Raises:
      WaitExpired: the workers do not end, or the fork server does not report their end.
    """
    for pool in self._old.values():
      pool.stop()
    pool, self._pool = self._pool, None
    self.clock.exist(0)
    self._measure()
    try:
      await asyncio.gather(*self._old)
    finally:
      if pool is not None:
        await _stopped(pool)

  def _measure(self, *, are_starting: bool = False) -> None:
    """Updates the clock with the current activities of the workers. Batches in flight occupy one
    worker each, up to the number of workers; further batches are queued.
    """
    if self._pool is None:
      self.clock.set({})
    elif are_starting:
      self.clock.set({'start': self.count})
    else:
      busy = min(self._batches, self.count)
      self.clock.set({'score': busy, 'idle': self.count - busy})

  async def resize(self, count: int) -> None:
    """Changes the number of workers for later calls. Calls in flight finish in their old workers.

    Raises:
      RunError: the new workers do not start. The current workers are kept.
    """
    async with self._changing:
      if count == self.count:
        return
      if self._pool is not None:
        new = self._new_pool(count)
        try:
          await _started(new)
        except BrokenProcessPool as error:
          await _stopped(new)
          raise RunError(
            f'scorer pool: {count} workers do not start ({error}); keeping {self.count}'
          ) from None
        old, self._pool = self._pool, new
        ending = asyncio.create_task(_stopped(old, START_DEADLINE_S + 2 * self._longest_s))
        self._old[ending] = old
        ending.add_done_callback(self._old.pop)
      self.count = count
      self._queue.set_limit(2 * count)
      self.clock.exist(count if self._pool is not None else 0)
      self._measure()

  async def call(
    self, config: ScorerConfig, attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...]
  ) -> CallOutcome:
    """Calls scorer `config.name` on one attempt. A `PerGroup` scorer is called on a group and the
    per-sample scores of its attempts.
    """
    return await self._queue.call(config, attempts, scores)

  async def _make(self, calls: Sequence[Call]) -> Sequence[CallOutcome] | None:
    """Makes calls of one scorer in one worker, and returns their outcomes.

    Returns None if the calls must be repeated: the pool broke and has been replaced, or one of
    several calls has failed in a way that ends the worker.
    """
    pool, config = self._pool, calls[0].config
    if pool is None:
      raise RunError('scorer pool: score() was called before start() or after close()')
    self._batches += 1
    self._measure()
    try:
      outcomes = await bounded(
        _answer(pool, _schedule(pool, calls)),
        name='score',
        owner=f'sample {calls[0].attempts[0].uid}',
        waits_for=f'scorer {config.name}',
        deadline_s=START_DEADLINE_S + 2 * self._longest_s,
      )
    except (concurrent.futures.TimeoutError, pebble.ProcessExpired) as error:
      outcomes = [_ended_by(error, config)] if len(calls) == 1 else None
    except BrokenProcessPool as error:
      await self._mend(pool, error)
      return None
    finally:
      self._batches -= 1
      self._measure()
    self._breaks_in_a_row = 0
    return outcomes

  async def _mend(self, broken: pebble.ProcessPool, error: BrokenProcessPool) -> None:
    """Replaces a broken pool. If several calls have failed because of the same pool, it is replaced
    only once.
    """
    async with self._changing:
      if self._pool is not broken:
        return
      self._counts['breaks'] += 1
      self._breaks_in_a_row += 1
      if self._breaks_in_a_row > MAX_BREAKS:
        raise RunError(
          f'scorer pool: broke {self._breaks_in_a_row} times without a score in between (last: '
          f'{error}); is something killing workers, or is memory short? Lower rewards.workers'
        )
      logging.warning('Scorer pool broke (%s): starting new workers', error)
      self._measure(are_starting=True)
      new = self._new_pool(self.count)
      # If the new pool is broken too, the next call notices it and counts another break.
      with contextlib.suppress(BrokenProcessPool):
        await _started(new)
      if self._pool is not broken:  # The pool was closed meanwhile.
        await _stopped(new)
        return
      self._pool = new
      self._measure()
      await _stopped(broken)

  def _new_pool(self, count: int) -> pebble.ProcessPool:
    context = NamelessLocks()
    context.set_forkserver_preload(list(worker.preload(self._scorers.values())))
    return pebble.ProcessPool(
      max_workers=count,
      initializer=worker.initialise,
      initargs=(self._scorers, self._memory_limit_bytes, (*self._withheld, *self._places)),
      context=context,
    )


def _check_travels(name: str, scorer: Scorer | PerGroup) -> None:
  """Raises UserError unless the scorer can be pickled."""
  try:
    pickle.dumps(scorer)
  # pickle.dumps can raise any of these three exceptions.
  except (AttributeError, TypeError, pickle.PicklingError) as error:
    raise UserError(
      f'scorer {name!r}: cannot be pickled for its worker process ({error}); wanted a top-level '
      'function, or a functools.partial of one'
    ) from None


def _first_call(pool: pebble.ProcessPool) -> concurrent.futures.Future:
  """Starts the pool with SIGINT blocked, and schedules its first call.

  The workers inherit the block. Otherwise, Ctrl-C would interrupt workers that are still importing
  modules.
  """
  signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    return pool.schedule(worker.heavy_modules)
  finally:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _schedule(pool: pebble.ProcessPool, calls: Sequence[Call]) -> concurrent.futures.Future:
  config = calls[0].config
  arguments = [(call.attempts, call.scores) for call in calls]
  timeout = config.deadline_s if len(calls) == 1 else min(config.deadline_s, BATCH_DEADLINE_S)
  try:
    return pool.schedule(worker.call_each, args=(config.name, arguments), timeout=timeout)
  except RuntimeError as error:  # The pool is not running.
    raise BrokenProcessPool(str(error)) from error


def _ended_by(
  error: concurrent.futures.TimeoutError | pebble.ProcessExpired, config: ScorerConfig
) -> CallOutcome:
  """Returns the outcome of a call that ended its worker."""
  if isinstance(error, concurrent.futures.TimeoutError):
    return timed_out(config.deadline_s)
  evidence = {'error': 'the worker process died', 'exit_code': error.exitcode}
  return CallOutcome(status=Status.CRASHED, evidence=evidence)


async def _started(pool: pebble.ProcessPool) -> list[str]:
  """Starts the workers and returns the names of modules in `worker.HEAVY` (jax, torch) that they
  have imported.

  Raises BrokenProcessPool if the workers die, and WaitExpired if they do not respond in time.
  """

  async def start() -> list[str]:
    return await _answer(pool, await asyncio.to_thread(_first_call, pool))

  names = {'owner': 'scorer pool', 'waits_for': _TO_START}
  try:
    return await bounded(start(), name='scorers_start', **names, deadline_s=START_DEADLINE_S)
  except (WaitExpired, asyncio.CancelledError):
    # The workers may still be starting, so a thread stops them.
    threading.Thread(target=_stop, args=(pool, 0.0), daemon=True).start()
    raise


async def _answer(pool: pebble.ProcessPool, answer: concurrent.futures.Future) -> Any:
  """Returns the result of a call. Raises BrokenProcessPool if the pool died without an answer."""
  future = asyncio.wrap_future(answer)
  try:
    while True:
      await asyncio.wait({future}, timeout=CHECK_S)
      alive = pool.active
      if answer.done():  # `future` is done only after the event loop runs its callback.
        return await future  # Wait 'score': over already, because the result has arrived.
      if not alive:
        raise BrokenProcessPool('the pool ended without an answer')
  finally:
    future.cancel()  # This has no effect if the future is done.


async def _stopped(pool: pebble.ProcessPool, answers_s: float = 0.0) -> None:
  """Stops the workers. Calls in flight first get up to `answers_s` seconds to finish.

  Raises:
    WaitExpired: the workers do not end.
  """
  await bounded(
    asyncio.to_thread(_stop, pool, answers_s),
    name='scorers_stop',
    owner='scorer pool',
    waits_for='its workers to end after SIGKILL',
    deadline_s=answers_s + START_DEADLINE_S,
  )


def _stop(pool: pebble.ProcessPool, answers_s: float) -> None:
  if answers_s:
    pool.close()
    with contextlib.suppress(TimeoutError):
      pool.join(answers_s)
      return
  # If the start of a pool was given up (see `_started`), a thread stops the pool, perhaps while
  # `close` also stops it. Without the lock, pebble would close a file descriptor twice.
  with _STOPPING:
    pool.stop()
    pool.join()  # Wait 'scorers_stop': bounded by the caller.
