"""What to attempt: a prompt, and what a scorer needs to judge an attempt at it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import xxhash

from jaxrl_llm.core.types import Json

Message = Mapping[str, str]
"""{'role': 'system' | 'user' | 'assistant' | 'tool', 'content': text}, as chat templates read it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Media:
  """What a prompt shows beside its text. The bytes stay where they are; the digest says which they are."""

  kind: str
  """'image'."""
  digest: str
  """32 hex digits of the bytes (xxh3-128)."""
  reference: str
  """A path relative to the taskset's file, or the bytes as `data:;base64,…`."""


def prompt_digest(prompt: tuple[Message, ...], media: tuple[Media, ...] = ()) -> str:
  """32 hex digits of the prompt's content (xxh3-128 of canonical JSON): what makes two tasks the same task."""
  content: list[Json] = [dict(m) for m in prompt]
  content += [{'media': m.kind, 'digest': m.digest} for m in media]
  canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(',', ':'))
  return xxhash.xxh3_128_hexdigest(canonical.encode())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """One thing to attempt. Two tasks with the same prompt and media are the same task, whatever their source."""

  taskset: str
  """Name of the taskset it came from."""
  domain: str
  """What kind of answer is wanted ('code', 'math', 'k12', 'vision', 'general', ...): chooses scorers."""
  prompt: tuple[Message, ...]
  truth: str | None
  """Reference answer, where there is one."""
  fields: Mapping[str, Json]
  """The source's own row (a verifier's entry, `extra_info`), JSON only. Never shown to the policy."""
  media: tuple[Media, ...] = ()
  """In the order in which the prompt speaks of them. A policy of text does not see them."""

  @property
  def digest(self) -> str:
    return prompt_digest(self.prompt, self.media)

  @property
  def uid(self) -> str:
    """Stable over runs and sources: taskset name and half of the prompt's digest."""
    return f'{self.taskset}:{self.digest[:16]}'
