"""The key/value cache of decoding: entry s of a row holds the token at position s."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.spec import ModelSpec

LayerCache = dict[str, Float[Array, 'batch length kv_heads head_dim']]
"""'k' and 'v' of one layer."""
Cache = tuple[LayerCache, ...]


def init_cache(spec: ModelSpec, batch: int, length: int, *, dtype: str) -> Cache:
  """An empty cache; what it holds is seen by no query before it has been written."""
  shape = (batch, length, spec.num_key_value_heads, spec.head_dim)
  empty = lambda: jnp.zeros(shape, dtype)
  return tuple({'k': empty(), 'v': empty()} for _ in range(spec.num_hidden_layers))


def write(
  cache: Float[Array, 'batch length kv_heads head_dim'],
  new: Float[Array, 'batch time kv_heads head_dim'],
  positions: Int[Array, 'batch time'],
) -> Float[Array, 'batch length kv_heads head_dim']:
  """Writes each token's entry at its position; positions outside the cache are dropped."""
  rows = jnp.arange(cache.shape[0])[:, None]
  return cache.at[rows, positions].set(new.astype(cache.dtype), mode='drop')
