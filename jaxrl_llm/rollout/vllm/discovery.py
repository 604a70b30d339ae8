"""Discovery of servers that register themselves in a registry: which have joined, which have left,
and whether they serve the policy's model. A registration is called a lease, because it expires
unless the server renews it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import Lease, Watch
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.replica import Replica

_UNCOMPARED = ('max_position_embeddings', 'initializer_range', 'head')
"""Fields of a model spec that may differ between the policy and a server. The maximum length is
checked separately, and the other fields do not affect sampling.
"""

_REST_S = 60.0
"""Seconds until a discovered server that was given up may rejoin."""


def fingerprint(spec: ModelSpec, tokenizer: bytes | None) -> dict[str, str]:
  """Returns digests that are equal for a policy and a server with the same model and tokenizer.

  Args:
    spec: spec of the model.
    tokenizer: content of tokenizer.json; None if there is no such file.
  """
  fields = dataclasses.asdict(spec)
  for name in _UNCOMPARED:
    del fields[name]
  digests = {'model': _digest(fields)}
  if tokenizer is not None:
    content = json.loads(tokenizer)
    # Other fields, such as truncation and padding, may change when a library saves the tokenizer.
    digests['tokenizer'] = _digest([content.get('model'), content.get('added_tokens')])
  return digests


def _digest(value: object) -> str:
  text = json.dumps(value, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class Discovery:
  """Finds a fleet's servers in a registry.

  Attributes:
    required: number of servers that must be available before the run starts.
  """

  def __init__(
    self,
    watch: Watch,
    *,
    required: int,
    fingerprint: Mapping[str, str],
    build: Callable[[str, str, int], Replica],
    tell: Callable[[str, str], None],
  ):
    """
    Args:
      watch: reads the servers' leases from the registry.
      required: number of servers that must be available before the run starts.
      fingerprint: digests of the policy's model and tokenizer (see `fingerprint`).
      build: returns the replica of a server (the fleet's state of that server), given the server's
        name, address and number.
      tell: called with the name of a server and an event: 'joined', 'left', 'expired', 'refused' or
        'given up'.
    """
    self.required, self.tell = required, tell
    self._watch, self._fingerprint, self._build = watch, fingerprint, build
    self._numbers = itertools.count()
    self._leases: dict[Replica, Lease] = {}
    """Leases of the servers in the fleet."""
    self._resting: dict[str, float] = {}
    """Event loop time from which each refused or abandoned server may rejoin, keyed by the id of
    its lease.
    """

  @property
  def directory(self) -> pathlib.Path:
    return self._watch.registry.directory

  @property
  def expired(self) -> frozenset[str]:
    """Addresses of servers whose leases have expired."""
    return self._watch.expired

  async def look(self) -> Sequence[Lease]:
    """Reads the registry and returns the unexpired leases."""
    return await self._watch.look_async()

  def match(
    self, replicas: Sequence[Replica], leases: Sequence[Lease], *, engine: str, refuses: bool
  ) -> tuple[list[Replica], list[Lease]]:
    """Compares the servers of the fleet with the registry. Returns (servers that have left, leases
    of servers that may join). A server that was refused or given up may not join while it rests
    (see `rest`).

    Args:
      replicas: servers of the fleet.
      leases: leases that have not expired.
      engine: name of the engine, for messages.
      refuses: whether a server that cannot serve the policy raises UserError. If False, such a
        server is ignored.
    """
    at = {lease.address: lease for lease in leases}
    gone = [replica for replica in replicas if replica.client.address not in at]
    for replica in gone:
      self.forget(replica)
    for replica in replicas:
      if replica not in gone:  # The server may have registered again, with a new lease.
        self._leases[replica] = at.pop(replica.client.address)
    now, ids = asyncio.get_running_loop().time(), {lease.id for lease in leases}
    self._resting = {id: until for id, until in self._resting.items() if id in ids}
    joining = []
    for lease in at.values():
      if self._resting.get(lease.id, now) > now:
        continue
      reason = self.mismatch(lease)
      if reason and refuses:
        raise UserError(f'engine {engine}: {reason}; stop it, or name another registry')
      if reason:
        self._resting[lease.id] = math.inf
        logging.warning('engine %s: %s; it is ignored', engine, reason)
      else:
        joining.append(lease)
    return gone, joining

  def forget(self, replica: Replica) -> None:
    """Forgets the lease of a server that is no longer in the fleet."""
    self._leases.pop(replica, None)

  def rest(self, replica: Replica, *, for_good: bool) -> bool:
    """Keeps a refused or abandoned server from rejoining, for `_REST_S` seconds or permanently
    (`for_good`). Returns False and does nothing if the server has already left the registry.
    """
    lease = self._leases.pop(replica, None)
    if lease is not None:
      now = asyncio.get_running_loop().time()
      self._resting[lease.id] = math.inf if for_good else now + _REST_S
    return lease is not None

  def mismatch(self, lease: Lease) -> str | None:
    """Returns the reason why a server cannot serve the policy, or None if it can. A digest that is
    missing on either side is not compared.
    """
    for name in sorted(self._fingerprint.keys() & lease.fingerprint.keys()):
      if lease.fingerprint[name] != (wanted := self._fingerprint[name]):
        return (
          f'{lease.name} ({lease.address}) serves another {name} than the policy: its digest is '
          f'{lease.fingerprint[name]:.16}, wanted {wanted}'
        )
    return None

  def replica(self, lease: Lease, taken: Collection[str]) -> Replica:
    """Builds the replica (the fleet's state) of a server. The replica has the server's name, with a
    number appended if that name is in `taken`.
    """
    names = itertools.chain([lease.name], (f'{lease.name}-{i}' for i in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    replica = self._build(name, lease.address, next(self._numbers))
    self._leases[replica] = lease
    return replica
