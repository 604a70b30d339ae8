"""Task records: a prompt, and the data that scorers need to judge an attempt at it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping

import xxhash

from jaxrl_llm.core.types import Json

Message = Mapping[str, str]
"""Chat message {'role': 'system' | 'user' | 'assistant' | 'tool', 'content': text}, in the form
that chat templates read.
"""
ChatMessage = Mapping[str, Json]
"""A message that may also have tool calls, reasoning and other keys that a chat template reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Media:
  """An attachment of a prompt, stored by reference and identified by its digest."""

  kind: str
  """Kind of media; only 'image' so far."""
  digest: str
  """xxh3-128 of the bytes, as 32 hex digits."""
  reference: str
  """Path relative to the directory of the taskset's file, or the bytes as `data:;base64,…`."""


def prompt_digest(prompt: tuple[Message, ...], media: tuple[Media, ...] = ()) -> str:
  """Returns a task's digest: xxh3-128 of prompt and media as canonical JSON, in 32 hex digits."""
  content: list[Json] = [dict(m) for m in prompt]
  content += [{'media': m.kind, 'digest': m.digest} for m in media]
  canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(',', ':'))
  return xxhash.xxh3_128_hexdigest(canonical.encode())


def is_held_out(digest: str, holdout: float) -> bool:
  """Returns whether a digest belongs to the held-out fraction `holdout`, in [0, 1), of all
  digests.
  """
  return int(digest, 16) < holdout * 16 ** len(digest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A task to attempt. Tasks with the same prompt and media have the same digest."""

  taskset: str
  """Name of the source taskset."""
  domain: str
  """Kind of answer expected, such as 'code', 'math', 'k12', 'vision' or 'general'. It determines
  which scorers judge the task.
  """
  prompt: tuple[Message, ...]
  truth: str | None
  """Reference answer; None if there is none."""
  fields: Mapping[str, Json]
  """The row of the data source that became this task, as JSON. Scorers see the row; the policy does
  not.
  """
  media: tuple[Media, ...] = ()
  """Media in the order in which the prompt refers to them. A text-only policy does not see them."""

  @functools.cached_property
  def digest(self) -> str:
    return prompt_digest(self.prompt, self.media)

  @property
  def uid(self) -> str:
    """Identifier that is the same in all runs: taskset name and first half of the digest."""
    return f'{self.taskset}:{self.digest[:16]}'
