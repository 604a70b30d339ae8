"""JSON client of a service that has one or more addresses.

Invariant: a call returns the body of a 200 response or raises a `RemoteError`. Transient errors (no
connection, timeout, 429, 5xx) are retried, at another address if there is one. If the last retry
also fails, the raised error lists the errors of all tries. At most `concurrency` requests are in
flight at once.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Self

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Client, Lost, Malformed, Refused, RemoteError, parse_json
from jaxrl_llm.core.net.connections import certificates, check_address, read_key
from jaxrl_llm.core.types import Json

CHAT_PATH = '/v1/chat/completions'
"""Path of chat completions on OpenAI-compatible servers."""
_MAX_WAIT_S = 30.0
"""Maximum wait before a retry in seconds. It also limits the effect of a `Retry-After` header."""
_REST_S = 5.0
"""Seconds after an error at one address during which other addresses are preferred."""
_MAX_ANSWER_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteOptions:
  addresses: tuple[str, ...]
  """Addresses `http://host:port/path`, `https://…` or `unix:/path/to.sock`. Each request goes to
  the least busy address; addresses with a recent error come last.
  """
  key_file: str | None = None
  """File whose first line is the bearer token. If None, no token is sent."""
  ca_file: str | None = None
  """File of CA certificates with which https servers are verified; if None, the system's
  certificates are used.
  """
  concurrency: int = 16
  """Maximum number of requests in flight, over all addresses."""
  request_deadline_s: float = 60.0
  """Time limit of one try in seconds. If the client belongs to a scorer, the scorer's `deadline_s`
  also limits all tries together.
  """
  retries: int = 5
  """Maximum number of retries after transient errors. With the default values, the waits between
  tries add up to about 15 s, which is enough for a restart of the service.
  """
  first_wait_s: float = 0.5
  """Seconds to wait before the first retry. The wait doubles for each later retry; a `Retry-After`
  header may extend the wait.
  """

  def check(self, where: str) -> None:
    """Raises UserError if an option is invalid, or names a file that cannot be read."""
    _check_addresses(self.addresses, where)
    if self.concurrency < 1 or self.retries < 0:
      raise UserError(
        f'{where}: concurrency is {self.concurrency} and retries is {self.retries}, wanted at '
        'least 1 and at least 0'
      )
    if not self.request_deadline_s > 0 or not self.first_wait_s > 0:
      raise UserError(
        f'{where}: request_deadline_s is {self.request_deadline_s} and first_wait_s is '
        f'{self.first_wait_s}, wanted both above 0'
      )
    read_key(self.key_file, f'{where}: key_file')
    if self.ca_file is not None:
      certificates(self.ca_file, where)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscoveringOptions(RemoteOptions):
  """Options of a service whose addresses may come from the run's registry."""

  addresses: tuple[str, ...] = ()
  """Addresses `http://host:port/path`, `https://…` or `unix:/path/to.sock`; empty if `discover` is
  set. Each request goes to the least busy address; addresses with a recent error come last.
  """
  discover: str | None = None
  """Pattern of service names, such as '*' or 'quality-*'. Requests go to those services in the
  run's registry whose names match, as long as they are registered. If None, `addresses` are used
  instead.
  """
  key_file: str | None = None
  """File whose first line is the bearer token. If None, the token is the registry's key if
  `discover` is set, and no token is sent otherwise.
  """

  def check(self, where: str) -> None:
    if self.discover is None:
      if not self.addresses:
        raise UserError(f'{where}: addresses is empty, wanted at least one, or discover')
      super().check(where)
      return
    if self.addresses or not self.discover:
      raise UserError(
        f'{where}: discover is {self.discover!r}, with {len(self.addresses)} addresses; wanted a '
        "pattern such as '*', and no addresses"
      )
    # Run the checks of the base class with a placeholder address, which is never called.
    dataclasses.replace(self, discover=None, addresses=('unix:/discovered',)).check(where)


def _check_addresses(addresses: Sequence[str], where: str) -> None:
  if not addresses:
    raise UserError(f'{where}: addresses is empty, wanted at least one')
  for address in addresses:
    check_address(address, where)


class ServiceClient:
  """Client of a service with one or more addresses; also the base class of clients of specific
  services.

  Use it as an async context manager in the event loop that makes the calls.
  """

  def __init__(self, options: RemoteOptions, where: str, path: str = ''):
    """
    Args:
      where: owner of the client, for error messages.
      path: path appended to each address. If it is empty, the addresses are complete URLs.
    """
    self._options, self._where, self._path = options, where, path
    self._clients: dict[str, Client] = {}
    self._busy: collections.Counter[str] = collections.Counter()
    self._served: collections.Counter[str] = collections.Counter()
    self._rests_until: dict[str, float] = {}
    self._slots = asyncio.Semaphore(options.concurrency)
    self._addresses = options.addresses

  async def __aenter__(self) -> Self:
    self._key = read_key(self._options.key_file, f'{self._where}: key_file')
    return self

  async def __aexit__(self, *raised: object) -> None:
    clients, self._clients = list(self._clients.values()), {}
    for client in clients:
      await client.close()

  def set_addresses(self, addresses: Sequence[str]) -> None:
    """Directs later requests to these addresses; requests in flight are unaffected.

    Raises UserError if `addresses` is empty, or one of them is malformed.
    """
    _check_addresses(addresses, self._where)
    self._addresses = tuple(addresses)

  async def post(self, body: Json) -> Json:
    """Posts `body` and returns the JSON response.

    Raises RemoteError if an error is not transient, or no retries are left.
    """
    met: list[str] = []
    wait = self._options.first_wait_s
    while True:
      async with self._slots:
        address = self._choose()
        self._busy[address] += 1
        try:
          return await self._try(address, body)
        except RemoteError as error:
          if not _is_transient(error):
            raise
          met.append(str(error))
          if len(met) > self._options.retries:
            errors = '; '.join(dict.fromkeys(met))
            message = f'{len(met)} tries: {errors}' if len(met) > 1 else errors
            last = dict(status=error.status, reason=error.reason, wait_s=error.wait_s)
            raise type(error)(message, **last) from None
          asked = error.wait_s
          self._rests_until[address] = asyncio.get_running_loop().time() + _REST_S
        finally:
          self._busy[address] -= 1
          self._served[address] += 1
      # Wait outside the slot, so that another request can use the slot meanwhile.
      await asyncio.sleep(min(max(wait, asked), _MAX_WAIT_S))
      wait *= 2

  def _choose(self) -> str:
    """Returns the address for the next request.

    Addresses without a recent error are preferred. Among them, the address with the fewest requests
    in flight is chosen, and in case of a tie the one that has served the fewest requests.
    """
    now = asyncio.get_running_loop().time()

    def rests(address):
      return self._rests_until.get(address, now) > now

    return min(
      self._addresses,
      key=lambda address: (rests(address), self._busy[address], self._served[address]),
    )

  def _client(self, address: str) -> Client:
    if address not in self._clients:
      options = {'key': self._key, 'ca_file': self._options.ca_file, 'where': self._where}
      self._clients[address] = Client(address, **options, max_bytes=_MAX_ANSWER_BYTES)
    return self._clients[address]

  def _path_at(self, address: str) -> str:
    # The address may end with the API version, like the base URLs of OpenAI clients. The path then
    # must not repeat the version.
    has_version = address.startswith('http') and address.rstrip('/').endswith('/v1')
    return self._path.removeprefix('/v1') if has_version else self._path

  async def _try(self, address: str, body: Json) -> Json:
    limit_s = self._options.request_deadline_s
    try:
      async with self._client(address).request(
        'POST', self._path_at(address), body, label=address, deadline_s=limit_s
      ) as response:
        return parse_json(await response.read(), address)
    except RemoteError as error:
      if error.refuses_key:
        raise Refused(
          f'{error}; the service refuses the key: check key_file', status=error.status
        ) from None
      raise


def _is_transient(error: RemoteError) -> bool:
  """Returns whether the error is transient, so that a retry may succeed."""
  return error.status == 429 or (isinstance(error, Lost) and not isinstance(error, Malformed))


def read_object(answer: Any, what: str) -> dict[str, Json]:
  """Returns `answer` if it is a JSON object. Raises Malformed otherwise."""
  if not isinstance(answer, dict):
    raise Malformed(
      f'{what} is a {type(answer).__name__}, wanted an object: {json.dumps(answer):.200}'
    )
  return answer
