"""Workflows of episodes: a subclass defines the course of one episode, and this module builds the
samples.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.episodes.episode import Episode, OutOfTokens, response_text
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.recording import Place
from jaxrl_llm.rollout.workflow import Rollout
from jaxrl_llm.tasks.tokenizer import Tokenizer


class Episodes(abc.ABC):
  """Workflow of episodes. A subclass defines the course of one episode in `play`. The episodes of a
  group run concurrently.
  """

  def __init__(
    self,
    hub: Hub,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    schemas: Sequence[Mapping[str, Json]] = (),
  ):
    """
    Args:
      max_tokens: maximum number of tokens of an episode after its first prompt.
      schemas: JSON schemas of tools, which the chat template describes to the policy.
    """
    self.hub, self.tokenizer, self.max_tokens = hub, tokenizer, max_tokens
    self._schemas = tuple(schemas)

  @abc.abstractmethod
  async def play(self, episode: Episode) -> None:
    """Runs one episode, from its first observation to its last turn or reward. If the episode runs
    out of tokens, a method of `episode` raises `OutOfTokens`, which need not be caught.
    """

  def text(self, sample: Sample) -> str:
    return response_text(self.tokenizer, sample)

  async def run(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> AsyncIterator[Rollout]:
    group = f'{stage}/{task.uid}/{visit}'
    places = [Place(task=task, visit=visit, group=group, index=i) for i in range(samples)]
    playing = [asyncio.ensure_future(self._played(place, sampling)) for place in places]
    try:
      for finished in asyncio.as_completed(playing):
        # The wait 'played' is bounded by the limits of the group, the engine and the environment.
        yield await finished
    finally:
      for episode in playing:
        episode.cancel()
      await asyncio.gather(*playing, return_exceptions=True)

  async def _played(self, place: Place, sampling: Sampling) -> Rollout:
    episode = Episode(
      self.hub,
      self.tokenizer,
      place,
      sampling=sampling,
      max_tokens=self.max_tokens,
      tools=self._schemas,
    )
    try:
      await self.play(episode)
    except OutOfTokens:
      return episode.end(out_of_tokens=True)
    return episode.end()
