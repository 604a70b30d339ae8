"""Scorer `http`: posts each attempt as JSON to an HTTP server, and reads the verdict from the
response.

The request is `{uid, prompt, completion, ground_truth, data_source, extra_info}`, where `prompt` is
a list of chat messages. The response is `{value, parts, evidence}`, where `parts` and `evidence`
are optional and `value` may also be named `score`. A null value means that the attempt cannot be
judged. Any other response counts as a failure of the scorer, never as a value.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.net.remote import DiscoveringOptions, ServiceClient, read_object
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Attempt, Awaited, Discovers, Verdict
from jaxrl_llm.rewards.scorers.adapters import data_source, ground_truth


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointOptions(DiscoveringOptions):
  """Options of the scorer. The addresses are complete URLs, such as `http://host:port/path`."""


def request_body(attempt: Attempt) -> dict[str, Json]:
  task = attempt.task
  return {
    'uid': attempt.uid,
    'prompt': [dict(message) for message in task.prompt],
    'completion': attempt.completion,
    'ground_truth': ground_truth(task),
    'data_source': data_source(task),
    'extra_info': task.fields.get('extra_info') or {},
  }


def is_number(value: Any) -> bool:
  return (
    isinstance(value, int | float)
    and not isinstance(value, bool)
    and abs(value) <= sys.float_info.max
  )


def read_verdict(answer: Json) -> Verdict:
  """Parses a response. Raises Malformed if it is not a verdict."""
  fields = read_object(answer, 'the answer')
  named = [key for key in ('value', 'score') if key in fields]
  if len(named) != 1:
    raise Malformed(
      f'the answer has the keys {sorted(fields)}, wanted one of value and score among them'
    )
  value = fields[named[0]]
  if value is not None and not is_number(value):
    raise Malformed(f'the answer has {named[0]} {value!r:.100}, wanted a finite number or null')
  parts, evidence = fields.get('parts') or {}, fields.get('evidence') or {}
  if not isinstance(parts, Mapping) or not all(is_number(part) for part in parts.values()):
    raise Malformed(f'the answer has parts {parts!r:.100}, wanted an object of finite numbers')
  if not isinstance(evidence, Mapping):
    raise Malformed(f'the answer has evidence {evidence!r:.100}, wanted an object')
  numbers = {name: float(part) for name, part in parts.items()}
  return Verdict(value=None if value is None else float(value), parts=numbers, evidence=evidence)


class Endpoint(ServiceClient):
  """Scorer that posts attempts to HTTP servers."""

  def __init__(self, options: EndpointOptions):
    super().__init__(options, "scorer 'http'")

  async def __call__(self, attempt: Attempt) -> Verdict:
    return read_verdict(await self.post(request_body(attempt)))


def http_scorer(**options: Any) -> Awaited:
  """Calls an HTTP endpoint, which receives each attempt and responds with its value. The options
  are `EndpointOptions`.
  """
  read = from_json(dict(options), EndpointOptions, "options of scorer 'http'")
  read.check("scorer 'http'")
  return Awaited(
    functools.partial(Endpoint, read),
    concurrency=read.concurrency,
    discovers=Discovers.of('reward', read.discover),
  )
