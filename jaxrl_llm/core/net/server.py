"""Authenticating HTTP server with a fixed table of routes.

Invariant: no request reaches the handler unless it carries a known token and its method and path
are those of a route, byte for byte. Unauthenticated connections have a deadline, and the oldest is
dropped when there are too many. Therefore, clients without a token can neither occupy memory or
descriptors for long, nor lock out clients that have a token.

The module also runs on hosts that only serve models and lack JAX, so it imports neither JAX nor any
other module of this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
import re
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import aiohttp
from aiohttp import hdrs, web

Client = TypeVar('Client')
SERVER = {hdrs.SERVER: 'front'}
"""Server header of responses. The default of aiohttp would reveal the versions of aiohttp and
Python.
"""

_QUERY = re.compile(r'[\x21\x22\x24-\x7e]*')
_KEEPALIVE_S, _LINGER_S, _SHUTDOWN_S = 75.0, 1.0, 0.2
_STRANGER_S, _STRANGERS = 10.0, 1024
"""Seconds within which a new connection must authenticate, including its TLS handshake, and maximum
number of unauthenticated connections. The maximum is high because a trainer opens hundreds at once.
"""
_BODY_S = 60.0
"""Maximum seconds between two chunks of a request body."""
_READ_BYTES = 1 << 20
"""Number of bytes of a response that a client must read within the time limit of `write`."""
_DESCRIPTORS = 1 << 16
"""Limit on open files that a process with a server sets for itself. A proxied request needs two
descriptors.
"""
_BACKLOG = 1024
"""Maximum number of connections waiting to be accepted."""
_log = logging.getLogger(__name__)


class Server(Generic[Client]):
  """HTTP server of one address.

  Attributes:
    refused: number of requests refused so far because they lacked a known token.
  """

  def __init__(
    self,
    routes: Sequence[tuple[str, str]],
    *,
    authenticate: Callable[[bytes], Client | None],
    handle: Callable[[web.BaseRequest, Client], Awaitable[web.StreamResponse]],
    wanted: str,
    closes: Callable[[Client], bool] = lambda client: False,
  ):
    """
    Args:
      routes: (method, path) pairs of the requests that are handled. The path of a request is
        compared as sent, byte by byte.
      authenticate: returns the client that an Authorization header identifies, or None if it
        identifies none. It must take the same time for all wrong headers, so that the time reveals
        nothing about the token.
      handle: responds to an authenticated request. It may raise Refusal, and is cancelled if the
        client disconnects.
      wanted: error message for requests without a known token.
      closes: returns whether the connection of a client is closed after a refused request. It must
        be closed if the client's header may no longer be good for anything.
    """
    self.refused, self._closes = 0, closes
    self._routes, self._wanted = tuple(routes), wanted
    self._authenticated, self._respond = authenticate, handle
    self._listener: _Listener | None = None
    self._runner: web.ServerRunner | None = None

  @property
  def port(self) -> int:
    """Port on which the server listens; known only after `start`."""
    assert self._runner is not None, 'not started'
    return self._runner.addresses[0][1]

  async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
    """Starts listening. If the address cannot be bound, raises OSError and stays closed.

    Args:
      port: port to listen on; 0 for any free port.
      tls: context for TLS; if None, TLS is not used.
    """
    assert self._runner is None, 'started already'
    descriptors = _permit_descriptors()
    server = _Connections(self._handle, handler_cancellation=True)
    self._runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
    try:
      await self._listen(self._runner, host, port, tls, descriptors)
    except BaseException:
      await self.close()
      raise

  async def close(self) -> None:
    """Stops listening and aborts requests in flight."""
    runner, self._runner = self._runner, None
    if runner is not None:
      await runner.cleanup()

  async def _listen(
    self,
    runner: web.ServerRunner,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    descriptors: int,
  ) -> None:
    # Use only the first address of the host. For a host with two addresses, asyncio would open two
    # sockets and, with port 0, choose two different ports.
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = addresses[0]
    self._listener = _Listener(family, kind, protocol, strangers=min(_STRANGERS, descriptors // 4))
    try:
      self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      self._listener.bind(address)
    except OSError:
      self._listener.close()
      raise
    await runner.setup()
    # The backlog is limited because asyncio may accept several full backlogs of connections before
    # the first unauthenticated connection is closed.
    backlog = min(_BACKLOG, descriptors // 16)
    await web.SockSite(runner, self._listener, ssl_context=tls, backlog=backlog).start()

  async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
    client: Client | None = None
    try:
      client = self._authenticate(request)
      _admit(request, self._routes)
      return await self._respond(request, client)
    except Refusal as refusal:
      response = error_response(refusal)
      if client is not None and self._closes(client):
        response.force_close()
      return response

  def _authenticate(self, request: web.BaseRequest) -> Client:
    given = request.headers.getall(hdrs.AUTHORIZATION, [])
    if len(given) == 1:
      client = self._authenticated(given[0].encode('utf-8', 'surrogateescape'))
      if client is not None:
        assert self._listener is not None
        if request.transport is not None:
          self._listener.trust(request.transport)
        return client
    self.refused += 1
    # Log only when the count is a power of two, so that a flood of requests does not fill the log.
    if self.refused & (self.refused - 1) == 0:
      _log.warning(
        'Refused %d requests without the token so far, the last from %s',
        self.refused,
        request.remote,
      )
    raise Refusal(401, self._wanted)


class Refusal(Exception):
  """Raised to answer a request with an error status."""

  def __init__(
    self,
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    *,
    code: str | None = None,
  ):
    """
    Args:
      message: error message for the client.
      code: name of the error, for programs; if None, the status.
    """
    super().__init__(message)
    self.status, self.headers = status, headers or {}
    self.code = code or status


class Upload:
  """A request body of bounded size, as a stream of chunks."""

  fault: Refusal | None = None
  """Reason why the body ended early; None if it did not. It is stored here, because an aiohttp
  client that forwards the body reports only that sending failed.
  """

  def __init__(self, request: web.BaseRequest, limit: int):
    self._content, self._limit = request.content, limit
    if (request.content_length or 0) > limit:
      raise self._too_large()

  async def __aiter__(self) -> AsyncIterator[bytes]:
    size = 0
    try:
      while True:
        if self._content.is_eof():  # The whole body has arrived, as that of most small requests.
          chunk = self._content.read_nowait()
        else:
          async with asyncio.timeout(_BODY_S):
            chunk = await self._content.readany()
        if not chunk:
          return
        size += len(chunk)
        if size > self._limit:
          raise self._too_large()
        yield chunk
    except Refusal as fault:
      self.fault = fault
      raise
    except web.RequestPayloadError:
      self.fault = Refusal(400, 'the framing of the body is invalid')
      raise self.fault from None
    except TimeoutError:
      self.fault = Refusal(408, f'no part of the body arrived for {_BODY_S:g} s')
      raise self.fault from None

  async def read(self) -> bytes:
    """Returns the whole body."""
    return b''.join([chunk async for chunk in self])

  def _too_large(self) -> Refusal:
    return Refusal(413, f'the body is larger than {self._limit} bytes')


async def begin_upload(request: web.BaseRequest, limit: int) -> Upload:
  """Returns the body of a request. Raises Refusal if its Content-Length exceeds `limit` bytes.
  Iterating over the body raises Refusal, too, if the body exceeds `limit`, stalls or breaks off.
  """
  upload = Upload(request, limit)
  if request.headers.get(hdrs.EXPECT, '').lower() == '100-continue':
    await request.writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
    # Reset the count of sent bytes: `handle_error` concludes from a positive count that the
    # response has begun, and `100 Continue` is not part of the response.
    request.writer.output_size = 0
  return upload


async def write(
  request: web.BaseRequest, response: web.StreamResponse, data: bytes, *, read_s: float
) -> bool:
  """Writes a part of a response. Disconnects a client that does not read for `read_s` seconds,
  because its response would stay in memory. Returns whether the client is still connected.

  Raises:
    ConnectionError: the client has disconnected.
  """
  for start in range(0, len(data), _READ_BYTES):
    try:
      async with asyncio.timeout(read_s):
        await response.write(data[start : start + _READ_BYTES])
    except TimeoutError:
      if request.transport is not None:
        request.transport.abort()
      return False
  return True


def parse_object(data: bytes) -> dict[str, Any]:
  """Parses a request body that must be a JSON object. Raises Refusal if it is not."""
  try:
    body = json.loads(data.decode())
  except (ValueError, RecursionError):
    raise Refusal(400, 'the body is not JSON') from None
  if not isinstance(body, dict):
    raise Refusal(400, 'the body is not a JSON object')
  return body


class _Listener(socket.socket):
  """Listening socket that bounds the number and the duration of unauthenticated connections.

  Both bounds apply to a connection as soon as it is accepted, and so also to connections whose TLS
  handshake never finishes.
  """

  def __init__(self, *args: int, strangers: int):
    super().__init__(*args)
    self._permitted = strangers
    self._strangers: dict[int, tuple[socket.socket, asyncio.TimerHandle]] = {}
    """Unauthenticated connections with their deadlines, keyed by descriptor, oldest first. A closed
    connection remains until its entry is removed. Its `fileno()` is -1, and its descriptor may
    already belong to another file.
    """

  def accept(self) -> tuple[socket.socket, Any]:
    """Accepts a connection. Called by the event loop."""
    # Wait 'request': does not block, because the event loop has found the socket readable.
    connection, address = super().accept()
    number = connection.fileno()
    self._forget(number)  # An earlier connection with this descriptor has been closed.
    deadline = asyncio.get_running_loop().call_later(_STRANGER_S, self._drop, number)
    self._strangers[number] = connection, deadline
    if len(self._strangers) > self._permitted:
      for closed in [k for k, (each, _) in self._strangers.items() if each.fileno() < 0]:
        self._forget(closed)
    if len(self._strangers) > self._permitted:
      self._drop(next(iter(self._strangers)))
    return connection, address

  def trust(self, transport: asyncio.BaseTransport) -> None:
    """Cancels the deadline of a connection that has authenticated."""
    self._forget(transport.get_extra_info('socket').fileno())

  def _forget(self, number: int) -> None:
    if stranger := self._strangers.pop(number, None):
      stranger[1].cancel()

  def _drop(self, number: int) -> None:
    connection, _ = self._strangers[number]
    self._forget(number)
    # After the shutdown, the event loop reads end-of-file and closes the connection.
    with contextlib.suppress(OSError):
      connection.shutdown(socket.SHUT_RDWR)


class _Connections(web.Server):
  """Creates a `_Connection` for each accepted connection."""

  def __call__(self) -> web.RequestHandler:
    return _Connection(
      self,
      loop=asyncio.get_running_loop(),
      access_log=None,
      keepalive_timeout=_KEEPALIVE_S,
      lingering_time=_LINGER_S,
      auto_decompress=False,
    )


class _Connection(web.RequestHandler):
  __slots__ = ()

  def handle_error(
    self,
    request: web.BaseRequest,
    status: int = 500,
    exc: BaseException | None = None,
    message: str | None = None,
  ) -> web.StreamResponse:
    """Responds to invalid HTTP (400) and unexpected errors (500) without internal details."""
    if status >= 500:
      _log.error('%s %s failed', request.method, request.raw_path, exc_info=exc)
    if request.writer.output_size > 0:
      raise ConnectionError('the error occurred after the response had begun')
    response = error_response(
      Refusal(status, 'not a valid request' if status < 500 else 'the server failed')
    )
    response.force_close()
    return response


def _permit_descriptors() -> int:
  """Raises the soft limit on open files to `_DESCRIPTORS`, or to the hard limit if that is lower. A
  higher soft limit is kept.

  Returns:
    The smaller of `_DESCRIPTORS` and the hard limit.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
  return wanted


def split_path(request: web.BaseRequest) -> tuple[str, str]:
  """Returns the path and query of a request, as sent."""
  path, _, query = request.raw_path.partition('?')
  return path, query


def _admit(request: web.BaseRequest, routes: Sequence[tuple[str, str]]) -> None:
  """Raises Refusal if an authenticated request matches no route or has a form that is not accepted,
  such as a compressed body.
  """
  path, query = split_path(request)
  methods = [method for method, known in routes if known == path]
  if not methods:
    raise Refusal(403, f'no route has exactly this path: {path[:200]!a}')
  if request.method not in methods:
    raise Refusal(405, f'{path} takes {" or ".join(methods)}', {hdrs.ALLOW: ', '.join(methods)})
  if not _QUERY.fullmatch(query):
    raise Refusal(400, 'the query string holds characters that must be percent-encoded')
  if request.version < aiohttp.HttpVersion11:
    # Clients of older HTTP versions cannot distinguish a truncated response from a complete one.
    raise Refusal(505, 'wanted HTTP/1.1')
  if hdrs.CONTENT_ENCODING in request.headers:
    raise Refusal(415, 'compressed bodies are not accepted')


def error_response(refusal: Refusal) -> web.Response:
  error = {
    'message': str(refusal),
    'type': http.HTTPStatus(refusal.status).phrase.title().replace(' ', ''),
    'code': refusal.code,
  }
  headers = {**SERVER, **refusal.headers}
  if refusal.status == 401:
    headers[hdrs.WWW_AUTHENTICATE] = 'Bearer'
  return web.json_response({'error': error}, status=refusal.status, headers=headers)
