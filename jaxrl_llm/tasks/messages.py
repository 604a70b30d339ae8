"""Reads and checks the chat messages of a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.records.task import ChatMessage, Message
from jaxrl_llm.core.types import Json

_ROLES = ('system', 'user', 'assistant', 'tool')
_CHAT_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_SHAREGPT_ROLES = {'human': 'user', 'gpt': 'assistant'}
"""Role names of chat templates, keyed by the role names in ShareGPT's messages ({from, value})."""
_REASONING = ('reasoning_content', 'reasoning', 'thinking')
"""Keys under which an assistant message may contain its reasoning."""


def text_messages(name: str, value: list[Json]) -> list[Message]:
  """Returns the messages with only their roles and texts. Raises ValueError if a message has no
  text or an unknown role.

  Args:
    name: name of the field, for the error message.
    value: list of messages.
  """
  messages = []
  for item in value:
    if (
      not isinstance(item, Mapping)
      or item.get('role') not in _ROLES
      or not isinstance(item.get('content'), str)
    ):
      raise ValueError(
        f'{name} message {json.dumps(item)[:80]} is not {{role: {"|".join(_ROLES)}, content: text}}'
      )
    messages.append({'role': item['role'], 'content': item['content']})
  return messages


def chat_messages(name: str, value: list[Json]) -> list[ChatMessage]:
  """Returns messages, which may also have tool calls, reasoning and further keys.

  Keys whose value is null are left out, as in transformers' `apply_chat_template`. ShareGPT's
  messages ({from, value}) are converted to {role, content}. Content that is a list of texts becomes
  one text, with line breaks between the parts as in vLLM.

  Args:
    name: name of the field, for the error message.

  Raises:
    ValueError: a message has an unknown role, content that is not text, invalid tool calls, or
      neither content nor tool calls; or a message of the assistant is empty.
  """
  return [chat_message(f'{name}[{i}]', item) for i, item in enumerate(value)]


def roles(messages: Sequence[ChatMessage]) -> list[str]:
  return [str(message['role']) for message in messages]


def chat_message(where: str, item: Json) -> ChatMessage:
  """Checks and converts one message; see `chat_messages`. `where` is the message's place, for error
  messages.
  """
  if not isinstance(item, Mapping):
    raise ValueError(f'{where} is {_shown(item)}, wanted a message {{role, content}}')
  message = {key: value for key, value in item.items() if value is not None}
  if 'role' not in message and 'from' in message:
    source = message.pop('from')
    message['role'] = _SHAREGPT_ROLES.get(source, source) if isinstance(source, str) else source
    if 'value' in message:
      message['content'] = message.pop('value')
  if message.get('role') not in _CHAT_ROLES:
    raise ValueError(
      f'{where} has role {_shown(message.get("role"))}, wanted one of {", ".join(_CHAT_ROLES)}'
    )
  if 'content' in message:
    message['content'] = _text(where, message['content'])
  calls = message.pop('tool_calls', None)
  if calls:
    _check_tool_calls(where, message['role'], calls)
    message['tool_calls'] = calls
  elif 'content' not in message:
    raise ValueError(f'{where} of {message["role"]!r} has no content{_or_calls(message["role"])}')
  elif message['role'] == 'assistant' and not any(
    str(message.get(key, '')).strip() for key in ('content', *_REASONING)
  ):
    raise ValueError(f"{where} of 'assistant' is empty, so there is nothing to learn from it")
  return message


def _or_calls(role: Json) -> str:
  return ' and no tool_calls' if role == 'assistant' else ''


def _text(where: str, content: Json) -> str:
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise ValueError(f'{where} has content {_shown(content)}, wanted text')
  for part in content:
    if not isinstance(part, Mapping) or not isinstance(part.get('text'), str):
      raise ValueError(
        f'{where} has content with part {_shown(part)}, wanted {{type: "text", text}}: policies '
        'read text only'
      )
  return '\n'.join(part['text'] for part in content)


def _check_tool_calls(where: str, role: Json, calls: Json) -> None:
  if role != 'assistant':
    raise ValueError(f"{where} of {role!r} has tool_calls, which only an 'assistant' makes")
  if not isinstance(calls, list):
    raise ValueError(f'{where} has tool_calls {_shown(calls)}, wanted a list of tool calls')
  for call in calls:
    if called_name(call) is None:
      raise ValueError(
        f'{where} has tool call {_shown(call)}, wanted {{function: {{name, arguments}}}}'
      )


def called_name(call: Json) -> str | None:
  """Returns the name of the tool in a tool call or in a tool's description; None if no tool is
  named.
  """
  inner = call.get('function', call) if isinstance(call, Mapping) else None
  name = inner.get('name') if isinstance(inner, Mapping) else None
  return name if isinstance(name, str) and name else None


def _shown(value: Json) -> str:
  return one_line(json.dumps(value), 80)
