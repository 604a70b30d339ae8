"""Publication of versions to the servers of a fleet: write, prepare, send, prove, remove.

Invariant: a server gets requests only while it serves the current version, with proof. If every
server refuses a version, the previous version stays in service.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.net.client import Lost, Refused, RemoteError
from jaxrl_llm.core.types import Json, Version
from jaxrl_llm.rollout.api import Completion, Probe, Weights
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.device_transfer import DeviceFeed
from jaxrl_llm.rollout.vllm.publication import Publication, PublicationFolder
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState, Unproven
from jaxrl_llm.rollout.vllm.roster import Roster
from jaxrl_llm.rollout.vllm.selftest import sampling_fault
from jaxrl_llm.rollout.vllm.version_writer import VersionWriter


@dataclasses.dataclass(frozen=True)
class Current:
  """Publication and probe of the version that all servers should serve."""

  publication: Publication
  probe: Probe | None


@dataclasses.dataclass(frozen=True)
class Served:
  """Properties of the model that the servers serve."""

  vocab_size: int
  dtype: str
  """Hugging Face name of the data type of the servers' weights, for example 'bfloat16'."""
  max_length: int
  """Length of the longest sequence in tokens, including its prompt."""


class Updates:
  """Writes versions, and updates servers to the current one.

  Attributes:
    folder: folder of published versions.
    current: publication that all servers should serve; None until the first.
    lock: lock that is held while a version is published and while servers are released or restored.
  """

  def __init__(
    self,
    roster: Roster,
    config: VllmConfig,
    folder: PublicationFolder,
    served: Served,
    run: Callable[..., Awaitable[Any]],
    feed: DeviceFeed | None = None,
  ):
    """
    Args:
      run: calls its first argument with the remaining arguments on the process's device thread, and
        returns the result.
      feed: feed of the servers' transfers from the trainer's device memory; None if they send
        files.
    """
    self._feed = feed
    self._roster, self._config, self.folder, self._served = roster, config, folder, served
    self._writer = VersionWriter(folder, run)
    self._tolerance = config.probe_tolerance
    if self._tolerance is None:
      self._tolerance = 1e-3 if served.dtype == 'float32' else 0.5
    self.current: Current | None = None
    self._earlier: Current | None = None
    """The previous version. Its files are kept until every server has the current version."""
    self._version: Version | None = None
    self._names: dict[Version, Version] = {}
    """Mapping from each published version to the version that `relabel` has since given to the same
    weights.
    """
    self._seconds: dict[str, float] = {}
    self.lock = asyncio.Lock()

  @property
  def version(self) -> Version | None:
    """Version that completions are attributed to; None until a version is in service."""
    return self._version

  def serving(self) -> list[Replica]:
    """Returns the servers that serve the current version."""
    return self._roster.serving(self.current.publication.version if self.current else None)

  async def begin(self) -> Json | None:
    """Returns the order by which the other processes of the trainer write their shares of the next
    version, or None if this process must write alone.
    """
    return await self._writer.begin(self._roster.replicas)

  async def load(self, weights: Weights, repair: Callable[[Replica, str], None]) -> None:
    """Publishes the weights to every server, and returns once at least one server serves them.
    Servers that are released load them when they are restored.

    Args:
      repair: takes a server that failed the update out of service, given the reason, and recovers
        or restarts it in the background.

    Raises:
      RunError: no server accepted the version. The message has the reason, and the previous version
        stays in service.
    """
    roster = self._roster
    async with self.lock, contextlib.AsyncExitStack() as ending:
      roster.check_alive()
      loop = asyncio.get_running_loop()
      began = loop.time()
      publication = await self._writer.write(weights, roster.replicas)
      self._seconds['perf/publish_write_s'] = loop.time() - began
      if self._feed is not None:
        self._feed.offer(publication.label, weights.on_device)
        ending.callback(self._feed.withdraw)
      current = Current(publication, weights.probe)
      # Until all hosts have the files, the servers sample with the previous version.
      failures = await self._prepare_all(current)
      before, self.current = self.current, current
      roster.changed.set()
      if roster.released is not None:
        self._earlier, self._version = None, publication.version
        await asyncio.to_thread(self.folder.keep_only, publication)
        self._measure(publication)
        return
      live = roster.in_state(ReplicaState.SERVING)
      answers = await asyncio.gather(*(self._take(r, failures.get(r), repair) for r in live))
      refusals = [answer for answer in answers if answer is not None]
      held = [replica for replica in live if replica.state == ReplicaState.UPDATING]
      if refusals and not roster.serving(publication.version):
        self.current = before
        for replica in held:
          roster.serve(replica)
        roster.dispatcher.dispatch()
        raise RunError(
          f'version {weights.version} was not published, and version {self._version or "none"} '
          f'stays in service: {refusals[0]}'
        )
      for replica in held:
        # Other servers accepted the files, so this server is at fault. Forgetting its weights
        # forces a restart.
        replica.forget()
        repair(replica, 'refused weights that other servers accepted')
      await roster.until_serving(publication.version)
      self._earlier = before
      await self._let_go()
      self._version = publication.version
      pauses = [r.paused_s for r in roster.replicas if r.version == publication.version]
      # `pauses` is empty if the server that accepted the version has left again.
      self._seconds['perf/publish_pause_s'] = max(pauses, default=0.0)
      self._measure(publication)
    roster.dispatcher.dispatch()

  def _measure(self, publication: Publication) -> None:
    self._roster.counts['publications'] += 1
    nbytes = publication.sent_bytes
    if publication.deltas and not self.current.publication.deltas:
      # In addition to the deltas, the whole weights were published (`_in_full`).
      nbytes += publication.nbytes
    self._seconds['perf/publish_bytes'] = float(nbytes)
    if publication.changed_fraction is not None:
      self._seconds['perf/publish_changed_fraction'] = publication.changed_fraction

  def take_seconds(self) -> dict[str, float]:
    """Returns the timings and size of the last publication, if there was one since the last call,
    keyed by metric.
    """
    seconds, self._seconds = self._seconds, {}
    return seconds

  async def relabel(self, version: Version) -> None:
    """Attributes the current weights to `version` in returned completions. The servers keep the old
    label.
    """
    async with self.lock:
      self._roster.check_alive()
      if self.current is None:
        raise RuntimeError(f'engine {self._roster.name}: call load before relabel')
      self._names[self.current.publication.version] = version
      self._version = version

  def named(self, completion: Completion) -> Completion:
    """Returns the completion with each relabelled version replaced by its new version."""

    def named(segment):
      return dataclasses.replace(segment, version=self._names.get(segment.version, segment.version))

    return dataclasses.replace(
      completion, segments=tuple(named(segment) for segment in completion.segments)
    )

  async def _prepare_all(self, current: Current) -> dict[Replica, RemoteError]:
    """Prepares the update of all serving servers to a version, for example by fetching the files to
    their hosts. Returns the errors of the servers for which this failed.
    """
    failures = {}

    async def prepare(replica: Replica) -> None:
      try:
        await self._prepare(replica, current)
      except RemoteError as error:
        failures[replica] = error

    await asyncio.gather(*map(prepare, self._roster.in_state(ReplicaState.SERVING)))
    return failures

  async def _take(
    self, replica: Replica, failure: RemoteError | None, repair: Callable[[Replica, str], None]
  ) -> str | None:
    """Updates a serving replica to the current version. If the server refuses the version, returns
    the reason and leaves the replica in the state UPDATING. Otherwise returns None.

    Args:
      failure: error of `_prepare_all`; None if there was none.
      repair: see `load`.
    """
    if replica.state == ReplicaState.GONE:  # The server has just left.
      return None
    replica.state = ReplicaState.UPDATING
    try:
      # If a server cannot use the files below deltas, `transact` sends whole weights.
      if failure is not None and not (
        isinstance(failure, Refused) and self.current.publication.deltas
      ):
        raise failure
      await self.transact(replica, self.current)
    except Refused as error:
      return str(error)
    except (Lost, Unproven) as error:
      repair(replica, str(error))
    else:
      self._roster.serve(replica)
    return None

  async def transact(self, replica: Replica, current: Current) -> None:
    """Updates a server to a version, with whole weights if it cannot use the deltas.

    Raises:
      Refused, Lost, Unproven: see `Replica.take`.
    """
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
        vocab=self._served.vocab_size,
        max_length=replica.max_length,
        tolerance=self._tolerance,
        deadline_s=self._config.start_deadline_s,
      )
      replica.is_tested = True
      logging.info(
        'engine %s: speculative decoding: %s', replica.name, replica.sampling_fault or 'passes'
      )

  async def _prepare(self, replica: Replica, current: Current) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline_s = self._config.transfer_deadline_s
    await replica.prepare(current.publication, deadline_s=deadline_s)
    if self._config.transfer == 'pull':
      key, seconds = 'perf/publish_transfer_s', loop.time() - began
      self._seconds[key] = max(seconds, self._seconds.get(key, 0.0))

  async def _send(self, replica: Replica, current: Current) -> None:
    await replica.take(
      current.publication,
      current.probe,
      tolerance=self._tolerance,
      deadline_s=self._config.transfer_deadline_s,
    )

  async def _in_full(self, current: Current) -> Current:
    """Publishes a version again, with its whole weights. Raises Refused if it is no longer the
    newest version.
    """
    try:
      whole = await asyncio.to_thread(self.folder.write_whole, current.publication)
    except ValueError as error:
      raise Refused(str(error)) from None
    again = Current(whole, current.probe)
    if self.current is current:
      self.current = again
    return again

  async def until_newer(self, current: Current | None, patience_s: float) -> None:
    """Waits until `current` is no longer the current version, for at most `patience_s` seconds."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(patience_s):
        while self.current is current:
          self._roster.changed.clear()
          await self._roster.changed.wait()

  async def drop_earlier(self) -> None:
    """Removes the files of the previous version once no server needs them. Does nothing while a
    version is being published.
    """
    if self._earlier is not None and not self.lock.locked() and not self._is_any_behind():
      async with self.lock:
        await self._let_go()

  def _is_any_behind(self) -> bool:
    """Returns whether any server lacks the current version. Abandoned servers do not count."""
    version = self.current.publication.version
    return any(r.state != ReplicaState.GONE and r.version != version for r in self._roster.replicas)

  async def _let_go(self) -> None:
    """Removes the files of earlier versions. The files of the previous version are kept while any
    server lacks the current version.
    """
    if not self._is_any_behind():
      self._earlier = None
    kept = [each.publication for each in (self.current, self._earlier) if each is not None]
    await asyncio.to_thread(self.folder.keep_only, *kept)

  async def close(self) -> None:
    """Removes the published files."""
    await asyncio.to_thread(self.folder.close)
