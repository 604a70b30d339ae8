"""One engine over several servers. Its parts have one task each: `Membership` lets servers join and
leave, `Updates` publishes versions to them, `Repairs` recovers failed ones, and `Completions`
samples. They share the `Roster` of the servers and use each other only in this order: roster,
updates, repairs, membership.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError, first_cause
from jaxrl_llm.core.net.client import Lost, RemoteError
from jaxrl_llm.core.process_clock import TOKENS, seconds_metrics
from jaxrl_llm.core.types import Json, Version
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.api import Completion, Request, Weights
from jaxrl_llm.rollout.vllm.admission import Admission
from jaxrl_llm.rollout.vllm.completions import Completions
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.device_transfer import DeviceFeed
from jaxrl_llm.rollout.vllm.discovery import Discovery
from jaxrl_llm.rollout.vllm.dispatch import Dispatcher
from jaxrl_llm.rollout.vllm.membership import Membership, away
from jaxrl_llm.rollout.vllm.publication import PublicationFolder
from jaxrl_llm.rollout.vllm.repairs import Repairs
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState, Requirements
from jaxrl_llm.rollout.vllm.roster import Roster
from jaxrl_llm.rollout.vllm.updates import Served, Updates
from jaxrl_llm.weights.tables import entries


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
    feed: DeviceFeed | None = None,
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
      feed: see `Updates`.
    """
    self.name = name
    self._config = config
    dispatcher = Dispatcher(self._serving, config)
    self._roster = roster = Roster(name, replicas, dispatcher, max_length=max_length)
    served = Served(spec.vocab_size, dtype, max_length)
    self._updates = Updates(roster, config, folder, served, run, feed)
    requirements = Requirements(
      shapes={entry.hf: entry.shape for entry in entries(spec)},
      dtype=dtype,
      max_length=max_length,
      min_length=config.least_length,
      speculative=config.speculative,
      adapter_rank=adapter_rank,
      direct=direct,
    )
    self._admission = Admission(config, requirements, check_tokenizer)
    self._repairs = Repairs(roster, self._updates, self._admission, config, discovery)
    self._membership: Membership | None = None
    if discovery is not None:
      self._membership = Membership(roster, self._repairs, self._admission, config, discovery)
    self._completions = Completions(
      roster, config, served, seed=seed, repair=self._repairs.repair, named=self._updates.named
    )
    self._watcher: asyncio.Task | None = None
    self._follower: asyncio.Task | None = None
    self._taken: collections.Counter[str] = collections.Counter()
    self._measured: set[Replica] = set(replicas)
    """Servers of the fleet when metrics were last taken."""

  @property
  def counts(self) -> collections.Counter[str]:
    """Totals since the start, keyed by name: accepted completions and their tokens; retries,
    restarts and publications; void completions (discarded because their version was not proven) and
    their tokens; tokens of delivered completions; and tokens of unwanted completions, whose caller
    had gone away. With discovery, also the servers that joined and left. For streamed answers that
    broke off: continued answers, kept tokens, and lost tokens, which arrived but were not kept.
    """
    return self._roster.counts

  @property
  def replicas(self) -> tuple[Replica, ...]:
    """Servers of the fleet. With discovery, servers are added and removed while the fleet runs."""
    return self._roster.replicas

  @property
  def version(self) -> Version | None:
    return self._updates.version

  @property
  def is_released(self) -> bool:
    return self._roster.released is not None

  is_outside = True

  @property
  def device_bytes(self) -> int:
    """Estimated device memory of the servers in bytes: their weights and, on CPUs, their KV caches.
    On GPUs, the servers use more than this estimate, because vLLM always reserves the fraction
    `gpu_memory_utilization` of each card.
    """
    current = self._updates.current
    if current is None or self.is_released:
      return 0
    whole = current.publication.base or current.publication
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
    if self._membership is not None:
      await self._membership.await_servers()
    absent = await away(self._roster, self._config)
    try:
      async with asyncio.TaskGroup() as starts:
        for replica in self.replicas:
          # A released server that the run owns is started only by `restore`.
          if replica not in absent and (not self.is_released or replica.server is None):
            starts.create_task(self._admission.start(replica))
    except BaseExceptionGroup as group:
      error = first_cause(group)
      raise UserError(str(error)) if isinstance(error, RemoteError) else error from None
    started = any(replica.max_length for replica in self.replicas)
    if started and not absent and self._membership is None and not self._roster.holding:
      raise UserError(
        f'engine {self.name}: no server holds the longest sequences '
        '(rollout.max_prompt_length + max_response_length); start one with a larger --max_model_len'
      )
    for replica in self.replicas:
      replica.state = ReplicaState.SERVING
    for replica in absent:
      self._repairs.repair(replica, f'does not answer at {replica.client.address}')
    if (how := self._roster.released) is not None:
      await self._release_all(how)
    self._watcher = asyncio.create_task(self._repairs.watch(), name=f'engine {self.name}: watch')
    if self._membership is not None:
      self._membership.announce()
      following = self._membership.follow()
      self._follower = asyncio.create_task(following, name=f'engine {self.name}: registry')

  async def close(self) -> None:
    """Stops the owned servers and removes the published files."""
    self._roster.fail(RunError(f'engine {self.name}: closed'))
    replicas = (*self.replicas, *self._leaving)
    closing = () if self._membership is None else self._membership.tasks
    tasks = [self._watcher, self._follower, *self._repairs.tasks, *closing]
    tasks = [task for task in tasks if task is not None]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ends = await asyncio.gather(
      *(self._admission.end(replica) for replica in replicas), return_exceptions=True
    )
    await self._updates.close()
    if errors := [end for end in ends if end is not None]:
      raise errors[0]

  @property
  def _leaving(self) -> tuple[Replica, ...]:
    """Servers that have left and are not closed yet."""
    return () if self._membership is None else self._membership.leaving

  async def release(self, how: str) -> None:
    async with self._updates.lock:
      self._roster.check_alive()
      self._roster.released = how
      if self._watcher is not None:  # Otherwise, `start` releases the servers.
        await self._release_all(how)

  async def _release_all(self, how: str) -> None:
    """Releases every server. Cancels pending repairs, because `restore` brings the servers back."""
    await self._repairs.cancel_all()
    live = [replica for replica in self.replicas if replica.state != ReplicaState.GONE]
    await asyncio.gather(*(self._release(replica, how) for replica in live))

  async def _release(self, replica: Replica, how: str) -> None:
    replica.state = ReplicaState.RELEASED
    try:
      await replica.release(how, deadline_s=self._config.transfer_deadline_s)
    except Lost as error:  # `restore` restarts the server.
      logging.warning('engine %s: did not answer when it was released: %s', replica.name, error)

  async def restore(self) -> None:
    async with self._updates.lock:
      self._roster.check_alive()
      self._roster.released = None
      await self._repairs.restore(self._roster.in_state(ReplicaState.RELEASED))
      self._roster.check_alive()
      if (current := self._updates.current) is not None:
        await self._roster.until_serving(current.publication.version)
    self._roster.dispatcher.dispatch()

  async def load(self, weights: Weights) -> None:
    """Publishes the weights to every server, and returns once at least one server serves them (see
    `Updates.load`). Servers that fail the update recover or are restarted in the background.

    Raises:
      RunError: no server accepted the version. The message has the reason, and the previous version
        stays in service.
    """
    await self._updates.load(weights, self._repairs.repair)

  async def begin_load(self) -> Json | None:
    self._roster.check_alive()
    return await self._updates.begin()

  async def relabel(self, version: Version) -> None:
    """Attributes the current weights to `version` in returned completions. The servers keep the old
    label.
    """
    await self._updates.relabel(version)

  async def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    self._roster.check_alive()
    if self.version is None:
      raise RuntimeError(f'engine {self.name}: call start and load before generate')
    async with contextlib.aclosing(self._completions.generate(request)) as completions:
      async for each in completions:
        yield each

  def _serving(self) -> list[Replica]:
    return self._updates.serving()

  def take_metrics(self) -> dict[str, float]:
    """Returns metrics since the last call: events, tokens, the servers' seconds per activity, and
    the timings and size of the last publication, if any. Also returns the current numbers of
    servers and of sampled tokens that have not been delivered.
    """
    counts = {
      f'run/engine_{name}': float(self.counts[name] - self._taken[name])
      for name in (
        *('retries', 'restarts', 'void', 'continued', 'kept_tokens', 'lost_tokens'),
        *(('joined', 'left') if self._membership is not None else ()),
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
    seconds = self._updates.take_seconds()
    in_service = (ReplicaState.SERVING, ReplicaState.RELEASED)
    serving = sum(replica.state in in_service for replica in self.replicas)
    counts['run/engines_serving'] = float(serving)
    if self._membership is not None:
      counts['run/engines'] = float(len(self.replicas))
    measured = self._measured | {*self.replicas, *self._leaving}
    self._measured = set(self.replicas)
    clocks = [replica.clock for replica in measured]
    return {**counts, **seconds, **seconds_metrics('servers', clocks)}
