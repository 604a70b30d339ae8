"""The forward pass of a packed micro-batch, and the score pass over a whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.core.types import Params
from jaxrl_llm.learner.algorithm import Outputs
from jaxrl_llm.models.api import Model
from jaxrl_llm.ops.logprobs import sequence_scores, token_logprobs, token_values
from jaxrl_llm.ops.reduce import by_segment
from jaxrl_llm.parallel import rules


def chunk_outputs(model: Model, params: Params, chunks: Chunks, *, token_chunk: int) -> Outputs:
  """What the model makes of one micro-batch: logprobs under each sample's own temperature, values, or scores."""
  hidden = model.apply(params, chunks.tokens, chunks.positions, chunks.segment_ids)
  kernel = rules.constrain(model.head_kernel(params), model.mesh, 'vocab', None)
  if model.spec.head == 'value':
    return token_values(hidden, kernel, chunks.segment_ids)
  if model.spec.head == 'scalar':
    return sequence_scores(hidden, kernel, chunks.segment_ids, segments=chunks.temperature.shape[-1])
  temperature = by_segment(chunks.temperature, chunks.segment_ids)
  return token_logprobs(
    hidden,
    kernel,
    chunks.tokens,
    chunks.segment_ids,
    temperature,
    chunks.reported,
    token_chunk=token_chunk,
    **_parts(model, chunks),
  )


def _parts(model: Model, chunks: Chunks) -> dict[str, int]:
  """Into how many parts the mesh cuts rows and time, where it does."""
  if model.mesh is None:
    return {}
  rows, time = (rules.parts(model.mesh, axis, size) for axis, size in zip(('batch', 'time'), chunks.tokens.shape))
  return {'row_shards': rows, 'time_shards': time}


def micro_batch(batch: Chunks, i: int | Int[Array, '']) -> Chunks:
  """Micro-batch `i` of arrays `[micro_batches, chunks, ...]`."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batch)


Score = Callable[[Params, Chunks, Int[Array, '']], Float[Array, 'micro chunks ...']]


def build_score(model: Model, mesh: Mesh, *, token_chunk: int) -> Score:
  """A jitted forward-only pass: logprobs, values or scores of the first `used` micro-batches, 0 elsewhere."""

  def score(params: Params, batch: Chunks, used: Int[Array, '']) -> Float[Array, 'micro chunks ...']:
    one = lambda i: chunk_outputs(model, params, micro_batch(batch, i), token_chunk=token_chunk)[0]
    like = jax.eval_shape(one, 0)
    start = jnp.zeros((batch.tokens.shape[0], *like.shape), like.dtype)
    return jax.lax.fori_loop(0, used, lambda i, all: jax.lax.dynamic_update_index_in_dim(all, one(i), i, 0), start)

  return jax.jit(score, out_shardings=rules.sharding_of_batch(mesh))
