"""MCP servers whose tools the policy may call, through the official client (package `mcp`).

Invariant: apart from sessions that are closing, a server has at most one session in this process.
Each session runs in an asyncio task; when the task ends, the client also ends the server processes
that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.extras import check_library
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.episodes.tools import ToolFailed

if TYPE_CHECKING:
  import mcp

_CLOSE_S = 15.0
"""Maximum seconds for a session to close."""
_PROBE_S = 5.0
"""Maximum seconds for a server to list its tools, after a call has exceeded its deadline."""
_AGAIN_S = 5.0
"""Seconds for which calls fail at once after a server has failed to start. The next call after that
starts the server again.
"""
_WORDS = 2000
"""Number of characters at the end of a server's stderr output that are kept for messages."""
_MAX_CHARACTERS = 8192
"""Maximum length of a result. The rest is cut off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class McpServerConfig:
  """An MCP server: either a command that uses MCP over stdin and stdout, or the URL of a server
  that uses streamable HTTP.
  """

  command: str = ''
  args: tuple[str, ...] = ()
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment variables of the command, in addition to basic ones such as HOME and PATH. In a
  value, `$NAME` is replaced by this process's variable NAME, so that a secret need not be in the
  configuration.
  """
  cwd: str | None = None
  """Working directory of the command."""
  url: str = ''
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """HTTP headers of requests to `url`. In a value, `$NAME` is replaced by this process's
  environment variable NAME.
  """
  tools: tuple[str, ...] | None = None
  """Names of the tools that the policy may call; None for all tools of the server."""
  start_s: float = 60.0
  """Maximum seconds for a session with the server to open, including the start of `command`. The
  first session has 15 more seconds to list the server's tools.
  """
  concurrency: int = 16
  """Maximum number of calls in flight. Other calls wait; the wait counts towards their deadline."""

  def __post_init__(self):
    if bool(self.command) == bool(self.url):
      raise UserError(
        f'MCP server: got command {self.command!r} and url {self.url!r}, wanted one of them'
      )
    if not (self.start_s > 0 and self.concurrency > 0):
      raise UserError(
        f'MCP server: got start_s {self.start_s} and concurrency {self.concurrency}, wanted above 0'
      )


class McpTool:
  """A tool of an MCP server.

  Attributes:
    name: name of the tool.
    schema: JSON schema for chat templates, as the server describes the tool.
  """

  def __init__(self, server: _Server, description: mcp.Tool, deadline_s: float):
    self.name, self._server, self._deadline_s = description.name, server, deadline_s
    self.schema: dict[str, Json] = {
      'type': 'function',
      'function': {
        'name': description.name,
        'description': description.description or '',
        'parameters': description.input_schema,
      },
    }

  async def __call__(self, arguments: Mapping[str, Json]) -> str:
    """Calls the tool and returns the text of its result. Raises ToolFailed if the call fails or
    exceeds its deadline, or if the server does not start.
    """
    try:
      # `encode` replaces lone surrogates, which a policy may write but which cannot be sent.
      text = json.dumps(dict(arguments), ensure_ascii=False).encode(errors='replace')
      sent = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise ToolFailed(one_line(f'{self.name}: the arguments are not JSON: {error}')) from None
    return await self._server.call(self.name, sent, self._deadline_s)


def check_servers(servers: Mapping[str, Mapping[str, Json]]) -> None:
  """Raises UserError if a server's configuration is invalid, or if `mcp` is not installed."""
  for name, options in servers.items():
    from_json(dict(options), McpServerConfig, f'rollout.workflow.options.mcp.{name}')
  if servers:
    check_library('mcp', 'rollout.workflow.options.mcp')


async def mcp_tools(
  servers: Mapping[str, Mapping[str, Json]], deadline_s: float
) -> Sequence[McpTool]:
  """Returns the tools of the servers, which are started if they are not running yet.

  Args:
    servers: fields of `McpServerConfig`, keyed by the server's name.
    deadline_s: maximum seconds for a call.

  Raises:
    RunError: a server does not start, or lacks a tool.
  """
  loop = asyncio.get_running_loop()
  tools: list[McpTool] = []
  for name, options in servers.items():
    server = _server(loop, name, json.dumps(dict(options), sort_keys=True))
    tools += [McpTool(server, description, deadline_s) for description in await server.tools()]
  return tools


@functools.lru_cache(maxsize=64)
def _server(loop: asyncio.AbstractEventLoop, name: str, options: str) -> _Server:
  """Returns the server object for a name and its options, given as JSON. Calls with the same
  arguments return the same object, so all workflows of this process share the server.
  """
  config = from_json(json.loads(options), McpServerConfig, f'rollout.workflow.options.mcp.{name}')
  return _Server(name, config)


class _Session:
  """A session with a server, from its start to its end."""

  def __init__(self, config: McpServerConfig):
    self.client: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
    self.words = ''
    """End of the server's output to stderr."""
    self._leave = asyncio.Event()
    self._task = asyncio.create_task(self._run(config))

  def leave(self) -> None:
    """Asks the session to close."""
    self._leave.set()

  @property
  def has_ended(self) -> bool:
    return self._leave.is_set() or self._task.done()

  async def _run(self, config: McpServerConfig) -> None:
    try:
      async with (
        asyncio.timeout(config.start_s) as limit,
        self._stderr() as stderr,
        _transport(config, stderr) as transport,
      ):
        import mcp

        async with mcp.Client(transport) as client:
          limit.reschedule(None)
          self.client.set_result(client)
          # Wait 'mcp_session': bounded: the event loop cancels its tasks when it ends.
          await self._leave.wait()
          limit.reschedule(asyncio.get_running_loop().time() + _CLOSE_S)
    except Exception as error:
      late = isinstance(error, TimeoutError) and limit.expired()
      reason = f'no session within {config.start_s:g} s' if late else _reason(error)
      if not self.client.done():
        self.client.set_exception(ToolFailed(one_line(f'{reason} {self.words}'.strip())))
    finally:
      self._leave.set()
      if not self.client.done():
        self.client.cancel()

  @contextlib.asynccontextmanager
  async def _stderr(self) -> AsyncIterator[Any]:
    """Yields a file for the server's stderr output. The end of the output is kept in `words`."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    loop = asyncio.get_running_loop()

    def read() -> None:
      with contextlib.suppress(BlockingIOError):
        if block := os.read(reader, 65536):
          self.words = (self.words + block.decode(errors='replace'))[-_WORDS:]
        else:
          loop.remove_reader(reader)

    loop.add_reader(reader, read)
    try:
      with open(writer, 'w') as file:
        yield file
    finally:
      loop.remove_reader(reader)
      os.close(reader)


class _Server:
  """An MCP server and its session. After a session has failed, the next call opens a new one."""

  def __init__(self, name: str, config: McpServerConfig):
    self._name, self._config = name, config
    self._session: _Session | None = None
    self._failed_at = -_AGAIN_S
    self._failure: ToolFailed | None = None
    self._probing: asyncio.Task[None] | None = None
    self._free = asyncio.Semaphore(config.concurrency)
    self._listing: asyncio.Task[Sequence[mcp.Tool]] | None = None

  async def tools(self) -> Sequence[mcp.Tool]:
    """Returns the tools that the policy may call. Raises RunError if the server does not start, or
    lacks a tool that the configuration names.
    """
    if self._listing is None:
      self._listing = asyncio.create_task(self._listed())
    return await asyncio.shield(self._listing)

  async def _listed(self) -> Sequence[mcp.Tool]:
    where = f'rollout.workflow.options.mcp.{self._name}'
    try:
      async with asyncio.timeout(self._config.start_s + _CLOSE_S):
        client, tools, cursor = await self._client(), [], None
        while True:
          page = await client.list_tools(cursor=cursor)
          tools += page.tools
          cursor = page.next_cursor
          if cursor is None:
            break
    except Exception as error:
      raise RunError(
        f'{where}: the MCP server does not start: {_reason(error)}; correct its command or url'
      ) from None
    if self._config.tools is None:
      return tools
    by_name = {tool.name: tool for tool in tools}
    if missing := [name for name in self._config.tools if name not in by_name]:
      raise RunError(
        f'{where}.tools: the server has no tool {missing[0]!r}; it has {", ".join(by_name)}'
      )
    return [by_name[name] for name in self._config.tools]

  async def call(self, tool: str, arguments: Mapping[str, Json], deadline_s: float) -> str:
    """Calls a tool and returns the text of the result. Raises ToolFailed if the call fails or
    exceeds its deadline, or if the server does not start.
    """
    session, client = None, None
    try:
      async with asyncio.timeout(deadline_s) as limit, self._free:
        client = await self._client()
        session = self._session
        result = await client.call_tool(tool, dict(arguments))
    except Exception as error:
      if isinstance(error, TimeoutError) and limit.expired():
        if session is not None:
          self._probe(session, client)
        raise ToolFailed(f'{tool}: no result within {deadline_s:g} s') from None
      if not _is_answer(error):
        self._end(session, _reason(error))
      raise ToolFailed(one_line(f'{tool}: {_reason(error)}')) from None
    text = _text(result)
    if result.is_error:
      raise ToolFailed(one_line(f'{tool}: {text}', _MAX_CHARACTERS))
    return text[:_MAX_CHARACTERS]

  async def _client(self) -> mcp.Client:
    """Returns the client of the open session, opening a session if necessary."""
    if self._session is None or self._session.has_ended:
      if asyncio.get_running_loop().time() < self._failed_at + _AGAIN_S and self._failure:
        raise self._failure
      self._session = _Session(self._config)
    session = self._session
    try:
      return await asyncio.shield(session.client)
    except ToolFailed as failure:
      self._failed_at, self._failure = asyncio.get_running_loop().time(), failure
      raise

  def _probe(self, session: _Session, client: mcp.Client) -> None:
    """Checks in the background whether the server still lists its tools, after a call has exceeded
    its deadline. If the server does not, the session is closed.
    """

    async def probe() -> None:
      try:
        async with asyncio.timeout(_PROBE_S):
          await client.list_tools(cache_mode='bypass')
      except Exception:
        self._end(
          session, f'a call exceeded its deadline, and then it did not answer for {_PROBE_S:g} s'
        )

    if self._probing is None or self._probing.done():
      self._probing = asyncio.create_task(probe())

  def _end(self, session: _Session | None, reason: str) -> None:
    """Closes a failed session. The next call opens a new one."""
    if session is not None and not session.has_ended:
      logging.log_first_n(
        logging.WARNING, 'MCP server %s: will be restarted: %s', 20, self._name, reason
      )
      session.leave()


@contextlib.asynccontextmanager
async def _transport(config: McpServerConfig, stderr: Any) -> AsyncIterator[Any]:
  """Yields the transport of a session. If the transport has an HTTP client, the client closes when
  the block ends.
  """
  # Imported in a thread, because the import takes seconds.
  streams = await asyncio.to_thread(_imported)
  if config.command:
    command = streams.StdioServerParameters(
      command=config.command, args=list(config.args), env=_expanded(config.env), cwd=config.cwd
    )
    yield streams.stdio_client(command, errlog=stderr)
    return
  from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

  async with create_mcp_http_client(headers=_expanded(config.headers)) as client:
    yield streamable_http_client(config.url, http_client=client)


def _imported() -> Any:
  import mcp

  return mcp


def _expanded(values: Mapping[str, str]) -> dict[str, str]:
  return {name: os.path.expandvars(value) for name, value in values.items()}


def _is_answer(error: Exception) -> bool:
  """Returns whether the error is a response of the server, so that the session can continue."""
  import mcp

  return isinstance(error, mcp.MCPError) and error.code != mcp.types.CONNECTION_CLOSED


def _reason(error: BaseException) -> str:
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return str(error) if isinstance(error, ToolFailed) else f'{type(error).__name__}: {error}'


def _text(result: mcp.types.CallToolResult) -> str:
  """Returns the text of a result. Images and other blocks are replaced by a note that names their
  type. A result without blocks is represented by its structured content as JSON, if it has any.
  """
  texts = [
    block.text if block.type == 'text' else f'({block.type} is not shown)'
    for block in result.content
  ]
  if not texts and result.structured_content is not None:
    return json.dumps(result.structured_content)
  return '\n'.join(texts)
