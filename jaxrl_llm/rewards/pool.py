"""Runs scorers in worker processes: each sample is scored the moment it ends, beside everything else.

Invariants: every call ends in exactly one Score; a scorer that hangs, raises or takes its process down costs its own
Score and nothing else; no worker outlives the process that owns the pool.

Worker start-up: a fork server imports the scorers' libraries once and forks each worker from there, so a killed worker
is replaced in milliseconds. `multiprocessing` runs the main module's top level in every new worker: a script that uses
the pool keeps its heavy imports under `if __name__ == '__main__':`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import fcntl
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool

import pebble
from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Json
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.experience.score import Score, Status
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, RewardsConfig, Scorer, ScorerConfig, Verdict, in_force

PRELOAD = (
  'jaxrl_llm.rewards.pool',
  'jaxrl_llm.rewards.answer',
  'jaxrl_llm.rewards.verifier',
  'math_verify',
  'reasoning_gym',
)
"""What the fork server imports; a worker then has it for nothing."""

START_DEADLINE_S = 120.0
"""Of the fork server with its imports, and of a worker, on a busy machine."""

CHECK_S = 1.0
"""Seconds between looks at whether the pool still lives while a call is out."""

MAX_BREAKS = 5
"""Breaks of the whole pool, without a Score in between, after which the run stops."""

HEAVY = ('jax', 'torch')

_scorers: dict[str, Scorer] = {}
"""In a worker: its scorers by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Outcome:
  """What a worker says of one call."""

  verdict: Verdict | None
  error: dict[str, Json]
  seconds: float


def _die_with_owner() -> None:
  """The kernel kills this worker when the pool's owner is gone, even if the owner was SIGKILLed.

  The worker's parent is the fork server, so PR_SET_PDEATHSIG would watch the wrong process. The sentinel is a pipe
  whose other end only the owner holds: its hang-up raises a signal, also under C code that never gives back the GIL.
  """
  parent = multiprocessing.parent_process()
  if sys.platform == 'linux':
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if multiprocessing.connection.wait([parent.sentinel], timeout=0):  # Gone before the signal was set.
      os._exit(1)
  else:

    def watch() -> None:
      parent.join()
      os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _initialise(scorers: Mapping[str, Scorer], memory_limit_bytes: int) -> None:
  _die_with_owner()
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the owner decides.
  # A Python handler would wait for C code to return, with all workers held up meanwhile.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  if memory_limit_bytes:
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
  _scorers.update(scorers)


def _heavy_modules() -> list[str]:
  return [name for name in HEAVY if name in sys.modules]


def _checked(verdict: Verdict) -> Verdict:
  """The verdict as plain floats and JSON. Raises TypeError or ValueError for anything else."""
  if not isinstance(verdict, Verdict):
    raise TypeError(f'scorer returned {type(verdict).__name__}, wanted Verdict')
  value = None if verdict.value is None else float(verdict.value)
  parts = {name: float(part) for name, part in verdict.parts.items()}
  turns = tuple(float(turn) for turn in verdict.turn_values)
  if not all(math.isfinite(number) for number in (value or 0.0, *parts.values(), *turns)):
    raise ValueError(f'scorer returned value {value}, parts {parts} and turns {turns}, wanted finite numbers')
  evidence = json.loads(json.dumps(dict(verdict.evidence)))
  return Verdict(value=value, parts=parts, turn_values=turns, evidence=evidence)


def _run(name: str, attempt: Attempt) -> _Outcome:
  """One call, in a worker. What the scorer raises comes back as data: SystemExit too, which would end the owner."""
  start = time.perf_counter()
  try:
    verdict, error = _checked(_scorers[name](attempt)), {}
  except BaseException as raised:
    last = traceback.extract_tb(raised.__traceback__)[-1]
    where = f'{last.filename}:{last.lineno}'
    verdict, error = None, {'error': f'{type(raised).__name__}: {raised}'[:500], 'where': where}
  return _Outcome(verdict=verdict, error=error, seconds=time.perf_counter() - start)


class ScorerPool:
  """Scores attempts in `config.workers` processes.

  Attributes:
    counts: calls by status, in total (`ok`, `timeout`, `error`, `crashed`) and per scorer (`<scorer>/<status>`);
      `unscorable` counts values of None, `breaks` restarts of the whole pool.
  """

  def __init__(self, scorers: Mapping[str, Scorer], config: RewardsConfig):
    missing = [s.name for s in config.scorers if s.name not in scorers]
    if missing:
      raise UserError(f'rewards.scorers: no scorer was built for {missing}; built: {sorted(scorers)}')
    self.config = config
    self.counts: collections.Counter[str] = collections.Counter()
    self._scorers = {s.name: scorers[s.name] for s in config.scorers}
    # Twice the workers: each has its next call waiting while the event loop is busy elsewhere.
    self._slots = asyncio.Semaphore(2 * config.workers)
    self._mending = asyncio.Lock()
    self._breaks_in_a_row = 0
    self._pool: pebble.ProcessPool | None = None

  async def start(self) -> None:
    """Starts the workers, and returns when they answer."""
    self._pool = self._new_pool()
    waits_for = 'scorer workers to start (do their modules import?)'
    try:
      future = await asyncio.to_thread(_first_call, self._pool)
      wait = bounded(
        self._settled(self._pool, asyncio.wrap_future(future)),
        name='scorers_start',
        owner='scorer pool',
        waits_for=waits_for,
        deadline_s=START_DEADLINE_S,
      )
      heavy = (await wait).result()
    except BrokenProcessPool:
      await self.close()
      raise RunError(f'scorer pool: waited for {waits_for}, but they died; their errors are in the log above') from None
    if heavy:
      logging.warning(
        'Scorer workers import %s: each new one costs that time and memory. Keep the heavy imports of the launch '
        "script under `if __name__ == '__main__':`.",
        ', '.join(heavy),
      )

  async def close(self) -> None:
    """Kills the workers; a call that is still out raises RunError."""
    if self._pool is not None:
      pool, self._pool = self._pool, None
      await asyncio.to_thread(_stop, pool)

  async def score(self, attempt: Attempt) -> tuple[Score, ...]:
    """One Score for each scorer in force for the attempt's domain, in the configuration's order."""
    chosen = in_force(self.config.scorers, attempt.task.domain, attempt.task.taskset)
    return tuple(await asyncio.gather(*(self._score(config, attempt) for config in chosen)))

  async def _score(self, config: ScorerConfig, attempt: Attempt) -> Score:
    async with self._slots:
      score = await self._call(config, attempt)
      while score is None:
        score = await self._call(config, attempt)
    self._breaks_in_a_row = 0
    self.counts[score.status.value] += 1
    self.counts[f'{config.name}/{score.status.value}'] += 1
    self.counts['unscorable'] += score.value is None
    if score.status != Status.OK:
      logging.warning('Scorer %s on %s: %s %s', config.name, attempt.uid, score.status, dict(score.evidence))
    return score

  async def _call(self, config: ScorerConfig, attempt: Attempt) -> Score | None:
    """One call; None if the whole pool broke under it: it has been replaced, and the call may be repeated."""
    pool = self._pool
    if pool is None:
      raise RunError('scorer pool: score() was called before start() or after close()')
    try:
      future = asyncio.wrap_future(_schedule(pool, config, attempt))
      settled = await bounded(
        self._settled(pool, future),
        name='score',
        owner=f'sample {attempt.uid}',
        waits_for=f'scorer {config.name}',
        deadline_s=START_DEADLINE_S + 2 * max(s.deadline_s for s in self.config.scorers),
      )
      outcome = settled.result()
    except concurrent.futures.TimeoutError:
      return self._timed_out(config, attempt)
    except pebble.ProcessExpired as expired:
      evidence = {'error': 'the worker process died', 'exit_code': expired.exitcode}
      return Score(uid=attempt.uid, scorer=config.name, value=None, status=Status.CRASHED, evidence=evidence)
    except BrokenProcessPool as error:
      await self._mend(pool, error)
      return None
    if outcome.verdict is None:
      return Score(
        uid=attempt.uid,
        scorer=config.name,
        value=None,
        status=Status.ERROR,
        evidence=outcome.error,
        time=outcome.seconds,
      )
    return Score(uid=attempt.uid, scorer=config.name, time=outcome.seconds, **dataclasses.asdict(outcome.verdict))

  def _timed_out(self, config: ScorerConfig, attempt: Attempt) -> Score:
    blamed = isinstance(self._scorers[config.name], OverrunIsZero)
    return Score(
      uid=attempt.uid,
      scorer=config.name,
      value=0.0 if blamed else None,
      status=Status.TIMEOUT,
      evidence={
        'error': f'ran past its deadline of {config.deadline_s:g} s',
        'caused_by': 'completion' if blamed else 'scorer',
      },
      time=config.deadline_s,
    )

  async def _settled(self, pool: pebble.ProcessPool, future: asyncio.Future) -> asyncio.Future:
    """The future once it is done. Raises BrokenProcessPool if the pool died and forgot it."""
    try:
      while True:
        await asyncio.wait({future}, timeout=CHECK_S)
        alive = pool.active
        if future.done():
          return future
        if not alive:
          raise BrokenProcessPool('the pool ended without an answer')
    finally:
      if not future.done():
        future.cancel()

  async def _mend(self, broken: pebble.ProcessPool, error: BrokenProcessPool) -> None:
    """Replaces a broken pool, once however many calls met the break."""
    async with self._mending:
      if self._pool is not broken:
        return
      self.counts['breaks'] += 1
      self._breaks_in_a_row += 1
      if self._breaks_in_a_row > MAX_BREAKS:
        raise RunError(
          f'scorer pool: broke {self._breaks_in_a_row} times without a score in between (last: {error}); '
          'are workers killed from outside, or is memory short? Lower rewards.workers'
        )
      logging.warning('Scorer pool broke (%s): starting new workers', error)
      self._pool = self._new_pool()
      await asyncio.to_thread(_stop, broken)

  def _new_pool(self) -> pebble.ProcessPool:
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(list(PRELOAD))
    return pebble.ProcessPool(
      max_workers=self.config.workers,
      initializer=_initialise,
      initargs=(self._scorers, self.config.memory_limit_mib << 20),
      context=context,
    )


def _first_call(pool: pebble.ProcessPool) -> concurrent.futures.Future:
  """Starts the pool; SIGINT is blocked in all its processes: Ctrl-C reaches the whole group, amid their imports too."""
  signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    return pool.schedule(_heavy_modules)
  finally:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _schedule(pool: pebble.ProcessPool, config: ScorerConfig, attempt: Attempt) -> concurrent.futures.Future:
  try:
    return pool.schedule(_run, args=(config.name, attempt), timeout=config.deadline_s)
  except RuntimeError as error:  # How pebble says that the pool is not running.
    raise BrokenProcessPool(str(error)) from error


def _stop(pool: pebble.ProcessPool) -> None:
  pool.stop()
  pool.join()
