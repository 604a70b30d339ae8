"""What a workflow may ask for in the middle of an episode, in the master's process or in another.

Invariant: a workflow reaches models and scorers through its hub alone, so all that it asks passes through the master.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from jaxrl_llm.core.records.task import Message
from jaxrl_llm.rewards.api import Attempt, Reward
from jaxrl_llm.rollout.api import Completion, Request


@runtime_checkable
class Hub(Protocol):
  """Whom a workflow asks."""

  def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """The policy's completions, as `Engine.generate` gives them."""
    ...

  async def score(self, attempt: Attempt) -> Reward:
    """What the run's scorers say of an unfinished attempt. It is not stored: the sample is scored when it has ended."""
    ...

  async def ask(self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float = 0.0) -> str:
    """What an auxiliary model of `rollout.auxiliary` answers. Raises RunError when none of its servers does."""
    ...
