"""Authenticating HTTP server at a configured address.

Invariant: no request reaches the handler unless it carries the token (`core.net.server`).

The module also runs on hosts that only serve models and lack JAX, so it imports neither JAX nor any
module of this package except `core.errors` and three modules of `core.net`.
"""

from __future__ import annotations

import dataclasses
import errno
import hmac
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self

from aiohttp import web

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import is_loopback
from jaxrl_llm.core.net.server import Refusal, Server, split_path
from jaxrl_llm.core.net.tickets import Ticket, TicketKeys

TicketHandler = Callable[[web.BaseRequest, Ticket], Awaitable[web.StreamResponse]]
"""Function that answers a request that was made with a ticket. It may raise Refusal."""
_TOKEN = re.compile(r'[\x21-\x7e]{16,4096}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontConfig:
  """Address, token and TLS settings of a front."""

  host: str = '127.0.0.1'
  port: int = 0
  """Port to listen on; 0 for any free port."""
  token_file: str | None = None
  """File whose first line is the bearer token: 16 to 4096 visible ASCII characters. Other users
  must have no access to the file (mode 600). If None, the token is the key of the run's registry.
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
        'text; set tls_cert and tls_key, or allow_plaintext if the network is trusted'
      )


class TokenServer:
  """HTTP server that admits requests with the configured token. Use it as an async context manager,
  or call `start` and `close`.
  """

  def __init__(
    self,
    config: FrontConfig,
    *,
    routes: Sequence[tuple[str, str]],
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ticketed: Mapping[tuple[str, str], TicketHandler] | None = None,
  ):
    """
    Args:
      routes: (method, path) pairs of the requests that are handled. The path of a request is
        compared as sent, byte by byte.
      handle: responds to an authenticated request; see `core.net.server.Server`.
      ticketed: handlers of the requests that need a ticket in place of the token, keyed by
        (method, path).

    Raises:
      UserError: the token file or the TLS files cannot be used.
    """
    self._config = config
    token = _read_token(config.token_file)
    self._wanted = f'Bearer {token}'.encode()
    self._tls = _tls_context(config)
    self._plain, self._ticketed = handle, dict(ticketed or {})
    self._keys = TicketKeys(token) if self._ticketed else None
    self._server = Server(
      (*routes, *self._ticketed),
      authenticate=self._authenticate,
      handle=self._answer,
      wanted='wanted one header "Authorization: Bearer TOKEN" with this front\'s token',
      # A used ticket still authenticates. It must not keep connections, which have no deadline.
      closes=lambda client: isinstance(client, Ticket),
    )

  async def __aenter__(self) -> Self:
    await self.start()
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  @property
  def refused(self) -> int:
    """Number of requests refused so far because they did not carry the token."""
    return self._server.refused

  @property
  def address(self) -> str:
    """Address of the server, `https://host:port` or `http://host:port`; known only after
    `start`.
    """
    host = f'[{self._config.host}]' if ':' in self._config.host else self._config.host
    return f'{"https" if self._tls else "http"}://{host}:{self._server.port}'

  async def start(self) -> str:
    """Starts listening and returns the address. Raises UserError if the address cannot be bound."""
    try:
      await self._server.start(self._config.host, self._config.port, self._tls)
    except OSError as error:
      raise self._unbound(error) from None
    return self.address

  async def close(self) -> None:
    """Stops listening and aborts requests in flight."""
    await self._server.close()

  def _authenticate(self, given: bytes) -> bool | Ticket | None:
    """Returns True if the header contains the token, the ticket if it contains a valid ticket, and
    None otherwise.
    """
    if hmac.compare_digest(given, self._wanted):
      return True
    return None if self._keys is None else self._keys.read(given)

  async def _answer(self, request: web.BaseRequest, client: bool | Ticket) -> web.StreamResponse:
    handler = self._ticketed.get((request.method, split_path(request)[0]))
    if not isinstance(client, Ticket):
      if handler is not None:
        raise Refusal(403, 'wanted a ticket for this path, not the token')
      return await self._plain(request)
    if handler is None:
      raise Refusal(403, 'a ticket does not admit to this path')
    return await handler(request, client)

  def _unbound(self, error: OSError) -> UserError:
    host, port = self._config.host, self._config.port
    if error.errno == errno.EADDRINUSE:
      return UserError(
        f'front.port: {port} of {host} is in use; stop the program that listens on it, or set '
        'another port (0 takes a free one)'
      )
    return UserError(
      f'front.host: cannot listen on {host} port {port} ({error}); set an address of this host'
    )


def _read_token(path: str | None) -> str:
  if path is None:
    raise UserError(
      'front.token_file: not set, and there is no registry whose key could be used instead; name a '
      'file with a token of at least 16 characters, mode 600'
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
