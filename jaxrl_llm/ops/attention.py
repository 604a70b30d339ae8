"""Attention over explicit masks: the reference implementation, used by training and by decoding from a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30
"""Finite, so that a query without any key gets a finite (meaningless) result instead of NaN."""


def segment_mask(segment_ids: Int[Array, 'batch time']) -> Bool[Array, 'batch time time']:
  """Which key each query sees: those at or before it with the same segment id. Padding (0) sees padding only."""
  time = segment_ids.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  return same & (jnp.arange(time)[:, None] >= jnp.arange(time)[None, :])


def cache_mask(positions: Int[Array, 'batch time'], length: int) -> Bool[Array, 'batch time length']:
  """Which cache entry each query sees: entry s holds position s, so those up to the query's own position."""
  return jnp.arange(length) <= positions[..., None]


def attention(
  q: Float[Array, 'batch time heads head_dim'],
  k: Float[Array, 'batch keys kv_heads head_dim'],
  v: Float[Array, 'batch keys kv_heads head_dim'],
  mask: Bool[Array, 'batch time keys'],
) -> Float[Array, 'batch time heads head_dim']:
  """softmax(q kᵀ / √head_dim) v over the keys that `mask` permits; each kv head serves heads/kv_heads queries.

  Scores and softmax are float32; memory is quadratic in time.
  """
  batch, time, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
  scores = jnp.einsum('btkgd,bskd->bkgts', grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
  scores = jnp.where(mask[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum('bkgts,bskd->btkgd', weights, v).reshape(q.shape)
