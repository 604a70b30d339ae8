"""Serves the requests that workflows send to the master: generation, scores, auxiliary models."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.task import Message
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Attempt, Reward, RewardsConfig, combine
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Completion, Engine, Request
from jaxrl_llm.rollout.auxiliary import AuxiliaryModel
from jaxrl_llm.runtime.events import SILENT, Edge, Events


class MasterHub:
  """Implements `rollout.hub.Hub` with the run's own engine, scorers and auxiliary models."""

  def __init__(
    self,
    engine: Engine | None,
    scorers: ScorerPool,
    rewards: RewardsConfig,
    *,
    auxiliary: Mapping[str, AuxiliaryModel],
    events: Events = SILENT,
  ):
    """
    Args:
      engine: engine that generates completions; None if the run generates nothing.
      auxiliary: auxiliary models, keyed by the names that workflows use.
    """
    self._engine, self._scorers, self._rewards = engine, scorers, rewards
    self._auxiliary, self._events = auxiliary, events

  def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    assert self._engine is not None, 'a run without an engine has no workflow'
    return self._engine.generate(request)

  async def score(self, attempt: Attempt) -> Reward:
    with self._asked(Edge.AUXILIARY_SCORE, sample=attempt.uid) as reply:
      reward = combine(await self._scorers.score(attempt), self._rewards)
      reply['value'] = reward.value
    return reward

  async def ask(
    self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float = 0.0
  ) -> str:
    if model not in self._auxiliary:
      configured = ', '.join(sorted(self._auxiliary)) or 'none'
      raise RunError(
        f'workflow: calls auxiliary model {model!r}; rollout.auxiliary has {configured}; add it '
        'there'
      )
    with self._asked(Edge.AUXILIARY_MODEL, model=model) as reply:
      answer = await self._auxiliary[model].ask(
        messages, max_tokens=max_tokens, temperature=temperature
      )
      reply['characters'] = len(answer)
    return answer

  @contextlib.contextmanager
  def _asked(self, edge: Edge, **fields: Json) -> Iterator[dict[str, Json]]:
    """Emits a request event of type `edge`, with `fields`, when the block begins, and a reply event
    when it ends. The block adds the fields of the reply to the yielded dict. If the block raises,
    the reply has only the field `given_up`.
    """
    asked, reply, answered = self._events.request(edge, **fields), {}, False
    try:
      yield reply
      answered = True
    finally:
      self._events.reply(asked, **(reply if answered else {'given_up': True}))
