"""Compiled programs of the embedded engine (prefill, admit, decode) and their state on the device.

Invariant: every shape is fixed when the programs are built. The batch of the decode program has
`slots` rows, and the batch of a prefill program has `prefill_rows` rows of a configured length,
called a bucket. Hence a row's arithmetic does not depend on the other rows. The programs are
compiled ahead of time and reject other shapes, so nothing is compiled later. The programs are not
thread-safe: call them from one thread only.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32, Shaped, UInt32

from jaxrl_llm.core.types import Params
from jaxrl_llm.models.api import Model, unstack_layers
from jaxrl_llm.models.cache import Cache, write_rows
from jaxrl_llm.parallel.memory import shard_bytes
from jaxrl_llm.parallel.rules import constrain
from jaxrl_llm.rollout.embedded.placement import Placement
from jaxrl_llm.rollout.embedded.sampling import Draw, draw, draw_filtered
from jaxrl_llm.rollout.embedded.speculation import SpeculationConfig, propose
from jaxrl_llm.rollout.embedded.weights import copied

_BEGUN = 8
"""Maximum number of prefills in flight, and of admissions; see `DeviceThread`."""


class Slots(NamedTuple):
  """State of the decode slots. `remaining` is 0 in a slot that is free, or whose finished sample
  the host has not collected yet.
  """

  cache: Cache
  token: Int32[Array, 'slots']
  """Newest token of the sequence. Its keys and values are not yet in the cache."""
  position: Int32[Array, 'slots']
  """Position of `token` in its sequence."""
  remaining: Int32[Array, 'slots']
  """Number of tokens that may still be sampled."""
  top_k: Int32[Array, 'slots']
  temperature: Float[Array, 'slots']
  top_p: Float[Array, 'slots']
  key: UInt32[Array, 'slots 2']
  stop_ids: Int32[Array, 'slots stops']
  """Stop tokens, padded with -1."""
  history: Int32[Array, 'slots length']
  """Tokens of the sequence before `token`. Only speculative decoding reads and updates them. With
  speculative decoding, the first `position` entries are valid, and all later entries are arbitrary.
  """


class Prefilled(NamedTuple):
  """Sequences without their last tokens, padded with zeros to the length of a bucket, and the
  sequences' keys and values.
  """

  cache: Cache
  tokens: Int32[Array, 'rows bucket']


class Admission(NamedTuple):
  """One slot's row of the matrix that `Programs.admit` takes. The columns are in the order of these
  fields. Floats and key words are stored as int32 with the same bits.
  """

  source: int
  """Row of the sample's prompt in the prefilled batch. -1 means that the slot keeps its state."""
  token: int
  position: int
  remaining: int
  top_k: int
  temperature: float
  top_p: float
  key: UInt32[np.ndarray, '2']
  stop_ids: tuple[int, ...]

  def write(self, out: Int32[np.ndarray, 'columns']) -> None:
    out[:5] = self.source, self.token, self.position, self.remaining, self.top_k
    out[5:7] = np.array([self.temperature, self.top_p], np.float32).view(np.int32)
    out[7:9] = self.key.view(np.int32)
    out[9 : 9 + len(self.stop_ids)] = self.stop_ids


def admissions_matrix(slots: int, max_stop_ids: int) -> Int32[np.ndarray, 'slots columns']:
  """Returns an argument for `Programs.admit` that admits nothing: every slot keeps its state."""
  return np.full((slots, 9 + max_stop_ids), -1, np.int32)


class Decoded(NamedTuple):
  """Result of one decode call."""

  tokens: Int32[np.ndarray, 'most slots']
  """Sampled tokens. The tokens of slot i are the first `produced[i]` entries of column i."""
  logprobs: Float[np.ndarray, 'most slots']
  produced: Int32[np.ndarray, 'slots']
  remaining: Int32[np.ndarray, 'slots']
  steps: Int32[np.ndarray, 'slots']
  """Number of decode steps that sampled tokens of each slot."""
  drafted: Int32[np.ndarray, 'slots']
  """Number of tokens that were drafted for each slot."""
  accepted: Int32[np.ndarray, 'slots']
  """Number of drafted tokens that were accepted for each slot."""


class Programs:
  """The compiled prefill, admit and decode programs with the weights and slots that they use.

  Call `compile`, `restore` and `load` before `prefill`, `admit` and `decode`.
  """

  def __init__(
    self,
    model: Model,
    *,
    slots: int,
    max_length: int,
    prefill_rows: int,
    buckets: tuple[int, ...],
    decode_steps: int,
    max_stop_ids: int,
    speculation: SpeculationConfig | None = None,
    placement: Placement,
  ):
    """
    Args:
      model: language model. The weights are stored in its compute data type.
      slots: number of rows decoded at a time.
      max_length: length of the longest sequence in tokens, including its prompt.
      prefill_rows: number of prompts prefilled at a time.
      buckets: padded prompt lengths in tokens, ascending.
      decode_steps: number of decode steps per call. A step samples one token per slot, or more with
        speculative decoding.
      max_stop_ids: maximum number of stop tokens per request.
      speculation: options of speculative decoding. If None, each step samples one token per slot.
      placement: devices of the weights, the slots and the programs.
    """
    self.slots, self.buckets, self.prefill_rows, self.decode_steps = (
      slots,
      buckets,
      prefill_rows,
      decode_steps,
    )
    self.max_stop_ids, self.max_length = max_stop_ids, max_length
    self._speculation = speculation
    self._placement, self._model = placement, placement.model(model)
    shapes = jax.eval_shape(lambda: unstack_layers(model.init(jax.random.key(0))))
    dtype = jnp.dtype(model.options.dtype)
    self._shapes = jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding),
      shapes,
      placement.of_params(self._model, shapes),
    )
    self._empty = functools.partial(_empty_slots, model, slots, max_length, max_stop_ids)
    self._slots = self._abstract_rows(jax.eval_shape(self._empty))
    self._params: Params | None = None
    self._state: Slots | None = None
    self._waiting: Params | None = None
    """Copy of the weights in host memory while the device memory is released; None otherwise."""
    self._begun: collections.deque[jax.Array] = collections.deque()
    """Tokens of the newest prefills, which may not have ended."""
    self._admitted = 0
    """Number of admissions since the last one that waited for the earlier ones."""

  @property
  def nbytes(self) -> int:
    """Size in bytes of the weights and the slots on each device."""
    return shard_bytes((self._params, self._state), self._placement.device)

  @property
  def planned_bytes(self) -> int:
    """Size in bytes that the weights and the slots need on each device. It is computed from their
    shapes, so it is known before they are created.
    """
    return sum(
      math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
      for leaf in jax.tree.leaves((self._shapes, self._slots))
    )

  def lower(self, *, filtered: bool) -> dict[tuple[str, int], jax.stages.Lowered]:
    """Lowers every program of the engine. The keys of the result are ('prefill', bucket) and
    ('admit', bucket) for each bucket (padded prompt length), ('decode', False), and ('decode',
    True) if `filtered`.
    """

    whole, state = self._placement.whole, self._slots

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

    lowered, of_state = {}, _shardings(state)
    for bucket in self.buckets:
      tokens, compute = ints(self.prefill_rows, bucket), functools.partial(_prefill, self._model)
      prefilled = self._abstract_rows(jax.eval_shape(compute, self._shapes, tokens))
      prefill = jax.jit(compute, out_shardings=_shardings(prefilled))
      lowered['prefill', bucket] = prefill.lower(self._shapes, tokens)
      admit = jax.jit(_admit, donate_argnums=0, out_shardings=of_state)
      lowered['admit', bucket] = admit.lower(
        state, prefilled, ints(self.slots, 9 + self.max_stop_ids)
      )
    for kind in sorted({False, filtered}):
      decode = jax.jit(
        functools.partial(
          _decode,
          self._model,
          steps=self.decode_steps,
          filtered=kind,
          speculation=self._speculation,
        ),
        donate_argnums=1,
        out_shardings=(of_state, whole),
      )
      lowered['decode', kind] = decode.lower(self._shapes, state, ints(1 + self.slots))
    return lowered

  def compile(self, *, filtered: bool) -> None:
    """Compiles the programs. The decode program with top-k and top-p is compiled only if
    `filtered`. Call `restore` to create the slots.
    """
    self._compiled = {
      name: lowered.compile() for name, lowered in self.lower(filtered=filtered).items()
    }
    self._make_slots = jax.jit(self._empty, out_shardings=_shardings(self._slots)).lower().compile()

  def release(self) -> None:
    """Frees the device memory. The weights are kept in host memory; the contents of the slots are
    lost.
    """
    if self._params is not None:
      self._waiting = jax.tree.map(np.array, self._params)
    for leaf in jax.tree.leaves((self._params, self._state)):
      leaf.delete()
    self._params = self._state = None

  def restore(self) -> None:
    """Creates empty slots. If host memory contains weights, copies them to the device."""
    self._state = jax.block_until_ready(self._make_slots())
    if self._waiting is not None:
      self._params = jax.block_until_ready(jax.device_put(self._waiting, _shardings(self._shapes)))
      self._waiting = None

  def load(self, leaves: Iterable[tuple[str, np.ndarray | jax.Array]]) -> None:
    """Copies the weights to the devices or, while the device memory is released, to host memory;
    see `weights.copied`. On a mesh, the earlier weights are freed first.
    """
    is_released = self._state is None
    if self._placement.mesh is not None:
      self._params = None
    loaded = copied(leaves, self._shapes, to_devices=not is_released)
    if is_released:
      self._waiting = loaded
    else:
      self._params = loaded

  def prefill(self, tokens: Int32[np.ndarray, 'rows bucket']) -> Prefilled:
    """Computes the keys and values of `prefill_rows` prompts, which are padded with zeros to the
    length of a bucket.
    """
    if len(self._begun) == _BEGUN:
      jax.block_until_ready(self._begun.popleft())
    prefilled = self._compiled['prefill', tokens.shape[1]](self._params, tokens)
    self._begun.append(prefilled.tokens)
    return prefilled

  def admit(self, prefilled: Prefilled, admissions: Int32[np.ndarray, 'slots columns']) -> None:
    """Copies prefilled prompts into slots, and sets the slots' other fields (see `Admission`)."""
    self._admitted = (self._admitted + 1) % _BEGUN
    if self._admitted == 0:
      jax.block_until_ready(self._state.token)
    self._state = self._compiled['admit', prefilled.tokens.shape[1]](
      self._state, prefilled, admissions
    )

  def decode(self, control: Int32[np.ndarray, 'controls'], *, filtered: bool) -> Decoded:
    """Runs up to `decode_steps` steps, each of which samples tokens in every active slot.

    Args:
      control: one entry for the call, then one entry per slot. The call stops early once the number
        of active slots is at most the first entry. A slot's entry is 1 if the slot may continue,
        else 0.
      filtered: whether top-k and top-p are applied.
    """
    self._state, out = self._compiled['decode', filtered](self._params, self._state, control)
    rows = np.asarray(out)
    counts = len(Decoded._fields) - 2
    tokens, bits = np.split(rows[:-counts], 2)
    return Decoded(tokens, bits.view(np.float32), *rows[-counts:])

  def _abstract_rows(self, tree: Any) -> Any:
    """Returns the shapes of a tree of rows with the shardings that they have on the devices."""
    return jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      tree,
      self._placement.of_rows(tree),
    )


def _shardings(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.sharding, tree)


def _empty_slots(model: Model, slots: int, length: int, stops: int) -> Slots:
  def zeros(*shape: int, dtype=jnp.int32) -> Array:
    return jnp.zeros((slots, *shape), dtype)

  return Slots(
    cache=model.init_cache(slots, length),
    token=zeros(),
    position=zeros(),
    remaining=zeros(),
    top_k=zeros() - 1,
    temperature=zeros(dtype=jnp.float32) + 1,
    top_p=zeros(dtype=jnp.float32) + 1,
    key=zeros(2, dtype=jnp.uint32),
    stop_ids=zeros(stops) - 1,
    history=zeros(length),
  )


def _prefill(model: Model, params: Params, tokens: Int32[Array, 'rows bucket']) -> Prefilled:
  """Computes the keys and values of padded prompts. The padding's keys and values have no effect,
  because decode overwrites them before any token attends to them.
  """
  rows, bucket = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(bucket, dtype=jnp.int32), tokens.shape)
  _, cache = model.decode(params, tokens, positions, model.init_cache(rows, bucket))
  return Prefilled(cache, tokens)


def _admit(state: Slots, prefilled: Prefilled, admissions: Int32[Array, 'slots columns']) -> Slots:
  source = admissions[:, 0]
  chosen = source >= 0

  def copy(old: Shaped[Array, 'slots *longer'], new: Shaped[Array, 'rows *shorter']) -> Array:
    """Copies to the beginning of every axis but the first."""
    head = old[:, *map(slice, new.shape[1:])]
    rows = jnp.where(chosen.reshape(-1, *(1,) * (old.ndim - 1)), new[jnp.maximum(source, 0)], head)
    return jax.lax.dynamic_update_slice(old, rows, (0,) * old.ndim)

  floats = jax.lax.bitcast_convert_type(admissions[:, 5:7], jnp.float32)
  new = Slots(
    cache=jax.tree.map(copy, state.cache, prefilled.cache),
    token=admissions[:, 1],
    position=admissions[:, 2],
    remaining=admissions[:, 3],
    top_k=admissions[:, 4],
    temperature=floats[:, 0],
    top_p=floats[:, 1],
    key=jax.lax.bitcast_convert_type(admissions[:, 7:9], jnp.uint32),
    stop_ids=admissions[:, 9:],
    history=copy(state.history, prefilled.tokens),
  )

  def keep(
    fresh: Shaped[Array, 'slots *entry'], old: Shaped[Array, 'slots *entry']
  ) -> Shaped[Array, 'slots *entry']:
    return jnp.where(chosen.reshape(-1, *(1,) * (old.ndim - 1)), fresh, old)

  return Slots(
    new.cache, *(keep(fresh, old) for fresh, old in zip(new[1:], state[1:], strict=True))
  )


class _Carry(NamedTuple):
  step: Int32[Array, '']
  state: Slots
  tokens: Int32[Array, 'slots most']
  logprobs: Float[Array, 'slots most']
  produced: Int32[Array, 'slots']
  steps: Int32[Array, 'slots']
  drafted: Int32[Array, 'slots']
  accepted: Int32[Array, 'slots']


def _decode(
  model: Model,
  params: Params,
  state: Slots,
  control: Int32[Array, 'controls'],
  *,
  steps: int,
  filtered: bool,
  speculation: SpeculationConfig | None,
) -> tuple[Slots, Int32[Array, 'rows slots']]:
  """Runs decode steps and returns (new state, results). All results are in one integer array, so
  that one transfer copies them to the host.
  """
  slots = state.token.shape[0]
  width = 1 if speculation is None else 1 + speculation.tokens
  state = state._replace(remaining=jnp.where(control[1:] > 0, state.remaining, 0))
  step = functools.partial(
    _decode_step,
    model,
    params,
    model.head_kernel(params),
    filtered=filtered,
    speculation=speculation,
  )

  def go_on(carry: _Carry) -> Array:
    return (carry.step < steps) & ((carry.state.remaining > 0).sum() > control[0])

  def zeros(*shape: int, dtype=jnp.int32) -> Array:
    return jnp.zeros(shape, dtype)

  start = _Carry(
    zeros(),
    state,
    zeros(slots, steps * width),
    zeros(slots, steps * width, dtype=jnp.float32),
    *(zeros(slots) for _ in range(4)),
  )
  end = jax.lax.while_loop(go_on, step, start)
  bits = jax.lax.bitcast_convert_type(end.logprobs, jnp.int32)
  counts = (end.produced, end.state.remaining, end.steps, end.drafted, end.accepted)
  return end.state, jnp.concatenate([end.tokens.T, bits.T, jnp.stack(counts)])


def _decode_step(
  model: Model,
  params: Params,
  kernel: Float[Array, 'vocab embed'],
  carry: _Carry,
  *,
  filtered: bool,
  speculation: SpeculationConfig | None,
) -> _Carry:
  """Samples one token in each active slot or, with speculation, up to 1 + `speculation.tokens`
  tokens.
  """
  carry = _sharded_rows(carry, model.mesh)
  state = carry.state
  slots, most = carry.tokens.shape
  width = 1 if speculation is None else 1 + speculation.tokens
  offsets = jnp.arange(width, dtype=jnp.int32)
  active = state.remaining > 0
  positions = state.position[:, None] + offsets
  window, has_draft = state.token[:, None], jnp.zeros(slots, bool)
  if speculation is not None:
    history = write_rows(state.history, window, positions[:, :1])
    drafts, has_draft = propose(history, state.position, speculation)
    window = jnp.concatenate([window, drafts], axis=1)
  hidden, cache = model.decode(params, window, positions, state.cache)
  drawn = _draw_window(hidden, kernel, state, filtered=filtered, mesh=model.mesh)
  if speculation is not None:
    state = state._replace(history=write_rows(history, drawn.tokens, positions + 1))
  # Accepts the sampled tokens up to and including the first that differs from its draft. All of
  # them were sampled given correct earlier tokens.
  agree = (window[:, 1:] == drawn.tokens[:, :-1]) & has_draft[:, None]
  agreeing = jnp.cumprod(agree, axis=1, dtype=jnp.int32).sum(-1)
  stops = (drawn.tokens[:, :, None] == state.stop_ids[:, None]).any(-1)
  until_stop = jnp.where(stops, offsets + 1, width + 1).min(-1)
  count = jnp.minimum(jnp.minimum(agreeing + 1, until_stop), state.remaining) * active
  newest = jnp.take_along_axis(drawn.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
  places = jnp.where(offsets < count[:, None], carry.produced[:, None] + offsets, most)
  return _Carry(
    step=carry.step + 1,
    state=state._replace(
      cache=cache,
      token=jnp.where(active, newest, state.token),
      position=state.position + count,
      remaining=jnp.where(active & (count != until_stop), state.remaining - count, 0),
    ),
    tokens=write_rows(carry.tokens, drawn.tokens, places),
    logprobs=write_rows(carry.logprobs, drawn.logprobs, places),
    produced=carry.produced + count,
    steps=carry.steps + active,
    drafted=carry.drafted + (active & has_draft) * (width - 1),
    accepted=carry.accepted + jnp.minimum(agreeing, count),
  )


def _sharded_rows(carry: _Carry, mesh: Mesh | None) -> _Carry:
  """Shards the rows of all arrays but the KV cache over a mesh. Otherwise, the compiler would shard
  them over more devices than the rows of hidden states, and gather them in every layer.
  """

  def shard(x: Shaped[Array, '...']) -> Shaped[Array, '...']:
    return constrain(x, mesh, *('batch', *(None,) * x.ndim)[: x.ndim])

  return jax.tree.map(lambda x: x if x.ndim == 4 else shard(x), carry)


def _draw_window(
  hidden: Float[Array, 'slots width embed'],
  kernel: Float[Array, 'vocab embed'],
  state: Slots,
  *,
  filtered: bool,
  mesh: Mesh | None,
) -> Draw:
  """Samples the token after each token of the slots' windows. A window consists of a slot's newest
  token and the drafts after it. Both fields of the result have the shape [slots, width].

  On a mesh, each device computes the logits of its part of the vocabulary. The rows are then
  divided among the devices, so that one device has all logits of a row and samples as without a
  mesh.
  """
  slots, width = hidden.shape[:2]
  logits = jax.lax.dot_general(
    hidden.reshape(slots * width, -1),
    kernel.astype(hidden.dtype),
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  logits = constrain(constrain(logits, mesh, 'batch', 'vocab'), mesh, 'draws', None)

  def each(values: Shaped[Array, 'slots *entry']) -> Shaped[Array, 'rows *entry']:
    return jnp.repeat(values, width, axis=0)

  positions = (state.position[:, None] + 1 + jnp.arange(width)).reshape(-1)
  common = (logits, each(state.key), positions, each(state.temperature))
  drawn = (
    draw_filtered(*common, each(state.top_k), each(state.top_p)) if filtered else draw(*common)
  )
  return Draw(*(constrain(field.reshape(slots, width), mesh, 'batch', None) for field in drawn))
