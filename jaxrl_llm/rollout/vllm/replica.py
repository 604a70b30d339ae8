"""One server of a fleet, and the transaction that updates it from one version to the next.

Invariant: a version is added to `proven` only after the digests or checksums of the loaded weights
matched the published ones and, if there is a probe, the server reproduced its logprobs. Tokens of
other versions must not be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.core.errors import UserError, first_cause
from jaxrl_llm.core.net.client import Lost, Malformed, Refused, RemoteError
from jaxrl_llm.core.process_clock import ProcessClock
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Completion, Probe, Request
from jaxrl_llm.rollout.vllm.api import (
  DirectServer,
  EngineServer,
  ServerProcess,
  SleepingServer,
  StreamingServer,
)
from jaxrl_llm.rollout.vllm.config import SPECULATION
from jaxrl_llm.rollout.vllm.publication import Publication, digest, part, read_published
from jaxrl_llm.rollout.vllm.server import lora_rank
from jaxrl_llm.rollout.vllm.stream import Arrivals
from jaxrl_llm.rollout.vllm.transfer import (
  FileTransfer,
  PreparingTransfer,
  Transfer,
  slice_of,
)
from jaxrl_llm.rollout.vllm.workload import Workload
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.checksums import checksums as tensor_checksums


class ReplicaState(enum.Enum):
  DOWN = 'down'
  """The server is starting, being checked or restarting, and does not serve."""
  SERVING = 'serving'
  UPDATING = 'updating'
  """The server is being updated to a new version, or has refused it, and gets no new requests."""
  RELEASED = 'released'
  """The server was stopped or put to sleep on purpose, because a memory phase needs its memory."""
  GONE = 'gone'
  """The server was closed, has left the fleet, or was abandoned after failed recoveries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirements:
  """Requirements that a server must meet to join the fleet."""

  shapes: Mapping[str, tuple[int, ...]]
  """Shapes of the policy's tensors, keyed by Hugging Face name."""
  dtype: str
  """Hugging Face name of the data type of the published weights, for example 'bfloat16'."""
  max_length: int
  """Length of the longest sequence in tokens, including its prompt."""
  min_length: int | None = None
  """Least maximum sequence length of the server in tokens. If None, it must be `max_length`."""
  speculative: bool = False
  """Whether speculative decoding is configured, so that servers are allowed to use it."""
  adapter_rank: int = 0
  """Rank of the adapters that the server will load, or 0 if it loads whole weights."""
  direct: bool = False
  """Whether explorers will fetch completions from the server. Its front must then sign them."""


class Unproven(Exception):
  """Raised when the server's weights differ from the published ones. The server's tokens must be
  discarded, and the server must be restarted.
  """


class Replica:
  """State of one server: its client, its proven versions and its load."""

  def __init__(
    self,
    name: str,
    *,
    client: EngineServer,
    server: ServerProcess | None,
    transfer: Transfer | None = None,
    keeps_cache: bool = False,
    has_served: bool = False,
  ):
    """
    Args:
      client: client of the server.
      server: process of an owned server; None for an attached one.
      transfer: weight transfer to this server only. If None, the server reads the published files.
      keeps_cache: whether running requests keep their keys and values across updates. The client
        must then be a `CacheKeepingServer`.
      has_served: whether an earlier attempt (start of the run) used an attached server at this
        address.
    """
    self.has_served = has_served
    self._keeps_cache, self._streams = keeps_cache, isinstance(client, StreamingServer)
    self._is_direct = isinstance(client, DirectServer)
    self.name, self.client, self.server = name, client, server
    self.transfer: Transfer = transfer or FileTransfer()
    self._state = ReplicaState.DOWN
    self._in_flight = 0
    self.clock = ProcessClock()
    """Clock of the time that the server spends in each `activity`."""
    self.version: Version | None = None
    """Newest version that the server was proven to have loaded."""
    self.label: str | None = None
    """Label of tokens sampled under `version`."""
    self.holds: str | None = None
    """Label of the whole weights (as opposed to adapters) that the server has loaded, with
    proof.
    """
    self.proven: set[Version] = set()
    self.life = 0
    """Number of times that the server's weights became unknown. If it changes while a completion is
    in flight, the completion is discarded.
    """
    self._updates = 0
    """Number of updates that have begun, plus `life`."""
    self.workload = Workload()
    """Requests that the fleet has dispatched to the server."""
    self.max_length = 0
    """Length in tokens of the longest sequence that the server can sample, prompt included, up to
    that of the run's longest sequence. 0 until the server is admitted.
    """
    self.failures = 0
    """Number of failures since the last accepted completion."""
    self.slices: list[Mapping[str, Any]] = []
    """Each worker's description of its tensors: shape, dtype and slice, keyed by tensor name."""
    self.speculates = False
    """Whether the server decodes speculatively."""
    self.is_tested = False
    """Whether the self-test of speculative decoding has run since the server started."""
    self.sampling_fault: str | None = None
    """Reason why the server gets no requests with a temperature above 0, from the self-test; None
    if the server may get them.
    """
    self.on_cpu = False
    """Whether the server's workers compute on CPUs."""
    self._sampling = 0
    """Number of requests in progress on the server."""
    self._drained = asyncio.Event()
    """Event that is set while `_sampling` is 0."""
    self._drained.set()
    self.settled = asyncio.Event()
    """Event that is set while no update is in progress. During an update, the server may sample
    tokens under the new version before that version is added to `proven`.
    """
    self.settled.set()
    self.paused_s = 0.0
    """Seconds for which the last update paused sampling. For an adapter on CPUs, they include the
    wait until the requests in flight have ended.
    """
    self._measure()

  @property
  def state(self) -> ReplicaState:
    return self._state

  @state.setter
  def state(self, state: ReplicaState) -> None:
    self._state = state
    self._measure()

  @property
  def in_flight(self) -> int:
    """Number of requests that the fleet has dispatched to the server."""
    return self._in_flight

  @in_flight.setter
  def in_flight(self, count: int) -> None:
    self._in_flight = count
    self._measure()

  @property
  def sampled_with(self) -> Version | None:
    """Version that is certain to sample the tokens of a request that is sent now, until the next
    update begins. None during an update, and if the server's weights are unknown.
    """
    return self.version if self.settled.is_set() else None

  @property
  def activity(self) -> str | None:
    """Current activity of the server: 'generate', 'idle' (it serves but has no request), 'publish',
    'down' (it is starting or being repaired) or 'released' (its memory is freed). None once the
    server is gone.
    """
    if self._state == ReplicaState.SERVING:
      return 'generate' if self._in_flight else 'idle'
    states = {
      ReplicaState.UPDATING: 'publish',
      ReplicaState.DOWN: 'down',
      ReplicaState.RELEASED: 'released',
    }
    return states.get(self._state)

  def _measure(self) -> None:
    activity = self.activity
    self.clock.set({} if activity is None else {activity: 1})
    self.clock.exist(self._state != ReplicaState.GONE)

  async def generate(
    self, request: Request, index: int, *, seed: int, deadline_s: float, stream: int | None = None
  ) -> Completion:
    """Calls `EngineServer.generate`, or `StreamingServer.stream` for an answer that may be longer
    than `stream` tokens, or `DirectServer.fetch` for a request with a courier. Counts the running
    requests, because an adapter update on CPUs waits until no request is running.

    Args:
      stream: see `VllmConfig.stream`.

    Raises:
      Undelivered: the courier has not delivered the completion.
      Broken: a streamed answer broke off. The tokens in the exception were sampled by the version
        that `sampled_with` named when this method was called.
    """
    self._sampling += 1
    self._drained.clear()
    try:
      if stream is not None and (request.max_tokens <= stream or not self._streams):
        stream = None
      updates = self._updates if self.sampled_with is not None else None
      arguments = {'seed': seed, 'deadline_s': deadline_s}
      if request.courier is not None and self._is_direct:
        return await self.client.fetch(
          request, index, **arguments, stream=stream, is_known=lambda: self._updates == updates
        )
      if stream is None:
        return await self.client.generate(request, index, **arguments)
      arrivals = Arrivals(stream, lambda: self._updates == updates)
      return await self.client.stream(
        request, index, seed=seed, deadline_s=deadline_s, arrivals=arrivals
      )
    finally:
      self._sampling -= 1
      if not self._sampling:
        self._drained.set()

  def forget(self) -> None:
    """Marks the server's weights as unknown, for example because an update failed or the server
    restarts.
    """
    self.life += 1
    self._updates += 1
    self.version = self.holds = self.client.adapter = None
    # A server that failed the self-test is not tested again, because the test may crash it.
    self.is_tested = self.sampling_fault is not None
    self.proven.clear()
    self.workload.recent.clear()

  async def release(self, how: str, *, deadline_s: float) -> None:
    """Stops the server or puts it to sleep, after its requests in flight have ended.

    Raises:
      UserError: the server cannot sleep.
    """
    # Wait 'drained': bounded by the deadlines of the requests in flight.
    await self._drained.wait()
    self.forget()
    if how == 'destroy' and self.server is not None:
      await self.server.stop()
      return
    try:
      if self.on_cpu:
        raise Refused('it is on a CPU, where vLLM keeps its memory')
      if not isinstance(self.client, SleepingServer):
        raise Refused('its client has no sleep and wake_up')
      await self.client.sleep(deadline_s=deadline_s)
    except Refused as error:
      raise UserError(
        f"phases.engine: 'sleep', but engine {self.name} cannot sleep: {error}; wanted a server on "
        "a GPU with --enable-sleep-mode, or phases.engine='destroy'"
      ) from None

  async def wake_up(self, *, deadline_s: float) -> None:
    """Wakes the server. Its weights are unknown afterwards."""
    if isinstance(self.client, SleepingServer):
      await self.client.wake_up(deadline_s=deadline_s)

  async def recognise(self) -> None:
    """Raises Lost if the server does not report the label of `version`. Such a server was restarted
    from outside the run and must be checked again.
    """
    if self.version is not None and (label := await self.client.served_label()) != self.label:
      raise Lost(
        f'engine {self.name}: serves {label!r}, wanted {self.label}; it was restarted from outside '
        'the run'
      )

  async def prepare(self, publication: Publication, *, deadline_s: float) -> None:
    """Brings a published version close to the server, which still samples with its version.

    Raises:
      Refused, Lost: the version cannot be transferred to the server.
    """
    if not isinstance(self.transfer, PreparingTransfer):
      return
    for missing in self._missing_parts(publication):
      await self.transfer.prepare(self.client, missing, deadline_s=deadline_s)

  def _missing_parts(self, publication: Publication) -> list[Publication]:
    """Returns the publications that the server needs in order to load a version. The base weights
    of adapters are sent once, but the publication itself is always sent.
    """
    base = publication.base
    before = [base] if base is not None and base.label != self.holds else []
    return [each.since(self.holds) for each in (*before, publication)]

  async def take(
    self, publication: Publication, probe: Probe | None, *, tolerance: float, deadline_s: float
  ) -> None:
    """Updates the server to a published version.

    `prepare` must have been called. Steps: pause the server, write the weights of verified files,
    compare the digests or checksums of the loaded weights, label the version, clear the cache
    (unless running requests keep it), resume, and check the probe. On CPUs, an adapter is probed
    only after the requests in flight have ended (each has a deadline), and with one sequence at a
    time, because vLLM 0.32's adapter kernel for CPUs crashed when it batched prompt logprobs with
    other requests.

    Raises:
      Refused: the files differ from the announced digests, or do not fit the model. Nothing was
        written, and the previous version stays in service. If a server with several workers refuses
        a delta, however, its weights are unknown, it stays paused, and whole weights must follow.
      Unproven, Lost: the server's weights are wrong (Unproven) or unknown (Lost).
    """
    self.settled.clear()
    self._updates += 1
    try:
      before = time.monotonic()
      await self._hold_and_send(publication, deadline_s)
      try:
        await self._label(publication, deadline_s)
        self.paused_s = time.monotonic() - before
        if probe is not None:
          alone = publication.adapter is not None and self.on_cpu
          if alone:
            # Wait 'drained': bounded by the deadlines of the requests in flight.
            await self._drained.wait()
            self.paused_s = time.monotonic() - before
          await self._check_probe(probe, tolerance, deadline_s, alone=alone)
      except Refused as error:  # Weights were written before the failure.
        raise Lost(str(error)) from None
      self.proven.add(publication.version)
      self.version, self.label = publication.version, publication.label
    except Refused:
      raise
    except BaseException:
      self.forget()
      raise
    finally:
      self.settled.set()

  async def _hold_and_send(self, publication: Publication, deadline_s: float) -> None:
    try:
      if self._keeps_cache and self.version is not None:
        await self.client.pause_with_cache()
      else:
        await self.client.pause()
      for missing in self._missing_parts(publication):
        await self.transfer.send(self.client, missing, deadline_s=deadline_s)
    except Refused as error:
      # Each worker reads the files independently. While one refuses them, another may already have
      # written weights.
      if len(self.slices) > 1:
        if not publication.deltas:
          raise Lost(str(error)) from None
        self.forget()  # The server stays paused, because whole weights follow.
        raise
      await self.client.resume()
      raise

  async def _label(self, publication: Publication, deadline_s: float) -> None:
    whole = publication.base or publication
    if whole is publication or whole.label != self.holds:
      # On a CPU, digests are faster than checksums, and the parameters are on the host anyway.
      prove = self.client.digests if self.on_cpu else self.client.checksums
      loaded = await prove(deadline_s=deadline_s)
      await asyncio.to_thread(self._check_loaded, loaded, whole)
      self.holds = whole.label
    await self.client.set_version(publication)
    # The server clears its cache, or separates it from later requests.
    self.workload.recent.clear()
    if self._keeps_cache:
      self.client.separate_cache(publication)
    if not self._keeps_cache or self.version is None:
      # Until a first version is loaded, the cache may hold keys and values of unknown weights.
      await self.client.reset_cache()
    await self.client.resume()

  def _check_loaded(self, workers: list[dict[str, str]], publication: Publication) -> None:
    if len(workers) != len(self.slices):
      raise Unproven(
        f'engine {self.name}: {len(workers)} workers answered, wanted {len(self.slices)} as '
        'at the start'
      )
    for worker, (loaded, slices) in enumerate(zip(workers, self.slices)):
      wanted = _expected(publication, slices, checksums=not self.on_cpu)
      differing = sorted(
        name for name in wanted.keys() | loaded.keys() if wanted.get(name) != loaded.get(name)
      )
      if differing:
        raise Unproven(
          f'engine {self.name}, worker {worker}: {len(differing)} of {len(wanted)} loaded tensors '
          f'differ from those published as {publication.version}: {", ".join(differing[:4])}'
        )

  async def _check_probe(
    self, probe: Probe, tolerance: float, deadline_s: float, *, alone: bool
  ) -> None:
    """Raises Unproven if the server's logprobs of the probe differ from the trainer's. If `alone`,
    the server computes one sequence at a time.
    """
    longest = self.max_length - 1  # The server samples one token after the sequence.

    turns = asyncio.Semaphore(1 if alone else len(probe.sequences))

    async def logprobs(sequence: np.ndarray) -> np.ndarray:
      async with turns:
        return await self.client.prompt_logprobs(sequence[:longest].tolist(), deadline_s=deadline_s)

    try:
      async with asyncio.TaskGroup() as requests:
        tasks = [requests.create_task(logprobs(sequence)) for sequence in probe.sequences]
    except BaseExceptionGroup as errors:
      raise first_cause(errors) from None
    answers = [task.result() for task in tasks]
    worst = float(np.abs(np.stack(answers) - probe.logprobs[:, :longest]).max())
    if not worst <= tolerance:
      raise Unproven(
        f"engine {self.name}: its logprobs of the probe differ from the trainer's by up to "
        f'{worst:.3g}, '
        f'wanted at most {tolerance:g} (rollout.vllm.probe_tolerance)'
      )

  async def is_alive(self, *, deadline_s: float) -> bool:
    """Returns whether the server still samples tokens. A health check alone would not detect a hung
    engine.
    """
    with contextlib.suppress(RemoteError):
      if await self.client.is_healthy():
        if self.client.adapter is None:
          await self.client.prompt_logprobs([0, 0], deadline_s=deadline_s)
        else:  # On CPUs, prompt logprobs could crash the server; see `take`.
          alive = Request(uid=f'alive/{self.name}', prompt=(0,), max_tokens=1, key=(0,))
          await self.client.generate(alive, 0, seed=0, deadline_s=deadline_s)
        return True
    return False

  async def admit(self, wanted: Requirements, *, deadline_s: float = 600.0) -> None:
    """Checks a server before it joins the fleet, and prepares it to receive weights.

    Args:
      deadline_s: deadline of each warm-up request, during which the server may have to compile its
        programs.

    Raises:
      UserError: the server is unsuitable for the run, for example because of its model, its maximum
        sequence length or its logprobs.
      Lost: the server cannot be reached, or fails.
    """
    where = f'engine {self.name} ({self.client.address})'
    served = await self.client.max_model_len()
    least, names = wanted.min_length, 'rollout.vllm.min_length'
    if least is None:
      least, names = wanted.max_length, 'rollout.max_prompt_length + max_response_length'
    if served < least:
      raise UserError(
        f'{where}: max_model_len is {served}, the run needs {least} ({names}); start it with a '
        'larger --max_model_len'
      )
    self.max_length = min(served, wanted.max_length)
    with _explained(f'{where}: has no worker extension of jaxrl_llm', 'start it with jaxrl serve'):
      workers = await self.client.weights()
    if any(worker['device'] == JAX_DEVICE for worker in workers):
      raise UserError(
        f'{where}: computes with JAX, as vLLM does on TPUs, where it cannot load weights while it '
        'runs; set rollout.engine=embedded, which samples on TPUs, or serve on GPUs'
      )
    self.slices = [worker['tensors'] for worker in workers]
    self.on_cpu = any(worker['device'] == 'cpu' for worker in workers)
    self.speculates = any(worker.get('speculative') for worker in workers)
    for tensors in self.slices:
      _check_model(where, tensors, wanted)
    for worker in workers:
      _check_worker(where, worker, wanted)
    if wanted.direct:
      await self._check_front(where)
    with _explained(
      f'{where}: cannot receive weights over {self.transfer.backend!r}',
      'start it with the same rollout.vllm.transfer, or set another',
    ):
      await self.transfer.connect(self.client)
    with _explained(f'{where}: cannot generate', 'read its log, and restart it'):
      # A trainer that died during a publication may have left its servers paused.
      await self.client.resume()
      await self.client.warm_up(sampled=not wanted.speculative, deadline_s=deadline_s)

  async def _check_front(self, where: str) -> None:
    with _explained(
      f'{where}: no front signs its answers, which rollout.explorers.direct requires',
      'start it with jaxrl serve --host, or set rollout.explorers.direct=False',
    ):
      if not isinstance(self.client, DirectServer):
        raise Refused('its client cannot have others fetch completions')
      await self.client.check_front()


@contextlib.contextmanager
def _explained(problem: str, remedy: str) -> Iterator[None]:
  """Adds a problem and its remedy to the message of a RemoteError in the `with` block. If the
  server refuses a request or its answer is malformed, the server does not suit the run, and the
  error becomes a UserError. An error of another kind stays Lost, because the server may suit the
  run once it can be reached.
  """
  try:
    yield
  except RemoteError as error:
    is_at_fault = isinstance(error, Refused | Malformed)
    kind = UserError if is_at_fault else Lost
    raise kind(f'{problem} ({error}); {remedy}') from None


JAX_DEVICE = 'jax'
"""Device that workers without torch parameters report. It equals `JAX` in `rollout.vllm.worker`,
which cannot be imported here because it needs torch.
"""
PROCESSED = 'processed_logprobs'
"""vLLM's name for logprobs of the distribution that it samples from."""


def _check_worker(where: str, worker: Mapping[str, Any], wanted: Requirements) -> None:
  """Raises UserError if a worker's logprobs, decoding or adapters do not suit the run."""
  if worker.get('logprobs_mode', PROCESSED) != PROCESSED:
    raise UserError(
      f'{where}: returns {worker["logprobs_mode"]}, wanted {PROCESSED} (of the '
      'temperature-scaled distribution); start it with jaxrl serve'
    )
  if worker.get('speculative') and not wanted.speculative:
    raise UserError(
      f'{where}: decodes speculatively; declare that in rollout.vllm.args.speculative_config, '
      f'because {SPECULATION}'
    )
  if worker.get('adapter_rank', 0) < wanted.adapter_rank:
    raise UserError(
      f'{where}: cannot load adapters of rank {wanted.adapter_rank} while it runs; start it with '
      f'jaxrl serve … -- --enable-lora --max-loras 2 --max-lora-rank '
      f'{lora_rank(wanted.adapter_rank)}, or set rollout.vllm.lora=merged'
    )


def _check_model(where: str, tensors: Mapping[str, Any], wanted: Requirements) -> None:
  """Raises UserError if a worker's tensors differ from the policy's in name, shape or data type."""
  names = sorted(tensors.keys() ^ wanted.shapes.keys())
  if names:
    raise UserError(
      f'{where}: serves a model other than the policy: only one of the two has '
      f'{", ".join(names[:4])}'
    )
  for name, policy_shape in wanted.shapes.items():
    shape, cut = tuple(tensors[name]['shape']), tensors[name]['slice']
    whole = [axis for axis in range(len(policy_shape)) if not cut or axis != cut[0]]
    if len(shape) != len(policy_shape) or any(shape[i] != policy_shape[i] for i in whole):
      hint = (
        ' (another vocabulary)' if name in ('model.embed_tokens.weight', 'lm_head.weight') else ''
      )
      raise UserError(
        f"{where}: {name} is {shape}, the policy's is {policy_shape}{hint}; serve the policy's "
        'config.json'
      )
    if tensors[name]['dtype'] != wanted.dtype:
      raise UserError(
        f'{where}: {name} is {tensors[name]["dtype"]}, published as {wanted.dtype}; start it with '
        f'--dtype={wanted.dtype}, or set rollout.vllm.dtype'
      )


def _expected(
  publication: Publication, slices: Mapping[str, Any], *, checksums: bool
) -> dict[str, str]:
  """Returns the digests (or checksums) that a worker's tensors must have, keyed by tensor name. If
  the worker was unknown when the publication was written, the values are computed from the files.
  """
  cuts = {name: slice_of(slices[name]) for name in publication.digests if name in slices}
  known = {name: _published(publication, name, cut, checksums) for name, cut in cuts.items()}
  if all(value is not None for value in known.values()):
    return known
  try:
    tensors = read_published(publication)
  except ValueError as error:  # The publication may have been released meanwhile.
    raise Lost(str(error)) from None
  if checksums:
    return {
      name: tensor_checksums(tensors[name], [cut] if cut else [])[cut] for name, cut in cuts.items()
    }
  return {name: digest(part(tensors[name], cut)) for name, cut in cuts.items()}


def _published(
  publication: Publication, name: str, cut: Slice | None, checksums: bool
) -> str | None:
  """Returns the published digest of a tensor or of its slice `cut`, or the checksum if `checksums`.
  Returns None if the publication does not contain this value.
  """
  if checksums:
    return publication.checksums.get(name, {}).get(cut)
  if cut is None:
    return publication.digests[name]
  return publication.slice_digests.get(name, {}).get(cut)
