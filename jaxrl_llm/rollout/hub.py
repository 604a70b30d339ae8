"""The hub: the services that a workflow can call while it runs, in the master process or in an
explorer process.

Invariant: a workflow reaches models and scorers only through its hub, so the master process sees
every request to them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from jaxrl_llm.core.records.task import Message
from jaxrl_llm.rewards.api import Attempt, Reward
from jaxrl_llm.rollout.api import Completion, Request


@runtime_checkable
class Hub(Protocol):
  """Gives a workflow access to the policy, the scorers and the auxiliary models."""

  def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """Yields the policy's completions; see `Generator.generate`."""
    ...

  async def score(self, attempt: Attempt) -> Reward:
    """Scores a completion with the run's scorers while the workflow is still running.

    The reward is returned to the workflow and not stored. The finished sample is scored separately.
    """
    ...

  async def ask(
    self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float = 0.0
  ) -> str:
    """Returns the reply of an auxiliary model (`rollout.auxiliary`). Raises RunError if there is no
    such model, none of its servers replies, or the reply has no text.
    """
    ...
