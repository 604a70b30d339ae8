"""Forward pass of a packed micro-batch, and passes without gradient over the micro-batches of an
optimizer step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
  sequence_scores,
  state_values,
  token_logprobs,
  token_values,
)
from jaxrl_llm.ops.reduce import by_segment
from jaxrl_llm.parallel import rules


def chunk_outputs(model: Model, params: Params, chunks: Chunks, *, token_chunk: int) -> Outputs:
  """Returns the outputs of the model's head for one micro-batch. Depending on the head, they are
  logprobs (at each sample's temperature), values or scores.
  """
  hidden, kernel = _states(model, params, chunks)
  if model.spec.head == 'value':
    return token_values(hidden, kernel, chunks.segment_ids)
  if model.spec.head == 'scalar':
    return sequence_scores(hidden, kernel, chunks.segment_ids, segments=chunks.segments)
  temperature = by_segment(chunks.temperature, chunks.segment_ids)
  return token_logprobs(
    hidden,
    kernel,
    chunks.tokens,
    chunks.segment_ids,
    temperature,
    chunks.reported,
    token_chunk=token_chunk,
    **_sharded(model, chunks, kernel),
  )


def _states(
  model: Model, params: Params, chunks: Chunks
) -> tuple[Float[Array, 'chunks time embed'], Float[Array, 'out embed']]:
  """Returns the hidden states and the kernel of the output head."""
  hidden = model.apply(
    params, chunks.tokens, chunks.positions, chunks.segment_ids, chunks.seen_until
  )
  return hidden, model.head_kernel(params)


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


Score = Callable[[Params, Chunks, Int[Array, '']], Float[Array, 'micro chunks ...']]


def build_score(model: Model, mesh: Mesh, *, token_chunk: int) -> Score:
  """Builds a jitted forward-only pass with the arguments (params, batch, used). It returns the
  logprobs, values or scores of the first `used` micro-batches, and 0 for the other micro-batches.
  """
  return _build_pass(
    lambda params, chunks: chunk_outputs(model, params, chunks, token_chunk=token_chunk)[0], mesh
  )


Value = Callable[[Params, Chunks, Int[Array, '']], StateValues]


def build_value(critic: Model, mesh: Mesh) -> Value:
  """Builds a jitted forward-only pass of a critic with the arguments (params, batch, used). For
  each token of the first `used` micro-batches, it returns the values of the states before and after
  the token. The values of the other micro-batches are 0.
  """
  return _build_pass(
    lambda params, chunks: state_values(*_states(critic, params, chunks), chunks.segment_ids), mesh
  )


def _build_pass(
  outputs: Callable[[Params, Chunks], Any], mesh: Mesh
) -> Callable[[Params, Chunks, Any], Any]:
  """Jits a pass that applies `outputs` to each of the first `used` micro-batches. The results have
  a leading micro-batch axis and are 0 for the other micro-batches.
  """

  def whole(params: Params, batch: Chunks, used: Int[Array, '']) -> Any:
    def run_one(i):
      return outputs(params, micro_batch(batch, i))

    count = batch.tokens.shape[0]
    start = jax.tree.map(
      lambda like: jnp.zeros((count, *like.shape), like.dtype), jax.eval_shape(run_one, 0)
    )

    def put(i, all, new):
      return jax.lax.dynamic_update_index_in_dim(all, new, i, 0)

    return jax.lax.fori_loop(
      0, used, lambda i, all: jax.tree.map(functools.partial(put, i), all, run_one(i)), start
    )

  return jax.jit(whole, out_shardings=rules.sharding_of_batch(mesh))
