"""One engine over several servers: dispatch, weight publication and recovery from server failures.

Invariant: each completion is returned once, and its tokens were sampled under versions that the
server was proven to have loaded. Requests in flight on a lost server are retried. If their answers
are streamed, the retries continue after the tokens that have arrived (see `stream`).

With discovery, servers that register themselves join and leave while the fleet runs. A server that
joins must load the current version and pass the probe before it gets any request. A server that
leaves gets no more requests and finishes those in flight. If a server's lease (its registration)
expires, its requests are retried on other servers at once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError, first_cause
from jaxrl_llm.core.net.client import Lost, Refused, RemoteError
from jaxrl_llm.core.net.registry import LOOK_S, Lease
from jaxrl_llm.core.process_clock import TOKENS, seconds_metrics
from jaxrl_llm.core.types import Json, Version
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.api import Completion, Probe, Request, Undelivered, Weights
from jaxrl_llm.rollout.vllm.answer import Begun
from jaxrl_llm.rollout.vllm.discovery import Discovery
from jaxrl_llm.rollout.vllm.dispatch import Dispatcher
from jaxrl_llm.rollout.vllm.publication import Publication, PublicationFolder
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState, Requirements, Unproven
from jaxrl_llm.rollout.vllm.selftest import sampling_fault
from jaxrl_llm.rollout.vllm.server import VllmConfig
from jaxrl_llm.rollout.vllm.stream import Answer, Broken
from jaxrl_llm.rollout.vllm.version_writer import VersionWriter
from jaxrl_llm.weights.tables import entries

_WATCH_S = 0.25
"""Seconds between checks of the owned servers' processes."""
_ATTACHED_LOOK_S = 2.0
"""Seconds between health checks of an attached server that does not respond."""
_REFUSED_S, _MAX_REFUSED_S = 1.0, 60.0
"""Seconds until a version is sent again to a server that has refused it. They double with each
refusal, up to the maximum.
"""
_PATIENCE = 3
"""Number of consecutive failures beyond which a server is restarted even if its health checks
succeed.
"""
_LOOK_S = LOOK_S
"""Seconds between two reads of the registry."""


@dataclasses.dataclass(frozen=True)
class _Current:
  """Publication and probe of the version that all servers should serve."""

  publication: Publication
  probe: Probe | None


class Fleet:
  """Engine that samples from servers. The methods are specified in `rollout.api.Engine`.

  A weight update clears a server's KV cache, and running completions recompute their keys and
  values with the new weights, unless `VllmConfig.kv` is 'keep'. The later tokens of a running
  completion form a new segment. If adapters are published instead of whole weights, a running
  completion keeps the adapter that it started with.
  """

  def __init__(
    self,
    replicas: Sequence[Replica],
    config: VllmConfig,
    *,
    spec: ModelSpec,
    folder: PublicationFolder,
    dtype: str,
    max_length: int,
    seed: int,
    run: Callable[..., Awaitable[Any]],
    name: str = 'vllm',
    check_tokenizer: Callable[[Replica], Awaitable[None]] | None = None,
    adapter_rank: int = 0,
    direct: bool = False,
    discovery: Discovery | None = None,
  ):
    """
    Args:
      replicas: initial servers; empty if `discovery` is given.
      folder: folder of published versions. Servers see it at the same path.
      dtype: Hugging Face name of the data type of the servers' weights, for example 'bfloat16'.
      max_length: length of the longest sequence in tokens, including its prompt.
      seed: seed of all sampling, combined with each request's key.
      run: calls its first argument with the remaining arguments on the process's device thread, and
        returns the result.
      check_tokenizer: raises a UserError if a server tokenizes text differently from the policy.
      adapter_rank: rank of the adapters that `folder` publishes, or 0 if it publishes whole
        weights.
      direct: whether all servers must have fronts that sign, because requests have couriers
        (`Request.courier`).
      discovery: finds servers that join and leave. If None, `replicas` are the only servers.
    """
    self.name = name
    self.counts: collections.Counter[str] = collections.Counter()
    """Totals since the start, keyed by name: accepted completions and their tokens; retries,
    restarts and publications; void completions (discarded because their version was not proven) and
    their tokens; tokens of delivered completions; and tokens of unwanted completions, whose caller
    had gone away. With discovery, also the servers that joined and left. For streamed answers that
    broke off: continued answers, kept tokens, and lost tokens, which arrived but were not kept.
    """
    self.replicas = tuple(replicas)
    """Servers of the fleet. With discovery, servers are added and removed while the fleet runs."""
    self._discovery = discovery
    self._leaving: dict[Replica, asyncio.Task] = {}
    """For each server that has left, the task that closes the server. If the server's lease has not
    expired, the task first waits for the requests in flight.
    """
    self._follower: asyncio.Task | None = None
    self._config, self._spec, self._folder = config, spec, folder
    self._seed, self._check_tokenizer = seed, check_tokenizer
    self._writer = VersionWriter(folder, run)
    self._requirements = Requirements(
      shapes={entry.hf: entry.shape for entry in entries(spec)},
      dtype=dtype,
      max_length=max_length,
      speculative=config.speculative,
      adapter_rank=adapter_rank,
      direct=direct,
    )
    self._tolerance = config.probe_tolerance
    if self._tolerance is None:
      self._tolerance = 1e-3 if dtype == 'float32' else 0.5
    self._current: _Current | None = None
    self._earlier: _Current | None = None
    """The previous version. Its files are kept until every server has the current version."""
    self._version: Version | None = None
    self._loading = asyncio.Lock()
    self._dispatcher = Dispatcher(self._serving, config)
    self._repairs: dict[Replica, asyncio.Task] = {}
    self._changed = asyncio.Event()
    self._watcher: asyncio.Task | None = None
    self._failure: Exception | None = None
    self._last_trouble = ''
    self._released: str | None = None
    """How the servers were released ('sleep' or 'destroy'); None while they are in service."""
    self._names: dict[Version, Version] = {}
    """Mapping from each published version to the version that `relabel` has since given to the same
    weights.
    """
    self._taken: collections.Counter[str] = collections.Counter()
    self._seconds: dict[str, float] = {}
    self._measured: set[Replica] = set(replicas)
    """Servers of the fleet when metrics were last taken."""

  @property
  def version(self) -> Version | None:
    return self._version

  @property
  def is_released(self) -> bool:
    return self._released is not None

  is_outside = True

  @property
  def device_bytes(self) -> int:
    """Estimated device memory of the servers in bytes: their weights and, on CPUs, their KV caches.
    On GPUs, the servers use more than this estimate, because vLLM always reserves the fraction
    `gpu_memory_utilization` of each card.
    """
    if self._current is None or self._released is not None:
      return 0
    publication = self._current.publication
    whole = publication.base or publication
    cache = self._config.cpu_cache_gib << 30
    live = [r for r in self.replicas if r.state in (ReplicaState.SERVING, ReplicaState.UPDATING)]
    return sum(whole.nbytes + (cache if replica.on_cpu else 0) for replica in live)

  async def start(self) -> None:
    """Starts the owned servers and checks all servers.

    With discovery, waits until enough servers have registered. In a resumed run, an attached server
    that has served before may be away: the other servers then serve without it until it is back.

    Raises:
      UserError: a server cannot be used; the message has the reason.
      RunError: an owned server does not start, or too few servers have registered or are back
        within `start_deadline_s`.
    """
    if self._discovery is not None:
      await self._await_servers(self._discovery)
    away = await self._away()
    try:
      async with asyncio.TaskGroup() as starts:
        for replica in self.replicas:
          # A released server that the run owns is started only by `restore`.
          if replica not in away and (self._released is None or replica.server is None):
            starts.create_task(self._start(replica))
    except BaseExceptionGroup as group:
      raise first_cause(group) from None
    for replica in self.replicas:
      replica.state = ReplicaState.SERVING
    for replica in away:
      self._repair(replica, f'does not answer at {replica.client.address}')
    if self._released is not None:
      await self._release_all(self._released)
    self._watcher = asyncio.create_task(self._watch(), name=f'engine {self.name}: watch')
    if self._discovery is not None:
      for replica in self.replicas:
        self._discovery.tell(replica.name, 'joined')
      following = self._follow(self._discovery)
      self._follower = asyncio.create_task(following, name=f'engine {self.name}: registry')

  async def _away(self) -> list[Replica]:
    """Returns the attached servers that have served before and do not answer. If none of the
    fleet's servers is left, waits until one answers.
    """
    known = [replica for replica in self.replicas if replica.has_served]
    if not known:
      return []
    deadline_s = self._config.start_deadline_s
    try:
      async with asyncio.timeout(deadline_s):
        while True:
          health = await asyncio.gather(*(replica.client.is_healthy() for replica in known))
          away = [replica for replica, healthy in zip(known, health) if not healthy]
          if len(away) < len(self.replicas):
            return away
          logging.warning('engine %s: none of its servers answers; waiting for one', self.name)
          await asyncio.sleep(_ATTACHED_LOOK_S)
    except TimeoutError:
      raise RunError(
        f'engine {self.name}: none of its {len(known)} servers has answered for '
        f'rollout.vllm.start_deadline_s={deadline_s:g} s; start one with jaxrl serve, or correct '
        'rollout.vllm.addresses'
      ) from None

  async def _await_servers(self, discovery: Discovery) -> None:
    """Waits until enough registered servers answer. These servers then form the fleet."""
    answering: list[Replica] = []
    try:
      async with asyncio.timeout(self._config.start_deadline_s):
        while True:
          self._match(discovery, await discovery.look(), start=True)
          health = await asyncio.gather(*(r.client.is_healthy() for r in self.replicas))
          answering = [replica for replica, healthy in zip(self.replicas, health) if healthy]
          if len(answering) >= discovery.required:
            break
          await asyncio.sleep(_LOOK_S)
    except TimeoutError:
      raise RunError(
        f'engine {self.name}: {len(answering)} of {discovery.required} servers have registered in '
        f'{discovery.directory} and answer within '
        f'rollout.vllm.start_deadline_s={self._config.start_deadline_s:g} s; start more with '
        f'jaxrl serve --registry={discovery.directory}, or lower rollout.vllm.discover'
      ) from None
    silent = [replica for replica in self.replicas if replica not in answering]
    self.replicas = tuple(answering)
    for replica in silent:  # Servers that do not answer can join later.
      discovery.forget(replica)
      await self._end(replica)

  def _match(self, discovery: Discovery, leases: Sequence[Lease], *, start: bool = False) -> None:
    """Removes servers that have left the registry, and adds servers that have registered.

    At the `start` of the run, new servers are not brought into service yet, and a server with
    another model raises UserError. Later, such a server is ignored.
    """
    gone, joining = discovery.match(self.replicas, leases, engine=self.name, refuses=start)
    for replica in gone:
      self._leave(replica, expired=replica.client.address in discovery.expired)
    for lease in joining:
      replica = discovery.replica(lease, {replica.name for replica in self.replicas})
      self.replicas = (*self.replicas, replica)
      if not start:
        logging.info('engine %s: joins, at %s', replica.name, lease.address)
        self._begin(replica, self._bring_in(replica), 'join')

  async def _follow(self, discovery: Discovery) -> None:
    """Reads the registry periodically, and lets servers join and leave."""
    # Wait 'registry': unbounded: the registry is watched as long as the fleet runs.
    while self._failure is None:
      await asyncio.sleep(_LOOK_S)
      leases = await discovery.look()
      if self._failure is not None:
        return
      try:
        self._match(discovery, leases)
      except UserError as error:  # The client cannot be built: a file is missing, for example.
        self._fail(error)

  async def _bring_in(self, replica: Replica) -> None:
    await self._await_attached(replica)
    await self._start(replica)
    await self._catch_up(replica, works=True)
    self.counts['joined'] += 1
    self._discovery.tell(replica.name, 'joined')

  def _leave(self, replica: Replica, *, expired: bool) -> None:
    """Removes a server from the fleet, and starts a task that closes it. The task first waits for
    the server's requests in flight, unless the lease has `expired`: such a server may no longer
    work.
    """
    self.replicas = tuple(r for r in self.replicas if r is not replica)
    replica.state = ReplicaState.GONE
    how = 'its lease has expired' if expired else 'it has left the registry'
    self._last_trouble = f'engine {replica.name}: {how}'
    line = 'engine %s: %s, with %d requests in flight'
    logging.warning(line, replica.name, how, replica.in_flight)
    if replica in self._repairs:
      self._repairs[replica].cancel()
    self.counts['left'] += 1
    self._discovery.tell(replica.name, 'expired' if expired else 'left')
    leaving = self._leaving[replica] = asyncio.create_task(
      self._see_off(replica, drain=not expired), name=f'engine {replica.name}: leave'
    )
    leaving.add_done_callback(lambda done: self._seen_off(replica, done))
    self._changed.set()

  async def _see_off(self, replica: Replica, *, drain: bool) -> None:
    # Wait 'leaving': bounded by the deadlines of the requests in flight.
    while drain and replica.in_flight:
      await asyncio.sleep(_WATCH_S)
    await self._end(replica)

  def _seen_off(self, replica: Replica, task: asyncio.Task) -> None:
    self._leaving.pop(replica, None)
    if not task.cancelled() and (error := task.exception()) is not None:
      logging.warning('engine %s: was not closed: %s', replica.name, error)

  async def close(self) -> None:
    """Stops the owned servers and removes the published files."""
    self._fail(RunError(f'engine {self.name}: closed'))
    replicas = (*self.replicas, *self._leaving)
    tasks = [self._watcher, self._follower, *self._repairs.values(), *self._leaving.values()]
    tasks = [task for task in tasks if task is not None]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ends = await asyncio.gather(
      *(self._end(replica) for replica in replicas), return_exceptions=True
    )
    await asyncio.to_thread(self._folder.close)
    if errors := [end for end in ends if end is not None]:
      raise errors[0]

  async def _end(self, replica: Replica) -> None:
    if replica.state == ReplicaState.RELEASED and replica.server is None:
      with contextlib.suppress(RemoteError):  # Other users may need the server after this run.
        await replica.wake_up(deadline_s=self._config.latency_s)
    replica.state = ReplicaState.GONE
    # Closes the transfer, the client and the server, in this order, even if one of them fails.
    async with contextlib.AsyncExitStack() as ends:
      if replica.server is not None:
        ends.push_async_callback(replica.server.close)
      ends.push_async_callback(replica.client.close)
      ends.push_async_callback(replica.transfer.close)

  async def _start(self, replica: Replica) -> None:
    """Starts the server if the run owns it, and checks that it serves the policy's model. Loads no
    version yet.
    """
    if replica.server is not None:
      replica.server.start()
      await replica.server.ready(deadline_s=self._config.start_deadline_s)
    await replica.admit(self._requirements, deadline_s=self._config.start_deadline_s)
    if self._check_tokenizer is not None:
      await self._check_tokenizer(replica)

  async def release(self, how: str) -> None:
    async with self._loading:
      self._check_alive()
      self._released = how
      if self._watcher is not None:  # Otherwise, `start` releases the servers.
        await self._release_all(how)

  async def _release_all(self, how: str) -> None:
    """Releases every server. Cancels pending repairs, because `restore` brings the servers back."""
    repairs = [*self._repairs.values()]
    for repair in repairs:
      repair.cancel()
    await asyncio.gather(*repairs, return_exceptions=True)
    live = [replica for replica in self.replicas if replica.state != ReplicaState.GONE]
    await asyncio.gather(*(self._release(replica, how) for replica in live))

  async def _release(self, replica: Replica, how: str) -> None:
    replica.state = ReplicaState.RELEASED
    try:
      await replica.release(how, deadline_s=self._config.transfer_deadline_s)
    except Lost as error:  # `restore` restarts the server.
      logging.warning('engine %s: did not answer when it was released: %s', replica.name, error)

  async def restore(self) -> None:
    async with self._loading:
      self._check_alive()
      self._released = None
      released = [r for r in self.replicas if r.state == ReplicaState.RELEASED]
      for replica in released:
        replica.state = ReplicaState.DOWN
        self._begin(replica, self._wake(replica), 'restore')
      # Wait 'restored': bounded by `max_restarts` times `start_deadline_s`.
      await asyncio.gather(
        *(self._repairs[replica] for replica in released), return_exceptions=True
      )
      self._check_alive()
      if self._current is not None:
        await self._until_serving(self._current.publication.version)
    self._dispatcher.dispatch()

  async def _wake(self, replica: Replica) -> None:
    """Wakes or starts a server, and loads the current version into it."""
    works = False
    if replica.server is None or replica.server.is_running():
      try:
        await replica.wake_up(deadline_s=self._config.start_deadline_s)
        works = True
      except RemoteError as error:
        logging.warning('engine %s: does not wake up: %s', replica.name, error)
    await self._catch_up(replica, works=works, is_failure=False)

  async def load(self, weights: Weights) -> None:
    """Publishes the weights to every server, and returns once at least one server serves them.
    Servers that are released load them when they are restored.

    Servers that fail the update recover or are restarted in the background.

    Raises:
      RunError: no server accepted the version. The message has the reason, and the previous version
        stays in service.
    """
    async with self._loading:
      self._check_alive()
      loop = asyncio.get_running_loop()
      began = loop.time()
      publication = await self._writer.write(weights, self.replicas)
      self._seconds['perf/publish_write_s'] = loop.time() - began
      current = _Current(publication, weights.probe)
      # Until all hosts have the files, the servers sample with the previous version.
      failures = await self._prepare_all(current)
      before, self._current = self._current, current
      self._changed.set()
      if self._released is not None:
        self._earlier, self._version = None, publication.version
        await asyncio.to_thread(self._folder.keep_only, publication)
        self.counts['publications'] += 1
        self._measure_publication(publication)
        return
      live = [replica for replica in self.replicas if replica.state == ReplicaState.SERVING]
      answers = await asyncio.gather(*(self._take(r, failures.get(r)) for r in live))
      refusals = [answer for answer in answers if answer is not None]
      held = [replica for replica in live if replica.state == ReplicaState.UPDATING]
      if refusals and not self._is_served(publication.version):
        self._current = before
        for replica in held:
          self._serve(replica)
        self._dispatcher.dispatch()
        raise RunError(
          f'version {weights.version} was not published, and version {self._version or "none"} '
          f'stays in service: {refusals[0]}'
        )
      for replica in held:
        # Other servers accepted the files, so this server is at fault. Forgetting its weights
        # forces a restart.
        replica.forget()
        self._repair(replica, 'refused weights that other servers accepted')
      await self._until_serving(publication.version)
      self._earlier = before
      await self._let_go()
      self._version = publication.version
      self.counts['publications'] += 1
      pauses = [r.paused_s for r in self.replicas if r.version == publication.version]
      # `pauses` is empty if the server that accepted the version has left again.
      self._seconds['perf/publish_pause_s'] = max(pauses, default=0.0)
      self._measure_publication(publication)
    self._dispatcher.dispatch()

  async def begin_load(self) -> Json | None:
    self._check_alive()
    return await self._writer.begin(self.replicas)

  def _measure_publication(self, publication: Publication) -> None:
    nbytes = publication.sent_bytes
    if publication.deltas and not self._current.publication.deltas:
      # In addition to the deltas, the whole weights were published (`_in_full`).
      nbytes += publication.nbytes
    self._seconds['perf/publish_bytes'] = float(nbytes)
    if publication.changed_fraction is not None:
      self._seconds['perf/publish_changed_fraction'] = publication.changed_fraction

  async def relabel(self, version: Version) -> None:
    """Attributes the current weights to `version` in returned completions. The servers keep the old
    label.
    """
    async with self._loading:
      self._check_alive()
      if self._current is None:
        raise RuntimeError(f'engine {self.name}: call load before relabel')
      self._names[self._current.publication.version] = version
      self._version = version

  async def _prepare_all(self, current: _Current) -> dict[Replica, RemoteError]:
    """Prepares the update of all serving servers to a version, for example by fetching the files to
    their hosts. Returns the errors of the servers for which this failed.
    """
    live = [replica for replica in self.replicas if replica.state == ReplicaState.SERVING]
    failures = {}

    async def prepare(replica: Replica) -> None:
      try:
        await self._prepare(replica, current)
      except RemoteError as error:
        failures[replica] = error

    await asyncio.gather(*map(prepare, live))
    return failures

  async def _take(self, replica: Replica, failure: RemoteError | None) -> str | None:
    """Updates a serving replica to the current version. If the server refuses the version, returns
    the reason and leaves the replica in the state UPDATING. Otherwise returns None.

    Args:
      failure: error of `_prepare_all`; None if there was none.
    """
    if replica.state == ReplicaState.GONE:  # The server has just left.
      return None
    replica.state = ReplicaState.UPDATING
    try:
      # If a server cannot use the files below deltas, `_transact` sends whole weights.
      if failure is not None and not (
        isinstance(failure, Refused) and self._current.publication.deltas
      ):
        raise failure
      await self._transact(replica, self._current)
    except Refused as error:
      return str(error)
    except (Lost, Unproven) as error:
      self._repair(replica, str(error))
    else:
      self._serve(replica)
    return None

  async def _transact(self, replica: Replica, current: _Current) -> None:
    await replica.recognise()
    try:
      # This does nothing if the version was prepared earlier, unless the server was away since.
      await self._prepare(replica, current)
      await self._send(replica, current)
    except (Refused, Unproven) as error:
      if not current.publication.deltas:
        raise
      logging.warning(
        'engine %s: gets whole weights, because it could not use a delta: %s', replica.name, error
      )
      whole = await self._in_full(current)
      await self._prepare(replica, whole)
      await self._send(replica, whole)
    if replica.speculates and not replica.is_tested:
      replica.sampling_fault = await sampling_fault(
        replica.client,
        vocab=self._spec.vocab_size,
        max_length=self._requirements.max_length,
        tolerance=self._tolerance,
        deadline_s=self._config.start_deadline_s,
      )
      replica.is_tested = True
      logging.info(
        'engine %s: speculative decoding: %s', replica.name, replica.sampling_fault or 'passes'
      )

  async def _prepare(self, replica: Replica, current: _Current) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline_s = self._config.transfer_deadline_s
    await replica.prepare(current.publication, deadline_s=deadline_s)
    if self._config.transfer == 'pull':
      key, seconds = 'perf/publish_transfer_s', loop.time() - began
      self._seconds[key] = max(seconds, self._seconds.get(key, 0.0))

  async def _send(self, replica: Replica, current: _Current) -> None:
    await replica.take(
      current.publication,
      current.probe,
      tolerance=self._tolerance,
      deadline_s=self._config.transfer_deadline_s,
    )

  async def _in_full(self, current: _Current) -> _Current:
    """Publishes a version again, with its whole weights. Raises Refused if it is no longer the
    newest version.
    """
    try:
      whole = await asyncio.to_thread(self._folder.write_whole, current.publication)
    except ValueError as error:
      raise Refused(str(error)) from None
    again = _Current(whole, current.probe)
    if self._current is current:
      self._current = again
    return again

  def _is_served(self, version: Version) -> bool:
    return any(r.state == ReplicaState.SERVING and r.version == version for r in self.replicas)

  def _is_one_behind(self) -> bool:
    """Returns whether any server lacks the current version. Abandoned servers do not count."""
    return any(
      r.state != ReplicaState.GONE and r.version != self._current.publication.version
      for r in self.replicas
    )

  async def _let_go(self) -> None:
    """Removes the files of earlier versions. The files of the previous version are kept while any
    server lacks the current version.
    """
    if not self._is_one_behind():
      self._earlier = None
    kept = [
      current.publication for current in (self._current, self._earlier) if current is not None
    ]
    await asyncio.to_thread(self._folder.keep_only, *kept)

  def _serve(self, replica: Replica) -> None:
    if replica.state == ReplicaState.GONE:  # The fleet was closed, or the server has left.
      return
    replica.state = ReplicaState.SERVING
    # Raises the server's count of assigned requests to the largest count of the other servers.
    # Otherwise, 'uniform' dispatch would send all requests to this server until it had caught up.
    serving = [
      r.assigned for r in self.replicas if r.state == ReplicaState.SERVING and r is not replica
    ]
    replica.assigned = max([replica.assigned, *serving])
    self._changed.set()

  async def _until_serving(self, version: Version) -> None:
    """Waits until at least one server serves the version, and then resets every server's count of
    assigned requests. Raises RunError if the engine has ended, for example because no server was
    available for too long.
    """
    self._check_alive()
    while not self._is_served(version):
      self._changed.clear()
      # Wait 'served': bounded by `start_deadline_s`, which the watcher enforces.
      await self._changed.wait()
      self._check_alive()
    for replica in self.replicas:
      replica.assigned = 0

  async def _watch(self) -> None:
    """Watches the servers: repairs an owned server whose process has ended, ends the engine if no
    server has been available for too long, and removes the previous version's files once no server
    needs them.
    """
    loop = asyncio.get_running_loop()
    served = loop.time()
    while self._failure is None:
      await asyncio.sleep(_WATCH_S)
      for replica in self.replicas:
        lost = replica.server is not None and not replica.server.is_running()
        if lost and replica.state == ReplicaState.SERVING:
          self._repair(replica, 'its process ended')
      if self._released is not None or any(
        replica.state in (ReplicaState.SERVING, ReplicaState.UPDATING) for replica in self.replicas
      ):
        served = loop.time()
      elif loop.time() - served > self._config.start_deadline_s:
        self._fail(
          RunError(
            'no engine left: none served for '
            f'rollout.vllm.start_deadline_s={self._config.start_deadline_s:g} s; the last failure: '
            f'{self._last_trouble}'
          )
        )
      try:
        self._check_samplers()
      except UserError as error:
        self._dispatcher.refuse_sampled(error)
      if self._earlier is not None and not self._loading.locked() and not self._is_one_behind():
        try:
          async with self._loading:
            await self._let_go()
        except RunError as error:
          self._fail(error)

  def _repair(self, replica: Replica, reason: str) -> None:
    """Takes a server out of service, and starts a task that recovers or restarts it."""
    is_out = replica.state in (ReplicaState.GONE, ReplicaState.RELEASED)
    if replica in self._repairs or self._failure is not None or is_out:
      return
    replica.state = ReplicaState.DOWN
    replica.failures += 1
    self._last_trouble = f'engine {replica.name}: {reason}'
    logging.warning('engine %s: taken out of service: %s', replica.name, reason)
    self._begin(replica, self._bring_back(replica), 'repair')

  def _begin(self, replica: Replica, work: Coroutine[Any, Any, None], name: str) -> None:
    """Starts a task that brings the server into service. If the task fails, the server is closed
    and given up.

    Args:
      work: coroutine that brings the server into service.
    """
    task = asyncio.create_task(
      self._bring_in_or_end(replica, work), name=f'engine {replica.name}: {name}'
    )
    self._repairs[replica] = task
    task.add_done_callback(lambda done: self._repaired(replica, done))

  def _repaired(self, replica: Replica, task: asyncio.Task) -> None:
    del self._repairs[replica]
    if not task.cancelled() and (error := task.exception()) is not None:
      replica.state = ReplicaState.GONE
      if self._discovery is not None:
        self._give_up(replica, error)
      else:
        logging.error('engine %s: given up: %s', replica.name, error)
        if all(r.state == ReplicaState.GONE for r in self.replicas):
          self._fail(RunError(f'no engine left; the last failure: {error}'))
    self._changed.set()
    self._dispatcher.dispatch()

  def _give_up(self, replica: Replica, error: BaseException) -> None:
    """Removes a discovered server from the fleet. It may rejoin later unless it is unsuitable for
    the run.
    """
    self.replicas = tuple(r for r in self.replicas if r is not replica)
    self._last_trouble = f'engine {replica.name}: {error}'
    unsuited = isinstance(error, UserError) and not isinstance(error, RunError)
    if self._discovery.rest(replica, for_good=unsuited):
      self._discovery.tell(replica.name, 'refused' if unsuited else 'given up')
      logging.warning(
        'engine %s: %s: %s', replica.name, 'is ignored' if unsuited else 'given up', error
      )

  async def _bring_in_or_end(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
    try:
      # Wait 'restored': bounded by `max_restarts` times `start_deadline_s`.
      await work
    except Exception:
      await self._end(replica)  # The memory and cores become available to the other servers.
      raise

  async def _bring_back(self, replica: Replica) -> None:
    await self._catch_up(replica, works=await self._is_as_before(replica))

  async def _catch_up(self, replica: Replica, *, works: bool, is_failure: bool = True) -> None:
    """Loads the current version into a server and brings it into service. If `works` is False, the
    server is restarted first. If `is_failure`, this restart is counted in `counts`.

    A server may refuse the current version because its files were damaged after other servers had
    loaded it. It then waits for the next version, which has files of its own. Repeated refusals of
    one version count as one failed attempt.
    """
    failures, refused, again_s = 0, set(), _REFUSED_S
    while True:
      current = self._current
      try:
        if not works:
          await self._start_again(replica, is_failure=is_failure)
          works = is_failure = True
        if current is not None and replica.version != current.publication.version:
          await self._transact(replica, current)
        if current is self._current:
          break
      except (RemoteError, Unproven) as error:
        # A server that refuses an update still works. It refuses, for example, if a newer version
        # has replaced the file.
        works = isinstance(error, Refused)
        failures += not works
        is_refused = works and current is self._current
        if is_refused:
          refused.add(current and current.publication.version)
        attempts = failures + len(refused)
        if attempts > self._config.max_restarts:
          raise
        self._last_trouble = f'engine {replica.name}: {error}'
        logging.warning(
          'engine %s: attempt %d to bring it back failed: %s', replica.name, attempts, error
        )
        if is_refused:
          await self._until_newer(current, again_s)
          again_s = min(2 * again_s, _MAX_REFUSED_S)
    logging.info('engine %s: in service, with version %s', replica.name, replica.version)
    self._serve(replica)

  async def _until_newer(self, current: _Current | None, patience_s: float) -> None:
    """Waits until `current` is no longer the current version, for at most `patience_s` seconds."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(patience_s):
        while self._current is current:
          self._changed.clear()
          await self._changed.wait()

  async def _is_as_before(self, replica: Replica) -> bool:
    """Returns whether a server has recovered from a failure by itself and still serves its last
    proven version.
    """
    if replica.failures > _PATIENCE or replica.version is None:
      return False
    if replica.server is not None and not replica.server.is_running():
      return False
    with contextlib.suppress(RemoteError):
      if await replica.client.served_label() == replica.label:
        return await replica.is_alive(deadline_s=self._config.latency_s)
    return False

  async def _start_again(self, replica: Replica, *, is_failure: bool) -> None:
    replica.forget()
    if replica.server is not None:
      self.counts['restarts'] += is_failure
      await replica.server.stop()
    else:
      await self._await_attached(replica)
    try:
      await self._start(replica)
    except UserError as error:
      # A UserError is appropriate only at the start of a run. This server has worked before and may
      # recover.
      raise Lost(str(error)) from None

  async def _await_attached(self, replica: Replica) -> None:
    try:
      async with asyncio.timeout(self._config.start_deadline_s):
        while not await replica.client.is_healthy():
          await asyncio.sleep(_ATTACHED_LOOK_S)
    except TimeoutError:
      raise RunError(
        f'engine {replica.name}: {replica.client.address} has not answered for '
        f'rollout.vllm.start_deadline_s={self._config.start_deadline_s:g} s'
      ) from None

  def _check_alive(self) -> None:
    if self._failure is not None:
      raise RunError(f'engine {self.name}: ended: {self._failure}') from self._failure

  def _fail(self, error: Exception) -> None:
    if self._failure is None:
      self._failure = error
    self._dispatcher.fail(self._failure)
    self._changed.set()

  async def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    self._check_alive()
    if self._version is None:
      raise RuntimeError(f'engine {self.name}: call start and load before generate')
    self._check(request)
    results: asyncio.Queue[tuple[int, Completion] | Exception] = asyncio.Queue()
    samples = [
      asyncio.create_task(self._sample(request, i, results))
      for i in range(request.first, request.first + request.samples)
    ]
    try:
      for _ in samples:
        # Wait 'completion': bounded: each of `max_retries` tries has a deadline.
        result = await results.get()
        if isinstance(result, Exception):
          raise result
        self.counts['delivered_tokens'] += len(result[1].tokens)
        yield result
    finally:
      for sample in samples:
        sample.cancel()
      await asyncio.gather(*samples, return_exceptions=True)
      while not results.empty():
        result = results.get_nowait()
        if not isinstance(result, Exception):
          self.counts['unwanted_tokens'] += len(result[1].tokens)

  def _check(self, request: Request) -> None:
    where, length = f'request {request.uid}', len(request.prompt)
    if length + request.max_tokens > self._requirements.max_length:
      raise UserError(
        f'{where}: {length} prompt tokens and max_tokens {request.max_tokens} exceed the maximum '
        f'length of {self._requirements.max_length} of engine {self.name}; raise '
        'rollout.max_prompt_length or max_response_length, or request fewer'
      )
    tokens = (*request.prompt, *request.stop_ids)
    if min(tokens) < 0 or max(tokens) >= self._spec.vocab_size:
      raise UserError(
        f"{where}: token ids outside the vocabulary of {self._spec.vocab_size}; use the model's "
        'tokenizer'
      )
    if reason := self._config.unsupported(request.sampling):
      raise UserError(f'{where}: {reason}')
    if request.sampling.temperature > 0:
      self._check_samplers()

  def _check_samplers(self) -> None:
    """Raises UserError if no server may serve requests with a temperature above 0."""
    replicas = [r for r in self.replicas if r.state != ReplicaState.GONE]
    if replicas and all(r.sampling_fault is not None for r in replicas):
      raise UserError(
        f'engine {replicas[0].name}: its speculative decoding failed the self-test: '
        f'{replicas[0].sampling_fault}; remove rollout.vllm.args.speculative_config'
      )

  async def _sample(self, request: Request, index: int, results: asyncio.Queue) -> None:
    try:
      results.put_nowait((index, await self._complete(request, index)))
    except Exception as error:  # `generate` raises the error again.
      results.put_nowait(error)

  async def _complete(self, request: Request, index: int) -> Completion:
    """Generates one completion, with up to `max_retries` retries, each of which continues after the
    tokens that have arrived. Retries after a server has left the fleet do not count.

    If the request's courier does not deliver the completion, the fleet fetches it itself. It does
    not repair the server because of that, and the retry does not count.
    """
    answer = Answer(request)
    error: Exception | None = None
    failures = 0
    while failures <= self._config.max_retries:
      self.counts['retries'] += error is not None
      self._check_alive()
      missing = answer.missing
      deadline_s = self._config.latency_s + missing.max_tokens / self._config.min_tokens_per_s
      # Wait 'place': bounded by the deadlines of earlier requests and by `_watch`.
      replica, life = await self._dispatcher.acquire(samples=request.sampling.temperature > 0)
      version = replica.sampled_with
      try:
        completion = await replica.generate(
          missing, index, seed=self._seed, deadline_s=deadline_s, stream=self._config.stream
        )
        # Wait 'settled': bounded by the deadlines of the calls that publish a version.
        await replica.settled.wait()
        if replica.life == life and all(
          segment.version in replica.proven for segment in completion.segments
        ):
          replica.failures = 0
          return self._accept(answer.complete(completion))
        self.counts['void'] += 1
        self.counts['void_tokens'] += len(completion.tokens)
        error = Lost(
          f'{replica.name}: returned tokens of a version it was not proven to have loaded'
        )
      except Undelivered as undelivered:
        error = undelivered
        answer.missing = dataclasses.replace(answer.missing, courier=None)
        continue
      except Lost as lost:
        error = lost
        if replica.state == ReplicaState.SERVING and replica.life == life:
          self._repair(replica, str(lost))
        if isinstance(lost, Broken) and self._keep(answer, lost.begun, version, replica.name):
          return self._accept(answer.whole)
      finally:
        self._dispatcher.release(replica)
      failures += replica in self.replicas
    raise RunError(
      f'request {request.uid}, sample {index}: lost {self._config.max_retries + 1} times; the '
      f'last error: {error}'
    )

  def _keep(self, answer: Answer, begun: Begun, version: Version | None, engine: str) -> bool:
    """Appends the tokens of a streamed answer that broke off. Returns whether the answer is now
    complete.

    Args:
      version: version that sampled the tokens. It may be None if there are no tokens.
      engine: name of the server.
    """
    count = len(begun.tokens)
    # A token outside the vocabulary in a prompt would end the engine of another server.
    is_kept = count > 0 and int(begun.tokens.max()) < self._spec.vocab_size
    self.counts['lost_tokens'] += begun.lost + (0 if is_kept else count)
    if is_kept:
      self.counts['continued'] += 1
      self.counts['kept_tokens'] += count
      answer.add(begun, version, engine)
    return answer.whole is not None

  def _accept(self, completion: Completion) -> Completion:
    self.counts['completions'] += 1
    self.counts['tokens'] += len(completion.tokens)
    return self._named(completion)

  def _named(self, completion: Completion) -> Completion:
    """Returns the completion with each relabelled version replaced by its new version."""

    def named(segment):
      return dataclasses.replace(segment, version=self._names.get(segment.version, segment.version))

    return dataclasses.replace(
      completion, segments=tuple(named(segment) for segment in completion.segments)
    )

  def _serving(self) -> list[Replica]:
    """Returns the servers that serve the current version."""
    current = self._current.publication.version if self._current else None
    return [r for r in self.replicas if r.state == ReplicaState.SERVING and r.version == current]

  def take_metrics(self) -> dict[str, float]:
    """Returns metrics since the last call: events, tokens, the servers' seconds per activity, and
    the timings and size of the last publication, if any. Also returns the current numbers of
    servers and of sampled tokens that have not been delivered.
    """
    counts = {
      f'run/engine_{name}': float(self.counts[name] - self._taken[name])
      for name in (
        *('retries', 'restarts', 'void', 'continued', 'kept_tokens', 'lost_tokens'),
        *(('joined', 'left') if self._discovery else ()),
      )
    }
    new = self.counts - self._taken
    wasted = new['void_tokens'] + new['lost_tokens']
    counts[f'{TOKENS}generated'] = float(new['tokens'] + wasted)
    counts[f'{TOKENS}discarded'] = float(wasted + new['unwanted_tokens'])
    counts[f'{TOKENS}open'] = float(
      self.counts['tokens'] - self.counts['delivered_tokens'] - self.counts['unwanted_tokens']
    )
    self._taken = self.counts.copy()
    seconds, self._seconds = self._seconds, {}
    in_service = (ReplicaState.SERVING, ReplicaState.RELEASED)
    serving = sum(replica.state in in_service for replica in self.replicas)
    counts['run/engines_serving'] = float(serving)
    if self._discovery is not None:
      counts['run/engines'] = float(len(self.replicas))
    measured = self._measured | {*self.replicas, *self._leaving}
    self._measured = set(self.replicas)
    clocks = [replica.clock for replica in measured]
    return {**counts, **seconds, **seconds_metrics('servers', clocks)}
