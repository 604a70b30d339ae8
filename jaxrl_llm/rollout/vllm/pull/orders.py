"""Orders with which a trainer makes a host fetch published weights."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import check_address, is_loopback
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.vllm.pull.bundle import Bundle

PULL_PATH = '/pull'
_MAX_ADDRESSES = 4096
_FIELDS = ('trainer', 'number', 'bundles', 'sources', 'origins', 'stores', 'place', 'keep')


class Provider(NamedTuple):
  """A host that has a file, or fetches it."""

  address: str
  bundle: str
  """Id of the bundle under which the host has the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchOrder:
  """Order of a trainer to a host: the bundles to fetch, and the hosts that have these bundles or
  fetch them at the same time.
  """

  trainer: str
  """Random id of the trainer's process."""
  number: int
  """Number of the order. Later orders of the same trainer have larger numbers."""
  bundles: tuple[Bundle, ...]
  sources: tuple[str, ...]
  """Addresses at which processes of the trainer serve files. The first one serves the bundles, and
  each of the others a bundle of a single file.
  """
  origins: Mapping[str, int]
  """For files that other processes than the first serve, keyed by file name, the index of the
  process in `sources`.
  """
  stores: tuple[str, ...]
  """Addresses of all hosts that fetch the bundles, in the same order on each of them."""
  place: int
  """Index of the receiving host in `stores`."""
  keep: frozenset[str]
  """Ids of the bundles that are still published. The host removes all others, unless it has had an
  order of the same trainer with a larger number.
  """

  def providers(self, number: int, bundle: Bundle, file: str) -> tuple[Provider, ...]:
    """Returns the hosts from which this host can fetch a piece of a file of a bundle, best first.

    The hosts form a ring. A piece's first host gets the piece from the trainer. Every other host
    gets it from the first working host, counted along the ring from the piece's first host. Thus
    the trainer sends each piece once, no host sends a piece more often than there are other hosts,
    and no two hosts wait for each other.

    Args:
      number: number of the piece.
    """
    count = len(self.stores)
    before = (self.place - number) % count if count else 0
    ring = [Provider(self.stores[(number + i) % count], bundle.id) for i in range(before)]
    if not self.sources:
      return tuple(ring)
    origin, identity = self.origins.get(file, 0), bundle.id
    if origin:
      identity = Bundle((bundle.file(file),)).id
    return (*ring, Provider(self.sources[origin], identity))

  def home(self, number: int) -> int:
    """Returns the index of the host that gets a piece from the trainer."""
    return number % len(self.stores) if self.stores else 0

  def to_json(self) -> Json:
    return {
      'trainer': self.trainer,
      'number': self.number,
      'bundles': [bundle.to_json() for bundle in self.bundles],
      'sources': list(self.sources),
      'origins': dict(self.origins),
      'stores': list(self.stores),
      'place': self.place,
      'keep': sorted(self.keep),
    }

  @classmethod
  def from_json(cls, value: Any, *, allow_plaintext: bool) -> FetchOrder:
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
    if not isinstance(value['trainer'], str):
      raise ValueError(f'trainer {value["trainer"]!r:.40}, wanted a text')
    if type(value['number']) is not int:
      raise ValueError(f'number {value["number"]!r:.40}, wanted an integer')
    sources, origins = _addresses(value['sources'], allow_plaintext), value['origins']
    if not isinstance(origins, dict) or not all(
      type(index) is int and 0 <= index < len(sources) for index in origins.values()
    ):
      raise ValueError(f'origins {origins!r:.80}, wanted indices of sources')
    return cls(
      trainer=value['trainer'],
      number=value['number'],
      bundles=tuple(Bundle.from_json(bundle) for bundle in value['bundles']),
      sources=sources,
      origins=origins,
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
