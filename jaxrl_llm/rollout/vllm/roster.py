"""Servers of a fleet and the condition of the fleet: which servers serve a version, and whether the
fleet has failed.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.vllm.dispatch import Dispatcher
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState


class Roster:
  """The servers of a fleet, shared by the parts of the fleet that start, update, repair and use
  them.
  """

  def __init__(
    self, name: str, replicas: Sequence[Replica], dispatcher: Dispatcher, *, max_length: int
  ):
    """
    Args:
      name: name of the engine, for messages.
      replicas: initial servers.
      dispatcher: queue of the requests that fail if the fleet fails.
      max_length: length of the run's longest sequence in tokens, including its prompt.
    """
    self.name = name
    self._max_length = max_length
    self.replicas = tuple(replicas)
    """Servers of the fleet. With discovery, servers are added and removed while the fleet runs."""
    self.dispatcher = dispatcher
    self.counts: collections.Counter[str] = collections.Counter()
    """Totals since the start, keyed by name (see `Fleet.counts`)."""
    self.changed = asyncio.Event()
    """Event that is set when a server enters or leaves service, the current version changes or the
    fleet fails. Whoever waits for a change clears it first.
    """
    self.failure: Exception | None = None
    """Reason why the fleet has ended; None while it works."""
    self.last_trouble = ''
    """Last failure of a server, with the server's name, for messages."""
    self.released: str | None = None
    """How the servers were released ('sleep' or 'destroy'); None while they are in service."""

  def add(self, replica: Replica) -> None:
    self.replicas = (*self.replicas, replica)

  def remove(self, replica: Replica) -> None:
    self.replicas = tuple(each for each in self.replicas if each is not replica)

  def note_trouble(self, replica: Replica, trouble: object) -> None:
    """Records a failure of a server as `last_trouble`."""
    self.last_trouble = f'engine {replica.name}: {trouble}'

  def check_alive(self) -> None:
    """Raises RunError if the fleet has failed."""
    if self.failure is not None:
      raise RunError(f'engine {self.name}: ended: {self.failure}') from self.failure

  def fail(self, error: Exception) -> None:
    """Ends the fleet with an error, and fails all waiting requests. A later error has no effect."""
    if self.failure is None:
      self.failure = error
    self.dispatcher.fail(self.failure)
    self.changed.set()

  def in_state(self, state: ReplicaState) -> list[Replica]:
    return [replica for replica in self.replicas if replica.state == state]

  def serving(self, version: Version | None) -> list[Replica]:
    """Returns the servers that serve a version."""
    return [r for r in self.in_state(ReplicaState.SERVING) if r.version == version]

  @property
  def holding(self) -> list[Replica]:
    """Servers that can sample the run's longest sequences."""
    return [replica for replica in self.replicas if replica.max_length >= self._max_length]

  def serve(self, replica: Replica) -> None:
    """Brings a server into service, unless the fleet was closed or the server has left."""
    if replica.state == ReplicaState.GONE:
      return
    replica.state = ReplicaState.SERVING
    # Raises the server's count of assigned requests to the largest count of the other servers.
    # Otherwise, 'uniform' dispatch would send all requests to this server until it had caught up.
    serving = [r.workload.assigned for r in self.in_state(ReplicaState.SERVING) if r is not replica]
    replica.workload.assigned = max([replica.workload.assigned, *serving])
    self.changed.set()

  async def until_serving(self, version: Version) -> None:
    """Waits until at least one server serves the version, and then resets every server's count of
    assigned requests. Raises RunError if the fleet has ended, for example because no server was
    available for too long.
    """
    self.check_alive()
    while not self.serving(version):
      self.changed.clear()
      # Wait 'served': bounded by `start_deadline_s`, which `Repairs.watch` enforces.
      await self.changed.wait()
      self.check_alive()
    for replica in self.replicas:
      replica.workload.assigned = 0

  def check_samplers(self) -> None:
    """Raises UserError if no server may serve requests with a temperature above 0."""
    replicas = [r for r in self.replicas if r.state != ReplicaState.GONE]
    if replicas and all(r.sampling_fault is not None for r in replicas):
      raise UserError(
        f'engine {replicas[0].name}: its speculative decoding failed the self-test: '
        f'{replicas[0].sampling_fault}; remove rollout.vllm.args.speculative_config'
      )
