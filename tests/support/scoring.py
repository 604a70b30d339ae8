"""Scorer pools for tests. Their scorers judge all attempts, unless their configuration restricts
them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from clocks import simulated

from jaxrl_llm.rewards.api import AnyScorer, Attempt, Awaited, RewardsConfig, ScorerConfig, Verdict
from jaxrl_llm.rewards.pool.pool import ScorerPool

T = TypeVar('T')


def awaited(call: Callable[[Attempt], Awaitable[Verdict]], **fields) -> Awaited:
  """Returns an asynchronous scorer that needs no resources."""

  @contextlib.asynccontextmanager
  async def opened() -> AsyncIterator[Callable[[Attempt], Awaitable[Verdict]]]:
    yield call

  return Awaited(opened, **fields)


def pool(scorers: Mapping[str, tuple[AnyScorer, Mapping]], *, live=None, **config) -> ScorerPool:
  """Returns a pool of scorers, given as name: (scorer, other fields of its ScorerConfig)."""
  configs = tuple(
    ScorerConfig(name=name, **{'deadline_s': 60.0, **fields})
    for name, (_, fields) in scorers.items()
  )
  built = {name: scorer for name, (scorer, _) in scorers.items()}
  return ScorerPool(built, RewardsConfig(scorers=configs, **config), live=live)


@contextlib.asynccontextmanager
async def started(one: ScorerPool) -> AsyncIterator[ScorerPool]:
  try:
    await one.start()
    yield one
  finally:
    await one.close()


async def _used(one: ScorerPool, use: Callable[[ScorerPool], Awaitable[T]]) -> T:
  async with started(one):
    return await use(one)


def using(one: ScorerPool, use: Callable[[ScorerPool], Awaitable[T]]) -> T:
  """Starts the pool and returns the result of `use`. Raises TimeoutError after 180 s, because
  workers may start slowly.
  """
  return asyncio.run(asyncio.wait_for(_used(one, use), 180))


def using_simulated(one: ScorerPool, use: Callable[[ScorerPool], Awaitable[T]]) -> T:
  """Does the same as `using`, but in simulated time. The pool's scorers must need no worker
  process.
  """
  return simulated(_used(one, use))
