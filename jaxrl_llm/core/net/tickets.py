"""Tickets and signatures. With a ticket, a client that does not have a front's token may send one
request to the front. The front signs its answer. If the client passes the answer on, the issuer of
the ticket can therefore check the answer.

Invariants: without the token, nobody can make a ticket or sign an answer. An answer is signed in
parts, while it arrives. The signature of a part covers the ticket, the signature of the previous
part and the part itself; the ticket covers the body of the request. Therefore, nobody can swap
parts, omit a part and deliver a later one, or insert parts of the answer to another request.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

SIGNATURE_BYTES = 32
"""Length of a signature in bytes."""
_SCHEME = b'Ticket '
"""Beginning of the Authorization header that carries a ticket."""
_TICKET = re.compile(
  rb'([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9a-f]{64})\.([0-9a-f]{8})\.([0-9a-f]{64})'
)
_COST = {'n': 1 << 14, 'r': 8, 'p': 1, 'maxmem': 64 << 20}
"""Cost of scrypt: 16 MiB and about 50 ms."""


class Ticket(NamedTuple):
  """The right to send one request to one front. All fields are hexadecimal."""

  nonce: str
  """Random number that identifies the ticket."""
  front: str
  """Random number of the front, which it chooses when it starts, and again from time to time."""
  digest: str
  """SHA-256 of the body of the request."""
  size: str
  """Size of the body in bytes, as 8 hexadecimal digits."""

  @property
  def body_bytes(self) -> int:
    """Size of the body in bytes."""
    return int(self.size, 16)

  def permits(self, body: bytes) -> bool:
    """Returns whether the ticket is for a request with this body."""
    return hmac.compare_digest(self.digest, hashlib.sha256(body).hexdigest())

  def encoded(self) -> bytes:
    return '.'.join(self).encode()


class TicketKeys:
  """The keys for tickets and for signatures of answers, which are derived from a front's token."""

  def __init__(self, token: str):
    self._tickets, self._answers = _derived(token)

  def issue(self, front: str, body: bytes) -> Ticket:
    """Returns a new ticket for a request with this body at a front."""
    digest, size = hashlib.sha256(body).hexdigest(), f'{len(body):08x}'
    return Ticket(secrets.token_hex(16), front, digest, size)

  def header(self, ticket: Ticket) -> str:
    """Returns the Authorization header for a request with a ticket."""
    text = ticket.encoded()
    return f'{_SCHEME.decode()}{text.decode()}.{_mac(self._tickets, text).hex()}'

  def read(self, header: bytes) -> Ticket | None:
    """Returns the ticket in an Authorization header. Returns None if there is none, or if it was
    not issued with these keys.
    """
    parts = _TICKET.fullmatch(header.removeprefix(_SCHEME))
    if parts is None or not header.startswith(_SCHEME):
      return None
    *fields, mac = parts.groups()
    ticket = Ticket(*(each.decode() for each in fields))
    wanted = _mac(self._tickets, ticket.encoded()).hex().encode()
    return ticket if hmac.compare_digest(mac, wanted) else None

  def chain(self, ticket: Ticket) -> Chain:
    """Returns the chain of signatures of the answer to the request that the ticket permits."""
    return Chain(self._answers, ticket)


class Chain:
  """Signatures of the parts of one answer, in order."""

  def __init__(self, key: bytes, ticket: Ticket):
    """
    Args:
      key: key for signatures.
      ticket: ticket of the request.
    """
    self._key, self._ticket = key, ticket.encoded()
    self._last = bytes(SIGNATURE_BYTES)
    """Signature of the newest part; zeros before the first part."""

  def sign(self, part: bytes) -> bytes:
    """Returns the signature of the next part."""
    self._last = _mac(self._key, self._ticket, self._last, part)
    return self._last

  def accepts(self, part: bytes, signature: bytes) -> bool:
    """Returns whether `signature` is the signature of `part` as the next part. If it is not, the
    chain stays as it was, so that another part can be the next one.
    """
    wanted = _mac(self._key, self._ticket, self._last, part)
    if not hmac.compare_digest(signature, wanted):
      return False
    self._last = wanted
    return True


def _mac(key: bytes, *parts: bytes) -> bytes:
  """Returns the HMAC-SHA256 of the parts. All parts but the last must have a constant length."""
  code = hmac.new(key, digestmod=hashlib.sha256)
  for part in parts:
    code.update(part)
  return code.digest()


@functools.cache
def _derived(token: str) -> tuple[bytes, bytes]:
  """Returns two independent keys derived from a token: for tickets, and for signatures."""
  # The derivation is slow on purpose. Otherwise, an explorer could find a weak token by trying
  # tokens until one of them fits a ticket.
  keys = hashlib.scrypt(token.encode(), salt=b'jaxrl_llm tickets 2', dklen=64, **_COST)
  return keys[:32], keys[32:]
