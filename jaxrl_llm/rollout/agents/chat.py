"""Requests and responses of the OpenAI chat-completions protocol.

Requests come from third-party agents, so every field that is used is checked. An unreadable request
raises a `Refusal`, which the agent's client reports as an API error.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.net.server import Refusal
from jaxrl_llm.core.records.task import ChatMessage
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.tasks.messages import called_name, chat_message

MAX_STOPS = 4
"""Maximum number of stop texts in a request, as in OpenAI's API."""
_KEPT = ('role', 'content', 'tool_calls', 'tool_call_id', 'name', 'reasoning_content', 'reasoning')
"""Keys of a message that chat templates read."""
_NEUTRAL: Mapping[str, tuple[Json, ...]] = {
  'frequency_penalty': (0,),
  'logit_bias': ({},),
  'min_p': (0,),
  'n': (1,),
  'presence_penalty': (0,),
  'repetition_penalty': (1,),
  'response_format': ({'type': 'text'},),
  'tool_choice': ('auto', 'none'),
}
"""Request parameters that can change the sampling distribution, with the values that leave it
unchanged.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
  """A request for the policy's next turn."""

  model: str
  """Name of the model that the agent requests. Every name refers to the policy."""
  messages: tuple[ChatMessage, ...]
  tools: tuple[Mapping[str, Json], ...]
  """Descriptions of the tools, for the chat template."""
  may_call: bool
  """Whether tool calls in the response are parsed."""
  max_tokens: int | None
  stop: tuple[str, ...]
  stream: bool
  include_usage: bool
  """Whether a streamed response ends with token counts."""
  filters: tuple[str, ...]
  """Parameters of the request whose values would change the run's sampling distribution, each as
  'name=value'.
  """


class Answer(NamedTuple):
  """A turn of the policy in the form that an agent receives."""

  message: Mapping[str, Json]
  """Message with role 'assistant': text and tool calls."""
  finish: str
  """Reason why the turn ended: 'stop', 'length' or 'tool_calls'."""
  number: int
  """Number of the turn in its episode, from 0."""
  prompt_tokens: int
  completion_tokens: int

  @property
  def usage(self) -> dict[str, Json]:
    total = self.prompt_tokens + self.completion_tokens
    return {
      'prompt_tokens': self.prompt_tokens,
      'completion_tokens': self.completion_tokens,
      'total_tokens': total,
    }


class MessageReader:
  """Reads the messages of an agent's requests. Most requests repeat the messages of the previous
  request and add a few, so only the added messages are read.
  """

  def __init__(self):
    self._items: list[Json] = []
    """Messages of the previous request, as received."""
    self._messages: list[ChatMessage] = []
    """The same messages, as returned."""
    self._called: dict[str, str] = {}
    """Name of the called tool, keyed by the id of the call."""

  def __call__(self, items: list[Json]) -> tuple[ChatMessage, ...]:
    """Returns the messages, each with only the keys that chat templates read. Tool results without
    a name get the name of the called tool. Raises Refusal if a message is malformed.
    """
    known = len(self._items)
    if items[:known] != self._items:
      known, self._items, self._messages, self._called = 0, [], [], {}
    added = [read_message(f'messages[{i}]', items[i]) for i in range(known, len(items))]
    self._items = items
    self._messages += map(self._named, added)
    return tuple(self._messages)

  def _named(self, message: ChatMessage) -> ChatMessage:
    """Returns the message, with the name of the called tool if it is the result of a call."""
    for call in message.get('tool_calls', []):
      if isinstance(call['id'], str):
        self._called[call['id']] = call['function']['name']
    uid = message.get('tool_call_id')
    if 'name' not in message and isinstance(uid, str) and uid in self._called:
      return {**message, 'name': self._called[uid]}
    return message


def read_request(
  body: Mapping[str, Json], sampling: Sampling, read_messages: MessageReader
) -> ChatRequest:
  """Parses the body of a chat-completion request.

  Args:
    sampling: the run's sampling parameters. A request may state the same values.
    read_messages: reader of the messages of this agent's requests.

  Raises:
    Refusal: the request is malformed, or requires an unsupported feature.
  """
  if body.get('logprobs') or body.get('functions'):
    name = 'logprobs' if body.get('logprobs') else 'functions'
    raise Refusal(400, f'{name} is not supported; leave it out')
  messages = body.get('messages')
  if not isinstance(messages, list) or not messages:
    raise Refusal(400, f'messages is {_shown(messages)}, wanted a list of messages')
  read = read_messages(messages)
  options = body.get('stream_options')
  return ChatRequest(
    model=_of_type(body, 'model', str, 'policy'),
    messages=read,
    tools=_read_tools(body.get('tools')),
    may_call=body.get('tool_choice') != 'none',
    max_tokens=_read_max_tokens(body),
    stop=_read_stop(body.get('stop')),
    stream=_of_type(body, 'stream', bool, False),
    include_usage=isinstance(options, Mapping) and options.get('include_usage') is True,
    filters=tuple(_filters(body, sampling)),
  )


def read_message(where: str, item: Json) -> ChatMessage:
  """Returns a message with only the keys that chat templates read. JSON arguments of its tool calls
  are parsed, and the role 'developer' becomes 'system'. Raises Refusal if the message is malformed.
  """
  if isinstance(item, Mapping) and item.get('role') == 'assistant' and not _says(item):
    return {'role': 'assistant', 'content': ''}
  try:
    message = chat_message(where, item)
  except ValueError as error:
    raise Refusal(400, one_line(error)) from None
  message = {key: message[key] for key in _KEPT if key in message}
  if message['role'] == 'developer':
    message['role'] = 'system'
  if 'tool_calls' in message:
    message['tool_calls'] = [_read_call(call) for call in message['tool_calls']]
  return message


def same_message(first: ChatMessage, second: ChatMessage) -> bool:
  """Returns whether two messages have the same content. Assistant messages have the same content if
  they have the same `answer_key`.
  """
  if first['role'] == second['role'] == 'assistant':
    return answer_key(first) == answer_key(second)
  return first == second


def answer_key(message: ChatMessage) -> Hashable:
  """Returns the text and the tool calls of an assistant message as a key of dictionaries. The key
  does not depend on surrounding white space, ids of tool calls and additional keys, because agents
  rebuild these messages from earlier responses.
  """
  calls = [call['function'] for call in message.get('tool_calls', [])]
  return message.get('content', '').strip(), _frozen(calls)


def completion(answer: Answer, request: ChatRequest) -> dict[str, Json]:
  """Returns the body of a non-streamed response."""
  choice = {
    'index': 0,
    'message': {**answer.message, 'refusal': None},
    'logprobs': None,
    'finish_reason': answer.finish,
  }
  return {**_head(answer, request, 'chat.completion'), 'choices': [choice], 'usage': answer.usage}


def chunks(answer: Answer, request: ChatRequest) -> Iterator[bytes]:
  """Yields the server-sent events of a streamed response."""
  calls = answer.message.get('tool_calls', [])
  text = {'role': 'assistant', 'content': answer.message['content']}
  deltas = [text, {'tool_calls': [{'index': i, **call} for i, call in enumerate(calls)]}]
  head = _head(answer, request, 'chat.completion.chunk')
  for delta in deltas if calls else deltas[:1]:
    yield _event({**head, 'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}]})
  yield _event({**head, 'choices': [{'index': 0, 'delta': {}, 'finish_reason': answer.finish}]})
  if request.include_usage:
    yield _event({**head, 'choices': [], 'usage': answer.usage})
  yield b'data: [DONE]\n\n'


def _head(answer: Answer, request: ChatRequest, kind: str) -> dict[str, Json]:
  return {
    'id': f'chatcmpl-{answer.number}',
    'object': kind,
    'created': int(time.time()),
    'model': request.model,
  }


def _event(value: Json) -> bytes:
  return f'data: {json.dumps(value)}\n\n'.encode()


def _says(message: Mapping[str, Json]) -> bool:
  texts = (message.get(key) for key in ('content', 'reasoning_content', 'reasoning'))
  return bool(message.get('tool_calls')) or any(str(text or '').strip() for text in texts)


def _frozen(value: Json) -> Hashable:
  """Returns a hashable value. Results are equal if and only if the given values are."""
  if isinstance(value, Mapping):
    return frozenset((key, _frozen(item)) for key, item in value.items())
  return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _read_call(call: Mapping[str, Json]) -> dict[str, Json]:
  function = dict(call.get('function', call))
  try:
    arguments = parse_json(function.get('arguments') or '{}')
  except (TypeError, ValueError):  # The value is already an object, or it is not JSON.
    arguments = function.get('arguments')
  return {
    'id': call.get('id'),
    'type': 'function',
    'function': {'name': function['name'], 'arguments': arguments},
  }


def _read_tools(value: Json) -> tuple[Mapping[str, Json], ...]:
  if value is None:
    return ()
  if not isinstance(value, list) or any(called_name(tool) is None for tool in value):
    raise Refusal(
      400, f'tools is {_shown(value)}, wanted a list of {{type, function: {{name, …}}}}'
    )
  return tuple(value)


def _read_max_tokens(body: Mapping[str, Json]) -> int | None:
  values = [body.get(name) for name in ('max_completion_tokens', 'max_tokens')]
  given = [value for value in values if value is not None]
  for value in given:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise Refusal(400, f'max_tokens is {_shown(value)}, wanted a number of at least 1')
  return min(given, default=None)


def _read_stop(value: Json) -> tuple[str, ...]:
  stop = [value] if isinstance(value, str) else value or []
  if (
    not isinstance(stop, list)
    or len(stop) > MAX_STOPS
    or not all(isinstance(text, str) and text for text in stop)
  ):
    raise Refusal(400, f'stop is {_shown(value)}, wanted a text, or at most {MAX_STOPS} texts')
  return tuple(stop)


def _filters(body: Mapping[str, Json], sampling: Sampling) -> Iterator[str]:
  permitted = {
    **_NEUTRAL,
    'temperature': (sampling.temperature,),
    'top_k': (-1, 0, sampling.top_k),
    'top_p': (1, sampling.top_p),
  }
  for name, neutral in permitted.items():
    value = body.get(name)
    if value is not None and value not in neutral:
      yield f'{name}={_shown(value)}'


def _of_type(body: Mapping[str, Json], name: str, kind: type, default: Any) -> Any:
  value = body.get(name)
  if value is None:
    return default
  if not isinstance(value, kind):
    raise Refusal(400, f'{name} is {_shown(value)}, wanted a {kind.__name__}')
  return value


def _shown(value: Json) -> str:
  return one_line(json.dumps(value), 80)
