"""Serves the requests that workflows send to the master: generation, scores, auxiliary models."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.process_clock import TOKENS
from jaxrl_llm.core.records.task import Message
from jaxrl_llm.core.types import Json
from jaxrl_llm.master.exploring.partial import PartialGenerator
from jaxrl_llm.rewards.api import Attempt, Reward, RewardsConfig, combine
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Completion, Engine, Request
from jaxrl_llm.rollout.auxiliary import AuxiliaryModel
from jaxrl_llm.runtime.events import SILENT, Edge, Events


class MasterHub:
  """Implements `rollout.hub.Hub` with the run's own engine, scorers and auxiliary models.

  Attributes:
    partials: generator of all completions. It limits the completions of partial rollouts to their
      token budgets.
  """

  def __init__(
    self,
    engine: Engine | None,
    scorers: ScorerPool,
    rewards_of: Callable[[str], RewardsConfig],
    *,
    auxiliary: Mapping[str, AuxiliaryModel],
    events: Events = SILENT,
  ):
    """
    Args:
      engine: engine that generates completions; None if the run generates nothing.
      rewards_of: returns the scorers of a stage and their weights, given the stage's name.
      auxiliary: auxiliary models, keyed by the names that workflows use.
    """
    self._engine, self._scorers, self._rewards_of = engine, scorers, rewards_of
    self.partials = PartialGenerator(self._sample)
    self._auxiliary, self._events = auxiliary, events
    self._tokens: collections.Counter[str] = collections.Counter()
    """Number of generated tokens that `take_tokens` has not returned yet, keyed by group."""

  def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    return self.partials.generate(request)

  async def _sample(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """Yields the completions that the engine samples."""
    assert self._engine is not None, 'a run without an engine has no workflow'
    async with contextlib.aclosing(self._engine.generate(request)) as completions:
      async for index, completion in completions:
        self._tokens[request.group] += len(completion.tokens)
        yield index, completion

  def take_tokens(self, group: str) -> int:
    """Returns the number of tokens that the engine has generated for a group since the last call
    for this group, including tokens that the group's workflow did not use.
    """
    return self._tokens.pop(group, 0)

  def take_metrics(self) -> dict[str, float]:
    """Returns the number of tokens generated for the groups that are in progress, as a metric."""
    return {f'{TOKENS}open': float(self._tokens.total())}

  async def score(self, attempt: Attempt) -> Reward:
    with self._asked(Edge.AUXILIARY_SCORE, sample=attempt.uid) as reply:
      rewards = self._rewards_of(attempt.uid.partition('/')[0])
      reward = combine(await self._scorers.with_config(rewards).score(attempt), rewards)
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
    """Emits a request event of type `edge` with `fields` when the block begins, and a reply event
    when it ends. The block adds the reply's fields to the yielded dict. If the block raises an
    exception, the reply has only the field `given_up`.
    """
    asked, reply, answered = self._events.request(edge, **fields), {}, False
    try:
      yield reply
      answered = True
    finally:
      self._events.reply(asked, **(reply if answered else {'given_up': True}))
