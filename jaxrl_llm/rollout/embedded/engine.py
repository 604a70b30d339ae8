"""Embedded engine: samples in the trainer's process, with continuous batching over a fixed number
of decode slots.

Invariant: as long as the weights stay the same, other requests affect when a token is sampled, but
never which token is sampled. The padded length of a prompt (its bucket) and the number of decoded
rows depend only on the request and the configuration. The random numbers depend only on the seed,
the request, the sample index and the token position.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.process_clock import TOKENS
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.api import Model
from jaxrl_llm.rollout.api import Completion, Request, Sampling, Weights, joined
from jaxrl_llm.rollout.embedded.placement import EmbeddedMesh, place
from jaxrl_llm.rollout.embedded.programs import Decoded, Programs
from jaxrl_llm.rollout.embedded.scheduler import QueuedRequest, Scheduler, Turn
from jaxrl_llm.rollout.embedded.speculation import SpeculationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedConfig:
  """Settings of the embedded engine, which determine the shapes of its programs. They affect memory
  and compilation, but not the random numbers of sampling.
  """

  slots: int = 64
  """Number of sequences decoded at a time."""
  prefill_rows: int = 8
  """Number of prompts prefilled at a time."""
  prefill_buckets: tuple[int, ...] = ()
  """Lengths in tokens to which prompts are padded. Each length has its own compiled program. If
  empty, the lengths are powers of two from 16, capped at the length of the longest sequence.
  """
  decode_steps: int = 16
  """Maximum number of decode steps in one device call. A step samples one token in each slot, or
  several with `speculation`. Finished sequences are returned, and weights are updated, only between
  calls.
  """
  max_stop_ids: int = 8
  """Maximum number of stop tokens per request."""
  filters: bool = True
  """Whether requests may use top_p or top_k, as some evaluations do. If so, one more decode program
  is compiled.
  """
  speculation: SpeculationConfig | None = None
  """Speculative decoding: the engine drafts tokens by copying text from the prompt and the answer
  so far, and verifies several of them in one decode step. None turns it off.
  """
  mesh: EmbeddedMesh | None = None
  """Mesh of the devices of process 0 on which the engine samples. If None, the engine uses only the
  first of them, whatever the trainer's mesh.
  """
  kv: Literal['recompute', 'keep'] | None = None
  """Treatment of the KV cache at a weight update while completions are running, which is possible
  only at a staleness bound above 0. 'recompute': keys and values are recomputed with the new
  weights. 'keep': they are kept, so the update is faster, and later tokens attend to keys and
  values from earlier weights. 'keep' is refused at bound 0. None means 'keep', and is permitted at
  every bound.
  """

  def __post_init__(self):
    for name in ('slots', 'prefill_rows', 'decode_steps', 'max_stop_ids'):
      if getattr(self, name) < 1:
        raise UserError(f'rollout.embedded.{name}: got {getattr(self, name)}, wanted at least 1')
    if any(bucket < 1 for bucket in self.prefill_buckets):
      raise UserError(
        f'rollout.embedded.prefill_buckets: got {self.prefill_buckets}, wanted positive token '
        'counts'
      )

  def unsupported(self, sampling: Sampling) -> str | None:
    """Returns the reason why an engine with this configuration cannot use the given sampling
    parameters, or None if it can.
    """
    if sampling.filtered and not self.filters:
      return 'top_p or top_k needs rollout.embedded.filters, which is off'
    return None


def plan_buckets(buckets: tuple[int, ...], *, max_length: int) -> tuple[int, ...]:
  """Returns the padded prompt lengths (buckets) in ascending order and without duplicates. Lengths
  above `max_length` are reduced to it. If `buckets` is empty, powers of two from 16 are used.
  """
  # Prefill omits the prompt's last token, and at least one token is sampled after the prompt.
  # Hence at most max_length - 2 tokens are prefilled.
  buckets = buckets or tuple(1 << i for i in range(4, max(15, max_length - 3).bit_length() + 1))
  return tuple(sorted({min(bucket, max_length) for bucket in buckets}))


def build_programs(
  model: Model, config: EmbeddedConfig, max_length: int, devices: Sequence[jax.Device]
) -> Programs:
  """Builds the uncompiled programs of an engine for sequences of at most `max_length` tokens.

  Args:
    devices: devices of process 0.

  Raises:
    UserError: the devices cannot form the configured mesh, or the mesh does not suit the model.
  """
  return Programs(
    model,
    slots=config.slots,
    max_length=max_length,
    prefill_rows=config.prefill_rows,
    buckets=plan_buckets(config.prefill_buckets, max_length=max_length),
    decode_steps=config.decode_steps,
    max_stop_ids=config.max_stop_ids,
    speculation=config.speculation,
    placement=place(config.mesh, devices, spec=model.spec, slots=config.slots),
  )


class EmbeddedEngine:
  """Engine that samples from a JAX model in this process. The methods are specified in
  `rollout.api.Engine`.

  A weight update keeps the KV cache of running completions, so their later tokens attend to keys
  and values of both versions, unless `EmbeddedConfig.kv` is 'recompute'. The segments of a
  completion record which version sampled each token. After a weight update, prompts that were
  prefilled for samples without a slot are prefilled again. At staleness bound 0, no completion is
  running during a weight update.
  """

  def __init__(
    self,
    model: Model,
    config: EmbeddedConfig,
    *,
    max_length: int,
    seed: int,
    run: Callable[..., Awaitable[Any]],
    name: str = 'embedded',
    devices: Sequence[jax.Device] | None = None,
  ):
    """
    Args:
      model: a language model (with the head 'lm'). Its `options.dtype` is the data type of this
        engine's weights, activations and KV cache.
      max_length: length of the longest sequence in tokens, including its prompt.
      seed: seed of all sampling, combined with each request's key.
      run: calls its first argument with the remaining arguments on the process's device thread, and
        returns the result.
      name: name in segments and messages.
      devices: devices for the engine: the configured mesh needs all of them, and without a mesh,
        the engine uses the first. If None, these are the devices of this process.

    Raises:
      UserError: the devices cannot form the configured mesh, or the mesh does not suit the model.
    """
    self.name = name
    self.counts: collections.Counter[str] = collections.Counter()
    """Totals since the start: prefill_calls, prefilled_prompts, decode_calls, decode_steps,
    slot_steps (steps summed over the slots that sampled), tokens, drafted and accepted (tokens of
    speculative decoding), completions, and discarded (tokens of finished completions that no caller
    received).
    """
    self._taken: collections.Counter[str] = collections.Counter()
    self._config, self._run, self._max_length = config, run, max_length
    self._vocab = model.spec.vocab_size
    self._programs = build_programs(
      model, config, max_length, jax.local_devices() if devices is None else devices
    )
    self._version: Version | None = None
    self._scheduler = Scheduler(
      name=name,
      seed=seed,
      slots=config.slots,
      max_length=max_length,
      prefill_rows=config.prefill_rows,
      max_stop_ids=config.max_stop_ids,
      recomputed=self._programs.buckets if config.kv == 'recompute' else (),
    )
    self._sampled_s, self._turn_began = 0.0, None
    self._undelivered = 0
    """Number of tokens in finished completions that have not been delivered yet."""
    self._wake = asyncio.Event()
    self._turns = asyncio.Lock()
    self._driver: asyncio.Task | None = None
    self._failure: Exception | None = None
    self._released = False

  @property
  def is_released(self) -> bool:
    return self._released

  is_outside = False

  @property
  def device_bytes(self) -> int:
    return self._programs.nbytes

  @property
  def version(self) -> Version | None:
    return self._version

  @property
  def sampled_s(self) -> float:
    """Total seconds that the device has spent on turns so far, including the current turn."""
    began = self._turn_began
    return self._sampled_s + (0.0 if began is None else time.perf_counter() - began)

  @property
  def free_slots(self) -> int:
    return self._scheduler.free_slots

  def take_metrics(self) -> dict[str, float]:
    """Returns the metrics since the last call: the numbers of sampled and of discarded tokens and,
    with speculative decoding, the share of drafted tokens that were accepted and the number of
    tokens per slot and step. The metric `open` is the number of sampled tokens that are in
    unfinished or undelivered completions now. Ratios without data are omitted.
    """
    totals = self.counts + collections.Counter(discarded=self._scheduler.discarded)
    since, self._taken = totals - self._taken, totals
    metrics = {
      f'{TOKENS}generated': float(since['tokens']),
      f'{TOKENS}discarded': float(since['discarded']),
      f'{TOKENS}open': float(self._scheduler.open_tokens + self._undelivered),
    }
    if self._config.speculation is not None and since['slot_steps']:
      metrics['speculation/tokens_per_step'] = since['tokens'] / since['slot_steps']
      if since['drafted']:
        metrics['speculation/accepted_ratio'] = since['accepted'] / since['drafted']
    return metrics

  async def start(self) -> None:
    await self._run(self._programs.compile, filtered=self._config.filters)
    if not self._released:
      await self._run(self._programs.restore)
    self._driver = asyncio.create_task(self._drive(), name=f'engine {self.name}')

  async def close(self) -> None:
    if self._driver is not None:
      self._driver.cancel()
      # Wait 'cancelled': short, since the task has just been cancelled.
      await asyncio.wait({self._driver})
    self._fail(RunError(f'engine {self.name}: closed'))

  async def load(self, weights: Weights) -> None:
    """Loads weights without checking their probe, because this engine runs the trainer's own model
    in the trainer's process.
    """
    version = weights.version
    async with self._turns:
      self._check_alive()
      try:
        await self._run(lambda: self._programs.load(joined(weights.leaves)))
      except BaseException as error:
        # On a mesh, the earlier weights are freed before a load.
        if self._config.mesh is not None or isinstance(error, asyncio.CancelledError):
          self._fail(
            RunError(
              f'engine {self.name}: a load was aborted half-way, so its weights have no known '
              'version'
            )
          )
        raise
      self._version = version
      self._scheduler.reweigh(version)
    self._wake.set()

  async def relabel(self, version: Version) -> None:
    async with self._turns:
      self._check_alive()
      if self._version is None:
        raise RuntimeError(f'engine {self.name}: call load before relabel')
      self._version = version
      self._scheduler.relabel(version)

  async def release(self, how: str) -> None:
    async with self._turns:
      self._check_alive()
      self._scheduler.vacate()
      await self._run(self._programs.release)
      self._released = True

  async def restore(self) -> None:
    async with self._turns:
      self._check_alive()
      await self._run(self._programs.restore)
      self._released = False
    self._wake.set()

  async def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    self._check_alive()
    if self._version is None or self._driver is None:
      raise RuntimeError(f'engine {self.name}: call start and load before generate')
    queued = QueuedRequest(request, self._check(request))
    self._scheduler.add(queued)
    self._wake.set()
    try:
      for _ in range(request.samples):
        # Wait 'completion': bounded by the waits 'collect' and 'suite' (docs/develop/waits.md).
        result = await queued.results.get()
        if isinstance(result, Exception):
          raise result
        self._undelivered -= len(result[1].tokens)
        yield result
    finally:
      queued.left = True
      self._discard_results(queued)
      self._wake.set()

  def _discard_results(self, queued: QueuedRequest) -> None:
    """Drops the undelivered completions of a request whose caller has gone away, and counts their
    tokens as discarded.
    """
    while not queued.results.empty():
      result = queued.results.get_nowait()
      if not isinstance(result, Exception):
        self._undelivered -= len(result[1].tokens)
        self.counts['discarded'] += len(result[1].tokens)

  def _check(self, request: Request) -> int:
    """Returns the length (bucket) to which the request's prompt is padded. Raises UserError if the
    engine cannot serve the request.
    """
    length, where = len(request.prompt), f'request {request.uid}'
    if length + request.max_tokens > self._max_length:
      raise UserError(
        f'{where}: {length} prompt tokens and max_tokens {request.max_tokens} exceed the maximum '
        f'length of {self._max_length} of engine {self.name}; raise rollout.max_prompt_length or '
        'max_response_length, or request fewer'
      )
    # The first decode step takes the prompt's last token, so prefill leaves it out.
    buckets = [bucket for bucket in self._programs.buckets if bucket >= length - 1]
    if not buckets:
      raise UserError(
        f'{where}: a prompt of {length} tokens fits none of rollout.embedded.prefill_buckets '
        f'{self._programs.buckets}; add one of at least {length - 1}'
      )
    if not all(0 <= token < self._vocab for token in (*request.prompt, *request.stop_ids)):
      raise UserError(
        f"{where}: token ids outside the vocabulary of {self._vocab}; use the model's tokenizer"
      )
    if len(request.stop_ids) > self._config.max_stop_ids:
      raise UserError(
        f'{where}: {len(request.stop_ids)} stop ids, wanted at most rollout.embedded.max_stop_ids '
        f'{self._config.max_stop_ids}'
      )
    if reason := self._config.unsupported(request.sampling):
      raise UserError(f'{where}: {reason}')
    return min(buckets)

  def _check_alive(self) -> None:
    if self._failure is not None:
      raise RunError(f'engine {self.name}: ended: {self._failure}') from self._failure

  async def _drive(self) -> None:
    """Executes turns (units of device work) as long as there is work, and otherwise waits for
    requests. An error ends the engine, because the device state was donated to the failed call and
    is lost.
    """
    try:
      while True:
        async with self._turns:
          self._wake.clear()
          turn = None if self._released else self._scheduler.plan(self._version)
          if turn is not None:
            decoded = await self._run(self._execute, turn)
            ended = self._scheduler.harvest(decoded)
            self.counts['completions'] += len(ended)
            for queued, tokens in ended:
              self._undelivered += tokens
              if queued.left:
                self._discard_results(queued)
        if turn is None:
          # Wait 'request': unbounded: an idle engine waits for its next request.
          await self._wake.wait()
    except Exception as error:
      logging.exception(
        'engine %s: a device call failed, and with it %d requests',
        self.name,
        len(self._scheduler.requests()),
      )
      self._fail(error)

  def _fail(self, error: Exception) -> None:
    if self._failure is None:
      self._failure = error
    for queued in self._scheduler.requests():
      queued.results.put_nowait(error)

  def _execute(self, turn: Turn) -> Decoded:
    """Runs a turn on the device thread."""
    self._turn_began = began = time.perf_counter()
    try:
      return self._executed(turn)
    finally:
      self._turn_began, self._sampled_s = None, self._sampled_s + time.perf_counter() - began

  def _executed(self, turn: Turn) -> Decoded:
    for prefill in turn.prefills:
      tokens = np.zeros((self._config.prefill_rows, prefill.bucket), np.int32)
      for row, sequence in enumerate(prefill.sequences):
        tokens[row, : len(sequence)] = sequence
      prefill.result = self._programs.prefill(tokens)
    for prefill, matrix in turn.admissions:
      self._programs.admit(prefill.result, matrix)
    decoded = self._programs.decode(turn.control, filtered=turn.filtered)
    self.counts['prefill_calls'] += len(turn.prefills)
    self.counts['prefilled_prompts'] += sum(len(prefill.sequences) for prefill in turn.prefills)
    self.counts['decode_calls'] += 1
    self.counts['decode_steps'] += int(decoded.steps.max())
    self.counts['slot_steps'] += int(decoded.steps.sum())
    self.counts['tokens'] += int(decoded.produced.sum())
    self.counts['drafted'] += int(decoded.drafted.sum())
    self.counts['accepted'] += int(decoded.accepted.sum())
    return decoded
