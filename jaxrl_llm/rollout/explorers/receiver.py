"""Receives the messages of explorers over HTTP, in an event loop of another thread than that of the
crew, which answers the messages.

The crew's event loop also runs the engine's requests, the scorers and the store. HTTP and the
decoding of messages would take more of its time than everything else that it does for a message.
Messages that need little of the crew's state are answered in the receiver's event loop, too.

Invariant: the crew gets only messages that are msgpack mappings and identify their sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from jaxrl_llm.core import background
from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.files import parse_msgpack
from jaxrl_llm.core.net.server import write
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.arrivals import read_sender
from jaxrl_llm.rollout.explorers.wire import pack

_MAX_MESSAGE_BYTES = 256 << 20
_READ_S = 3600.0
"""Seconds after which an explorer that does not read its stream is disconnected. A workflow may
read a completion only after the one before it was scored, for example.
"""


class Reply(NamedTuple):
  """Response of the crew to a message."""

  value: Any = None
  """Value of the response if the message is accepted."""
  status: int = 200
  """HTTP status. If it is not 200, the message is refused."""
  error: str = ''
  """Reason of a refusal."""


Answer = Callable[[str, dict[str, Any]], Awaitable[Reply]]
"""Function of (sender's name, message) that returns the response."""
Send = Callable[[Any], None]
"""Function that sends one value of a streamed response. It may be called in any thread."""
Stream = Callable[[str, dict[str, Any], Send], Awaitable[Reply]]
"""Function of (sender's name, message, send) that sends the values of a response. It is called in
the crew's event loop. If it returns a refusal, it has sent nothing.
"""


class Receiver:
  """HTTP application that receives messages, and passes them on to the event loop in which the
  receiver was created. If an explorer disconnects, the function that answers it in that loop is
  cancelled. If that function is cancelled in the loop, the explorer's connection is closed.
  """

  def __init__(
    self,
    answers: Mapping[str, Answer],
    streams: Mapping[str, Stream],
    local: Mapping[str, Answer] | None = None,
  ):
    """
    Args:
      answers: functions that answer messages with one value, keyed by path. They are called in the
        crew's event loop.
      streams: functions that answer messages with a stream of values, keyed by path.
      local: like `answers`, but called in the receiver's event loop, and not cancelled if the
        explorer disconnects.
    """
    self._crew, self._local = asyncio.get_running_loop(), local or {}
    self._answers, self._streams = answers, streams
    self.application = web.Application(client_max_size=_MAX_MESSAGE_BYTES)
    for path in (*answers, *self._local):
      self.application.router.add_post(path, self._answer)
    for path in streams:
      self.application.router.add_post(path, self._stream)

  async def _answer(self, request: web.Request) -> web.StreamResponse:
    try:
      message = await _read(request)
    except ValueError as error:
      return _malformed(request, error)
    if (answer := self._local.get(request.path)) is not None:
      # If the connection breaks, what has arrived is accepted nevertheless. The explorer's next
      # delivery of it will be ignored. An explorer does not avoid its eviction by disconnecting.
      return _response(await asyncio.shield(answer(*message)))
    return _response(await background.run_in(self._crew, self._answers[request.path](*message)))

  async def _stream(self, request: web.Request) -> web.StreamResponse:
    """Streams values as they arrive, and True as a heartbeat after each `wire.BEAT_S` seconds
    without a value. The headers are sent with the first value, because the message may be refused.
    """
    try:
      sender, body = await _read(request)
    except ValueError as error:
      return _malformed(request, error)
    loop, parts = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

    def send(value: Any) -> None:
      loop.call_soon_threadsafe(parts.put_nowait, pack(value))

    answering = asyncio.create_task(
      background.run_in(self._crew, self._streams[request.path](sender, body, send))
    )
    handler = asyncio.current_task()
    assert handler is not None

    def end(answering: asyncio.Task[Reply]) -> None:
      parts.put_nowait(None)
      # An explorer that does not read may keep the handler waiting, even after its lease has ended.
      if answering.cancelled():
        handler.cancel()

    answering.add_done_callback(end)
    response = web.StreamResponse()
    try:
      while True:
        try:
          async with asyncio.timeout(wire.BEAT_S):
            part = await parts.get()
        except TimeoutError:
          part = pack(True)
        if part is None:
          break
        await _write(response, request, part)
      reply = answering.result()
    finally:
      answering.remove_done_callback(end)
      answering.cancel()
      await asyncio.gather(answering, return_exceptions=True)
    if not response.prepared and reply.status != 200:
      return _response(reply)
    await _write(response, request, b'')
    return response


async def _write(response: web.StreamResponse, request: web.Request, part: bytes) -> None:
  try:
    if not response.prepared:
      await response.prepare(request)
    await write(request, response, part, read_s=_READ_S)
  except ConnectionError:
    pass  # The explorer is disconnected, so the handler is about to be cancelled.


async def _read(request: web.Request) -> tuple[str, dict[str, Any]]:
  """Returns (sender's name, message). Raises ValueError if the message is malformed."""
  body = parse_msgpack(await request.read())
  return read_sender(body), body


def _malformed(request: web.Request, error: ValueError) -> web.Response:
  return web.Response(status=400, text=f'{request.path}: {one_line(error)}')


def _response(reply: Reply) -> web.Response:
  if reply.status != 200:
    return web.Response(status=reply.status, text=reply.error)
  return web.Response(body=pack(reply.value))
