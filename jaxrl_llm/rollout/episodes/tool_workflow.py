"""Workflow in which the policy may call tools."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.rollout.episodes.episode import Episode, History
from jaxrl_llm.rollout.episodes.mcp_servers import McpTool, check_servers, mcp_tools
from jaxrl_llm.rollout.episodes.tool_calls import ToolCall, choose_parser
from jaxrl_llm.rollout.episodes.tools import Tool, ToolFailed, python_tool
from jaxrl_llm.rollout.episodes.workflow import Episodes
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.tasks.tokenizer import Tokenizer

_EMPTY = '(no output)'
"""Text that replaces an empty result, because some chat templates would omit an empty message."""


class ToolUse(Episodes):
  """Workflow in which the policy may call tools. An episode ends with the first turn that contains
  no call, or after `max_turns` turns.

  Results of calls are shown to the policy as messages with role 'tool'. The environment's reward
  has the value 0 and the parts `tool_calls` and `tool_failures`, the numbers of calls and of failed
  calls. If the tokenizer cannot encode a result, an error message takes its place. If it cannot
  encode the error message either, the episode ends.

  The schemas of the tools are part of the first prompt and count towards
  `rollout.max_prompt_length`. Tasks are selected by the length of their prompt without schemas; if
  the schemas make the first prompt too long, the sample is unscorable.
  """

  def __init__(
    self,
    hub: Hub,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    tools: Sequence[str] = (),
    mcp: Mapping[str, Mapping[str, Any]] | None = None,
    parser: str = 'auto',
    max_turns: int = 8,
    max_calls: int = 16,
    turn_tokens: int | None = None,
    stop: Sequence[str] = (),
    history: History = 'keep',
    deadline_s: float = 30.0,
  ):
    """
    Args:
      tools: names of the tools: 'module:attribute' of a function or of a `Tool`, or 'python' for a
        Python interpreter in the sandbox.
      mcp: MCP servers that offer further tools. The keys are the servers' names in messages, and
        the values have the fields of `McpServerConfig`. A server is started once per process,
        before the first episode.
      parser: parser of the calls in a turn's text: a built-in one ('hermes', 'llama3', 'qwen3'),
        'module:attribute' of a function from text to a list of `ToolCall`, or 'auto' for the
        built-in parser that fits the chat template.
      max_turns: maximum number of turns of an episode.
      max_calls: maximum number of calls in a turn that are carried out. The result of any further
        call is an error message.
      turn_tokens: maximum number of tokens of a turn. If None, a turn may use all tokens that the
        episode has left.
      stop: texts that end a turn, in addition to the tokenizer's end tokens. Each must be a single
        token.
      history: how messages are rendered if the chat template renders earlier turns differently from
        the tokens so far: 'keep' or 'template'. See `episode.History`.
      deadline_s: maximum seconds for a call, if the tool is given as a function or belongs to an
        MCP server.
    """
    self._given = [_tool(name, deadline_s) for name in tools]
    self._servers, self._deadline_s = dict(mcp or {}), deadline_s
    check_servers(self._servers)
    if not (self._given or self._servers):
      raise UserError('rollout.workflow.options: no tools and no mcp; name at least one tool')
    self._tools = _by_name(self._given)
    for name, value in (('max_turns', max_turns), ('max_calls', max_calls)):
      if value < 1:
        raise UserError(f'rollout.workflow.options.{name}: got {value}, wanted at least 1')
    super().__init__(hub, tokenizer, max_tokens=max_tokens, history=history)
    self._calls = choose_parser(parser, tokenizer.template)
    self._max_turns, self._max_calls = max_turns, max_calls
    self._turn_tokens, self._stop = turn_tokens, tuple(stop)
    self._set_schemas()

  async def open(self) -> None:
    if self._servers and len(self._tools) == len(self._given):
      started = await mcp_tools(self._servers, self._deadline_s)
      self._tools = _by_name([*self._given, *started])
      self._set_schemas()

  def _set_schemas(self) -> None:
    self.schemas = tuple(tool.schema for tool in self._tools.values())

  async def play(self, episode: Episode) -> None:
    episode.observe(episode.task.prompt)
    for name in ('tool_calls', 'tool_failures'):
      episode.count(name, 0)
    for _ in range(self._max_turns):
      turn = await episode.act(self._turn_tokens, stop=self._stop)
      calls = self._calls(turn.text)
      if not calls:
        return
      results = await asyncio.gather(
        *(self._result(episode, number, call) for number, call in enumerate(calls))
      )
      if None in results:
        return
      names = [call.name if call.name in self._tools else 'unknown' for call in calls]
      episode.observe(
        [{'role': 'tool', 'name': name, 'content': text} for name, text in zip(names, results)]
      )

  async def _result(self, episode: Episode, index: int, call: ToolCall) -> str | None:
    """Carries out a call and returns its result as text for the policy; None if the tokenizer
    cannot encode the text. `index` is the call's index in its turn.
    """
    episode.count('tool_calls')
    try:
      if index >= self._max_calls:
        raise ToolFailed(f'too many calls; at most {self._max_calls} in a turn are carried out')
      if call.error:
        raise ToolFailed(call.error)
      if call.name not in self._tools:
        raise ToolFailed(
          one_line(f'no tool {call.name!r}; there are {", ".join(self._tools)}', 200)
        )
      return self._readable(await self._tools[call.name](call.arguments))
    except ToolFailed as failed:
      episode.count('tool_failures')
      return self._readable(f'error: {failed}')

  def _readable(self, result: str) -> str | None:
    """Returns the result of a call as non-empty text that the policy's tokenizer can encode. This
    is `result` without lone surrogates, a note that the result is empty, or an error message.
    Returns None if the tokenizer cannot even encode the error message.
    """
    readable = result.encode(errors='replace').decode() or _EMPTY
    for text in (readable, 'error: the result has characters that the tokenizer lacks'):
      with contextlib.suppress(UserError):
        if self.tokenizer.encode(text):
          return text
    logging.log_first_n(
      logging.WARNING,
      'rollout.workflow: an episode ends early, because the tokenizer lacks characters of %r',
      5,
      one_line(result, 200),
    )
    return None


def _by_name(tools: Sequence[Tool | McpTool]) -> dict[str, Tool | McpTool]:
  """Returns the tools by name. Raises UserError if two have the same name."""
  named = {tool.name: tool for tool in tools}
  if len(named) < len(tools):
    names = [tool.name for tool in tools]
    twice = next(name for name in names if names.count(name) > 1)
    raise UserError(
      f'rollout.workflow.options: two tools are named {twice!r}, wanted different names; leave one '
      'out, or select the tools of an MCP server with its field `tools`'
    )
  return named


def _tool(name: str, deadline_s: float) -> Tool:
  found = python_tool() if name == 'python' else own_part(name, 'tool')
  return found if isinstance(found, Tool) else Tool(found, deadline_s=deadline_s)
