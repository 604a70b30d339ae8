"""One engine over several servers: dispatch, weight publication and recovery from server failures.

Invariant: each completion is returned once, and its tokens were sampled under versions that the
server was proven to have loaded. Requests in flight on a lost server are retried.

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
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError, first_cause
from jaxrl_llm.core.net.client import Lost, Refused, RemoteError
from jaxrl_llm.core.net.registry import LOOK_S, Lease
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.api import Completion, Probe, Request, Weights
from jaxrl_llm.rollout.vllm.discovery import Discovery
from jaxrl_llm.rollout.vllm.publication import Publication, PublicationFolder
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState, Unproven
from jaxrl_llm.rollout.vllm.server import VllmConfig
from jaxrl_llm.weights.tables import entries

_WATCH_S = 0.25
"""Seconds between checks of the owned servers' processes."""
_ATTACHED_LOOK_S = 2.0
"""Seconds between health checks of an attached server that is down."""
_BURST = 16
"""Maximum number of requests dispatched in one iteration of the event loop."""
_PATIENCE = 3
"""Number of consecutive failures after which a server is restarted even if it responds."""
_LOOK_S = LOOK_S
"""Seconds between two reads of the registry."""
_REST_S = 60.0
"""Seconds until a discovered server that was given up may join again."""


@dataclasses.dataclass(frozen=True)
class _Current:
  """The version that all servers should serve, with its probe."""

  publication: Publication
  probe: Probe | None


class Fleet:
  """Engine that samples from servers. The methods are specified in `rollout.api.Engine`.

  A weight update clears a server's KV cache. Running completions recompute their keys and values
  with the new weights, and their later tokens form a new segment. If adapters are published instead
  of whole weights, a running completion keeps the adapter that it started with.
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
    discovery: Discovery | None = None,
  ):
    """
    Args:
      replicas: initial servers; empty if `discovery` is given.
      folder: folder of published versions. Servers see it at the same path.
      dtype: Hugging Face name of the data type of the servers' weights, for example 'bfloat16'.
      max_length: length of the longest sequence in tokens, including its prompt.
      seed: seed of all sampling, combined with each request's key.
      run: calls `function(*args, **kwargs)` on the process's device thread and returns the result.
      check_tokenizer: raises a UserError if a server tokenizes text differently from the policy.
      adapter_rank: rank of the adapters that `folder` publishes, or 0 if it publishes whole
        weights.
      discovery: finds servers that join and leave. If None, `replicas` are the only servers.
    """
    self.name = name
    self.counts: collections.Counter[str] = collections.Counter()
    """Totals since the start: completions, tokens, retries, restarts, publications, and void
    (completions discarded because their version was not proven). With discovery, also the servers
    that joined and left.
    """
    self.replicas = tuple(replicas)
    """Servers of the fleet. With discovery, these are the servers with valid leases."""
    self._discovery = discovery
    self._resting: dict[str, float] = {}
    """For each server that was refused or given up: event loop time from which it may join again,
    keyed by the id of its lease.
    """
    self._leases: dict[Replica, Lease] = {}
    self._leaving: dict[Replica, asyncio.Task] = {}
    """Task that closes each server that has left, usually after its requests in flight."""
    self._follower: asyncio.Task | None = None
    self._config, self._spec, self._folder, self._dtype = config, spec, folder, dtype
    self._max_length, self._seed, self._run = max_length, seed, run
    self._check_tokenizer, self._adapter_rank = check_tokenizer, adapter_rank
    self._tolerance = config.probe_tolerance
    if self._tolerance is None:
      self._tolerance = 1e-3 if dtype == 'float32' else 0.5
    self._shapes = {entry.hf: entry.shape for entry in entries(spec)}
    self._current: _Current | None = None
    self._earlier: _Current | None = None
    """The previous version. Its files are kept until every server has the current version."""
    self._version: Version | None = None
    self._loading = asyncio.Lock()
    self._waiting: collections.deque[asyncio.Future[tuple[Replica, int]]] = collections.deque()
    self._repairs: dict[Replica, asyncio.Task] = {}
    self._changed = asyncio.Event()
    self._watcher: asyncio.Task | None = None
    self._failure: Exception | None = None
    self._last_trouble = ''
    self._names: dict[Version, Version] = {}
    """For each published version that was relabelled because the weights did not change: its new
    version.
    """
    self._taken: collections.Counter[str] = collections.Counter()
    self._seconds: dict[str, float] = {}

  @property
  def version(self) -> Version | None:
    return self._version

  async def start(self) -> None:
    """Starts the owned servers and checks all servers.

    With discovery, waits until enough servers have registered.

    Raises:
      UserError: a server cannot be used; the message has the reason.
      RunError: too few servers have registered within `start_deadline_s`.
    """
    if self._discovery is not None:
      await self._await_servers(self._discovery)
    try:
      async with asyncio.TaskGroup() as starts:
        for replica in self.replicas:
          starts.create_task(self._start(replica))
    except BaseExceptionGroup as group:
      raise first_cause(group) from None
    for replica in self.replicas:
      replica.state = ReplicaState.SERVING
    self._watcher = asyncio.create_task(self._watch(), name=f'engine {self.name}: watch')
    if self._discovery is not None:
      for replica in self.replicas:
        self._discovery.tell(replica.name, 'joined')
      following = self._follow(self._discovery)
      self._follower = asyncio.create_task(following, name=f'engine {self.name}: registry')

  async def _await_servers(self, discovery: Discovery) -> None:
    """Waits until enough registered servers answer. These servers then form the fleet."""
    answering: list[Replica] = []
    try:
      async with asyncio.timeout(self._config.start_deadline_s):
        while True:
          self._match(discovery, await discovery.look(), start=True)
          health = await asyncio.gather(*(r.client.is_healthy() for r in self.replicas))
          answering = [replica for replica, healthy in zip(self.replicas, health) if healthy]
          if len(answering) >= discovery.wanted:
            break
          await asyncio.sleep(_LOOK_S)
    except TimeoutError:
      raise RunError(
        f'engine {self.name}: {len(answering)} of {discovery.wanted} servers have registered in '
        f'{discovery.directory} and answer within '
        f'rollout.vllm.start_deadline_s={self._config.start_deadline_s:g} s; start more with '
        f'jaxrl serve --registry={discovery.directory}, or lower rollout.vllm.discover'
      ) from None
    silent = [replica for replica in self.replicas if replica not in answering]
    self.replicas = tuple(answering)
    for replica in silent:  # They join later if they answer then.
      del self._leases[replica]
      await self._end(replica)

  def _match(self, discovery: Discovery, leases: Sequence[Lease], *, start: bool = False) -> None:
    """Removes servers that have left the registry, and adds servers that have registered.

    At the `start` of the run, new servers are not brought into service yet, and a server of another
    model raises UserError. Later, such a server is ignored.
    """
    at = {lease.address: lease for lease in leases}
    for replica in self.replicas:
      address = replica.client.address
      if address not in at:
        self._leave(replica, expired=address in discovery.expired)
      else:  # The server may have registered again, with a new lease.
        self._leases[replica] = at.pop(address)
    now, ids = asyncio.get_running_loop().time(), {lease.id for lease in leases}
    self._resting = {id: until for id, until in self._resting.items() if id in ids}
    for lease in at.values():
      if self._resting.get(lease.id, now) > now:
        continue
      reason = discovery.mismatch(lease)
      if reason and start:
        raise UserError(f'engine {self.name}: {reason}; stop it, or name another registry')
      if reason:
        self._resting[lease.id] = math.inf
        logging.warning('engine %s: %s; it is ignored', self.name, reason)
        continue
      replica = discovery.replica(lease, {replica.name for replica in self.replicas})
      self._leases[replica] = lease
      self.replicas = (*self.replicas, replica)
      if not start:
        logging.info('engine %s: joins, at %s', replica.name, lease.address)
        self._begin(replica, joins=True)

  async def _follow(self, discovery: Discovery) -> None:
    """Reads the registry periodically, and lets servers join and leave."""
    # The wait 'registry' is unbounded, because it looks for servers as long as the fleet runs.
    while self._failure is None:
      await asyncio.sleep(_LOOK_S)
      leases = await discovery.look()
      if self._failure is not None:
        return
      try:
        self._match(discovery, leases)
      except UserError as error:  # No client can be built, because a file is missing.
        self._fail(error)

  async def _bring_in(self, replica: Replica) -> None:
    await self._await_attached(replica)
    await self._start(replica)
    await self._catch_up(replica, works=True)
    self.counts['joined'] += 1
    self._discovery.tell(replica.name, 'joined')

  def _leave(self, replica: Replica, *, expired: bool) -> None:
    """Removes a server from the fleet. Waits for its requests in flight, unless its lease has
    `expired` and it may therefore no longer work.
    """
    self.replicas = tuple(r for r in self.replicas if r is not replica)
    self._leases.pop(replica, None)
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
    # The wait 'leaving' is bounded by the deadlines of the requests in flight.
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
    await replica.admit(
      self._shapes,
      dtype=self._dtype,
      max_length=self._max_length,
      speculative=self._config.speculative,
      adapter_rank=self._adapter_rank,
      deadline_s=self._config.start_deadline_s,
    )
    if self._check_tokenizer is not None:
      await self._check_tokenizer(replica)

  async def load(self, weights: Weights) -> None:
    """Publishes the weights to every server, and returns once at least one server serves them.

    Servers that fail the update are restarted in the background.

    Raises:
      RunError: no server accepted the version. The message has the reason, and the previous version
        stays in service.
    """
    async with self._loading:
      self._check_alive()
      loop = asyncio.get_running_loop()
      began = loop.time()
      publication = await self._run(self._folder.write, weights.version, weights.leaves)
      self._seconds['perf/publish_write_s'] = loop.time() - began
      before, self._current = self._current, _Current(publication, weights.probe)
      live = [replica for replica in self.replicas if replica.state == ReplicaState.SERVING]
      refusals = [
        r for r in await asyncio.gather(*(self._take(replica) for replica in live)) if r is not None
      ]
      held = [replica for replica in live if replica.state == ReplicaState.HELD]
      if refusals and not self._is_served(publication.version):
        self._current = before
        for replica in held:
          self._serve(replica)
        self._deal()
        raise RunError(
          f'version {weights.version} was not published, {self._version or "none"} stays: '
          f'{refusals[0]}'
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
      self._seconds['perf/publish_bytes'] = float(publication.nbytes)
    self._deal()

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

  async def _take(self, replica: Replica) -> str | None:
    """Updates a serving replica to the current version. If the server refuses the version, the
    replica stays HELD, and the reason is returned. In all other cases, returns None.
    """
    if replica.state == ReplicaState.GONE:  # The server has just left.
      return None
    replica.state = ReplicaState.HELD
    try:
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
    await replica.take(
      current.publication,
      current.probe,
      tolerance=self._tolerance,
      deadline_s=self._config.transfer_deadline_s,
    )

  def _is_served(self, version: Version) -> bool:
    return any(r.state == ReplicaState.SERVING and r.version == version for r in self.replicas)

  def _is_one_behind(self) -> bool:
    """Returns whether any server still lacks the current version, apart from servers that were
    given up.
    """
    return any(
      r.state != ReplicaState.GONE and r.version != self._current.publication.version
      for r in self.replicas
    )

  async def _let_go(self) -> None:
    """Removes the files of earlier versions, except those of the previous version while any server
    lacks the current one.
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
    # Raises the server's count of assigned requests to that of the others. Otherwise, 'uniform'
    # dispatch would send all requests to this server until it had caught up.
    serving = [
      r.assigned for r in self.replicas if r.state == ReplicaState.SERVING and r is not replica
    ]
    replica.assigned = max([replica.assigned, *serving])
    self._changed.set()

  async def _until_serving(self, version: Version) -> None:
    """Waits until at least one server serves the version. Raises RunError if the engine has ended,
    for example because no server was available for too long.
    """
    self._check_alive()
    while not self._is_served(version):
      self._changed.clear()
      # The wait 'served' is bounded by `start_deadline_s`, which the watcher enforces.
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
      if any(
        replica.state in (ReplicaState.SERVING, ReplicaState.HELD) for replica in self.replicas
      ):
        served = loop.time()
      elif loop.time() - served > self._config.start_deadline_s:
        self._fail(
          RunError(
            'no engine left: none served for '
            f'rollout.vllm.start_deadline_s={self._config.start_deadline_s:g} s; the last: '
            f'{self._last_trouble}'
          )
        )
      if self._earlier is not None and not self._loading.locked() and not self._is_one_behind():
        try:
          async with self._loading:
            await self._let_go()
        except RunError as error:
          self._fail(error)

  def _repair(self, replica: Replica, reason: str) -> None:
    """Takes a server out of service, and starts a task that recovers or restarts it."""
    gone = replica.state == ReplicaState.GONE
    if replica in self._repairs or self._failure is not None or gone:
      return
    replica.state = ReplicaState.DOWN
    replica.failures += 1
    self._last_trouble = f'engine {replica.name}: {reason}'
    logging.warning('engine %s: taken out of service: %s', replica.name, reason)
    self._begin(replica, joins=False)

  def _begin(self, replica: Replica, *, joins: bool) -> None:
    """Starts a task that brings the server into service. If the task fails, the server is closed
    and given up.

    Args:
      joins: whether the server has just registered. If False, it is one that failed before.
    """
    task = asyncio.create_task(
      self._bring_in_or_end(replica, joins=joins),
      name=f'engine {replica.name}: {"join" if joins else "repair"}',
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
          self._fail(RunError(f'no engine left; the last: {error}'))
    self._changed.set()
    self._deal()

  def _give_up(self, replica: Replica, error: BaseException) -> None:
    """Removes a discovered server from the fleet. If the server suits the run, it may join again
    later.
    """
    self.replicas = tuple(r for r in self.replicas if r is not replica)
    self._last_trouble = f'engine {replica.name}: {error}'
    unsuited = isinstance(error, UserError) and not isinstance(error, RunError)
    loop = asyncio.get_running_loop()
    if (lease := self._leases.pop(replica, None)) is not None:  # Otherwise it has already left.
      self._resting[lease.id] = math.inf if unsuited else loop.time() + _REST_S
      self._discovery.tell(replica.name, 'refused' if unsuited else 'given up')
      logging.warning(
        'engine %s: %s: %s', replica.name, 'is ignored' if unsuited else 'given up', error
      )

  async def _bring_in_or_end(self, replica: Replica, *, joins: bool) -> None:
    try:
      if joins:
        await self._bring_in(replica)
      else:
        await self._bring_back(replica)
    except Exception:
      await self._end(replica)  # Frees its memory and cores for the working servers.
      raise

  async def _bring_back(self, replica: Replica) -> None:
    await self._catch_up(replica, works=await self._is_as_before(replica))

  async def _catch_up(self, replica: Replica, *, works: bool) -> None:
    """Loads the current version into a server and brings it into service. If `works` is False, the
    server is restarted first.
    """
    attempts = 0
    while True:
      current = self._current
      try:
        if not works:
          await self._start_again(replica)
          works = True
        if current is not None and replica.version != current.publication.version:
          await self._transact(replica, current)
        if current is self._current:
          break
      except (RemoteError, Unproven) as error:
        # A server that refuses has written nothing and still works. It refuses, for example, if a
        # newer version has replaced the file.
        works = isinstance(error, Refused)
        attempts += not works or current is self._current
        if attempts > self._config.max_restarts:
          raise
        self._last_trouble = f'engine {replica.name}: {error}'
        logging.warning(
          'engine %s: attempt %d to bring it back failed: %s', replica.name, attempts, error
        )
    logging.info('engine %s: in service, with version %s', replica.name, replica.version)
    self._serve(replica)

  async def _is_as_before(self, replica: Replica) -> bool:
    """Returns whether a server works again after a failure and still serves its last proven
    version.
    """
    if replica.failures > _PATIENCE or replica.version is None:
      return False
    if replica.server is not None and not replica.server.is_running():
      return False
    with contextlib.suppress(RemoteError):
      if await replica.client.served_label() == replica.label:
        return await replica.is_alive(deadline_s=self._config.latency_s)
    return False

  async def _start_again(self, replica: Replica) -> None:
    replica.forget()
    if replica.server is not None:
      self.counts['restarts'] += 1
      await replica.server.stop()
    else:
      await self._await_attached(replica)
    try:
      await self._start(replica)
    except UserError as error:
      # A UserError is right only at the start of a run. Here, the server has worked before and may
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
    while self._waiting:
      future = self._waiting.popleft()
      if not future.done():
        future.set_exception(self._failure)
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
        # The wait 'completion' is bounded by the request's deadline times `max_retries`.
        result = await results.get()
        if isinstance(result, Exception):
          raise result
        yield result
    finally:
      for sample in samples:
        sample.cancel()
      await asyncio.gather(*samples, return_exceptions=True)

  def _check(self, request: Request) -> None:
    where, length = f'request {request.uid}', len(request.prompt)
    if length + request.max_tokens > self._max_length:
      raise UserError(
        f'{where}: {length} prompt tokens and max_tokens {request.max_tokens} are more than the '
        f'{self._max_length} of engine {self.name}; raise rollout.max_prompt_length or '
        'max_response_length, or ask for fewer'
      )
    if not all(
      0 <= token < self._spec.vocab_size for token in (*request.prompt, *request.stop_ids)
    ):
      raise UserError(
        f'{where}: token ids outside the vocabulary of {self._spec.vocab_size}; another tokenizer '
        'than the model?'
      )
    if reason := self._config.unsupported(request.sampling):
      raise UserError(f'{where}: {reason}')

  async def _sample(self, request: Request, index: int, results: asyncio.Queue) -> None:
    try:
      results.put_nowait((index, await self._complete(request, index)))
    except Exception as error:  # `generate` re-raises it.
      results.put_nowait(error)

  async def _complete(self, request: Request, index: int) -> Completion:
    """Generates one completion, with up to `max_retries` retries.

    Retries because a server has left the fleet do not count.
    """
    deadline_s = self._config.latency_s + request.max_tokens / self._config.min_tokens_per_s
    error: Exception | None = None
    failures = 0
    while failures <= self._config.max_retries:
      self.counts['retries'] += error is not None
      replica, life = await self._acquire()
      try:
        completion = await replica.generate(request, index, seed=self._seed, deadline_s=deadline_s)
        # The wait 'settled' is bounded by the deadlines of the calls that publish a version.
        await replica.settled.wait()
        if replica.life == life and all(
          segment.version in replica.proven for segment in completion.segments
        ):
          replica.failures = 0
          self.counts['completions'] += 1
          self.counts['tokens'] += len(completion.tokens)
          return self._named(completion)
        self.counts['void'] += 1
        error = Lost(f'{replica.name}: returned tokens of a version that it was not proven to hold')
      except Lost as lost:
        error = lost
        if replica.state == ReplicaState.SERVING and replica.life == life:
          self._repair(replica, str(lost))
      finally:
        replica.in_flight -= 1
        self._deal()
      failures += replica in self.replicas
    raise RunError(
      f'request {request.uid}, sample {index}: lost {self._config.max_retries + 1} times, the '
      f'last: {error}'
    )

  def _named(self, completion: Completion) -> Completion:
    """Replaces relabelled versions in a completion by their new versions."""

    def named(segment):
      return dataclasses.replace(segment, version=self._names.get(segment.version, segment.version))

    return dataclasses.replace(
      completion, segments=tuple(named(segment) for segment in completion.segments)
    )

  async def _acquire(self) -> tuple[Replica, int]:
    """Waits for a server that can take another request, and counts the request as in flight on that
    server. Returns (replica, current `life` of the replica).
    """
    self._check_alive()
    future: asyncio.Future[tuple[Replica, int]] = asyncio.get_running_loop().create_future()
    self._waiting.append(future)
    self._deal()
    try:
      # The wait 'place' is bounded by the requests before it, and by `_watch`.
      return await future
    except asyncio.CancelledError:
      if future.done() and not future.cancelled() and future.exception() is None:
        future.result()[0].in_flight -= 1
        self._deal()
      raise

  def _deal(self) -> None:
    """Dispatches waiting requests, in order of arrival, to servers that can take another request.

    At most `_BURST` requests are dispatched at a time, because starting hundreds of requests in one
    iteration of the event loop would block everything else.
    """
    for _ in range(_BURST):
      if not self._waiting:
        return
      if self._waiting[0].done():
        self._waiting.popleft()
        continue
      replica = self._choose()
      if replica is None:
        return
      replica.in_flight += 1
      replica.assigned += 1
      self._waiting.popleft().set_result((replica, replica.life))
    asyncio.get_running_loop().call_soon(self._deal)

  def _choose(self) -> Replica | None:
    current = self._current.publication.version if self._current else None
    serving = [r for r in self.replicas if r.state == ReplicaState.SERVING and r.version == current]
    if not serving:
      return None
    load = (lambda r: r.assigned) if self._config.dispatch == 'uniform' else (lambda r: r.in_flight)
    chosen = min(serving, key=load)
    return chosen if chosen.in_flight < self._config.max_in_flight else None

  def take_metrics(self) -> dict[str, float]:
    """Returns the counts of events since the last call, and the timings and size of the last
    publication.
    """
    counts = {
      f'run/engine_{name}': float(self.counts[name] - self._taken[name])
      for name in ('retries', 'restarts', 'void', *(('joined', 'left') if self._discovery else ()))
    }
    self._taken = self.counts.copy()
    seconds, self._seconds = self._seconds, {}
    serving = sum(replica.state == ReplicaState.SERVING for replica in self.replicas)
    counts['run/engines_serving'] = float(serving)
    if self._discovery is not None:
      counts['run/engines'] = float(len(self.replicas))
    return {**counts, **seconds}
