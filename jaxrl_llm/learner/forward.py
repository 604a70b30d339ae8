"""Forward pass of a packed micro-batch, and passes without gradient over the micro-batches of an
optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.core.types import Params
from jaxrl_llm.learner.algorithm import Outputs
from jaxrl_llm.models.api import Model
from jaxrl_llm.ops.logprobs import (
  KernelShardings,
  StateValues,
  TimeOrder,
  plan_token_chunk,
  sequence_scores,
  state_values,
  token_logprobs,
  token_values,
)
from jaxrl_llm.ops.reduce import by_segment
from jaxrl_llm.parallel import rules
from jaxrl_llm.parallel.balance import in_balanced_order, in_natural_order
from jaxrl_llm.parallel.mesh import data_parallel_ranks


def chunk_outputs(
  model: Model, params: Params, chunks: Chunks, *, token_chunk: int, planned: int | None = None
) -> Outputs:
  """Returns the outputs of the model's head for one micro-batch. Depending on the head, they are
  logprobs (at each sample's temperature), values or scores.

  Args:
    token_chunk: see `token_logprobs`.
    planned: number of chunks for which `token_chunk` was planned, if `chunks` may have fewer. With
      fewer, logits are computed for more positions of each at a time, in the same memory.
  """
  if model.spec.head == 'value':
    return token_values(*_states(model, params, chunks), chunks.segment_ids)
  if model.spec.head == 'scalar':
    states = _states(model, params, chunks)
    return sequence_scores(*states, chunks.segment_ids, segments=chunks.segments)
  # The hidden states of balanced shards stay on their devices: tokens and results, which are much
  # smaller, are permuted instead. On GPUs, a permutation of the hidden states would also keep the
  # gather of the head from running beside the last layer's products, because the compiler lets only
  # one collective run at a time.
  rows, time = chunks.tokens.shape
  order = _order(model, time)
  options = {} if order is None else {'in_natural_order': False}
  hidden, kernel = _states(model, params, chunks, **options)
  temperature = by_segment(chunks.temperature, chunks.segment_ids)
  sharded = _sharded(model, chunks, kernel)
  if planned is not None and rows < planned:
    shards = sharded.get('time_shards', 1)
    token_chunk = plan_token_chunk(
      chunks=rows,
      time=time,
      vocab=1,
      budget_bytes=4 * planned * token_chunk // shards,
      time_shards=shards,
    )
  return token_logprobs(
    hidden,
    kernel,
    chunks.tokens,
    chunks.segment_ids,
    temperature,
    chunks.reported,
    token_chunk=token_chunk,
    order=order,
    **sharded,
  )


def _states(
  model: Model, params: Params, chunks: Chunks, **options: bool
) -> tuple[Float[Array, 'chunks time embed'], Float[Array, 'out embed']]:
  """Returns the hidden states and the kernel of the output head. `options` are those of
  `Model.apply`.
  """
  places = chunks.positions, chunks.segment_ids, chunks.seen_until
  hidden = model.apply(params, chunks.tokens, *places, **options)
  return hidden, model.head_kernel(params)


def _order(model: Model, time: int) -> TimeOrder | None:
  """Returns the order of hidden states if the shards of rows of `time` tokens are balanced; None if
  it is the natural order.
  """
  shards = model.balanced_shards(time)
  if shards == 1:
    return None

  def on_whole_rows(permute):
    # Each device has all tokens of its rows, and needs all results. Without the second constraint,
    # the compiler cuts the rows in between, and exchanges pieces once more.
    def permuted(x):
      x = permute(rules.constrain(x, model.mesh, 'batch', None), shards)
      return rules.constrain(x, model.mesh, 'batch', None)

    return permuted

  return TimeOrder(on_whole_rows(in_balanced_order), on_whole_rows(in_natural_order))


def _sharded(model: Model, chunks: Chunks, kernel: Float[Array, 'vocab embed']) -> dict[str, Any]:
  """Returns how rows, time and the head's kernel are sharded over the mesh, as keyword arguments of
  `token_logprobs`. Without a mesh, the result is empty.
  """
  if model.mesh is None:
    return {}
  rows, time = (
    rules.parts(model.mesh, axis, size)
    for axis, size in zip(('batch', 'time'), chunks.tokens.shape)
  )
  stored, used = (
    rules.sharding(model.mesh, ('vocab', embed), kernel.shape) for embed in ('embed', None)
  )
  return {'row_shards': rows, 'time_shards': time, 'shardings': KernelShardings(stored, used)}


def micro_batch(batch: Chunks, i: int | Int[Array, '']) -> Chunks:
  """Returns micro-batch `i` of a batch whose arrays are `[micro_batches, chunks, ...]`."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batch)


Total = TypeVar('Total')
Put = Callable[[Array, Array], Array]
"""Function of (array `[micro_batches, chunks, ...]`, results of the chunks just computed).
Returns the array with the results at the places of these chunks.
"""


def fold_used(
  step: Callable[[Total, Chunks, Put], Total],
  start: Total,
  batch: Chunks,
  used: Int[Array, ''],
  *,
  split_ranks: int | None,
) -> Total:
  """Folds `step` over the used part of a batch whose arrays are `[micro_batches, chunks, ...]`.

  Args:
    step: function of (result so far, chunks to compute, function that stores their results), which
      returns the new result.
    used: number of micro-batches in use; see `split_ranks`.
    split_ranks: number of data-parallel ranks if the remainder is split (`Packing`). `used` is then
      the number of chunks per rank in use. `step` gets as many of them as possible as whole
      micro-batches, and the others as one chunk per rank at a time. If None, `step` always gets
      whole micro-batches.
  """

  def whole(i, total):
    def put(array, new):
      return jax.lax.dynamic_update_index_in_dim(array, new, i, 0)

    return step(total, micro_batch(batch, i), put)

  if split_ranks is None:
    return jax.lax.fori_loop(0, used, whole, start)
  chunks = batch.tokens.shape[1] // split_ranks

  def by_rank(x):
    return x.reshape(x.shape[0], split_ranks, chunks, *x.shape[2:])

  def single(c, total):
    i, j = c // chunks, c % chunks

    def put(array, new):
      zero = jnp.zeros_like(i)
      origin = (i, zero, j, *[zero] * (new.ndim - 1))
      places = jax.lax.dynamic_update_slice(by_rank(array), new[None, :, None], origin)
      return places.reshape(array.shape)

    def chunk(x):
      return jax.lax.dynamic_index_in_dim(by_rank(x)[i], j, axis=1, keepdims=False)

    return step(total, jax.tree.map(chunk, batch), put)

  full = used // chunks
  total = jax.lax.fori_loop(0, full, whole, start)
  return jax.lax.fori_loop(full * chunks, used, single, total)


def split_ranks(mesh: Mesh, splits_remainder: bool) -> int | None:
  """Returns the argument `split_ranks` of `fold_used`."""
  return data_parallel_ranks(mesh) if splits_remainder else None


Score = Callable[[Params, Chunks, Int[Array, '']], Float[Array, 'micro chunks ...']]


def build_score(
  model: Model, mesh: Mesh, *, token_chunk: int, splits_remainder: bool = False
) -> Score:
  """Builds a jitted forward-only pass with the arguments (params, batch, used). It returns the
  logprobs, values or scores of the used part of the batch, and 0 elsewhere.

  Args:
    splits_remainder: whether the remainder is split (`Packing`). `used` is then the number of
      chunks per rank in use, and otherwise the number of micro-batches in use.
  """
  return _build_pass(
    lambda params, chunks, planned: chunk_outputs(
      model, params, chunks, token_chunk=token_chunk, planned=planned
    )[0],
    split_ranks(mesh, splits_remainder),
    mesh,
  )


Value = Callable[[Params, Chunks, Int[Array, '']], StateValues]


def build_value(critic: Model, mesh: Mesh, *, splits_remainder: bool = False) -> Value:
  """Builds a jitted forward-only pass of a critic with the arguments (params, batch, used). For
  each token of the used part of the batch, it returns the values of the states before and after the
  token. All other values are 0.

  Args:
    splits_remainder: see `build_score`.
  """
  return _build_pass(
    lambda params, chunks, _: state_values(*_states(critic, params, chunks), chunks.segment_ids),
    split_ranks(mesh, splits_remainder),
    mesh,
  )


def _build_pass(
  outputs: Callable[[Params, Chunks, int], Any], ranks: int | None, mesh: Mesh
) -> Callable[[Params, Chunks, Any], Any]:
  """Jits a pass that applies `outputs` to the used part of a batch. The results have a leading
  micro-batch axis and are 0 elsewhere.

  Args:
    ranks: `split_ranks` of `fold_used`.
  """

  def whole(params: Params, batch: Chunks, used: Int[Array, '']) -> Any:
    count, planned = batch.tokens.shape[:2]
    first = jax.eval_shape(lambda b: outputs(params, micro_batch(b, 0), planned), batch)
    start = jax.tree.map(lambda like: jnp.zeros((count, *like.shape), like.dtype), first)

    def step(total, chunks, put):
      return jax.tree.map(put, total, outputs(params, chunks, planned))

    return fold_used(step, start, batch, used, split_ranks=ranks)

  return jax.jit(whole, out_shardings=rules.sharding_of_batch(mesh))
