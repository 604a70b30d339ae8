"""Tools: Python functions that the policy may call, and the workflow in which it calls them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.sandbox.sandbox import Ending, Limits, Sandboxes
from jaxrl_llm.rollout.episodes.episode import Episode
from jaxrl_llm.rollout.episodes.tool_calls import ToolCall, choose_parser
from jaxrl_llm.rollout.episodes.workflow import Episodes
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.tasks.tokenizer import Tokenizer

_TYPES: Mapping[str, type | tuple[type, ...]] = {
  'array': list,
  'boolean': bool,
  'integer': int,
  'number': (int, float),
  'object': dict,
  'string': str,
}


MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Maximum number of calls that run in threads at a time, in this process. A call that has exceeded
its deadline does not count.
"""
MAX_OVERDUE = 64
"""Maximum number of threads whose calls have exceeded their deadline and still run. If there are
more, further calls in threads fail at once.
"""
_overdue: set[threading.Thread] = set()


@functools.lru_cache(maxsize=1)
def _free_threads(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
  """Returns the semaphore of the process's event loop that calls of tools hold while they run in a
  thread.
  """
  return asyncio.Semaphore(MAX_THREADS)


def _in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, asyncio.Future[Any]]:
  """Starts a call in a thread of its own. Returns the thread and the call's result.

  The thread is a daemon, so a call that hangs does not keep the process from ending.
  """
  result: concurrent.futures.Future[Any] = concurrent.futures.Future()
  result.set_running_or_notify_cancel()  # A call that has started cannot be cancelled.

  def run() -> None:
    try:
      result.set_result(call())
    except BaseException as error:  # Whatever the call raises is its result.
      result.set_exception(error)

  thread = threading.Thread(target=run, name='tool', daemon=True)
  thread.start()
  return thread, asyncio.wrap_future(result)


class ToolFailed(Exception):
  """A call of a tool failed. The policy reads the exception's message as the result of the call."""


class Tool:
  """A typed Python function that the policy may call.

  Attributes:
    name: name of the function.
    schema: JSON schema for chat templates, from the function's annotations and docstring.
  """

  def __init__(
    self, function: Callable[..., Any], *, deadline_s: float = 30.0, max_characters: int = 8192
  ):
    """
    Args:
      function: function, or coroutine function, with annotations and a docstring that describes
        each parameter under `Args:`. A plain function runs in a thread. Python cannot end a thread,
        so a function that may hang should do its work in a process and end this process itself.
      deadline_s: maximum seconds for a call. The wait until fewer than `MAX_THREADS` calls run in
        threads does not count.
      max_characters: maximum length of a result. The rest is cut off.

    Raises:
      UserError: the function is not annotated or not documented.
    """
    from transformers.utils import get_json_schema  # Takes seconds to import.

    self.name, self._function = function.__name__, function
    self._deadline_s, self._max_characters = deadline_s, max_characters
    try:
      self.schema: dict[str, Json] = get_json_schema(function)
    except Exception as error:
      raise UserError(
        one_line(f'tool {self.name}: no JSON schema can be made of its signature: {error}')
      ) from None

  async def __call__(self, arguments: Mapping[str, Json]) -> str:
    """Calls the function and returns its result as text. Raises ToolFailed if the arguments do not
    fit the function, or if the function raises an exception or exceeds its deadline.
    """
    self._check(arguments)
    call = functools.partial(self._function, **arguments)
    if inspect.iscoroutinefunction(self._function):
      return await self._result(call)
    async with _free_threads(asyncio.get_running_loop()):
      _overdue.intersection_update([thread for thread in _overdue if thread.is_alive()])
      if len(_overdue) > MAX_OVERDUE:
        raise ToolFailed(f'{self.name}: too many calls of tools hang')
      thread, result = _in_thread(call)
      try:
        return await self._result(lambda: result)
      finally:
        if thread.is_alive():
          _overdue.add(thread)

  async def _result(self, call: Callable[[], Awaitable[Any]]) -> str:
    try:
      async with asyncio.timeout(self._deadline_s) as limit:
        return str(await call())[: self._max_characters]
    except Exception as error:
      if isinstance(error, TimeoutError) and limit.expired():
        raise ToolFailed(f'{self.name}: no result within {self._deadline_s:g} s') from None
      raise ToolFailed(one_line(f'{self.name}: {type(error).__name__}: {error}')) from None

  def _check(self, arguments: Mapping[str, Json]) -> None:
    parameters = self.schema['function']['parameters']
    known = parameters.get('properties', {})
    if unknown := sorted(set(arguments) - set(known)):
      raise ToolFailed(
        one_line(f'{self.name}: no argument {unknown[0]!r}; there are {", ".join(known)}', 200)
      )
    if missing := [name for name in parameters.get('required', []) if name not in arguments]:
      raise ToolFailed(f'{self.name}: argument {missing[0]!r} is missing')
    for name, value in arguments.items():
      kind = known[name].get('type')
      wanted = _TYPES.get(kind) if isinstance(kind, str) else None
      is_bool = isinstance(value, bool) and kind != 'boolean'
      if wanted is not None and (is_bool or not isinstance(value, wanted)):
        raise ToolFailed(
          one_line(f'{self.name}: argument {name!r} is {value!r}, wanted {kind}', 200)
        )


class ToolUse(Episodes):
  """Workflow in which the policy may call tools. An episode ends with the first turn that contains
  no call, or after `max_turns` turns.

  The policy reads the results of calls as messages of the role 'tool'. The environment's reward has
  the value 0 and the parts `tool_calls` and `tool_failures`, the numbers of calls and failed calls.
  If the tokenizer cannot encode a result, the policy reads an error message instead. If it cannot
  encode this message either, the episode ends.

  The schemas of the tools are part of the first prompt and count in `rollout.max_prompt_length`,
  although tasks are selected by the length of their prompt without schemas.
  """

  def __init__(
    self,
    hub: Hub,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    tools: Sequence[str],
    parser: str = 'auto',
    max_turns: int = 8,
    max_calls: int = 16,
    turn_tokens: int | None = None,
    stop: Sequence[str] = (),
    deadline_s: float = 30.0,
  ):
    """
    Args:
      tools: 'module:attribute' of each tool, a function or a `Tool`; 'python' is a Python
        interpreter in the sandbox.
      parser: reads the calls in a turn's text. It is a built-in parser ('hermes', 'llama3',
        'qwen3'), 'module:attribute' of a function from text to a list of `ToolCall`, or 'auto' for
        the built-in parser that fits the chat template.
      max_turns: maximum number of turns of an episode.
      max_calls: maximum number of calls in a turn that are carried out. The result of any further
        call is an error message.
      turn_tokens: maximum number of tokens of a turn. If None, a turn may use all tokens that the
        episode has left.
      stop: texts that end a turn, in addition to the tokenizer's end tokens. Each must be a single
        token.
      deadline_s: maximum seconds for a call of a tool that is given as a function.
    """
    given = [_tool(name, deadline_s) for name in tools]
    self._tools = {tool.name: tool for tool in given}
    if not given or len(self._tools) < len(given):
      raise UserError(f'rollout.workflow.options.tools: got {list(tools)}, wanted names, each once')
    for name, value in (('max_turns', max_turns), ('max_calls', max_calls)):
      if value < 1:
        raise UserError(f'rollout.workflow.options.{name}: got {value}, wanted at least 1')
    super().__init__(hub, tokenizer, max_tokens=max_tokens, schemas=[tool.schema for tool in given])
    self._calls = choose_parser(parser, tokenizer.template)
    self._max_turns, self._max_calls = max_turns, max_calls
    self._turn_tokens, self._stop = turn_tokens, tuple(stop)

  async def play(self, episode: Episode) -> None:
    episode.observe(episode.task.prompt)
    for name in ('tool_calls', 'tool_failures'):
      episode.count(name, 0)
    for _ in range(self._max_turns):
      turn = await episode.act(self._turn_tokens, stop=self._stop)
      calls = self._calls(turn.text)
      if not calls:
        return
      results = await asyncio.gather(*(self._result(episode, *one) for one in enumerate(calls)))
      if None in results:
        return
      names = [call.name if call.name in self._tools else 'unknown' for call in calls]
      episode.observe(
        [{'role': 'tool', 'name': name, 'content': text} for name, text in zip(names, results)]
      )

  async def _result(self, episode: Episode, index: int, call: ToolCall) -> str | None:
    """Returns what the policy reads as the result of the call with this index in its turn; None if
    the tokenizer cannot encode it.
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
    """Returns the result of a call as a text that the policy's tokenizer can encode: `result`
    itself, without lone surrogates, or an error message in its place. Returns None if the tokenizer
    cannot encode this error message either.
    """
    error = 'error: the result has characters that the tokenizer lacks'
    for text in (result.encode(errors='replace').decode(), error):
      with contextlib.suppress(UserError):
        self.tokenizer.encode(text)
        return text
    logging.log_first_n(
      logging.WARNING,
      'rollout.workflow: an episode ends early, because the tokenizer lacks characters of %r',
      5,
      one_line(result, 200),
    )
    return None


def _tool(name: str, deadline_s: float) -> Tool:
  found = python_tool() if name == 'python' else own_part(name, 'tool')
  return found if isinstance(found, Tool) else Tool(found, deadline_s=deadline_s)


def python_tool(limits: Limits | None = None) -> Tool:
  """Returns a tool that runs a Python program in the sandbox and returns what it prints."""
  allowed = Limits() if limits is None else limits
  sandboxes = Sandboxes(allowed)

  def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
      code: the program.
    """
    outcome, output = sandboxes.output(code, '')
    if outcome.ended == Ending.PASSED:
      return output
    return f'{output}\n{outcome.detail or f"stopped at a limit: {outcome.ended}"}'.strip()

  return Tool(python, deadline_s=allowed.wall_s + 30.0)
