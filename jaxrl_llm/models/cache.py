"""KV cache, which contains the keys and values of each row's past tokens, indexed by position.

The heads come before the positions, so that the products with all keys and values of a head read
them where they are. In the order of the layers' outputs, positions first, attention in a decode
step on a CPU would spend more than half of its time laying the cache out anew.

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

LayerCache = dict[str, Float[Array, 'batch kv_heads length head_dim']]
"""One layer's rotated keys `k` and values `v`."""

Cache = tuple[LayerCache, ...]
"""One `LayerCache` per layer. The buffers are separate, so that a cache which is donated or carried
through a loop is updated in place.
"""


def init_cache(spec: ModelSpec, batch: int, length: int, *, dtype: jnp.dtype) -> Cache:
  """Creates an empty cache for `batch` rows of at most `length` tokens."""
  shape = (batch, spec.num_key_value_heads, length, spec.head_dim)
  return tuple(
    {name: jnp.zeros(shape, dtype) for name in ('k', 'v')} for _ in range(spec.num_hidden_layers)
  )


def places(cache: LayerCache) -> Places:
  """Returns the places of the cache entries. All entries are in segment 1, and each entry's
  position is its index.
  """
  batch, _, length, _ = cache['k'].shape
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
  # Each row, and in it each head, is written by itself.
  write_heads = jax.vmap(jax.vmap(_write_row, in_axes=(0, 1, None)))
  return {
    name: write_heads(cache[name], new, positions) for name, new in (('k', key), ('v', value))
  }


def entries(
  cache: LayerCache,
) -> tuple[
  Float[Array, 'batch length kv_heads head_dim'], Float[Array, 'batch length kv_heads head_dim']
]:
  """Returns the keys and values in the order of the axes that attention takes."""
  return jnp.moveaxis(cache['k'], 1, 2), jnp.moveaxis(cache['v'], 1, 2)


def write_rows(
  rows: Shaped[Array, 'batch length *entry'],
  new: Shaped[Array, 'batch time *entry'],
  places: Int[Array, 'batch time'],
) -> Shaped[Array, 'batch length *entry']:
  """Writes entries to places of their rows. Entries with a place beyond the length are dropped."""
  # To the compiler, mapped rows are independent, so a device needs nothing of other devices' rows.
  return jax.vmap(_write_row)(rows, new, places)


def _write_row(row, entries, at):
  return row.at[at].set(entries.astype(row.dtype), mode='drop')
