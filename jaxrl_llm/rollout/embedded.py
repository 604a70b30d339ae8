"""The engine inside the trainer's process: requests are dealt to a fixed number of decode slots, freed ones refilled.

Invariant: load decides only when a token is drawn, never which: a prompt's bucket and the decode width are functions of
the request and the configuration, and randomness is counted by request, sample and position.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Params, Version
from jaxrl_llm.experience.sample import Finish, Segment
from jaxrl_llm.models.api import Model
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.rollout.api import CUT, Completion, Request
from jaxrl_llm.rollout.programs import Admission, Decoded, Programs
from jaxrl_llm.rollout.sampling import row_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedConfig:
  """Shapes of the embedded engine; each of them costs memory or compilations, none changes what is drawn at random."""

  slots: int = 64
  """Sequences decoded at a time."""
  prefill_rows: int = 8
  """Prompts prefilled at a time."""
  prefill_buckets: tuple[int, ...] = ()
  """Tokens that prompts are padded to, a program each; empty = powers of two from 16 up to the longest sequence."""
  decode_steps: int = 16
  """Tokens of a slot per device call, at most: how soon ended ones are seen, and weights can be replaced."""
  max_stop_ids: int = 8
  """Stop tokens of one request, at most."""
  filters: bool = True
  """Whether requests may ask for top_p or top_k (evaluation); one program more to compile."""

  def __post_init__(self):
    for name in ('slots', 'prefill_rows', 'decode_steps', 'max_stop_ids'):
      if getattr(self, name) < 1:
        raise UserError(f'rollout.embedded.{name}: got {getattr(self, name)}, wanted at least 1')
    if any(bucket < 1 for bucket in self.prefill_buckets):
      raise UserError(f'rollout.embedded.prefill_buckets: got {self.prefill_buckets}, wanted positive token counts')


def plan_buckets(buckets: tuple[int, ...], *, max_length: int) -> tuple[int, ...]:
  """Ascending, each once, none longer than a sequence; powers of two from 16 where none are given."""
  buckets = buckets or tuple(1 << i for i in range(4, max(max_length - 1, 16).bit_length() + 1))
  return tuple(sorted({min(bucket, max_length) for bucket in buckets}))


class _Job:
  """A request and how far it has got."""

  def __init__(self, request: Request, bucket: int):
    self.request, self.bucket = request, bucket
    self.admitted = 0
    """Samples that have a slot or had one."""
    self.left = False
    """Nobody waits for it any more."""
    self.results: asyncio.Queue[tuple[int, Completion] | Exception] = asyncio.Queue()


@dataclasses.dataclass(eq=False)
class _Prefill:
  """Prompts whose keys and values are on the device, or will be when the turn has run."""

  jobs: tuple[_Job, ...]
  cache: Cache | None = None

  def pending(self) -> int:
    """Samples that wait for a slot."""
    return sum(job.request.samples - job.admitted for job in self.jobs if not job.left)


@dataclasses.dataclass(eq=False)
class _Occupant:
  """The sample that a slot decodes."""

  job: _Job
  index: int
  segments: list[tuple[int, Version]]
  """(first token, version), oldest first."""
  length: int = 0


@dataclasses.dataclass(eq=False)
class _Turn:
  """What the device does between two looks at the queue."""

  prefills: list[_Prefill]
  admissions: list[tuple[_Prefill, np.ndarray]]
  control: np.ndarray
  filtered: bool


class EmbeddedEngine:
  """Draws from a JAX model in this process; see `rollout.api.Engine` for what the methods promise.

  When weights are replaced, what a running completion has in its KV cache stays as the old weights made it: its later
  tokens see keys and values of two versions, and its segments say which tokens are whose. Prompts that were prefilled
  and not begun are prefilled again. At bound 0 nothing runs when weights are replaced.
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
    device: jax.Device | None = None,
  ):
    """
    Args:
      model: an 'lm' model; its `options.dtype` is the type of weights, activations and KV cache here.
      max_length: tokens of the longest sequence, prompt included.
      seed: of all randomness, with the requests' keys.
      run: awaits `function(*args, **kwargs)` on the process's device thread.
      name: in segments and messages.
      device: None = the first of this process.
    """
    self.name = name
    self.counts: collections.Counter[str] = collections.Counter()
    """Since the start: prefill_calls, prefilled_prompts, decode_calls, decode_steps, tokens, completions."""
    self._config, self._seed, self._run, self._max_length = config, seed, run, max_length
    self._vocab = model.spec.vocab_size
    self._programs = Programs(
      model,
      slots=config.slots,
      max_length=max_length,
      prefill_rows=config.prefill_rows,
      buckets=plan_buckets(config.prefill_buckets, max_length=max_length),
      decode_steps=config.decode_steps,
      max_stop_ids=config.max_stop_ids,
      device=jax.local_devices()[0] if device is None else device,
    )
    self._version: Version | None = None
    self._waiting: collections.deque[_Job] = collections.deque()
    self._ready: list[_Prefill] = []
    self._slots: list[_Occupant | None] = [None] * config.slots
    self._tokens = np.zeros((config.slots, max_length), np.int32)
    self._logprobs = np.zeros((config.slots, max_length), np.float32)
    self._filtered = False
    self._wake = asyncio.Event()
    self._turns = asyncio.Lock()
    self._driver: asyncio.Task | None = None
    self._failure: Exception | None = None

  @property
  def version(self) -> Version | None:
    return self._version

  @property
  def free_slots(self) -> int:
    return self._slots.count(None)

  async def start(self) -> None:
    await self._run(self._programs.compile, filtered=self._config.filters)
    self._driver = asyncio.create_task(self._drive(), name=f'engine {self.name}')

  async def close(self) -> None:
    if self._driver is not None:
      self._driver.cancel()
      await asyncio.wait({self._driver})
    self._fail(RunError(f'engine {self.name}: closed'))

  async def load(self, params_host: Params, version: Version) -> None:
    async with self._turns:
      self._check_alive()
      await self._run(self._programs.load, params_host)
      self._version = version
      for occupant in self._slots:
        if occupant is not None:
          cut = [segment for segment in occupant.segments if segment[0] < occupant.length]
          occupant.segments = [*cut, (occupant.length, version)]
      unbegun = [job for prefill in self._ready for job in prefill.jobs if job.admitted < job.request.samples]
      self._ready = []
      self._waiting.extendleft(reversed(unbegun))
    self._wake.set()

  async def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    self._check_alive()
    if self._version is None or self._driver is None:
      raise RuntimeError(f'engine {self.name}: start and load come before generate')
    job = _Job(request, self._check(request))
    self._waiting.append(job)
    self._wake.set()
    try:
      for _ in range(request.samples):
        result = await job.results.get()
        if isinstance(result, Exception):
          raise result
        yield result
    finally:
      job.left = True
      self._wake.set()

  def _check(self, request: Request) -> int:
    """The bucket of the request's prompt; UserError if it is none that this engine can serve."""
    length, where = len(request.prompt), f'request {request.uid}'
    if length + request.max_tokens > self._max_length:
      raise UserError(
        f'{where}: {length} prompt tokens and max_tokens {request.max_tokens} are more than the {self._max_length} of '
        f'engine {self.name}; raise rollout.max_prompt_length or max_response_length, or ask for fewer'
      )
    # The prompt's last token is fed by the first decode step, so that prefill draws nothing.
    buckets = [bucket for bucket in self._programs.buckets if bucket >= length - 1]
    if not buckets:
      raise UserError(
        f'{where}: a prompt of {length} tokens fits none of rollout.embedded.prefill_buckets '
        f'{self._programs.buckets}; add one of at least {length - 1}'
      )
    if not all(0 <= token < self._vocab for token in (*request.prompt, *request.stop_ids)):
      raise UserError(f'{where}: token ids outside the vocabulary of {self._vocab}; another tokenizer than the model?')
    if len(request.stop_ids) > self._config.max_stop_ids:
      raise UserError(
        f'{where}: {len(request.stop_ids)} stop ids, wanted at most rollout.embedded.max_stop_ids '
        f'{self._config.max_stop_ids}'
      )
    if request.sampling.filtered and not self._config.filters:
      raise UserError(f'{where}: top_p or top_k asked for; set rollout.embedded.filters')
    return min(buckets)

  def _check_alive(self) -> None:
    if self._failure is not None:
      raise RunError(f'engine {self.name}: ended: {self._failure}') from self._failure

  async def _drive(self) -> None:
    """Runs turns while there is work. An error ends the engine: its state was given to the call that failed."""
    try:
      while True:
        async with self._turns:
          turn = self._plan()
          if turn is not None:
            self._harvest(await self._run(self._execute, turn))
        if turn is None:
          await self._wake.wait()
    except Exception as error:
      logging.exception('engine %s: a device call failed; %d requests with it', self.name, len(self._jobs()))
      self._fail(error)

  def _fail(self, error: Exception) -> None:
    if self._failure is None:
      self._failure = error
    for job in self._jobs():
      job.results.put_nowait(error)

  def _jobs(self) -> set[_Job]:
    running = {slot.job for slot in self._slots if slot is not None}
    return running | set(self._waiting) | {job for prefill in self._ready for job in prefill.jobs}

  def _plan(self) -> _Turn | None:
    """Frees what nobody waits for, fills free slots, and says what to run; None where there is nothing."""
    self._wake.clear()
    self._slots = [None if slot is None or slot.job.left else slot for slot in self._slots]
    self._waiting = collections.deque(job for job in self._waiting if not job.left)
    self._ready = [prefill for prefill in self._ready if prefill.pending()]
    if self.free_slots == self._config.slots and not self._ready and self._waiting:
      self._filtered = self._waiting[0].request.sampling.filtered
    prefills = self._take_prompts()
    admissions = self._fill_slots()
    occupied = np.array([slot is not None for slot in self._slots])
    if not occupied.any():
      return None
    pending = sum(prefill.pending() for prefill in self._ready)
    pending += sum(job.request.samples - job.admitted for job in self._same_kind())
    # With samples waiting, a call ends as soon as an eighth of the slots can be refilled.
    active = int(occupied.sum())
    until = active - min(active, pending, max(1, self._config.slots // 8)) if pending else 0
    control = np.array([until, *occupied], np.int32)
    return _Turn(prefills=prefills, admissions=admissions, control=control, filtered=self._filtered)

  def _same_kind(self) -> Iterable[_Job]:
    """Waiting jobs up to the first that needs the other decode program: kinds never share a wave, none is starved."""
    for job in self._waiting:
      if job.request.sampling.filtered != self._filtered:
        return
      yield job

  def _take_prompts(self) -> list[_Prefill]:
    """Prefills in the order of arrival, filled up with later prompts of the same bucket."""
    taken = []
    short = self.free_slots - sum(prefill.pending() for prefill in self._ready)
    while short > 0:
      candidates = list(self._same_kind())
      jobs = [job for job in candidates if job.bucket == candidates[0].bucket][: self._config.prefill_rows]
      if not jobs:
        break
      chosen = set(jobs)
      self._waiting = collections.deque(job for job in self._waiting if job not in chosen)
      taken.append(_Prefill(tuple(jobs)))
      short -= taken[-1].pending()
    self._ready += taken
    return taken

  def _fill_slots(self) -> list[tuple[_Prefill, np.ndarray]]:
    """Deals pending samples to free slots; per prefill a matrix with a row for every slot."""
    free = [i for i, slot in enumerate(self._slots) if slot is None]
    samples = (
      (prefill, row, job)
      for prefill in self._ready
      for row, job in enumerate(prefill.jobs)
      if not job.left
      for _ in range(job.request.samples - job.admitted)
    )
    matrices: dict[_Prefill, np.ndarray] = {}
    for slot, (prefill, row, job) in zip(free, samples):
      if prefill not in matrices:
        matrices[prefill] = np.full((self._config.slots, 9 + self._config.max_stop_ids), -1, np.int32)
      self._admission(job, row).bits(matrices[prefill][slot])
      self._slots[slot] = _Occupant(job, job.admitted, [(0, self._version)])
      job.admitted += 1
    self._ready = [prefill for prefill in self._ready if prefill.pending()]
    return list(matrices.items())

  def _admission(self, job: _Job, row: int) -> Admission:
    request = job.request
    return Admission(
      source=row,
      token=request.prompt[-1],
      position=len(request.prompt) - 1,
      remaining=request.max_tokens,
      top_k=request.sampling.top_k,
      temperature=request.sampling.temperature,
      top_p=request.sampling.top_p,
      key=row_key(seed=self._seed, words=request.key, sample_index=job.admitted),
      stop_ids=request.stop_ids,
    )

  def _execute(self, turn: _Turn) -> Decoded:
    """On the device thread."""
    for prefill in turn.prefills:
      tokens = np.zeros((self._config.prefill_rows, prefill.jobs[0].bucket), np.int32)
      for row, job in enumerate(prefill.jobs):
        tokens[row, : len(job.request.prompt) - 1] = job.request.prompt[:-1]
      prefill.cache = self._programs.prefill(tokens)
    for prefill, matrix in turn.admissions:
      self._programs.admit(prefill.cache, matrix)
    decoded = self._programs.decode(turn.control, filtered=turn.filtered)
    self.counts['prefill_calls'] += len(turn.prefills)
    self.counts['prefilled_prompts'] += sum(len(prefill.jobs) for prefill in turn.prefills)
    self.counts['decode_calls'] += 1
    self.counts['decode_steps'] += int(decoded.produced.max())
    self.counts['tokens'] += int(decoded.produced.sum())
    return decoded

  def _harvest(self, decoded: Decoded) -> None:
    """Takes what was drawn, and hands out what has ended."""
    steps, slots = np.nonzero(np.arange(len(decoded.tokens))[:, None] < decoded.produced)
    lengths = np.array([0 if slot is None else slot.length for slot in self._slots])
    self._tokens[slots, lengths[slots] + steps] = decoded.tokens[steps, slots]
    self._logprobs[slots, lengths[slots] + steps] = decoded.logprobs[steps, slots]
    for i, occupant in enumerate(self._slots):
      if occupant is None:
        continue
      occupant.length += int(decoded.produced[i])
      if decoded.remaining[i] == 0:
        self._slots[i] = None
        self.counts['completions'] += 1
        occupant.job.results.put_nowait((occupant.index, self._completion(i, occupant)))

  def _completion(self, slot: int, occupant: _Occupant) -> Completion:
    tokens = self._tokens[slot, : occupant.length].copy()
    finish = Finish.STOP if tokens[-1] in occupant.job.request.stop_ids else Finish.LENGTH
    ends = [start for start, _ in occupant.segments[1:]] + [occupant.length]
    finishes = [CUT] * (len(ends) - 1) + [str(finish)]
    return Completion(
      tokens=tokens,
      logprobs=self._logprobs[slot, : occupant.length].copy(),
      finish=finish,
      segments=tuple(
        Segment(start=start, end=end, version=version, engine=self.name, finish=how)
        for (start, version), end, how in zip(occupant.segments, ends, finishes, strict=True)
      ),
    )
