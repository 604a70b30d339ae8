"""Base class for workflows of episodes. A subclass defines the course of one episode, and this
module builds the samples.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import get_args

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.episodes.episode import (
  Episode,
  EpisodeOver,
  History,
  PromptTooLong,
  response_text,
)
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.recording import Place
from jaxrl_llm.rollout.workflow import Rollout
from jaxrl_llm.tasks.tokenizer import Tokenizer


class Episodes(abc.ABC):
  """Workflow of episodes. A subclass defines the course of one episode in `play`. The episodes of a
  group run concurrently.

  Attributes:
    max_steps: maximum number of steps of an episode. The run sets it to `rollout.max_steps`.
    schemas: JSON schemas of tools, which the chat template describes to the policy.
    max_prompt: maximum number of tokens of an episode's first prompt; None if the engine alone
      limits it. `build_workflow` sets it.
  """

  max_prompt: int | None = None

  def __init__(
    self,
    hub: Hub,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    history: History = 'keep',
    schemas: Sequence[Mapping[str, Json]] = (),
  ):
    """
    Args:
      max_tokens: maximum number of tokens of a step after its prompt.
      schemas: JSON schemas of tools, which the chat template describes to the policy.
    """
    self.hub, self.tokenizer, self.max_tokens, self.max_steps = hub, tokenizer, max_tokens, 1
    self._history, self.schemas = history, tuple(schemas)
    if history not in get_args(History):
      raise UserError(
        f'rollout.workflow.options.history: got {history!r}, wanted one of {get_args(History)}'
      )

  async def open(self) -> None:
    """Opens the resources that episodes need, such as connections. Called before the episodes of
    each group, for several groups concurrently.
    """
    return  # Most workflows have nothing to prepare.

  @abc.abstractmethod
  async def play(self, episode: Episode) -> None:
    """Runs one episode, from its first observation to its last turn or reward. If the episode runs
    out of tokens or steps, `episode.act` raises `EpisodeOver`, which need not be caught.
    """

  def text(self, sample: Sample) -> str:
    return response_text(self.tokenizer, sample)

  async def run(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> AsyncIterator[Rollout]:
    await self.open()
    group = f'{stage}/{task.uid}/{visit}'
    places = [Place(task=task, visit=visit, group=group, index=i) for i in range(samples)]
    playing = [asyncio.ensure_future(self._played(place, sampling)) for place in places]
    try:
      for finished in asyncio.as_completed(playing):
        # Wait 'played': bounded by the limits of the group, the engine and the environment.
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
      max_tokens=sampling.limit(self.max_tokens),
      max_steps=self.max_steps,
      history=self._history,
      max_prompt=self.max_prompt,
      tools=self.schemas,
    )
    try:
      await self.play(episode)
    except EpisodeOver as over:
      return episode.end(finish=over.finish)
    except PromptTooLong as error:
      logging.log_first_n(logging.WARNING, 'task %s: %s', 5, place.task.uid, error)
      episode.fail(f'task {place.task.uid}: {error}')
    return episode.end()


async def act_blindly(episode: Episode) -> None:
  """Samples one token after an end token, for an episode without a readable prompt, because every
  sample needs a completion.
  """
  episode.restart(episode.tokenizer.stop_ids[:1])
  await episode.act(1)
