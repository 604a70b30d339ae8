"""Scorer `environment`: its value is the reward that the workflow's environment gave."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.rewards.api import Attempt, Awaited, Verdict, read_options


async def read_environment(attempt: Attempt) -> Verdict:
  """Returns the environment's reward. If the environment gave none, an episode that ran out of
  tokens gets the value 0, and any other attempt cannot be scored.
  """
  if attempt.environment is not None:
    return attempt.environment
  if attempt.finish_reason == Finish.LENGTH:
    return Verdict(value=0.0, evidence={'ended': 'out of tokens before a reward'})
  return Verdict(value=None, evidence={'error': 'no environment gave a reward'})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
  """Options class of the scorer, which has no options."""


def environment_scorer(**options: Any) -> Awaited:
  """Scores with the reward that the workflow's environment gave, at the end or for each turn. The
  options are `EnvironmentOptions`.
  """
  read_options(EnvironmentOptions, options, 'environment')
  return Awaited(_opened, concurrency=1024)


@contextlib.asynccontextmanager
async def _opened() -> AsyncIterator[Callable[[Attempt], Awaitable[Verdict]]]:
  yield read_environment
