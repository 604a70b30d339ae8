"""KV cache: keys and values of a row's past tokens, indexed by position.

Invariant: an entry is written before any token that may attend to it (index <= position) is
computed, so entries beyond a row's last position (prefill padding, tokens of a previous occupant)
are never read.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.ops.places import Places

LayerCache = dict[str, Float[Array, 'batch length kv_heads head_dim']]
"""One layer's rotated keys `k` and values `v`."""

Cache = tuple[LayerCache, ...]
"""A `LayerCache` per layer: separate buffers, so a donated or looped cache is updated in place."""


def init_cache(spec: ModelSpec, batch: int, length: int, *, dtype: jnp.dtype) -> Cache:
  """Creates an empty cache for `batch` rows of at most `length` tokens."""
  shape = (batch, length, spec.num_key_value_heads, spec.head_dim)
  return tuple(
    {name: jnp.zeros(shape, dtype) for name in ('k', 'v')} for _ in range(spec.num_hidden_layers)
  )


def places(cache: LayerCache) -> Places:
  """Returns the places of the entries: all in one segment, each at its index."""
  batch, length = cache['k'].shape[:2]
  indices = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  return Places(jnp.ones_like(indices), indices)


def write(
  cache: LayerCache,
  key: Float[Array, 'batch time kv_heads head_dim'],
  value: Float[Array, 'batch time kv_heads head_dim'],
  positions: Int[Array, 'batch time'],
) -> LayerCache:
  """Writes each token's key and value at its position in its row; drops tokens past the end."""
  rows = jnp.arange(positions.shape[0])[:, None]
  return {
    name: cache[name].at[rows, positions].set(new.astype(cache[name].dtype), mode='drop')
    for name, new in (('k', key), ('v', value))
  }
