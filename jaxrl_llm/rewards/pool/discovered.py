"""Updates the addresses of scorers when their services enter or leave a registry.

New addresses take effect in the same way as addresses in the file `scorers.json`.

Invariant: all services that a scorer calls have the same fingerprint, because scores of two models
must not be mixed. The fingerprint, a part of a service's registry entry, identifies by digests what
the service serves, such as a model. A service whose fingerprint differs from that of the scorer's
first service is ignored and logged once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch
from collections.abc import Awaitable, Callable, Mapping

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import LOOK_S, Kind, Lease, Registry, Watch
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.rewards.api import Discovers
from jaxrl_llm.rewards.pool.live import Live

SERVICES_DEADLINE_S = 900.0
"""Maximum seconds that a run waits at its start for services that its scorers discover. The wait
ends when each scorer that discovers services has found one.
"""
_LOOK_S = LOOK_S


@dataclasses.dataclass
class _Followed:
  """A scorer that discovers its services, with the services last seen in the registry."""

  name: str
  discovers: Discovers
  first: Lease | None = None
  """First service that was found. Other services must have the same fingerprint."""
  addresses: tuple[str, ...] = ()
  """Last addresses that were given to the scorer; empty if no service is registered."""
  refused: set[str] = dataclasses.field(default_factory=set)
  """IDs of the registry entries (leases) that are ignored because their fingerprints differ."""


class Discovered:
  """Watches the registry for the services of all scorers that discover their services."""

  def __init__(
    self,
    registry: Registry,
    scorers: Mapping[str, Discovers],
    apply: Callable[[Live], Awaitable[None]],
  ):
    """
    Args:
      scorers: selection of the services that each scorer calls, keyed by the scorer's name.
      apply: gives new addresses to a scorer. It raises UserError if they cannot be used.
    """
    self._registry, self._apply = registry, apply
    self._scorers = [_Followed(name, discovers) for name, discovers in scorers.items()]
    kinds = {followed.discovers.kind for followed in self._scorers}
    self._watches = {kind: Watch(registry, Kind(kind)) for kind in kinds}
    self._closing = asyncio.Event()
    self._following: asyncio.Task | None = None

  async def start(self) -> None:
    """Waits until each scorer has a service, then watches the registry in the background.

    Raises WaitExpired if a scorer has no service after `SERVICES_DEADLINE_S`.
    """
    names = ', '.join(
      f'{followed.name} ({followed.discovers.kind} {followed.discovers.pattern})'
      for followed in self._scorers
    )
    await bounded(
      self._first_services(),
      name='services',
      owner='the scorer pool',
      waits_for=f'services in {self._registry.directory} for the scorers {names}; start them with '
      'jaxrl serve --registry',
      deadline_s=SERVICES_DEADLINE_S,
    )
    self._following = asyncio.create_task(self._follow())

  async def _first_services(self) -> None:
    await self._check()
    # Wait 'services': bounded by SERVICES_DEADLINE_S, which the caller enforces.
    while not all(followed.addresses for followed in self._scorers):
      await asyncio.sleep(_LOOK_S)
      await self._check()

  async def close(self) -> None:
    """Stops watching the registry, after any change in progress has been applied."""
    self._closing.set()
    if self._following is not None:
      # Wait 'live_file': bounded by the duration of the change in progress.
      await self._following

  async def _follow(self) -> None:
    while True:
      try:
        await asyncio.wait_for(self._closing.wait(), _LOOK_S)
        return
      except TimeoutError:
        await self._check()

  async def _check(self) -> None:
    seen = {kind: await watch.look_async() for kind, watch in self._watches.items()}
    for followed in self._scorers:
      matching = [
        lease
        for lease in seen[followed.discovers.kind]
        if fnmatch.fnmatchcase(lease.name, followed.discovers.pattern)
      ]
      addresses = tuple(lease.address for lease in matching if self._suits(followed, lease))
      if addresses == followed.addresses:
        continue
      if not addresses:
        logging.warning(
          'scorer %s: no service is left in the registry; its calls go on to %s',
          *(followed.name, ', '.join(followed.addresses)),
        )
        followed.addresses = ()
        continue
      try:
        await self._apply(Live(addresses={followed.name: addresses}))
        followed.addresses = addresses
      except UserError as error:
        logging.warning('scorer %s: %s', followed.name, error)

  def _suits(self, followed: _Followed, lease: Lease) -> bool:
    followed.first = followed.first or lease
    if lease.fingerprint == followed.first.fingerprint:
      return True
    if lease.id not in followed.refused:
      followed.refused.add(lease.id)
      logging.warning(
        'scorer %s: %s (%s) serves something other than %s and is ignored; narrow discover=%r',
        *(followed.name, lease.name, lease.address, followed.first.name),
        followed.discovers.pattern,
      )
    return False
