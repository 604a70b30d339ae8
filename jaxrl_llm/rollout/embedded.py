"""The embedded engine: prefill and decode in JAX, on this process's own device, behind the Engine protocol.

Invariant: there is one decode program of a fixed number of slots and one prefill program per planned bucket, always
padded to their shapes; so a request's tokens are the same whatever shares the batch, and nothing compiles after
`start`. A request's prompt is prefilled once for all its samples; a finished slot is refilled while others decode.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Params, Version
from jaxrl_llm.experience.sample import Finish, Segment
from jaxrl_llm.models.api import Model, unstack_layers
from jaxrl_llm.rollout.api import Completion, Request
from jaxrl_llm.rollout.sampling import draw, draw_filtered, row_key

_STOPS = 8
"""Stop ids a request may have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedConfig:
  """Shapes of the engine's programs."""

  slots: int = 64
  """Sequences decoded at a time."""
  prefill_rows: int = 8
  """Prompts of one prefill."""
  prefill_buckets: tuple[int, ...] = ()
  """Lengths, in tokens, that prompts are padded to; the longest prompt's is always one."""
  decode_steps: int = 16
  """Tokens per slot between two looks at which slots have finished."""


@flax.struct.dataclass
class _Slots:
  """Device state of the decode program; row i is slot i."""

  cache: Any
  tokens: Any
  """i32[slots]: the token that is fed next."""
  positions: Any
  """i32[slots]: its position."""
  active: Any
  """bool[slots]"""
  made: Any
  """i32[slots]: completion tokens so far."""
  limits: Any
  """i32[slots]: completion tokens at most."""
  stops: Any
  """i32[slots, _STOPS], -1 where unused"""
  keys: Any
  """u32[slots, 2]"""
  temperature: Any
  top_k: Any
  top_p: Any
  out_tokens: Any
  """i32[slots, length]"""
  out_logprobs: Any
  """f32[slots, length]"""


@flax.struct.dataclass
class _Admission:
  """What `admit` puts into slots; `source` -1 leaves a slot alone, else it is the row of the prefill."""

  source: Any
  tokens: Any
  positions: Any
  limits: Any
  stops: Any
  keys: Any
  temperature: Any
  top_k: Any
  top_p: Any


@dataclasses.dataclass(eq=False)
class _Call:
  """One `generate` under way."""

  request: Request
  results: asyncio.Queue
  cancelled: bool = False


@dataclasses.dataclass(eq=False)
class _Prefilled:
  """A prefill whose prompts still have samples to admit."""

  cache: Any
  waiting: collections.deque[tuple[int, _Call, int]]
  """(row of the prefill, call, sample index)"""


@dataclasses.dataclass(eq=False)
class _Occupant:
  """Who is in a slot, and which version wrote up to where."""

  call: _Call
  index: int
  segments: list[tuple[int, Version]]
  """(first completion token, version), ascending"""


class EmbeddedEngine:
  """An Engine in this process."""

  name = 'embedded'

  def __init__(
    self,
    model: Model,
    config: EmbeddedConfig,
    *,
    max_prompt: int,
    max_completion: int,
    filtered: bool,
    seed: int,
    run: Callable[..., Awaitable[Any]],
    device: jax.Device | None = None,
  ):
    """
    Args:
      model: without scan_layers.
      config: shapes.
      max_prompt, max_completion: tokens of the longest prompt and of the longest completion.
      filtered: whether requests with top_p or top_k will come; their decode program is compiled only then.
      seed: one part of what every draw is counted by.
      run: awaits a function on the device thread.
      device: where it computes; None = this process's first.
    """
    self._model, self._config, self._seed, self._run = model, config, seed, run
    self._max_prompt, self._max_completion, self._max_length = max_prompt, max_completion, max_prompt + max_completion
    self._device = jax.local_devices()[0] if device is None else device
    self._buckets = sorted({*(b for b in config.prefill_buckets if b < max_prompt), max_prompt})
    self._version: Version | None = None
    self._params: Params | None = None
    self._slots: _Slots | None = None
    self._occupants: dict[int, _Occupant] = {}
    self._queue: collections.deque[_Call] = collections.deque()
    self._prefilled: collections.deque[_Prefilled] = collections.deque()
    self._work = asyncio.Event()
    self._hold = asyncio.Lock()
    self._driver: asyncio.Task | None = None
    self.counts: collections.Counter[str] = collections.Counter()
    """Programs run so far: prefill, admit, decode; and `steps`, decode steps of the whole batch."""
    self._prefill = jax.jit(self._prefill_program)
    self._admit = jax.jit(self._admit_program, donate_argnums=0)
    self._decode = {
      filtered: jax.jit(functools.partial(self._decode_program, filtered=filtered), donate_argnums=1)
      for filtered in ((False, True) if filtered else (False,))
    }

  @property
  def version(self) -> Version | None:
    return self._version

  async def start(self) -> None:
    self._slots = await self._run(self._fresh_slots)
    self._driver = asyncio.create_task(self._drive())

  async def close(self) -> None:
    if self._driver is not None:
      self._driver.cancel()
      await asyncio.wait({self._driver})
    for call in self._calls():
      call.results.put_nowait(RunError('embedded engine: closed while requests were under way'))

  async def load(self, params_host: Params, version: Version) -> None:
    async with self._hold:
      first = self._params is None
      self._params = await self._run(self._place, params_host)
      if first:
        await self._run(self._warm_up)
      self._version = version
      for slot, occupant in self._occupants.items():
        made = int(await self._run(lambda s=slot: np.asarray(self._slots.made)[s]))
        if made == occupant.segments[-1][0]:
          occupant.segments.pop()
        occupant.segments.append((made, version))

  async def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """Yields (sample index, completion) as each of the request's samples ends."""
    self._check(request)
    call = _Call(request, asyncio.Queue())
    self._queue.append(call)
    self._work.set()
    try:
      for _ in range(request.samples):
        result = await call.results.get()
        if isinstance(result, Exception):
          raise result
        yield result
    finally:
      call.cancelled = True

  def _check(self, request: Request) -> None:
    if len(request.prompt) > self._max_prompt or request.max_tokens > self._max_completion:
      raise UserError(
        f'request {request.uid}: prompt of {len(request.prompt)} and max_tokens of {request.max_tokens} tokens, the '
        f'engine was planned for {self._max_prompt} and {self._max_completion}; raise rollout.max_prompt_length or '
        'rollout.max_response_length'
      )
    if request.sampling.filtered not in self._decode:
      raise UserError(f'request {request.uid}: {request.sampling} filters, the engine was planned without filters')
    if len(request.stop_ids) > _STOPS:
      raise UserError(f'request {request.uid}: {len(request.stop_ids)} stop ids, the engine takes {_STOPS}')

  def _calls(self) -> set[_Call]:
    waiting = {call for prefilled in self._prefilled for _, call, _ in prefilled.waiting}
    return {*self._queue, *waiting, *(o.call for o in self._occupants.values())}

  # The driver: admit, decode, harvest; one device call at a time.

  async def _drive(self) -> None:
    try:
      while True:
        if not (self._queue or self._prefilled or self._occupants):
          self._work.clear()
          await self._work.wait()
        async with self._hold:
          await self._admit_waiting()
          if self._occupants:
            await self._decode_once()
        await asyncio.sleep(0)
    except Exception as error:  # The fate of every call under way is decided here: it fails with this error.
      for call in self._calls():
        call.results.put_nowait(error)
      raise

  def _kind(self) -> bool | None:
    """Whether what is decoding is filtered; None when nothing is."""
    return next((o.call.request.sampling.filtered for o in self._occupants.values()), None)

  async def _admit_waiting(self) -> None:
    """Fills free slots, prefilling as many prompts as they need."""
    free = [slot for slot in range(self._config.slots) if slot not in self._occupants]
    while free:
      if not self._prefilled and not await self._prefill_next():
        return
      prefilled = self._prefilled[0]
      taken = self._take(prefilled, free)
      if taken:
        admission = self._admission(taken)
        self._slots = await self._run(self._admit, self._slots, prefilled.cache, admission)
        self.counts['admit'] += 1
        free = free[len(taken) :]
      if not prefilled.waiting:
        self._prefilled.popleft()
      elif not taken:
        return

  def _take(self, prefilled: _Prefilled, free: list[int]) -> list[tuple[int, int, _Occupant]]:
    """(slot, prefill row, occupant) for as many waiting samples as there are free slots."""
    taken = []
    while prefilled.waiting and len(taken) < len(free):
      row, call, index = prefilled.waiting.popleft()
      if not call.cancelled:
        occupant = _Occupant(call, index, [(0, self._version)])
        taken.append((free[len(taken)], row, occupant))
    self._occupants.update({slot: occupant for slot, _, occupant in taken})
    return taken

  async def _prefill_next(self) -> bool:
    """Prefills the next waiting prompts of one kind and bucket; False when none may start now."""
    calls: list[_Call] = []
    kind, bucket = self._kind(), None
    while self._queue and len(calls) < self._config.prefill_rows:
      call = self._queue[0]
      if call.cancelled:
        self._queue.popleft()
        continue
      filtered, length = call.request.sampling.filtered, self._bucket(len(call.request.prompt))
      if (kind is not None and filtered != kind) or (bucket is not None and length != bucket):
        break
      kind, bucket = filtered, length
      calls.append(self._queue.popleft())
    if not calls:
      return False
    tokens = np.zeros((self._config.prefill_rows, bucket), np.int32)
    for row, call in enumerate(calls):
      tokens[row, : len(call.request.prompt)] = call.request.prompt
    cache = await self._run(self._prefill, self._params, tokens)
    self.counts['prefill'] += 1
    waiting = collections.deque(
      (row, call, index) for row, call in enumerate(calls) for index in range(call.request.samples)
    )
    self._prefilled.append(_Prefilled(cache, waiting))
    return True

  def _bucket(self, length: int) -> int:
    return next(b for b in self._buckets if b >= length)

  def _admission(self, taken: list[tuple[int, int, _Occupant]]) -> _Admission:
    admission = self._no_admission()
    for slot, row, occupant in taken:
      request, sampling = occupant.call.request, occupant.call.request.sampling
      admission.source[slot] = row
      admission.tokens[slot] = request.prompt[-1]
      admission.positions[slot] = len(request.prompt) - 1
      admission.limits[slot] = request.max_tokens
      admission.stops[slot, : len(request.stop_ids)] = request.stop_ids
      admission.keys[slot] = row_key(seed=self._seed, words=request.key, sample_index=occupant.index)
      admission.temperature[slot] = sampling.temperature
      admission.top_k[slot], admission.top_p[slot] = sampling.top_k, sampling.top_p
    return admission

  def _no_admission(self) -> _Admission:
    n = self._config.slots
    return _Admission(
      source=np.full(n, -1, np.int32),
      tokens=np.zeros(n, np.int32),
      positions=np.zeros(n, np.int32),
      limits=np.zeros(n, np.int32),
      stops=np.full((n, _STOPS), -1, np.int32),
      keys=np.zeros((n, 2), np.uint32),
      temperature=np.ones(n, np.float32),
      top_k=np.full(n, -1, np.int32),
      top_p=np.ones(n, np.float32),
    )

  async def _decode_once(self) -> None:
    """Some decode steps, and the completions that ended in them."""
    self._slots, ended = await self._run(self._decode_and_fetch, bool(self._kind()))
    active, made, tokens, logprobs, stopped, steps = ended
    self.counts['decode'] += 1
    self.counts['steps'] += int(steps)
    for slot, occupant in list(self._occupants.items()):
      if not active[slot] or occupant.call.cancelled:
        del self._occupants[slot]
        if not occupant.call.cancelled:
          count = int(made[slot])
          completion = self._completion(occupant, tokens[slot, :count], logprobs[slot, :count], bool(stopped[slot]))
          occupant.call.results.put_nowait((occupant.index, completion))

  def _decode_and_fetch(self, filtered: bool):
    slots, stopped, steps = self._decode[filtered](self._params, self._slots)
    fetched = jax.device_get((slots.active, slots.made, slots.out_tokens, slots.out_logprobs, stopped, steps))
    return slots, fetched

  def _completion(self, occupant: _Occupant, tokens, logprobs, stopped: bool) -> Completion:
    finish = Finish.STOP if stopped else Finish.LENGTH
    ends = [start for start, _ in occupant.segments[1:]] + [len(tokens)]
    segments = tuple(
      Segment(start=start, end=end, version=version, engine=self.name, finish=str(finish))
      for (start, version), end in zip(occupant.segments, ends, strict=True)
      if end > start
    )
    return Completion(tokens=tokens.copy(), logprobs=logprobs.copy(), finish=finish, segments=segments)

  # Device programs.

  def _place(self, params_host: Params) -> Params:
    """Own device buffers: `jnp.array` copies, where `device_put` may alias the host's."""
    with jax.default_device(self._device):
      return jax.tree.map(jnp.array, unstack_layers(params_host))

  def _fresh_slots(self) -> _Slots:
    n, length = self._config.slots, self._max_length
    with jax.default_device(self._device):
      integers = lambda *shape: jnp.zeros((n, *shape), jnp.int32)
      return _Slots(
        cache=self._model.init_cache(n, length),
        tokens=integers(),
        positions=integers(),
        active=jnp.zeros(n, bool),
        made=integers(),
        limits=integers(),
        stops=integers(_STOPS),
        keys=jnp.zeros((n, 2), jnp.uint32),
        temperature=jnp.ones(n, jnp.float32),
        top_k=integers(),
        top_p=jnp.ones(n, jnp.float32),
        out_tokens=integers(length),
        out_logprobs=jnp.zeros((n, length), jnp.float32),
      )

  def _warm_up(self) -> None:
    """Runs every program once on nothing, so that none compiles later."""
    nobody = self._no_admission()
    for bucket in self._buckets:
      cache = self._prefill(self._params, np.zeros((self._config.prefill_rows, bucket), np.int32))
      self._slots = self._admit(self._slots, cache, nobody)
    for filtered in self._decode:
      self._slots, _ = self._decode_and_fetch(filtered)

  def _prefill_program(self, params: Params, tokens):
    """Keys and values of prompts `[rows, bucket]`; what padding writes is overwritten before it is seen."""
    rows, bucket = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(bucket, dtype=jnp.int32), tokens.shape)
    return self._model.decode(params, tokens, positions, self._model.init_cache(rows, bucket))[1]

  def _admit_program(self, slots: _Slots, prefilled, admission: _Admission) -> _Slots:
    enters = admission.source >= 0
    rows = jnp.maximum(admission.source, 0)

    def enter(cache, fresh):
      length = fresh.shape[1]
      mixed = jnp.where(enters[:, None, None, None], fresh[rows], cache[:, :length])
      return jax.lax.dynamic_update_slice(cache, mixed, (0, 0, 0, 0))

    choose = lambda new, old: jnp.where(enters.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
    return slots.replace(
      cache=jax.tree.map(enter, slots.cache, prefilled),
      tokens=choose(admission.tokens, slots.tokens),
      positions=choose(admission.positions, slots.positions),
      active=slots.active | enters,
      made=choose(jnp.zeros_like(slots.made), slots.made),
      limits=choose(admission.limits, slots.limits),
      stops=choose(admission.stops, slots.stops),
      keys=choose(admission.keys, slots.keys),
      temperature=choose(admission.temperature, slots.temperature),
      top_k=choose(admission.top_k, slots.top_k),
      top_p=choose(admission.top_p, slots.top_p),
    )

  def _decode_program(self, params: Params, slots: _Slots, *, filtered: bool):
    """Up to `decode_steps` tokens for every active slot; stops early when none is active any more."""
    kernel = self._model.head_kernel(params)
    rows = jnp.arange(self._config.slots)

    def step(carry):
      slots, stopped, i = carry
      hidden, cache = self._model.decode(params, slots.tokens[:, None], slots.positions[:, None], slots.cache)
      logits = jnp.einsum(
        'be,ve->bv', hidden[:, 0], kernel.astype(hidden.dtype), preferred_element_type=jnp.float32
      )
      positions = slots.positions + 1
      if filtered:
        drawn = draw_filtered(logits, slots.keys, positions, slots.temperature, slots.top_k, slots.top_p)
      else:
        drawn = draw(logits, slots.keys, positions, slots.temperature)
      # A slot that is not active writes beyond its buffer, which drops the write.
      at = jnp.where(slots.active, slots.made, self._max_length)
      hit = slots.active & (slots.stops == drawn.tokens[:, None]).any(-1)
      made = slots.made + slots.active
      return (
        slots.replace(
          cache=cache,
          tokens=jnp.where(slots.active, drawn.tokens, slots.tokens),
          positions=jnp.where(slots.active, positions, slots.positions),
          active=slots.active & ~hit & (made < slots.limits),
          made=made,
          out_tokens=slots.out_tokens.at[rows, at].set(drawn.tokens, mode='drop'),
          out_logprobs=slots.out_logprobs.at[rows, at].set(drawn.logprobs, mode='drop'),
        ),
        stopped | hit,
        i + 1,
      )

    going = lambda carry: (carry[2] < self._config.decode_steps) & carry[0].active.any()
    stopped = jnp.zeros(self._config.slots, bool)
    return jax.lax.while_loop(going, step, (slots, stopped, jnp.zeros((), jnp.int32)))
