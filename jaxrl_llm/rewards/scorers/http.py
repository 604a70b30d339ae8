"""Scorer `http`: posts each attempt as JSON to an HTTP server, and reads the verdict from the
response.

The request is `{uid, prompt, completion, ground_truth, data_source, extra_info}`, where `prompt` is
a list of chat messages. The response is `{value, parts, evidence, step_values}`, where all but
`value` are optional and `value` may also be named `score`. A null value means that the attempt
cannot be judged. Any other response counts as a failure of the scorer, never as a value.

`step_values` are the values from a process reward model, one per step. The option `steps`
determines how they are used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.net.remote import DiscoveringOptions, ServiceClient, read_object
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Attempt, Awaited, Discovers, Verdict
from jaxrl_llm.rewards.scorers.adapters import data_source, ground_truth


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointOptions(DiscoveringOptions):
  """Options of the scorer. The addresses are complete URLs, such as `http://host:port/path`."""

  steps: Literal['last', 'mean', 'min', 'product', 'sum', 'turns', 'turn_differences'] | None = None
  """Use of the values of steps in the responses (`step_values`). last, mean, min, product, sum: the
  attempt's value is this function of the step values; turns: the value of step k is the reward of
  the policy's turn k; turn_differences: the value of step k minus the value of step k - 1 is the
  reward of turn k. With turns and turn_differences, requests also contain `transcript`, the
  messages of the conversation. If None, the attempt's value is the response's `value`.
  """


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


def _with_steps(
  verdict: Verdict, answer: Mapping[str, Json], steps: str | None, turns: int
) -> Verdict:
  """Adds the response's step values to the verdict's evidence, and computes the value or the values
  of turns from them as the option `steps` requires.

  Args:
    steps: use of the step values; see `EndpointOptions.steps`.
    turns: number of the policy's turns.

  Raises Malformed if `steps` is set and there are no step values, if they are not finite numbers,
  or if their number differs from the number of turns although one per turn is required.
  """
  values = answer.get('step_values')
  if values is None and steps is None:
    return verdict
  if (
    not isinstance(values, list)
    or not 0 < len(values) <= _MAX_STEPS
    or not all(map(is_number, values))
  ):
    raise Malformed(
      f'the answer has step_values {values!r:.100}, wanted 1 to {_MAX_STEPS} finite numbers'
    )
  values = [float(value) for value in values]
  verdict = dataclasses.replace(verdict, evidence={**verdict.evidence, 'step_values': values})
  if steps is None or verdict.value is None:
    return verdict
  if steps in _COMBINED:
    return dataclasses.replace(verdict, value=_COMBINED[steps](values))
  if len(values) != turns:
    raise Malformed(f'the answer has {len(values)} step_values for {turns} turns of the policy')
  before = [0.0, *values[:-1]] if steps == 'turn_differences' else [0.0] * len(values)
  rewards = tuple(value - last for value, last in zip(values, before, strict=True))
  return dataclasses.replace(verdict, value=0.0, turn_values=rewards)


_MAX_STEPS = 4096
_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
  'last': lambda values: values[-1],
  'mean': lambda values: math.fsum(values) / len(values),
  'min': min,
  'product': math.prod,
  'sum': math.fsum,
}


def _policy_turns(attempt: Attempt) -> int:
  after = attempt.transcript[len(attempt.task.prompt) :]
  return sum(message['role'] == 'assistant' for message in after)


def read_verdict(answer: Json, *, steps: str | None = None, turns: int = 1) -> Verdict:
  """Parses a response. Raises Malformed if it is not a verdict.

  Args:
    steps: use of the step values; see `EndpointOptions.steps`.
    turns: number of the policy's turns.
  """
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
  verdict = Verdict(value=None if value is None else float(value), parts=numbers, evidence=evidence)
  return _with_steps(verdict, fields, steps, turns)


class Endpoint(ServiceClient):
  """Scorer that posts attempts to HTTP servers."""

  def __init__(self, options: EndpointOptions):
    super().__init__(options, "scorer 'http'")
    self._steps = options.steps

  async def __call__(self, attempt: Attempt) -> Verdict:
    body = request_body(attempt)
    if self._steps in ('turns', 'turn_differences'):
      body['transcript'] = [dict(message) for message in attempt.transcript]
    answer = await self.post(body)
    return read_verdict(answer, steps=self._steps, turns=_policy_turns(attempt))


def http_scorer(**options: Any) -> Awaited:
  """Returns a scorer that posts each attempt to an HTTP endpoint, which responds with the attempt's
  value. The options are `EndpointOptions`.
  """
  read = from_json(dict(options), EndpointOptions, "options of scorer 'http'")
  read.check("scorer 'http'")
  return Awaited(
    functools.partial(Endpoint, read),
    concurrency=read.concurrency,
    discovers=Discovers.of('reward', read.discover),
  )
