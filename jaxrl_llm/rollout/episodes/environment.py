"""Environments in which a policy acts over several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jaxrl_llm.core.records.task import ChatMessage, Task
from jaxrl_llm.core.types import Json


class Step(NamedTuple):
  """Response of an environment to an action."""

  observation: str | Sequence[ChatMessage]
  """Text or messages that the policy reads next. Plain text becomes a user message."""
  reward: float = 0.0
  done: bool = False
  """Whether the episode ends with this step. The policy then does not read the observation."""
  evidence: Mapping[str, Json] = {}
  """Details that explain the reward. They are stored with the reward."""


@runtime_checkable
class Environment(Protocol):
  """Environment of one episode. Each episode has its own environment, and many are open at a time.

  A method may be a plain function instead of a coroutine function. Calls of plain functions run in
  threads, so they may block; coroutine functions must not block. The calls of one environment do
  not overlap, with one exception: `close` may be called while a plain function that has exceeded
  its deadline is still running.
  """

  async def reset(self, task: Task) -> str | Sequence[ChatMessage] | None:
    """Begins an episode. Returns the first observation, or None if the task's prompt is the first
    observation. The tokens of the first observation count towards `rollout.max_prompt_length`.
    Tasks are selected by the length of their own prompt; if the first observation makes the prompt
    too long, the sample is unscorable.

    A UserError ends the run, because the configuration is at fault. Any other exception makes the
    sample unscorable.
    """
    ...

  async def step(self, action: str) -> Step:
    """Carries out an action of the policy, which is the text of its turn."""
    ...

  async def close(self) -> None:
    """Ends the episode and frees its resources. It is called exactly once for each environment,
    even after an error.
    """
    ...
