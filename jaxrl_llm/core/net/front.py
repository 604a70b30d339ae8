"""Authenticating reverse proxy for an inference server (the upstream) on the same host.

Invariant: no part of a request reaches the upstream unless the request carries the token and its
method and path are those of a route, byte for byte. Unauthenticated connections have a deadline,
and the oldest is dropped when there are too many. Clients without the token thus cannot occupy
memory or descriptors for long, and cannot lock out clients that have the token.

The module also runs on hosts that only serve models and lack JAX, so it imports neither JAX nor any
module of this package except `core.errors` and `core.net.connections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import http
import json
import logging
import os
import re
import resource
import socket
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import aiohttp
import yarl
from aiohttp import hdrs, web

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import is_loopback

RPC_PATH, UPDATE_PATH, ADAPTER_PATH = '/collective_rpc', '/update_weights', '/v1/load_lora_adapter'
ROUTES = (
  ('GET', '/health'),
  ('GET', '/version'),
  ('GET', '/v1/models'),
  ('GET', '/weight_info'),
  ('GET', '/is_paused'),
  ('GET', '/metrics'),
  ('GET', '/server_info'),
  ('GET', '/load'),
  ('POST', '/inference/v1/generate'),
  ('POST', '/v1/completions'),
  ('POST', '/v1/chat/completions'),
  ('POST', '/tokenize'),
  ('POST', '/detokenize'),
  ('POST', '/pause'),
  ('POST', '/resume'),
  ('POST', '/abort_requests'),
  ('POST', '/reset_prefix_cache'),
  ('POST', '/init_weight_transfer_engine'),
  ('POST', '/start_weight_update'),
  ('POST', UPDATE_PATH),
  ('POST', '/finish_weight_update'),
  ('POST', ADAPTER_PATH),
  ('POST', '/v1/unload_lora_adapter'),
  ('POST', '/update_weight_version'),
  ('POST', RPC_PATH),
)
"""(method, path) pairs of the requests that a trainer sends. The front compares the path of a
request as sent, byte by byte.
"""
RPC_METHODS = frozenset({'jaxrl_weights', 'jaxrl_digests'})
MAX_BODY, MAX_RPC_BODY, MAX_UPDATE_BODY = 256 << 20, 64 << 10, 16 << 20
"""Maximum body sizes in bytes."""

_TOKEN = re.compile(r'[\x21-\x7e]{16,4096}')
_HEADER_WORD = re.compile(r'[\x21-\x7e]+')
_QUERY = re.compile(r'[\x21\x22\x24-\x7e]*')
_SERVER = {hdrs.SERVER: 'front'}
"""Server header of responses. The default of aiohttp would reveal the versions of aiohttp and
Python.
"""
_KEEPALIVE_S, _LINGER_S, _SHUTDOWN_S, _CONNECT_S = 75.0, 1.0, 0.2, 10.0
_STRANGER_S, _STRANGERS = 10.0, 1024
"""Seconds within which a new connection must authenticate, its TLS handshake included, and maximum
number of connections that have not yet authenticated. The maximum is high because a trainer opens
hundreds at once.
"""
_BODY_S = 60.0
"""Maximum seconds between two chunks of a request body."""
_DESCRIPTORS = 1 << 16
"""Limit on open files that a process with a front sets for itself. A proxied request needs two
descriptors.
"""
_BACKLOG = 1024
"""Maximum number of connections waiting to be accepted."""
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontConfig:
  """Address, token and TLS settings of a front."""

  host: str = '127.0.0.1'
  port: int = 0
  """Port to listen on; 0 for any free port."""
  token_file: str | None = None
  """File whose first line is the bearer token, which has at least 16 visible ASCII characters. The
  file must have mode 600, so that only its owner can read it. If None, the token is the key of the
  run's registry.
  """
  tls_cert: str | None = None
  """PEM file with the certificate and, if there are any, its intermediate certificates. If None,
  TLS is not used.
  """
  tls_key: str | None = None
  """PEM file with the unencrypted private key of the certificate."""
  allow_plaintext: bool = False
  """Whether token and data may cross a network unencrypted."""

  def __post_init__(self):
    if not 0 <= self.port < 1 << 16:
      raise UserError(f'front.port: got {self.port}, wanted 0 … 65535; 0 takes a free one')
    if (self.tls_cert is None) != (self.tls_key is None):
      raise UserError('front: only one of tls_cert and tls_key is set; set both, or neither')
    if not (is_loopback(self.host) or self.tls_cert or self.allow_plaintext):
      raise UserError(
        f'front.host: {self.host!r} is not loopback, so the token would cross the network in plain '
        'text; set tls_cert and tls_key, or allow_plaintext where the network is trusted'
      )


class Front:
  """Proxy of one upstream. Use it as a context manager, or call `start` and `close`."""

  refused: int
  """Number of requests refused so far because they lacked the token."""

  def __init__(
    self,
    config: FrontConfig,
    *,
    upstream: str,
    upstream_token: str | None = None,
    publish_root: str | None = None,
    routes: Sequence[tuple[str, str]] = ROUTES,
  ):
    """
    Args:
      upstream: `unix:/path/to.sock`, or `http://127.0.0.1:PORT`.
      upstream_token: bearer token for the upstream; if None, no token is sent. The front's own
        token is never sent upstream.
      publish_root: directory that must contain every directory named in a weight update or an
        adapter load; if None, they may be anywhere.
      routes: (method, path) pairs of the requests that the front passes on.

    Raises:
      UserError: a file or token cannot be used, or the upstream may be reachable from other hosts.
    """
    self.refused = 0
    self._config = config
    self._wanted = f'Bearer {_read_token(config.token_file)}'.encode()
    self._tls = _tls_context(config)
    self._socket, self._base = _parse_upstream(upstream)
    if upstream_token is not None and not _HEADER_WORD.fullmatch(upstream_token):
      raise UserError(
        'front: upstream_token holds characters that a header cannot; wanted visible ASCII'
      )
    self._upstream_token, self._routes = upstream_token, tuple(routes)
    self._publish_root = None if publish_root is None else os.path.realpath(publish_root)
    self._session: aiohttp.ClientSession | None = None
    self._listener: _Listener | None = None
    self._runner: web.ServerRunner | None = None

  async def __aenter__(self) -> Self:
    await self.start()
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  @property
  def address(self) -> str:
    """Address of the front, `https://host:port` or `http://host:port`; known only after `start`."""
    assert self._runner is not None, 'not started'
    host = f'[{self._config.host}]' if ':' in self._config.host else self._config.host
    return f'{"https" if self._tls else "http"}://{host}:{self._runner.addresses[0][1]}'

  async def start(self) -> str:
    """Starts listening and returns the address. Raises UserError if the address cannot be bound."""
    assert self._runner is None, 'started already'
    # Each request gets its own connection to the upstream. This is cheap on the same host, and a
    # request cannot inherit the state of an earlier one.
    pool = {'limit': 0, 'force_close': True}
    self._session = aiohttp.ClientSession(
      connector=aiohttp.UnixConnector(self._socket, **pool)
      if self._socket
      else aiohttp.TCPConnector(**pool),
      timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
      cookie_jar=aiohttp.DummyCookieJar(),
      auto_decompress=False,
      skip_auto_headers=(hdrs.USER_AGENT, hdrs.CONTENT_TYPE),
    )
    descriptors = _permit_descriptors()
    server = _Server(self._handle, handler_cancellation=True)
    self._runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
    try:
      await self._listen(self._runner, descriptors)
    except OSError as error:
      await self.close()
      raise self._unbound(error) from None
    except BaseException:
      await self.close()
      raise
    return self.address

  async def close(self) -> None:
    """Stops listening and aborts requests in flight."""
    runner, self._runner = self._runner, None
    session, self._session = self._session, None
    if runner is not None:
      await runner.cleanup()
    if session is not None:
      await session.close()

  async def _listen(self, runner: web.ServerRunner, descriptors: int) -> None:
    host, port = self._config.host, self._config.port
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
    await web.SockSite(runner, self._listener, ssl_context=self._tls, backlog=backlog).start()

  def _unbound(self, error: OSError) -> UserError:
    host, port = self._config.host, self._config.port
    if error.errno == errno.EADDRINUSE:
      return UserError(
        f'front.port: {port} of {host} is taken; stop what listens there, or set another port (0 = '
        'free)'
      )
    return UserError(
      f'front.host: cannot listen on {host} port {port} ({error}); set an address of this host'
    )

  async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
    try:
      self._authenticate(request)
      path, query = _admit(request, self._routes)
      return await self._forward(request, path, query)
    except _Refusal as refusal:
      return _error_response(refusal)

  def _authenticate(self, request: web.BaseRequest) -> None:
    given = request.headers.getall(hdrs.AUTHORIZATION, [])
    if len(given) == 1 and hmac.compare_digest(
      given[0].encode('utf-8', 'surrogateescape'), self._wanted
    ):
      assert self._listener is not None
      if request.transport is not None:
        self._listener.trust(request.transport)
      return
    self.refused += 1
    # Log only when the count is a power of two, so that a flood of requests does not fill the log.
    if self.refused & (self.refused - 1) == 0:
      _log.warning(
        'Refused %d requests without the token so far, the last from %s',
        self.refused,
        request.remote,
      )
    raise _Refusal(401, 'wanted one header "Authorization: Bearer TOKEN" with this front\'s token')

  async def _forward(self, request: web.BaseRequest, path: str, query: str) -> web.StreamResponse:
    body = await self._body(request, path)
    url = yarl.URL.build(
      scheme='http',
      host=self._base.host,
      port=self._base.port,
      path=path,
      query_string=query,
      encoded=True,
    )
    assert self._session is not None
    response: web.StreamResponse | None = None
    try:
      # The wait 'upstream' is bounded by the client, which cancels the request by hanging up.
      async with self._session.request(
        request.method, url, data=body, headers=self._headers(request, body), allow_redirects=False
      ) as upstream:
        response = _begun_as(upstream)
        await response.prepare(request)
        async for chunk in upstream.content.iter_any():
          await response.write(chunk)
    except (aiohttp.ClientError, OSError) as error:
      if response is not None and response.prepared:
        _log.warning('%s %s: broken off in the response: %r', request.method, path, error)
        # Break the connection, so that a truncated response does not look complete.
        if request.transport is not None:
          request.transport.abort()
        return response
      if isinstance(body, _Upload) and body.fault is not None:
        raise body.fault from None
      _log.warning('%s %s: the upstream failed: %r', request.method, path, error)
      raise _Refusal(502, 'the server behind this front cannot be reached, or gave up') from None
    return response

  async def _body(self, request: web.BaseRequest, path: str) -> bytes | _Upload | None:
    """Returns the request body to pass on; None if the request has no body.

    For paths whose bodies are checked, the result is the checked body as bytes. For other paths, it
    is a stream of the body.
    """
    limits = {RPC_PATH: MAX_RPC_BODY}
    if self._publish_root is not None:
      limits |= {UPDATE_PATH: MAX_UPDATE_BODY, ADAPTER_PATH: MAX_UPDATE_BODY}
    upload = _Upload(request, limits.get(path, MAX_BODY))
    if request.headers.get(hdrs.EXPECT, '').lower() == '100-continue':
      await request.writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
      # Reset the count of bytes, since `100 Continue` is not yet part of the response.
      request.writer.output_size = 0
    if path not in limits:
      return upload if request.can_read_body else None
    content = _parse_object(b''.join([chunk async for chunk in upload]))
    if path == RPC_PATH:
      return _checked_rpc(content)
    check = _checked_update if path == UPDATE_PATH else _checked_adapter
    return await asyncio.to_thread(check, content, self._publish_root)

  def _headers(self, request: web.BaseRequest, body: bytes | _Upload | None) -> dict[str, str]:
    """Returns the headers to send upstream. Of the client's headers, only Content-Type is passed
    on.
    """
    headers = {hdrs.ACCEPT_ENCODING: 'identity'}
    if self._upstream_token is not None:
      headers[hdrs.AUTHORIZATION] = f'Bearer {self._upstream_token}'
    if isinstance(body, bytes):
      headers[hdrs.CONTENT_TYPE] = 'application/json'
    elif hdrs.CONTENT_TYPE in request.headers:
      headers[hdrs.CONTENT_TYPE] = request.headers[hdrs.CONTENT_TYPE]
    return headers


class _Refusal(Exception):
  """Raised for a request that is answered with an error status and never passed on."""

  def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
    super().__init__(message)
    self.status, self.headers = status, headers or {}


class _Listener(socket.socket):
  """Listening socket that bounds the number and time of unauthenticated connections.

  Both bounds hold from the moment at which a connection is accepted. A TLS handshake that is never
  finished therefore holds a descriptor no longer than a request that is never sent.
  """

  def __init__(self, *args: int, strangers: int):
    super().__init__(*args)
    self._permitted = strangers
    self._strangers: dict[int, tuple[socket.socket, asyncio.TimerHandle]] = {}
    """Unauthenticated connections with their deadlines, keyed by descriptor, oldest first. Closed
    connections stay until their entry is removed. Their `fileno()` is -1, and another file may have
    their descriptor meanwhile.
    """

  def accept(self) -> tuple[socket.socket, Any]:
    """Accepts a connection. Called by the event loop."""
    # The wait 'request' is over already, since the event loop has found the socket readable.
    connection, address = super().accept()
    number = connection.fileno()
    self._forget(number)  # An earlier connection with this descriptor is closed.
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


class _Server(web.Server):
  """HTTP server with this front's error pages."""

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
    """Responds to invalid HTTP (400) and errors in this module (500) without internal details."""
    if status >= 500:
      _log.error('%s %s failed', request.method, request.raw_path, exc_info=exc)
    if request.writer.output_size > 0:
      raise ConnectionError('the response had begun')
    response = _error_response(
      _Refusal(status, 'not a valid request' if status < 500 else 'the front failed')
    )
    response.force_close()
    return response


class _Upload:
  """A request body, streamed to the upstream."""

  fault: _Refusal | None = None
  """Reason why the body ended early; None if it did not. It is kept here because aiohttp's request
  call reports only that sending failed.
  """

  def __init__(self, request: web.BaseRequest, limit: int):
    self._content, self._limit = request.content, limit
    if (request.content_length or 0) > limit:
      raise self._too_large()

  async def __aiter__(self) -> AsyncIterator[bytes]:
    size = 0
    try:
      while True:
        async with asyncio.timeout(_BODY_S):
          chunk = await self._content.readany()
        if not chunk:
          return
        size += len(chunk)
        if size > self._limit:
          raise self._too_large()
        yield chunk
    except _Refusal as fault:
      self.fault = fault
      raise
    except web.RequestPayloadError:
      self.fault = _Refusal(400, 'the body is not validly framed')
      raise self.fault from None
    except TimeoutError:
      self.fault = _Refusal(408, f'nothing of the body came for {_BODY_S:g} s')
      raise self.fault from None

  def _too_large(self) -> _Refusal:
    return _Refusal(413, f'the body is larger than {self._limit} bytes')


def _permit_descriptors() -> int:
  """Raises the soft limit on open files to `_DESCRIPTORS`, or to the hard limit if that is lower. A
  higher soft limit is kept.

  Returns:
    The smaller one of `_DESCRIPTORS` and the hard limit.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
  return wanted


def _read_token(path: str | None) -> str:
  if path is None:
    raise UserError(
      'front.token_file: missing, and there is no registry whose key could serve; name a file '
      'with a token of at least 16 characters, mode 600'
    )
  try:
    with open(path, 'rb') as file:
      mode = os.fstat(file.fileno()).st_mode
      line = file.readline(8192)
  except OSError as error:
    raise UserError(
      f'front.token_file: cannot read {path} ({error.strerror}); put a token of at least 16 '
      'characters there, mode 600'
    ) from None
  if mode & 0o077:
    raise UserError(
      f'front.token_file: {path} has mode {mode & 0o777:o}, and others can read it; chmod 600 it'
    )
  token = line.decode('ascii', 'replace').strip()
  if not _TOKEN.fullmatch(token):
    raise UserError(
      f'front.token_file: the first line of {path} has {len(token)} characters, wanted 16 to 4096 '
      'of visible ASCII without spaces; write a longer random one, such as `openssl rand -hex 32` '
      'gives'
    )
  return token


def _tls_context(config: FrontConfig) -> ssl.SSLContext | None:
  if config.tls_cert is None:
    return None
  context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
  try:
    # The empty password makes an encrypted key an error. Without a password, OpenSSL would prompt
    # on the terminal.
    context.load_cert_chain(config.tls_cert, config.tls_key, password='')
  except OSError as error:
    raise UserError(
      f'front.tls_cert, front.tls_key: cannot use {config.tls_cert} with {config.tls_key} '
      f'({error}); wanted a certificate and its unencrypted key, both PEM'
    ) from None
  return context


def _parse_upstream(upstream: str) -> tuple[str | None, yarl.URL]:
  """Splits an upstream address into the path of its Unix socket (None for TCP) and the base URL."""
  kind, _, path = upstream.partition(':')
  if kind == 'unix' and path.startswith('/'):
    return path, yarl.URL('http://localhost')
  try:
    parts = urllib.parse.urlsplit(upstream)
    host, port = parts.hostname or '', parts.port
  except ValueError:
    host, port = '', None
  plain = re.fullmatch(r'http://[^/@?#]+/?', upstream) is not None
  if not (plain and port and is_loopback(host)):
    raise UserError(
      f'front: upstream is {upstream!r}, wanted unix:/path/to.sock or http://127.0.0.1:PORT; '
      'let the server listen on a Unix socket or on loopback alone'
    )
  return None, yarl.URL.build(scheme='http', host=host, port=port)


def _admit(request: web.BaseRequest, routes: Sequence[tuple[str, str]]) -> tuple[str, str]:
  """Returns the path and query of an authenticated request.

  Raises _Refusal if the request must not be passed on.
  """
  path, _, query = request.raw_path.partition('?')
  methods = [method for method, known in routes if known == path]
  if not methods:
    raise _Refusal(403, f'no such path here, as written: {path[:200]!a}')
  if request.method not in methods:
    raise _Refusal(405, f'{path} takes {" or ".join(methods)}', {hdrs.ALLOW: ', '.join(methods)})
  if not _QUERY.fullmatch(query):
    raise _Refusal(400, 'the query string holds characters that must be percent-encoded')
  if request.version < aiohttp.HttpVersion11:
    # Clients of older HTTP versions cannot distinguish a truncated response from a complete one.
    raise _Refusal(505, 'wanted HTTP/1.1')
  if hdrs.CONTENT_ENCODING in request.headers:
    raise _Refusal(415, 'compressed bodies are not taken')
  return path, query


def _error_response(refusal: _Refusal) -> web.Response:
  error = {
    'message': str(refusal),
    'type': http.HTTPStatus(refusal.status).phrase.title().replace(' ', ''),
    'code': refusal.status,
  }
  headers = {**_SERVER, **refusal.headers}
  if refusal.status == 401:
    headers[hdrs.WWW_AUTHENTICATE] = 'Bearer'
  return web.json_response({'error': error}, status=refusal.status, headers=headers)


def _begun_as(upstream: aiohttp.ClientResponse) -> web.StreamResponse:
  kept = (hdrs.CONTENT_TYPE, hdrs.CONTENT_ENCODING)
  headers = {name: upstream.headers[name] for name in kept if name in upstream.headers}
  response = web.StreamResponse(status=upstream.status, headers={**_SERVER, **headers})
  response.content_length = upstream.content_length
  return response


def _parse_object(data: bytes) -> dict[str, Any]:
  try:
    body = json.loads(data.decode())
  except (ValueError, RecursionError):
    raise _Refusal(400, 'the body is not JSON') from None
  if not isinstance(body, dict):
    raise _Refusal(400, 'the body is not a JSON object')
  return body


def _checked_rpc(body: dict[str, Any]) -> bytes:
  """Checks the body of an RPC request and returns it re-encoded.

  Without re-encoding, a key that occurs twice could have one value in the check and another one in
  the upstream.
  """
  method = body.get('method')
  if not isinstance(method, str) or method not in RPC_METHODS:
    raise _Refusal(403, f'method may be one of {", ".join(sorted(RPC_METHODS))}')
  return json.dumps(body).encode()


def _checked_update(body: dict[str, Any], root: str) -> bytes:
  """Checks the body of a weight update and returns it with the resolved path of its directory.

  Raises _Refusal unless the directory and all files named in the body lie below `root`.
  """
  info = body.get('update_info')
  if (
    set(body) != {'update_info'}
    or not isinstance(info, dict)
    or not set(info) <= {'directory', 'files', 'adapter'}
  ):
    raise _Refusal(
      400, 'wanted {"update_info": {"directory": …, "files": …, "adapter": …}} and nothing else'
    )
  directory, files = info.get('directory'), info.get('files', {})
  if not isinstance(directory, str) or not isinstance(files, dict):
    raise _Refusal(400, 'wanted a string as directory, and an object as files')
  try:
    resolved = os.path.realpath(directory)
    plain = os.path.isabs(directory) and all(
      os.path.basename(file) == file not in ('', '.', '..') for file in files
    )
    inside = all(
      _is_below(root, path)
      for path in (resolved, *(os.path.join(resolved, file) for file in files))
    )
  except ValueError:
    plain = inside = False
  if not (plain and inside):
    raise _Refusal(
      403, 'wanted an absolute path of a directory below publish_root, with files named inside it'
    )
  return json.dumps({'update_info': {**info, 'directory': resolved}}).encode()


def _checked_adapter(body: dict[str, Any], root: str) -> bytes:
  """Checks the body of an adapter load and returns it with the resolved path of its directory.

  Raises _Refusal unless the directory and all files in it lie below `root`.
  """
  path = body.get('lora_path')
  if set(body) != {'lora_name', 'lora_path', 'load_inplace'} or not isinstance(path, str):
    raise _Refusal(
      400, 'wanted {"lora_name": …, "lora_path": …, "load_inplace": …} and nothing else'
    )
  try:
    resolved = os.path.realpath(path)
    inside = os.path.isabs(path) and os.path.isdir(resolved) and _is_below(root, resolved)
    inside = inside and all(
      _is_below(root, os.path.join(resolved, file)) for file in os.listdir(resolved)
    )
  except (ValueError, OSError):
    inside = False
  if not inside:
    raise _Refusal(
      403, 'wanted an absolute path of a directory below publish_root, with files inside it'
    )
  return json.dumps({**body, 'lora_path': resolved}).encode()


def _is_below(root: str, path: str) -> bool:
  path = os.path.realpath(path)
  return path != root and os.path.commonpath([root, path]) == root
