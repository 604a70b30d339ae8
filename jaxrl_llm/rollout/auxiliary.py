"""Auxiliary models: other models than the policy that workflows may ask, on OpenAI-compatible servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.experience.task import Message
from jaxrl_llm.rewards.remote import Remote, RemoteError, RemoteOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuxiliaryConfig(RemoteOptions):
  name: str
  """What workflows call it."""
  model: str
  """What its servers call it."""

  def __post_init__(self):
    self.check(f'rollout.auxiliary.{self.name}')


class AuxiliaryModel:
  """One of them; open as a context manager."""

  def __init__(self, config: AuxiliaryConfig):
    self.name, self._model = config.name, config.model
    self._remote = Remote(config, f'rollout.auxiliary.{config.name}', '/v1/chat/completions')

  async def __aenter__(self) -> Self:
    await self._remote.__aenter__()
    return self

  async def __aexit__(self, *raised: object) -> None:
    await self._remote.__aexit__()

  async def ask(self, messages: Sequence[Message], *, max_tokens: int, temperature: float) -> str:
    """The text of its answer. Raises RunError when no server gives one."""
    body = {'model': self._model, 'messages': [dict(message) for message in messages]}
    try:
      answer = await self._remote.post({**body, 'max_tokens': max_tokens, 'temperature': temperature})
    except RemoteError as error:
      raise RunError(f'auxiliary model {self.name}: {error}') from None
    match answer:
      case {'choices': [{'message': {'content': str(text)}}, *_]}:
        return text
    raise RunError(f'auxiliary model {self.name}: answered {answer!r:.200}, wanted a chat completion with a text')
