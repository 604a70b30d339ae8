"""KV cache, which contains the keys and values of each row's past tokens, indexed by position.

Invariant: an entry is written before the computation of any token that may attend to it (index <=
position). Entries beyond a row's last position, such as prefill padding or tokens of an earlier
sequence in the same row, are therefore never attended to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.ops.places import Places

LayerCache = dict[str, Float[Array, 'batch length kv_heads head_dim']]
"""One layer's rotated keys `k` and values `v`."""

Cache = tuple[LayerCache, ...]
"""One `LayerCache` per layer. The buffers are separate, so that a cache which is donated or carried
through a loop is updated in place.
"""


def init_cache(spec: ModelSpec, batch: int, length: int, *, dtype: jnp.dtype) -> Cache:
  """Creates an empty cache for `batch` rows of at most `length` tokens."""
  shape = (batch, length, spec.num_key_value_heads, spec.head_dim)
  return tuple(
    {name: jnp.zeros(shape, dtype) for name in ('k', 'v')} for _ in range(spec.num_hidden_layers)
  )


def places(cache: LayerCache) -> Places:
  """Returns the places of the cache entries. All entries are in segment 1, and each entry's
  position is its index.
  """
  batch, length = cache['k'].shape[:2]
  indices = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  return Places(jnp.ones_like(indices), indices)


def write(
  cache: LayerCache,
  key: Float[Array, 'batch time kv_heads head_dim'],
  value: Float[Array, 'batch time kv_heads head_dim'],
  positions: Int[Array, 'batch time'],
) -> LayerCache:
  """Writes each token's key and value at the token's position in its row. Tokens beyond the cache's
  length are dropped.
  """
  return {name: write_rows(cache[name], new, positions) for name, new in (('k', key), ('v', value))}


def write_rows(
  rows: Shaped[Array, 'batch length *entry'],
  new: Shaped[Array, 'batch time *entry'],
  places: Int[Array, 'batch time'],
) -> Shaped[Array, 'batch length *entry']:
  """Writes entries to places of their rows. Entries with a place beyond the length are dropped."""

  # To the compiler, mapped rows are independent, so a device needs nothing of other devices' rows.
  def write_row(row, entries, at):
    return row.at[at].set(entries.astype(row.dtype), mode='drop')

  return jax.vmap(write_row)(rows, new, places)
