"""Scorer `environment`: returns the reward of the workflow's environment."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.rewards.api import Attempt, Awaited, Verdict, read_options


async def read_environment(attempt: Attempt) -> Verdict:
  """Returns the environment's reward. Without such a reward, the value is 0 if the episode ran out
  of tokens or steps, and None otherwise.
  """
  if attempt.environment is not None:
    return attempt.environment
  if attempt.finish_reason in (Finish.LENGTH, Finish.STEPS):
    limit = 'tokens' if attempt.finish_reason == Finish.LENGTH else 'steps'
    return Verdict(value=0.0, evidence={'ended': f'out of {limit} before a reward'})
  return Verdict(value=None, evidence={'error': 'no environment gave a reward'})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
  """Options class of the scorer, which has no options."""


def environment_scorer(**options: Any) -> Awaited:
  """Returns a scorer whose values are the rewards of the workflow's environment, given at the end
  or for each turn. The options are `EnvironmentOptions`.
  """
  read_options(EnvironmentOptions, options, 'environment')
  return Awaited(_opened, concurrency=1024)


@contextlib.asynccontextmanager
async def _opened() -> AsyncIterator[Callable[[Attempt], Awaitable[Verdict]]]:
  yield read_environment
