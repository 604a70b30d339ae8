"""Membership of a fleet: the servers that belong to it at the start and, with discovery, those that
join and leave while it runs.

A server that joins must load the current version and pass the probe before it gets any request. A
server that leaves gets no more requests and finishes those in flight. If a server's lease (its
registration) expires, its requests are retried on other servers at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.net.registry import LOOK_S, Lease
from jaxrl_llm.rollout.vllm.admission import Admission
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.discovery import Discovery
from jaxrl_llm.rollout.vllm.repairs import Repairs
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState
from jaxrl_llm.rollout.vllm.roster import Roster

_LOOK_S = LOOK_S
"""Seconds between two reads of the registry."""
_AWAY_LOOK_S = 2.0
"""Seconds between health checks of attached servers while none of them answers."""
_DRAIN_LOOK_S = 0.25
"""Seconds between two checks for requests in flight on a server that leaves."""


async def away(roster: Roster, config: VllmConfig) -> list[Replica]:
  """Returns the attached servers that have served before and do not answer. If none of the fleet's
  servers is left, waits until one answers.

  Raises:
    RunError: none has answered within `start_deadline_s`.
  """
  known = [replica for replica in roster.replicas if replica.has_served]
  if not known:
    return []
  deadline_s = config.start_deadline_s
  try:
    async with asyncio.timeout(deadline_s):
      while True:
        health = await asyncio.gather(*(replica.client.is_healthy() for replica in known))
        silent = [replica for replica, healthy in zip(known, health) if not healthy]
        if len(silent) < len(roster.replicas):
          return silent
        logging.warning('engine %s: none of its servers answers; waiting for one', roster.name)
        await asyncio.sleep(_AWAY_LOOK_S)
  except TimeoutError:
    raise RunError(
      f'engine {roster.name}: none of its {len(known)} servers has answered for '
      f'rollout.vllm.start_deadline_s={deadline_s:g} s; start one with jaxrl serve, or correct '
      'rollout.vllm.addresses'
    ) from None


class Membership:
  """Lets servers that register themselves join and leave a fleet."""

  def __init__(
    self,
    roster: Roster,
    repairs: Repairs,
    admission: Admission,
    config: VllmConfig,
    discovery: Discovery,
  ):
    self._roster, self._repairs, self._admission = roster, repairs, admission
    self._config, self._discovery = config, discovery
    self._leaving: dict[Replica, asyncio.Task] = {}
    """For each server that has left, the task that closes the server. If the server's lease has not
    expired, the task first waits for the requests in flight.
    """

  @property
  def leaving(self) -> tuple[Replica, ...]:
    """Servers that have left and are not closed yet."""
    return tuple(self._leaving)

  @property
  def tasks(self) -> tuple[asyncio.Task, ...]:
    """Tasks that close the servers that have left."""
    return tuple(self._leaving.values())

  async def await_servers(self) -> None:
    """Waits until enough registered servers answer. These servers then form the fleet.

    Raises:
      RunError: too few servers answer within `start_deadline_s`.
      UserError: a registered server serves another model.
    """
    roster, discovery = self._roster, self._discovery
    answering: list[Replica] = []
    try:
      async with asyncio.timeout(self._config.start_deadline_s):
        while True:
          self._match(await discovery.look(), start=True)
          health = await asyncio.gather(*(r.client.is_healthy() for r in roster.replicas))
          answering = [replica for replica, healthy in zip(roster.replicas, health) if healthy]
          if len(answering) >= discovery.required:
            break
          await asyncio.sleep(_LOOK_S)
    except TimeoutError:
      raise RunError(
        f'engine {roster.name}: {len(answering)} of {discovery.required} servers have registered '
        f'in {discovery.directory} and answer within '
        f'rollout.vllm.start_deadline_s={self._config.start_deadline_s:g} s; start more with '
        f'jaxrl serve --registry={discovery.directory}, or lower rollout.vllm.discover'
      ) from None
    silent = [replica for replica in roster.replicas if replica not in answering]
    roster.replicas = tuple(answering)
    for replica in silent:  # Servers that do not answer can join later.
      discovery.forget(replica)
      await self._admission.end(replica)

  def announce(self) -> None:
    """Reports the servers with which the fleet starts as joined."""
    for replica in self._roster.replicas:
      self._discovery.tell(replica.name, 'joined')

  async def follow(self) -> None:
    """Reads the registry periodically until the fleet ends, and lets servers join and leave."""
    # Wait 'registry': unbounded: the registry is watched as long as the fleet runs.
    while self._roster.failure is None:
      await asyncio.sleep(_LOOK_S)
      leases = await self._discovery.look()
      if self._roster.failure is not None:
        return
      try:
        self._match(leases)
      except UserError as error:  # The client cannot be built: a file is missing, for example.
        self._roster.fail(error)

  def _match(self, leases: Sequence[Lease], *, start: bool = False) -> None:
    """Removes servers that have left the registry, and adds servers that have registered.

    At the `start` of the run, new servers are not brought into service yet, and a server with
    another model raises UserError. Later, such a server is ignored.
    """
    roster, discovery = self._roster, self._discovery
    gone, joining = discovery.match(roster.replicas, leases, engine=roster.name, refuses=start)
    for replica in gone:
      self._leave(replica, expired=replica.client.address in discovery.expired)
    for lease in joining:
      replica = discovery.replica(lease, {replica.name for replica in roster.replicas})
      roster.add(replica)
      if not start:
        logging.info('engine %s: joins, at %s', replica.name, lease.address)
        self._repairs.bring_in(replica)

  def _leave(self, replica: Replica, *, expired: bool) -> None:
    """Removes a server from the fleet, and starts a task that closes it. The task first waits for
    the server's requests in flight, unless the lease has `expired`: such a server may no longer
    work.
    """
    self._roster.remove(replica)
    replica.state = ReplicaState.GONE
    how = 'its lease has expired' if expired else 'it has left the registry'
    self._roster.note_trouble(replica, how)
    line = 'engine %s: %s, with %d requests in flight'
    logging.warning(line, replica.name, how, replica.in_flight)
    self._repairs.cancel(replica)
    self._roster.counts['left'] += 1
    self._discovery.tell(replica.name, 'expired' if expired else 'left')
    leaving = self._leaving[replica] = asyncio.create_task(
      self._see_off(replica, drain=not expired), name=f'engine {replica.name}: leave'
    )
    leaving.add_done_callback(lambda done: self._seen_off(replica, done))
    self._roster.changed.set()

  async def _see_off(self, replica: Replica, *, drain: bool) -> None:
    # Wait 'leaving': bounded by the deadlines of the requests in flight.
    while drain and replica.in_flight:
      await asyncio.sleep(_DRAIN_LOOK_S)
    await self._admission.end(replica)

  def _seen_off(self, replica: Replica, task: asyncio.Task) -> None:
    self._leaving.pop(replica, None)
    if not task.cancelled() and (error := task.exception()) is not None:
      logging.warning('engine %s: was not closed: %s', replica.name, error)
