"""Masked attention with shared key-value heads: the reference that training and cached decoding both run.

Invariant: a query row without any valid key yields 0 and sends no gradient; nothing here makes a NaN of finite input.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Masked scores sit far below the floor under the row's maximum: exp underflows to 0 even in rows that are all masked.
_MASKED, _FLOOR = -1e30, -1e29


def segment_mask(segment_ids: Int[Array, 'batch time']) -> Bool[Array, 'batch time time']:
  """Entry [b, t, s]: token t may look at token s: same segment, s not later than t, not padding (segment 0)."""
  time = segment_ids.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  return same & (segment_ids > 0)[:, :, None] & jnp.tri(time, dtype=bool)


def cache_mask(positions: Int[Array, 'batch time'], *, length: int) -> Bool[Array, 'batch time length']:
  """Entry [b, t, s]: the token at `positions[b, t]` may look at cache index s: s not later than its position."""
  return jnp.arange(length) <= positions[:, :, None]


def attention(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch keys kv_heads head_dim'],
  value: Float[Array, 'batch keys kv_heads head_dim'],
  mask: Bool[Array, 'batch time keys'],
) -> Float[Array, 'batch time heads head_dim']:
  """softmax(query · key / √head_dim over the keys that `mask` allows) · value.

  Query heads g·n … g·n + n - 1 share key-value head g (n = heads / kv_heads), which is never copied. Scores,
  their maximum and the normaliser are at least float32; weights are cast to the values' dtype for the second product
  and normalised after it, as in flash attention (arXiv:2205.14135), which saves a pass over the scores.
  """
  batch, time, heads, head_dim = query.shape
  kv_heads, keys = key.shape[2], key.shape[1]
  group = heads // kv_heads
  statistics = jnp.promote_types(query.dtype, jnp.float32)
  # The heads that share keys become rows of one matrix product: plain batched products are what XLA runs best.
  rows = jnp.moveaxis(query.reshape(batch, time, kv_heads, group, head_dim), 1, 3)
  rows = rows.reshape(batch, kv_heads, group * time, head_dim)
  scores = jnp.einsum('bkqh,bskh->bkqs', rows, key, preferred_element_type=statistics)
  scores = scores.reshape(batch, kv_heads, group, time, keys) * head_dim**-0.5
  scores = jnp.where(mask[:, None, None], scores, _MASKED)
  peak = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), _FLOOR))
  weights = jnp.exp(scores - peak).reshape(batch, kv_heads, group * time, keys)
  mixed = jnp.einsum('bkqs,bskh->bkqh', weights.astype(value.dtype), value, preferred_element_type=statistics)
  # A row with a valid key has a total of at least 1 (its maximum's weight); only the empty rows' 0 is lifted.
  mixed = mixed / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9)
  mixed = jnp.moveaxis(mixed.reshape(batch, kv_heads, group, time, head_dim), 3, 1)
  return mixed.reshape(batch, time, heads, head_dim).astype(query.dtype)
