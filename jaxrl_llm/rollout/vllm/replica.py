"""One server of a fleet, and the transaction that brings it from one version to the next.

Invariant: a version is in `proven` only after the digests of what is loaded were the published ones and the probe gave
the trainer's logprobs; whoever takes tokens of another version from here breaks the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Completion, Probe, Request
from jaxrl_llm.rollout.vllm.client import Lost, Refused, VllmClient
from jaxrl_llm.rollout.vllm.publication import Publication, digest, read_checked
from jaxrl_llm.rollout.vllm.server import Server, lora_rank
from jaxrl_llm.rollout.vllm.transfer import FileTransfer, Transfer


class State(enum.Enum):
  DOWN = 'down'
  """Not serving: starting, being looked at, or being started again."""
  SERVING = 'serving'
  HELD = 'held'
  """Takes a version: gets no new requests."""
  GONE = 'gone'
  """Given up."""


class Unproven(Exception):
  """What the server holds is not what was published; its tokens are void and it must be started again."""


class Replica:
  """One server: its client, what it is known to serve, and how much it has to do."""

  def __init__(self, name: str, *, client: VllmClient, server: Server | None, transfer: Transfer | None = None):
    """
    Args:
      server: where it is ours to start and stop; None for an attached one.
      transfer: how weights come into it, of this replica alone; None = from files.
    """
    self.name, self.client, self.server = name, client, server
    self.transfer: Transfer = transfer or FileTransfer()
    self.state = State.DOWN
    self.version: Version | None = None
    """The newest proven one."""
    self.label: str | None = None
    """What its tokens are called under that version."""
    self.holds: str | None = None
    """Label of the whole weights that it was found to have loaded: the version's, or those that adapters stand on."""
    self.proven: set[Version] = set()
    self.life = 0
    """Counts the times that what it holds became unknown; what it was asked for in an earlier life is void."""
    self.in_flight = 0
    self.assigned = 0
    """Requests since the wave began."""
    self.failures = 0
    """In a row, without a completion in between."""
    self.slices: list[Mapping[str, Any]] = []
    """For each worker of the server, what it said of its tensors."""
    self._on_cpu = False
    self._sampling = 0
    """Requests that the server is sampling."""
    self._drained = asyncio.Event()
    """Set while there are none."""
    self._drained.set()
    self.settled = asyncio.Event()
    """Set while no version is being taken: what was sampled before is then proven or void."""
    self.settled.set()
    self.paused_s = 0.0
    """How long the last transaction kept it from sampling."""

  async def generate(self, request: Request, index: int, *, seed: int, deadline_s: float) -> Completion:
    """As `VllmClient.generate`; a publication of adapters waits for it."""
    self._sampling += 1
    self._drained.clear()
    try:
      return await self.client.generate(request, index, seed=seed, deadline_s=deadline_s)
    finally:
      self._sampling -= 1
      if not self._sampling:
        self._drained.set()

  def forget(self) -> None:
    """What it holds is unknown: an update failed, or another process is behind the address, or will be."""
    self.life += 1
    self.version = self.holds = self.client.adapter = None
    self.proven.clear()

  async def recognise(self) -> None:
    """Lost if another process is behind the address than was brought to `version`: nobody has looked at that."""
    if self.version is not None and (label := await self.client.served_label()) != self.label:
      raise Lost(f'engine {self.name}: serves {label!r} and not {self.label}; it was started again by somebody else')

  async def take(self, publication: Publication, probe: Probe | None, *, tolerance: float, deadline_s: float) -> None:
    """Brings the server to a publication, as architecture's contract has it.

    Hold, pause, check what is read, write, digest what is loaded, name the version, forget the cache, resume, probe.
    On CPUs, adapters are probed after the requests in flight have ended, each of which has a deadline: vLLM 0.32's
    kernel for adapters crashed there on prompt logprobs that it batched with them.

    Raises:
      Refused: the files are not what was announced; nothing was written, and the version before goes on.
      Unproven, Lost: what it holds is unknown or wrong.
    """
    self.settled.clear()
    try:
      before = time.monotonic()
      await self._hold_and_send(publication, deadline_s)
      try:
        await self._label(publication, deadline_s)
        self.paused_s = time.monotonic() - before
        if probe is not None:
          if publication.adapter is not None and self._on_cpu:
            await self._drained.wait()  # wait drained: deadlines of the requests in flight
            self.paused_s = time.monotonic() - before
          await self._check_probe(probe, tolerance, deadline_s)
      except Refused as error:  # After it was written.
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
      await self.client.pause()
      for part in (publication.base, publication):
        # What adapters stand on is sent once; a publication itself always.
        if part is publication or (part is not None and part.label != self.holds):
          await self.transfer.send(self.client, part, deadline_s=deadline_s)
    except Refused as error:
      if len(self.slices) > 1:  # Each worker reads for itself: another one may have written.
        raise Lost(str(error)) from None
      await self.client.resume()
      raise

  async def _label(self, publication: Publication, deadline_s: float) -> None:
    whole = publication.base or publication
    if whole is publication or whole.label != self.holds:
      found = await self.client.digests(deadline_s=deadline_s)
      await asyncio.to_thread(self._check_digests, found, whole)
      self.holds = whole.label
    await self.client.set_version(publication)
    await self.client.reset_cache()
    await self.client.resume()

  def _check_digests(self, found: list[dict[str, str]], publication: Publication) -> None:
    if len(found) != len(self.slices):
      raise Unproven(f'engine {self.name}: {len(found)} workers answered, {len(self.slices)} were looked at')
    for worker, (loaded, slices) in enumerate(zip(found, self.slices)):
      wanted = _expected(publication, slices)
      differing = sorted(name for name in wanted.keys() | loaded.keys() if wanted.get(name) != loaded.get(name))
      if differing:
        raise Unproven(
          f'engine {self.name}, worker {worker}: {len(differing)} of {len(wanted)} loaded tensors are not those '
          f'published as {publication.version}: {", ".join(differing[:4])}'
        )

  async def _check_probe(self, probe: Probe, tolerance: float, deadline_s: float) -> None:
    for sequence, wanted in zip(probe.sequences, probe.logprobs, strict=True):
      found = await self.client.prompt_logprobs(sequence.tolist(), deadline_s=deadline_s)
      worst = float(np.abs(found - wanted).max())
      if not worst <= tolerance:
        raise Unproven(
          f"engine {self.name}: its logprobs of the probe differ from the trainer's by up to {worst:.3g}, "
          f'tolerated are {tolerance:g} (rollout.vllm.probe_tolerance)'
        )

  async def is_alive(self, *, deadline_s: float) -> bool:
    """Whether it still samples; a server whose engine hangs answers /health all the same."""
    with contextlib.suppress(Lost, Refused):
      if await self.client.is_healthy():
        if self.client.adapter is None:
          await self.client.prompt_logprobs([0, 0], deadline_s=deadline_s)
        else:  # Beside other requests; see `take`.
          alive = Request(uid=f'alive/{self.name}', prompt=(0,), max_tokens=1, key=(0,))
          await self.client.generate(alive, 0, seed=0, deadline_s=deadline_s)
        return True
    return False

  async def admit(
    self,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: str,
    max_length: int,
    speculative: bool,
    adapter_rank: int = 0,
    deadline_s: float = 600.0,
  ) -> None:
    """Looks at a server that is about to join, and makes it ready to take a version.

    Args:
      shapes: of the policy's tensors, by Hugging Face name.
      dtype: of what is published.
      max_length: tokens of the longest sequence.
      speculative: whether it is known to speculate.
      adapter_rank: of the adapters that it will be given; 0: of none.
      deadline_s: of its first requests, for which it may have to compile.

    Raises:
      UserError: it serves another model, too short sequences, or other logprobs than are wanted.
    """
    where = f'engine {self.name} ({self.client.address})'
    served = await self.client.max_model_len()
    if served < max_length:
      raise UserError(
        f'{where}: max_model_len is {served}, the run needs {max_length} (rollout.max_prompt_length + '
        'max_response_length); start it with a larger --max_model_len'
      )
    try:
      workers = await self.client.weights()
    except (Lost, Refused) as error:
      raise UserError(f'{where}: has no worker extension of ours ({error}); start it with launch/serve.py') from None
    self.slices = [worker['tensors'] for worker in workers]
    self._on_cpu = any(worker['device'] == 'cpu' for worker in workers)
    for tensors in self.slices:
      _check_model(where, tensors, shapes, dtype)
    for worker in workers:
      if worker.get('logprobs_mode', PROCESSED) != PROCESSED:
        raise UserError(
          f'{where}: gives {worker["logprobs_mode"]}, wanted {PROCESSED} (of the temperature-scaled '
          'distribution); start it with launch/serve.py'
        )
      if worker.get('speculative') and not speculative:
        raise UserError(f'{where}: speculates; say so in rollout.vllm.args.speculative_config, for {SPECULATION}')
      if worker.get('adapter_rank', 0) < adapter_rank:
        raise UserError(
          f'{where}: takes no adapters of rank {adapter_rank} while it runs; start it with launch/serve.py … -- '
          f'--enable-lora --max-loras 2 --max-lora-rank {lora_rank(adapter_rank)}, or set rollout.vllm.lora=merged'
        )
    try:
      await self.transfer.connect(self.client)
    except (Lost, Refused) as error:
      raise UserError(
        f'{where}: cannot be sent weights over {self.transfer.backend!r} ({error}); start it with the same '
        'rollout.vllm.transfer, or set another'
      ) from None
    try:
      # A trainer that died while it published leaves a server paused.
      await self.client.resume()
      await self.client.warm_up(sampled=not speculative, deadline_s=deadline_s)
    except (Lost, Refused) as error:
      raise UserError(f'{where}: does not sample ({error}); look into its log, and start it again') from None


PROCESSED = 'processed_logprobs'
"""vLLM's name for logprobs of the distribution that is sampled from."""
SPECULATION = (
  'with speculation only greedy requests are served: tokens that vLLM 0.32 samples with n-gram drafts at temperature '
  '> 0 were measured to be off their distribution (a fifth with logprob -inf)'
)


def _check_model(where: str, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
  names = sorted(tensors.keys() ^ shapes.keys())
  if names:
    raise UserError(f'{where}: serves another model than the policy: only one of the two has {", ".join(names[:4])}')
  for name, wanted in shapes.items():
    found, cut = tuple(tensors[name]['shape']), tensors[name]['slice']
    whole = [axis for axis in range(len(wanted)) if not cut or axis != cut[0]]
    if len(found) != len(wanted) or any(found[axis] != wanted[axis] for axis in whole):
      hint = ' (another vocabulary)' if name in ('model.embed_tokens.weight', 'lm_head.weight') else ''
      raise UserError(f"{where}: {name} is {found}, the policy's is {wanted}{hint}; serve the policy's config.json")
    if tensors[name]['dtype'] != dtype:
      raise UserError(
        f'{where}: {name} is {tensors[name]["dtype"]}, published is {dtype}; start it with --dtype={dtype}, or set '
        'rollout.vllm.dtype'
      )


def _expected(publication: Publication, slices: Mapping[str, Any]) -> dict[str, str]:
  """Digests of what a worker ought to hold: of the whole tensors, or of its part of each."""
  if all(tensor['slice'] is None for tensor in slices.values()):
    return publication.digests
  try:
    whole = read_checked(publication.files, publication.directory)
  except ValueError as error:  # It may have been let go meanwhile.
    raise Lost(str(error)) from None
  return {name: digest(_part(array, slices[name])) for name, array in whole.items() if name in slices}


def _part(array: np.ndarray, tensor: Mapping[str, Any]) -> np.ndarray:
  if tensor['slice'] is None:
    return array
  axis, start = tensor['slice']
  return array.take(range(start, start + tensor['shape'][axis]), axis)
