"""Orders by which a trainer has a host fetch published weights."""

from __future__ import annotations

import dataclasses
import urllib.parse
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import check_address, is_loopback
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.vllm.pull.bundle import Bundle

PULL_PATH = '/pull'
_MAX_ADDRESSES = 4096
_FIELDS = ('number', 'bundles', 'sources', 'stores', 'place', 'keep')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
  """Bundles to fetch, and the hosts that have them or fetch them at the same time."""

  number: int
  """Larger for later orders of the same trainer."""
  bundles: tuple[Bundle, ...]
  sources: tuple[str, ...]
  """Addresses at which the trainer serves the bundles."""
  stores: tuple[str, ...]
  """Addresses of all hosts that fetch the bundles, in the same order on each of them."""
  place: int
  """Index of the receiving host in `stores`."""
  keep: frozenset[str]
  """Ids of the bundles that are still published. The host removes all others, unless it has had an
  order with a larger number.
  """

  def candidates(self, number: int) -> tuple[str, ...]:
    """Returns the addresses from which this host fetches a piece, best first.

    The hosts form a ring. A piece's first host gets it from the trainer, and each of the others
    from the first host of the ring, starting at that one, that works. Thus the trainer sends each
    piece once, no host sends a piece more often than there are other hosts, and no two hosts wait
    for each other.

    Args:
      number: number of the piece.
    """
    count = len(self.stores)
    before = (self.place - number) % count if count else 0
    ring = tuple(self.stores[(number + i) % count] for i in range(before))
    return (*ring, *self.sources)

  def home(self, number: int) -> int:
    """Returns the index of the host that gets a piece from the trainer."""
    return number % len(self.stores) if self.stores else 0

  def to_json(self) -> Json:
    return {
      'number': self.number,
      'bundles': [bundle.to_json() for bundle in self.bundles],
      'sources': list(self.sources),
      'stores': list(self.stores),
      'place': self.place,
      'keep': sorted(self.keep),
    }

  @classmethod
  def from_json(cls, value: Any, *, allow_plaintext: bool) -> Order:
    """Reads an order. Raises ValueError if it is malformed, or if it has an address that this host
    must not use, because the token would cross a network in plain text.
    """
    if not isinstance(value, dict) or set(value) != set(_FIELDS):
      raise ValueError(f'wanted {", ".join(_FIELDS)} and nothing else')
    if not isinstance(value['bundles'], list) or not isinstance(value['keep'], list):
      raise ValueError('wanted lists as bundles and keep')
    if not all(isinstance(kept, str) for kept in value['keep']):
      raise ValueError('wanted texts in keep')
    stores = _addresses(value['stores'], allow_plaintext)
    place = value['place']
    if type(place) is not int or not 0 <= place < max(1, len(stores)):
      raise ValueError(f'place {place!r:.40}, wanted an index of stores')
    if type(value['number']) is not int:
      raise ValueError(f'number {value["number"]!r:.40}, wanted an integer')
    return cls(
      number=value['number'],
      bundles=tuple(Bundle.from_json(bundle) for bundle in value['bundles']),
      sources=_addresses(value['sources'], allow_plaintext),
      stores=stores,
      place=place,
      keep=frozenset(value['keep']),
    )


def _addresses(value: Any, allow_plaintext: bool) -> tuple[str, ...]:
  if not isinstance(value, list) or len(value) > _MAX_ADDRESSES:
    raise ValueError(f'wanted lists of at most {_MAX_ADDRESSES} addresses')
  for address in value:
    if not isinstance(address, str) or not address.startswith(('http://', 'https://')):
      raise ValueError(f'address {address!r:.80}, wanted http(s)://HOST:PORT')
    try:
      check_address(address, 'order')
      host = urllib.parse.urlsplit(address).hostname or ''
    except (UserError, ValueError):
      raise ValueError(f'address {address!r:.80}, wanted http(s)://HOST:PORT') from None
    if address.startswith('http://') and not (is_loopback(host) or allow_plaintext):
      raise ValueError(
        f'{address:.200}: the token would cross the network in plain text; wanted https, or '
        '--allow_plaintext where the network is trusted'
      )
  return tuple(value)
