"""Compiled programs of the embedded engine (prefill, admit, decode) and their state on the device.

Invariant: every shape is fixed when the programs are built. The batch of the decode program has
`slots` rows, and that of a prefill program has `prefill_rows` rows of a configured length, called a
bucket. Hence a row's arithmetic does not depend on the other rows. The programs are compiled ahead
of time and reject other shapes, so nothing is compiled later. The programs are not thread-safe:
call them from one thread only.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int32, Shaped, UInt32

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.api import Model, unstack_layers
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.rollout.embedded.sampling import draw, draw_filtered


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
  """Returns a matrix for `Programs.admit` in which every slot keeps its state."""
  return np.full((slots, 9 + max_stop_ids), -1, np.int32)


class Decoded(NamedTuple):
  """Result of one decode call."""

  tokens: Int32[np.ndarray, 'steps slots']
  """Sampled tokens. The tokens of slot i are the first `produced[i]` entries of column i."""
  logprobs: Float[np.ndarray, 'steps slots']
  produced: Int32[np.ndarray, 'slots']
  remaining: Int32[np.ndarray, 'slots']


class Programs:
  """The compiled prefill, admit and decode programs with the weights and slots that they use.

  Call `compile` and `load` before `prefill`, `admit` and `decode`.
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
    device: jax.Device,
  ):
    """
    Args:
      model: language model, in whose compute dtype the weights are stored.
      slots: number of rows decoded at a time.
      max_length: length of the longest sequence in tokens, including its prompt.
      prefill_rows: number of prompts prefilled at a time.
      buckets: padded prompt lengths in tokens, ascending.
      decode_steps: maximum number of tokens per slot in one decode call.
      max_stop_ids: maximum number of stop tokens per request.
      device: device of the weights, the slots and the programs.
    """
    self.slots, self.buckets, self.prefill_rows, self.decode_steps = (
      slots,
      buckets,
      prefill_rows,
      decode_steps,
    )
    self.max_stop_ids, self.max_length = max_stop_ids, max_length
    self._model, self._place = model, SingleDeviceSharding(device)
    self._shapes = self._abstract(
      jax.eval_shape(lambda: unstack_layers(model.init(jax.random.key(0))))
    )
    self._shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(model.options.dtype), sharding=self._place),
      self._shapes,
    )
    self._empty = functools.partial(_empty_slots, model, slots, max_length, max_stop_ids)
    self._params: Params | None = None
    self._state: Slots | None = None

  def lower(self, *, filtered: bool) -> dict[tuple[str, int], jax.stages.Lowered]:
    """Lowers every program of the engine. The keys of the result are ('prefill', bucket) and
    ('admit', bucket) for each bucket (padded prompt length), ('decode', False), and ('decode',
    True) if `filtered`.
    """

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._place)

    state = self._abstract(jax.eval_shape(self._empty))
    lowered = {}
    for bucket in self.buckets:
      prefill = jax.jit(functools.partial(_prefill, self._model))
      lowered['prefill', bucket] = prefill.lower(self._shapes, ints(self.prefill_rows, bucket))
      prefilled = self._abstract(lowered['prefill', bucket].out_info)
      admit = jax.jit(_admit, donate_argnums=0)
      lowered['admit', bucket] = admit.lower(
        state, prefilled, ints(self.slots, 9 + self.max_stop_ids)
      )
    for kind in sorted({False, filtered}):
      decode = jax.jit(
        functools.partial(_decode, self._model, steps=self.decode_steps, filtered=kind),
        donate_argnums=1,
      )
      lowered['decode', kind] = decode.lower(self._shapes, state, ints(1 + self.slots))
    return lowered

  def compile(self, *, filtered: bool) -> None:
    """Compiles the programs and creates empty slots. The decode program with top-k and top-p is
    compiled only if `filtered`.
    """
    self._compiled = {
      name: lowered.compile() for name, lowered in self.lower(filtered=filtered).items()
    }
    self._state = jax.jit(self._empty, out_shardings=self._place)()

  def load(self, params: Params) -> None:
    """Copies the weights into buffers of this object. The tree may be nested or flat, and its
    layers may be stacked or separate.
    """
    given = flatten(unstack_layers(unflatten(flatten(params))))
    wanted = flatten(self._shapes)
    shapes = {name: np.shape(leaf) for name, leaf in given.items()}
    wrong = [
      f'{name}: got {shapes.get(name)}, wanted {wanted[name].shape if name in wanted else None}'
      for name in sorted(shapes.keys() | wanted.keys())
      if name not in wanted or shapes.get(name) != wanted[name].shape
    ]
    if wrong:
      raise ValueError(
        f'weights do not match this model ({len(wrong)} arrays differ): {"; ".join(wrong[:4])}'
      )
    # np.array always copies, even from a CPU device array, so device_put may alias the result.
    copies = {
      name: jax.device_put(np.array(leaf, wanted[name].dtype), self._place)
      for name, leaf in given.items()
    }
    self._params = jax.block_until_ready(unflatten(copies))

  def prefill(self, tokens: Int32[np.ndarray, 'rows bucket']) -> Cache:
    """Returns the keys and values of `prefill_rows` prompts, which are padded with zeros to the
    length of a bucket.
    """
    return self._compiled['prefill', tokens.shape[1]](self._params, tokens)

  def admit(self, prefilled: Cache, admissions: Int32[np.ndarray, 'slots columns']) -> None:
    """Copies the keys and values of prefilled prompts into slots, and sets the slots' other fields
    (see `Admission`).
    """
    self._state = self._compiled['admit', prefilled[0]['k'].shape[1]](
      self._state, prefilled, admissions
    )

  def decode(self, control: Int32[np.ndarray, 'controls'], *, filtered: bool) -> Decoded:
    """Samples up to `decode_steps` tokens in every active slot.

    Args:
      control: one entry for the call, then one entry per slot. The call stops early once the number
        of active slots is at most the first entry. A slot's entry is 1 if the slot may continue,
        else 0.
      filtered: whether top-k and top-p are applied.
    """
    self._state, out = self._compiled['decode', filtered](self._params, self._state, control)
    steps, rows = self.decode_steps, np.asarray(out)
    return Decoded(rows[:steps], rows[steps : 2 * steps].view(np.float32), rows[-2], rows[-1])

  def _abstract(self, tree):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place), tree
    )


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
  )


def _prefill(model: Model, params: Params, tokens: Int32[Array, 'rows bucket']) -> Cache:
  """Computes the keys and values of padded prompts. The padding's keys and values do no harm,
  because decode overwrites them before any token attends to them.
  """
  rows, bucket = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(bucket, dtype=jnp.int32), tokens.shape)
  _, cache = model.decode(params, tokens, positions, model.init_cache(rows, bucket))
  return cache


def _admit(state: Slots, prefilled: Cache, admissions: Int32[Array, 'slots columns']) -> Slots:
  source = admissions[:, 0]
  chosen = source >= 0

  def copy(
    old: Float[Array, 'slots length *entry'], new: Float[Array, 'rows bucket *entry']
  ) -> Float[Array, 'slots length *entry']:
    head = old[:, : new.shape[1]]
    rows = jnp.where(chosen[:, None, None, None], new[jnp.maximum(source, 0)], head)
    return jax.lax.dynamic_update_slice(old, rows, (0, 0, 0, 0))

  floats = jax.lax.bitcast_convert_type(admissions[:, 5:7], jnp.float32)
  new = Slots(
    cache=jax.tree.map(copy, state.cache, prefilled),
    token=admissions[:, 1],
    position=admissions[:, 2],
    remaining=admissions[:, 3],
    top_k=admissions[:, 4],
    temperature=floats[:, 0],
    top_p=floats[:, 1],
    key=jax.lax.bitcast_convert_type(admissions[:, 7:9], jnp.uint32),
    stop_ids=admissions[:, 9:],
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
  tokens: Int32[Array, 'steps slots']
  logprobs: Float[Array, 'steps slots']
  produced: Int32[Array, 'slots']


def _decode(
  model: Model,
  params: Params,
  state: Slots,
  control: Int32[Array, 'controls'],
  *,
  steps: int,
  filtered: bool,
) -> tuple[Slots, Int32[Array, 'rows slots']]:
  """Runs decode steps and returns (new state, results). All results are in one integer array, so
  that one transfer copies them to the host.
  """
  slots = state.token.shape[0]
  kernel = model.head_kernel(params)
  state = state._replace(remaining=jnp.where(control[1:] > 0, state.remaining, 0))

  def go_on(carry: _Carry) -> Array:
    return (carry.step < steps) & ((carry.state.remaining > 0).sum() > control[0])

  def advance(carry: _Carry) -> _Carry:
    state = carry.state
    hidden, cache = model.decode(params, state.token[:, None], state.position[:, None], state.cache)
    logits = jax.lax.dot_general(
      hidden[:, 0],
      kernel.astype(hidden.dtype),
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    common = (logits, state.key, state.position + 1, state.temperature)
    drawn = draw_filtered(*common, state.top_k, state.top_p) if filtered else draw(*common)
    active = state.remaining > 0
    stopped = (drawn.tokens[:, None] == state.stop_ids).any(-1)
    return _Carry(
      step=carry.step + 1,
      state=state._replace(
        cache=cache,
        token=jnp.where(active, drawn.tokens, state.token),
        position=state.position + active,
        remaining=jnp.where(active & ~stopped, state.remaining - 1, 0),
      ),
      tokens=carry.tokens.at[carry.step].set(drawn.tokens),
      logprobs=carry.logprobs.at[carry.step].set(drawn.logprobs),
      produced=carry.produced + active,
    )

  def zeros(*shape: int, dtype=jnp.int32) -> Array:
    return jnp.zeros(shape, dtype)

  start = _Carry(
    zeros(), state, zeros(steps, slots), zeros(steps, slots, dtype=jnp.float32), zeros(slots)
  )
  end = jax.lax.while_loop(go_on, advance, start)
  bits = jax.lax.bitcast_convert_type(end.logprobs, jnp.int32)
  out = jnp.concatenate([end.tokens, bits, end.produced[None], end.state.remaining[None]])
  return end.state, out
