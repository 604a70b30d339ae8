"""Slow scorers for benchmarks/scoring.py: the task's verifier, with a delay in seconds."""

import asyncio
import contextlib
import functools
import time

from jaxrl_llm.rewards.api import Attempt, Awaited, Scorer, Verdict
from jaxrl_llm.rewards.scorers.verifier.scorer import verifier_scorer

_VERIFIER = verifier_scorer(partial_credit=True)


def computing(*, seconds: float) -> Scorer:
  """Returns a scorer that blocks a worker for `seconds`."""
  return functools.partial(_computed, seconds=seconds)


def _computed(attempt: Attempt, *, seconds: float) -> Verdict:
  time.sleep(seconds)
  return _VERIFIER(attempt)


def waiting(*, seconds: float) -> Awaited:
  """Returns a scorer that awaits `seconds`, like a judge that answers all requests concurrently."""

  async def judge(attempt: Attempt) -> Verdict:
    await asyncio.sleep(seconds)
    return _VERIFIER(attempt)

  return Awaited(functools.partial(contextlib.nullcontext, judge), concurrency=1024)


def serial(*, seconds: float, count: int) -> Awaited:
  """Returns the control: a scorer that starts when all `count` attempts of a batch have ended, and
  scores them one after the other.
  """
  return Awaited(
    functools.partial(contextlib.nullcontext, _Serial(seconds, count)), concurrency=count
  )


class _Serial:
  def __init__(self, seconds: float, count: int):
    self._seconds, self._count, self._held = seconds, count, 0
    self._all_ended, self._turn = asyncio.Event(), asyncio.Lock()

  async def __call__(self, attempt: Attempt) -> Verdict:
    self._held, all_ended = self._held + 1, self._all_ended
    if self._held == self._count:
      self._held, self._all_ended = 0, asyncio.Event()
      all_ended.set()
    await all_ended.wait()
    async with self._turn:
      await asyncio.sleep(self._seconds)
      return _VERIFIER(attempt)
