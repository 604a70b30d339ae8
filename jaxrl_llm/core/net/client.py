"""HTTP client of one address, and the error classes of all clients.

Invariant: a response is yielded only if its status is 200, or 206 if a range was requested. Any
other outcome raises an error of this module. Redirects are not followed, because the service that
they lead to must not get the token. In this package, only this module and the front's proxy open
HTTP connections themselves.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import hdrs

from jaxrl_llm.core.net.connections import certificates, check_address
from jaxrl_llm.core.types import Json

_CONNECT_S = 10.0
"""Time limit in seconds for connecting."""
_KEEP_ALIVE_S = 2.0
"""Seconds after which the client closes an idle connection. Servers keep idle connections for a
longer time, so the client always closes them first. If a server closed a connection while the
client was sending a request, the request might be lost.
"""
_EXCERPT = 500
"""Maximum number of characters of a response that an error quotes."""


class RemoteError(Exception):
  """Raised when a service gave no usable response.

  Attributes:
    status: HTTP status of an error response; None for other errors.
    reason: error message from the response; empty for other errors.
    wait_s: seconds that the service asks the client to wait before the next request, or 0.
  """

  def __init__(
    self, message: str, *, status: int | None = None, reason: str = '', wait_s: float = 0.0
  ):
    super().__init__(message)
    self.status, self.reason, self.wait_s = status, reason, wait_s

  @property
  def refuses_key(self) -> bool:
    return self.status in (401, 403)


class Lost(RemoteError):
  """Raised when the service cannot be reached, does not respond in time, breaks the connection or
  fails (5xx).

  The service may nevertheless have carried out the request.
  """


class Malformed(Lost):
  """The response is not valid HTTP, is too large, or does not have the expected form."""


class Refused(RemoteError):
  """Raised when the service works but rejects the request: the status is below 500, but not 200 or
  206.
  """


class Response:
  """Body of an HTTP response, read in chunks or as a whole."""

  def __init__(self, content: aiohttp.StreamReader, label: str, max_bytes: int):
    self._content, self._label, self._max_bytes = content, label, max_bytes

  def chunks(self) -> AsyncIterator[bytes]:
    """Yields the body as it arrives, without a limit on its size."""
    return self._content.iter_any()

  async def read(self) -> bytes:
    """Returns the whole body. Raises Malformed if it is larger than the client's `max_bytes`."""
    chunks, size = [], 0
    async for chunk in self.chunks():
      chunks.append(chunk)
      size += len(chunk)
      if size > self._max_bytes:
        raise Malformed(f'{self._label}: answered more than {self._max_bytes} bytes')
    return b''.join(chunks)


class Client:
  """HTTP client of one address. The number of its connections is not limited."""

  def __init__(
    self, address: str, *, key: str | None, ca_file: str | None, where: str, max_bytes: int
  ):
    """
    Args:
      address: see `connections.check_address`.
      key: bearer token; if None, no token is sent.
      ca_file: see `connections.certificates`.
      where: owner of the client, for error messages.
      max_bytes: maximum size in bytes of a response that is read as a whole.

    Raises:
      UserError: the address or ca_file cannot be used.
    """
    check_address(address, where)
    self._address, self._max_bytes = address, max_bytes
    self._headers = {'Authorization': f'Bearer {key}'} if key else {}
    self._tls = certificates(ca_file, where) if address.startswith('https:') else True
    self._session: aiohttp.ClientSession | None = None
    self._closed = False

  async def close(self) -> None:
    self._closed = True
    if self._session is not None:
      await self._session.close()
      self._session = None

  @contextlib.asynccontextmanager
  async def request(
    self,
    method: str,
    path: str,
    body: Any = None,
    *,
    label: str,
    deadline_s: float | None,
    silence_s: float | None = None,
    params: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
  ) -> AsyncIterator[Response]:
    """Sends a request and yields its response.

    The errors below may also be raised while the `async with` block reads the response.

    Args:
      path: path appended to the address. If it is empty, the address is the complete URL.
      body: bytes, a JSON value, or None for no body.
      label: text at the beginning of error messages.
      deadline_s: time limit for the whole exchange in seconds; if None, only `silence_s` applies.
      silence_s: maximum time between two parts of the response in seconds; None for no limit.

    Raises:
      Lost: the client is closed, the connection fails or breaks, a time limit passes, or the status
        is 5xx.
      Malformed: the response is not valid HTTP, or a body that is read as a whole is too large.
      Refused: the status is below 500 and does not mean success. Success is 206 if the headers
        request a range, otherwise 200.
    """
    connect_s = min(deadline_s or _CONNECT_S, _CONNECT_S)
    timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=connect_s, sock_read=silence_s)
    content = {'data': body} if isinstance(body, bytes) else {'json': body}
    options = {**content, 'params': params, 'headers': headers, 'allow_redirects': False}
    session = self._opened(label)
    try:
      async with session.request(method, self._url(path), timeout=timeout, **options) as received:
        response = Response(received.content, label, self._max_bytes)
        if received.status != (206 if headers and hdrs.RANGE in headers else 200):
          raise _status_error(received, await response.read(), label)
        yield response
    # Timeouts are caught before their base class OSError.
    except aiohttp.ConnectionTimeoutError:
      raise Lost(f'{label}: no connection within {connect_s:g} s') from None
    except aiohttp.SocketTimeoutError:
      raise Lost(f'{label}: no answer within {silence_s:g} s') from None
    except TimeoutError:
      raise Lost(f'{label}: no answer within {deadline_s:g} s') from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
      raise Lost(f'{label}: {type(error).__name__}: {_line(str(error))}') from None
    except aiohttp.ClientError as error:
      raise Malformed(f'{label}: {type(error).__name__}: {_line(str(error))}') from None

  def _opened(self, label: str) -> aiohttp.ClientSession:
    """Returns the session, which is opened on first use because it belongs to the running event
    loop.
    """
    if self._closed:
      raise Lost(f'{label}: the client has been closed')
    if self._session is None:
      pool = {'limit': 0, 'keepalive_timeout': _KEEP_ALIVE_S}
      self._session = aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(self._address.removeprefix('unix:'), **pool)
        if self._address.startswith('unix:')
        else aiohttp.TCPConnector(ssl=self._tls, **pool),
        headers=self._headers,
      )
    return self._session

  def _url(self, path: str) -> str:
    if self._address.startswith('unix:'):
      return f'http://service{path}'  # A Unix socket has no host, so the name is arbitrary.
    # Without a path, the address is the complete URL and keeps its trailing slash.
    return self._address.rstrip('/') + path if path else self._address


def parse_json(data: bytes, label: str) -> Json:
  """Decodes a JSON response. Raises Malformed, with `label` in the message, if it is not JSON."""
  try:
    return json.loads(data)
  except (ValueError, RecursionError):
    text = _line(data.decode(errors='replace'))
    raise Malformed(f'{label}: answered {text!r}, wanted JSON') from None


def _status_error(response: aiohttp.ClientResponse, data: bytes, label: str) -> RemoteError:
  reason, wait = _reason(data), response.headers.get('Retry-After', '')
  kind = Lost if response.status >= 500 else Refused
  message = f'{label}: HTTP {response.status}: {reason}'
  return kind(
    message, status=response.status, reason=reason, wait_s=float(wait) if wait.isdecimal() else 0.0
  )


def _reason(data: bytes) -> str:
  """Extracts the message of an error response as one line."""
  text = data.decode(errors='replace')
  with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
    error = json.loads(text)['error']
    text = str(error['message'] if isinstance(error, dict) else error)
  return _line(text)


def _line(text: str) -> str:
  return ' '.join(text[: 4 * _EXCERPT].split())[:_EXCERPT]
