"""The forward pass of a packed micro-batch, and the score pass over a whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.api import Model
from jaxrl_llm.ops.logprobs import TokenLogprobs, token_logprobs
from jaxrl_llm.ops.reduce import by_segment
from jaxrl_llm.parallel import rules


def chunk_logprobs(model: Model, params: Params, chunks: Chunks, *, token_chunk: int) -> TokenLogprobs:
  """Logprobs and entropies of one micro-batch's tokens, each under its own sample's temperature."""
  hidden = model.apply(params, chunks.tokens, chunks.positions, chunks.segment_ids)
  temperature = by_segment(chunks.temperature, chunks.segment_ids)
  return token_logprobs(
    hidden, model.head_kernel(params), chunks.tokens, chunks.segment_ids, temperature, token_chunk=token_chunk
  )


def micro_batch(batch: Chunks, i: int | Int[Array, '']) -> Chunks:
  """Micro-batch `i` of arrays `[micro_batches, chunks, ...]`."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batch)


Score = Callable[[Params, Chunks, Int[Array, '']], Float[Array, 'micro chunks time']]


def build_score(model: Model, mesh: Mesh, *, token_chunk: int) -> Score:
  """A jitted forward-only pass: token logprobs of the first `used` micro-batches, 0 elsewhere."""

  def score(params: Params, batch: Chunks, used: Int[Array, '']) -> Float[Array, 'micro chunks time']:
    def body(i, logprobs):
      chunk = chunk_logprobs(model, params, micro_batch(batch, i), token_chunk=token_chunk)
      return jax.lax.dynamic_update_index_in_dim(logprobs, chunk.logprobs, i, 0)

    dtype = jnp.promote_types(model.options.dtype, jnp.float32)
    return jax.lax.fori_loop(0, used, body, jnp.zeros(batch.tokens.shape, dtype))

  return jax.jit(score, out_shardings=rules.sharding_of_batch(mesh))
