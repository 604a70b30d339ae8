"""Parsers that extract tool calls from the text of the policy's turns, in the formats of common
chat templates.

Parsers raise no exceptions, because the policy may write anything. An unreadable call becomes a
`ToolCall` with an error message, which is shown to the policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.types import Json


class ToolCall(NamedTuple):
  """A tool call in the policy's text."""

  name: str
  arguments: Mapping[str, Json]
  error: str = ''
  """Reason why the call cannot be read; empty if it can."""


Parser = Callable[[str], list[ToolCall]]

_TAGGED = re.compile(r'<tool_call>(.*?)(?:</tool_call>|\Z)', re.DOTALL)
_REASONING = re.compile(r'\A.*</think>', re.DOTALL)
_PYTHON_TAG = '<|python_tag|>'


def hermes_calls(text: str) -> list[ToolCall]:
  """Parses calls of the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes,
  Qwen2.5).
  """
  return [_read(body, 'arguments') for body in _TAGGED.findall(text)]


def qwen3_calls(text: str) -> list[ToolCall]:
  """Parses calls in the format of `hermes_calls`, but ignores calls within the reasoning
  (`<think>…</think>`).
  """
  after = _REASONING.sub('', text)
  return [] if after == text and '<think>' in text else hermes_calls(after)


def llama3_calls(text: str) -> list[ToolCall]:
  """Parses a turn that consists of `{"name": …, "parameters": {…}}` (Llama 3), or of several such
  objects separated by semicolons.
  """
  body = text.strip().removeprefix(_PYTHON_TAG).strip()
  if not body.startswith('{'):
    return []
  calls = [_read(part, 'parameters') for part in re.split(r'(?<=\})\s*;\s*(?=\{)', body)]
  # An ordinary answer may also begin with a brace. It counts as a call only if it has the tag or
  # the key "name".
  return calls if _PYTHON_TAG in text or '"name"' in body else []


PARSERS: Mapping[str, Parser] = {
  'hermes': hermes_calls,
  'llama3': llama3_calls,
  'qwen3': qwen3_calls,
}


def choose_parser(kind: str, template: str) -> Parser:
  """Returns the parser of tool calls that `kind` selects.

  Args:
    kind: name of a parser, 'module:attribute' of a custom one, or 'auto' for the one that fits the
      chat template.
    template: the tokenizer's chat template.

  Raises:
    UserError: there is no such parser, or none fits the template.
  """
  if ':' in kind:
    return own_part(kind, 'parser of tool calls')
  if kind != 'auto':
    if kind not in PARSERS:
      raise UserError(
        f'parser of tool calls: no {kind!r}; wanted auto, {", ".join(PARSERS)} or '
        "'module:attribute'"
      )
    return PARSERS[kind]
  if '<tool_call>' in template:
    return PARSERS['qwen3' if '</think>' in template else 'hermes']
  if 'ipython' in template or _PYTHON_TAG in template:
    return PARSERS['llama3']
  raise UserError(
    'parser of tool calls: no built-in parser fits the chat template; name one of '
    f'{", ".join(PARSERS)}, or your own, in rollout.workflow.options.parser'
  )


def _read(body: str, arguments: str) -> ToolCall:
  try:
    value = parse_json(body.strip())
  except ValueError as error:
    return ToolCall('', {}, one_line(f'the call is not JSON: {error}', 200))
  if not isinstance(value, Mapping) or not isinstance(value.get('name'), str):
    return ToolCall('', {}, 'the call has no "name"')
  given = value.get(arguments, {})
  if not isinstance(given, Mapping):
    return ToolCall(value['name'], {}, f'"{arguments}" is not an object')
  return ToolCall(value['name'], given)
