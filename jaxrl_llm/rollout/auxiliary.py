"""Auxiliary models: models other than the policy that workflows can query on OpenAI-compatible
servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.net.client import RemoteError
from jaxrl_llm.core.net.remote import CHAT_PATH, RemoteOptions, ServiceClient
from jaxrl_llm.core.records.task import Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuxiliaryConfig(RemoteOptions):
  """An auxiliary model and its OpenAI-compatible servers."""

  name: str
  """Name by which workflows refer to the model."""
  model: str
  """Name of the model in requests to the servers."""

  def __post_init__(self):
    self.check(f'rollout.auxiliary.{self.name}')


class AuxiliaryModel(ServiceClient):
  """Client of one auxiliary model."""

  def __init__(self, config: AuxiliaryConfig):
    super().__init__(config, f'rollout.auxiliary.{config.name}', CHAT_PATH)
    self.name, self._model = config.name, config.model

  async def ask(self, messages: Sequence[Message], *, max_tokens: int, temperature: float) -> str:
    """Returns the text of the model's reply. Raises RunError if no server replies, or if the reply
    has no text.
    """
    body = {'model': self._model, 'messages': [dict(message) for message in messages]}
    try:
      answer = await self.post({**body, 'max_tokens': max_tokens, 'temperature': temperature})
    except RemoteError as error:
      raise RunError(f'auxiliary model {self.name}: {error}') from None
    match answer:
      case {'choices': [{'message': {'content': str(text)}}, *_]}:
        return text
    raise RunError(
      f'auxiliary model {self.name}: answered {answer!r:.200}, wanted a chat completion with a text'
    )
