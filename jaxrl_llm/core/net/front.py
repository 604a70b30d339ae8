"""Authenticating reverse proxy for an inference server (the upstream) on the same host.

Invariant: no part of a request reaches the upstream unless the request carries the token and its
method and path are those of a route, byte for byte (`core.net.server`).

The module also runs on hosts that only serve models and lack JAX, so it imports neither JAX nor any
module of this package except `core.errors` and four modules of `core.net`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import yarl
from aiohttp import hdrs, web

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import is_loopback
from jaxrl_llm.core.net.server import (
  SERVER,
  Refusal,
  Upload,
  begin_upload,
  parse_object,
  split_path,
  write,
)
from jaxrl_llm.core.net.token_server import FrontConfig, TicketHandler, TokenServer

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
VERIFY = 'jaxrl_verify'
"""Method of the worker that verifies published files. Its argument is that of a weight update."""
RPC_METHODS = frozenset(
  {'jaxrl_weights', 'jaxrl_checksums', 'jaxrl_digests', VERIFY, 'jaxrl_verified'}
)
MAX_BODY, MAX_CHECKED_BODY = 256 << 20, 16 << 20
"""Maximum sizes in bytes of request bodies: of most requests, and of requests whose body is checked
(RPC requests and, if there are publish roots, weight updates and adapter loads). Verifying the
files of a large model takes more than 64 KiB, since each tensor and slice has a digest.
"""

_HEADER_WORD = re.compile(r'[\x21-\x7e]+')
_SMALL_BODY = 64 << 10
_CONNECT_S = 10.0
_READ_S = 600.0
"""Seconds after which a client that does not read its response is disconnected. Its request would
otherwise keep its place at the upstream.
"""
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Function that answers an authenticated request. It may raise Refusal."""
_log = logging.getLogger(__name__)


class Front(TokenServer):
  """Proxy of one upstream. Use it as an async context manager, or call `start` and `close`."""

  def __init__(
    self,
    config: FrontConfig,
    *,
    upstream: str,
    upstream_token: str | None = None,
    publish_roots: Sequence[str] = (),
    routes: Sequence[tuple[str, str]] = ROUTES,
    handlers: Mapping[tuple[str, str], Handler] | None = None,
    ticketed: Mapping[tuple[str, str], TicketHandler] | None = None,
  ):
    """
    Args:
      upstream: `unix:/path/to.sock`, or `http://127.0.0.1:PORT`.
      upstream_token: bearer token for the upstream; if None, no token is sent. The front's own
        token is never sent upstream.
      publish_roots: directories for published files. Every directory that a weight update or an
        adapter load names must be below one of them; if empty, it may be anywhere.
      routes: (method, path) pairs of the requests that the front passes on.
      handlers: handlers of requests that the front answers itself, keyed by (method, path).
      ticketed: handlers of requests that need a ticket in place of the token, keyed by (method,
        path).

    Raises:
      UserError: a file or token cannot be used, or the upstream may be reachable from other hosts.
    """
    self._socket, self._base = _parse_upstream(upstream)
    if upstream_token is not None and not _HEADER_WORD.fullmatch(upstream_token):
      raise UserError(
        'front: upstream_token has characters that HTTP headers cannot have; wanted visible ASCII'
      )
    self._upstream_token = upstream_token
    self._publish_roots = tuple(os.path.realpath(root) for root in publish_roots)
    self._session: aiohttp.ClientSession | None = None
    self._handlers = dict(handlers or {})
    super().__init__(
      config, routes=(*routes, *self._handlers), handle=self._handle, ticketed=ticketed
    )

  async def start(self) -> str:
    """Starts listening and returns the address. Raises UserError if the address cannot be bound."""
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
    try:
      return await super().start()
    except BaseException:
      await self.close()
      raise

  async def close(self) -> None:
    """Stops listening and aborts requests in flight."""
    session, self._session = self._session, None
    await super().close()
    if session is not None:
      await session.close()

  async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
    path, query = split_path(request)
    if handler := self._handlers.get((request.method, path)):
      return await handler(request)
    return await self._forward(request, path, query)

  async def _forward(self, request: web.BaseRequest, path: str, query: str) -> web.StreamResponse:
    body, is_checked = await self._body(request, path)
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
      # Wait 'upstream': bounded by the client, which cancels the request by hanging up.
      async with self._session.request(
        request.method,
        url,
        data=body,
        headers=self._headers(request, is_checked),
        allow_redirects=False,
      ) as upstream:
        response = _begun_as(upstream)
        await response.prepare(request)
        async for chunk in upstream.content.iter_any():
          if not await write(request, response, chunk, read_s=_READ_S):
            _log.warning('%s %s: the client did not read for %g s', request.method, path, _READ_S)
            break
    except (aiohttp.ClientError, OSError) as error:
      if response is not None and response.prepared:
        _log.warning('%s %s: the response was cut off: %r', request.method, path, error)
        # Break the connection, so that a truncated response does not look complete.
        if request.transport is not None:
          request.transport.abort()
        return response
      if isinstance(body, Upload) and body.fault is not None:
        raise body.fault from None
      _log.warning('%s %s: the upstream failed: %r', request.method, path, error)
      raise Refusal(502, 'the server behind this front cannot be reached, or failed') from None
    return response

  async def _body(self, request: web.BaseRequest, path: str) -> tuple[bytes | Upload | None, bool]:
    """Returns (request body to pass on, whether it was checked). The body is None if the request
    has none, and a stream if it is large and not checked.
    """
    checks = {RPC_PATH: _checked_rpc}
    if self._publish_roots:
      checks |= {UPDATE_PATH: _checked_update, ADAPTER_PATH: _checked_adapter}
    upload = await begin_upload(request, MAX_CHECKED_BODY if path in checks else MAX_BODY)
    if path not in checks:
      if not request.can_read_body:
        return None, False
      # vLLM answers some requests without reading their body, and closes the connection. A small
      # body is therefore sent together with the headers.
      is_small = request.content_length is not None and request.content_length <= _SMALL_BODY
      return (await upload.read() if is_small else upload), False
    content = parse_object(await upload.read())
    return await asyncio.to_thread(checks[path], content, self._publish_roots), True

  def _headers(self, request: web.BaseRequest, is_checked: bool) -> dict[str, str]:
    """Returns the headers to send upstream. The client's headers are dropped, except for the
    Content-Type of an unchecked body.
    """
    headers = {hdrs.ACCEPT_ENCODING: 'identity'}
    if self._upstream_token is not None:
      headers[hdrs.AUTHORIZATION] = f'Bearer {self._upstream_token}'
    if is_checked:
      headers[hdrs.CONTENT_TYPE] = 'application/json'
    elif hdrs.CONTENT_TYPE in request.headers:
      headers[hdrs.CONTENT_TYPE] = request.headers[hdrs.CONTENT_TYPE]
    return headers


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
      'let the server listen only on a Unix socket or on loopback'
    )
  return None, yarl.URL.build(scheme='http', host=host, port=port)


def _begun_as(upstream: aiohttp.ClientResponse) -> web.StreamResponse:
  kept = (hdrs.CONTENT_TYPE, hdrs.CONTENT_ENCODING)
  headers = {name: upstream.headers[name] for name in kept if name in upstream.headers}
  response = web.StreamResponse(status=upstream.status, headers={**SERVER, **headers})
  response.content_length = upstream.content_length
  return response


def _checked_rpc(body: dict[str, Any], roots: Sequence[str]) -> bytes:
  """Checks the body of an RPC request and returns it re-encoded.

  Raises Refusal if the method is not one of `RPC_METHODS`, or if files to verify are not below one
  of `roots`. If there are no roots, every directory is allowed, as for weight updates.

  Without re-encoding, the check and the upstream could read different values of a key that occurs
  twice.
  """
  method = body.get('method')
  if not isinstance(method, str) or method not in RPC_METHODS:
    raise Refusal(403, f'method must be one of {", ".join(sorted(RPC_METHODS))}')
  if method == VERIFY and roots:
    args = body.get('args')
    if set(body) != {'method', 'args'} or not isinstance(args, list) or len(args) != 1:
      raise Refusal(400, f'wanted {{"method": "{VERIFY}", "args": [update_info]}} and nothing else')
    body = {'method': method, 'args': [_checked_info(args[0], roots)]}
  return json.dumps(body).encode()


def _checked_update(body: dict[str, Any], roots: Sequence[str]) -> bytes:
  """Checks the body of a weight update. Returns it re-encoded, with resolved paths of directories.

  Raises Refusal if the body is malformed, or names a directory or file that is not below one of
  `roots`.
  """
  if set(body) != {'update_info'}:
    raise Refusal(400, 'wanted {"update_info": …} and nothing else')
  return json.dumps({'update_info': _checked_info(body['update_info'], roots)}).encode()


def _checked_info(info: Any, roots: Sequence[str]) -> dict[str, Any]:
  """Checks the description of a weight update. Returns it with resolved paths of directories.

  Raises Refusal if the description is malformed, or names a directory or file that is not below one
  of `roots`.
  """
  if not isinstance(info, dict) or not (
    set(info) <= {'directory', 'files', 'adapter', 'slices', 'label', 'deltas'}
  ):
    raise Refusal(
      400,
      'wanted update_info as {"directory": …, "files": …, "adapter": …, "slices": …, "label": …, '
      '"deltas": …} and nothing else',
    )
  deltas = info.get('deltas', [])
  if not isinstance(deltas, list) or not all(
    isinstance(delta, dict) and set(delta) == {'before', 'label', 'directory', 'files'}
    for delta in deltas
  ):
    raise Refusal(
      400,
      'wanted deltas as a list of {"before": …, "label": …, "directory": …, "files": …}',
    )
  checked = {**info, 'directory': _checked_directory(info, roots)}
  if deltas:
    checked['deltas'] = [
      {**delta, 'directory': _checked_directory(delta, roots)} for delta in deltas
    ]
  return checked


def _checked_directory(info: dict[str, Any], roots: Sequence[str]) -> str:
  """Returns the resolved path of the directory of published files that `info` names. Raises Refusal
  if `info` is malformed, or if the directory or one of its named files is not below one of `roots`.
  """
  directory, files = info.get('directory'), info.get('files', {})
  if not isinstance(directory, str) or not isinstance(files, dict):
    raise Refusal(400, 'wanted a string as directory, and an object as files')
  try:
    resolved = os.path.realpath(directory)
    plain = os.path.isabs(directory) and all(
      os.path.basename(file) == file not in ('', '.', '..') for file in files
    )
    inside = all(
      _is_below(roots, path)
      for path in (resolved, *(os.path.join(resolved, file) for file in files))
    )
  except ValueError:
    plain = inside = False
  if not (plain and inside):
    raise Refusal(
      403, 'wanted an absolute path of a directory below publish_root, with files named inside it'
    )
  return resolved


def _checked_adapter(body: dict[str, Any], roots: Sequence[str]) -> bytes:
  """Checks the body of an adapter load. Returns it re-encoded, with the directory's resolved path.

  Raises Refusal if the body is malformed, or if the directory or a file in it is not below one of
  `roots`.
  """
  path = body.get('lora_path')
  if set(body) != {'lora_name', 'lora_path', 'load_inplace'} or not isinstance(path, str):
    raise Refusal(
      400, 'wanted {"lora_name": …, "lora_path": …, "load_inplace": …} and nothing else'
    )
  try:
    resolved = os.path.realpath(path)
    inside = os.path.isabs(path) and os.path.isdir(resolved) and _is_below(roots, resolved)
    inside = inside and all(
      _is_below(roots, os.path.join(resolved, file)) for file in os.listdir(resolved)
    )
  except (ValueError, OSError):
    inside = False
  if not inside:
    raise Refusal(
      403, 'wanted an absolute path of a directory below publish_root, with files inside it'
    )
  return json.dumps({**body, 'lora_path': resolved}).encode()


def _is_below(roots: Sequence[str], path: str) -> bool:
  path = os.path.realpath(path)
  return any(path != root and os.path.commonpath([root, path]) == root for root in roots)
