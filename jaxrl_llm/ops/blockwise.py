"""Blockwise attention in plain JAX: memory linear in time, forward and backward, on any platform.

Invariant: only the current block of scores is materialised. The backward pass recomputes probabilities from the outputs
and the logarithm of each row's normaliser, as FlashAttention-2 does (arXiv:2307.08691).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.ops.places import FLOOR, MASKED, Places, visible

BLOCK = 128
"""Number of queries, and of keys, in a block."""


class _Rule(NamedTuple):
  """Static parameters of the attention."""

  window: int | None
  softcap: float | None
  block: int


def blockwise(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch keys kv_heads head_dim'],
  value: Float[Array, 'batch keys kv_heads head_dim'],
  of_queries: Places,
  of_keys: Places,
  *,
  window: int | None = None,
  softcap: float | None = None,
  block: int = BLOCK,
) -> Float[Array, 'batch time heads head_dim']:
  """See `attention`. Each block of queries iterates over the blocks of keys from the first to the last that it may see.

  If rows hold packed segments in order, these are the blocks of its own segments up to itself: neither later tokens
  nor other segments cost anything. Rows of the batch are processed sequentially, each with its own range of blocks.
  """
  return _attend(query, key, value, of_queries, of_keys, _Rule(window, softcap, block))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(query, key, value, of_queries, of_keys, rule):
  return _forward(query, key, value, of_queries, of_keys, rule)[0]


def _forward(query, key, value, of_queries, of_keys, rule):
  """Returns the outputs and the residuals for the backward pass."""
  rows = _Rows.of(query, key, value, of_queries, of_keys, rule)
  mixed, normalizer = jax.lax.map(lambda row: _forward_row(row, rule), rows)
  out = _unblocked(mixed, like=query)
  return out, (query, key, value, of_queries, of_keys, out, normalizer)


def _backward(rule, saved, gradient):
  query, key, value, of_queries, of_keys, out, normalizer = saved
  rows = _Rows.of(query, key, value, of_queries, of_keys, rule)
  statistics = normalizer.dtype
  # Softmax's correction of each row's gradient: Σ probability × its gradient, which equals output · gradient.
  taken = (out.astype(statistics) * gradient.astype(statistics)).sum(-1, keepdims=True)
  kv_heads = key.shape[2]
  of_rows = functools.partial(_blocked, kv_heads=kv_heads, block=rows.query_block)
  of_query, of_key, of_value = jax.lax.map(
    lambda row: _backward_row(*row, rule), (rows, of_rows(gradient), of_rows(taken), normalizer)
  )
  return (
    _unblocked(of_query, like=query),
    _unblocked(of_key, like=key),
    _unblocked(of_value, like=value),
    None,
    None,
  )


_attend.defvjp(_forward, _backward)


class _Rows(NamedTuple):
  """Arguments in blocks. Heads that share keys are rows of one matrix product (`rows` = group · block)."""

  query: Float[Array, '*batch blocks kv_heads rows head_dim']
  key: Float[Array, '*batch key_blocks kv_heads key_block head_dim']
  value: Float[Array, '*batch key_blocks kv_heads key_block head_dim']
  of_queries: Places
  """`[*batch, blocks, block]`."""
  of_keys: Places
  first: Int[Array, '*batch blocks']
  """First block of keys of each block of queries."""
  end: Int[Array, '*batch blocks']
  """End (exclusive) of the blocks of keys of each block of queries."""

  @property
  def query_block(self) -> int:
    return self.of_queries.positions.shape[-1]

  @classmethod
  def of(cls, query, key, value, of_queries, of_keys, rule) -> _Rows:
    kv_heads = key.shape[2]
    block, key_block = min(rule.block, query.shape[1]), min(rule.block, key.shape[1])
    of_queries, of_keys = _placed(of_queries, block), _placed(of_keys, key_block)
    first, end = _walks(of_queries, of_keys, rule.window)
    return cls(
      _blocked(query, kv_heads=kv_heads, block=block),
      _blocked(key, kv_heads=kv_heads, block=key_block),
      _blocked(value, kv_heads=kv_heads, block=key_block),
      of_queries,
      of_keys,
      first,
      end,
    )


def _blocked(x: Float[Array, 'batch time heads n'], *, kv_heads: int, block: int) -> Array:
  """Reshapes to `[batch, blocks, kv_heads, heads / kv_heads · block, n]`, padded with zeros."""
  batch, time, heads, n = x.shape
  x = jnp.pad(x, ((0, 0), (0, -time % block), (0, 0), (0, 0)))
  x = x.reshape(batch, -1, block, kv_heads, heads // kv_heads, n)
  return x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, -1, kv_heads, heads // kv_heads * block, n)


def _unblocked(x: Float[Array, 'batch blocks kv_heads rows n'], *, like: Float[Array, 'batch time heads n']) -> Array:
  batch, time, heads, n = like.shape
  blocks, kv_heads = x.shape[1:3]
  x = x.reshape(batch, blocks, kv_heads, heads // kv_heads, -1, n).transpose(0, 1, 4, 2, 3, 5)
  return x.reshape(batch, -1, heads, n)[:, :time].astype(like.dtype)


def _placed(places: Places, block: int) -> Places:
  """Splits places into blocks, with padding at the end."""
  fill = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(x.shape[0], -1, block)
  return Places(fill(places.segment_ids), fill(places.positions))


def _walks(of_queries: Places, of_keys: Places, window: int | None) -> tuple[Array, Array]:
  """Returns first and end of the blocks of keys that each block of queries may see; both 0 if there are none.

  A block of keys is skipped if all of it lies after the block's last query, or before the first key visible to its
  first query, by segment and then position. No visible key is skipped for any token order; for packed tokens the range
  is exact except for padding.
  """
  low, low_at, high, high_at = (x[..., :, None] for x in _span(of_queries))
  key_low, key_low_at, key_high, key_high_at = (x[..., None, :] for x in _span(of_keys))
  begun = (key_low < high) | ((key_low == high) & (key_low_at <= high_at))
  near = True if window is None else low_at - key_high_at < window
  seen = begun & ((key_high > low) | ((key_high == low) & near))
  blocks = jnp.arange(seen.shape[-1])
  end = jnp.where(seen, blocks + 1, 0).max(-1)
  return jnp.minimum(jnp.where(seen, blocks, seen.shape[-1]).min(-1), end), end


def _span(places: Places) -> tuple[Array, Array, Array, Array]:
  """Returns, per block, the lowest segment, its lowest position, the highest segment and its highest position.

  Padding is ignored; in a block of padding only, the lowest segment is above all others and the highest below.
  """
  segments, positions = places
  top = jnp.iinfo(segments.dtype).max
  low = jnp.where(segments > 0, segments, top).min(-1)
  high = jnp.maximum(segments, 0).max(-1)
  low_at = jnp.where(segments == low[..., None], positions, jnp.iinfo(positions.dtype).max).min(-1)
  high_at = jnp.where(segments == high[..., None], positions, 0).max(-1)
  return low, low_at, high, high_at


def _scores(query, key, of_queries, of_keys, rule) -> tuple[Array, Bool[Array, 'group_of_rows keys']]:
  """Returns the unmasked, scaled and capped scores of a block and its visibility mask, both `[.., rows, keys]`."""
  statistics = jnp.promote_types(query.dtype, jnp.float32)
  scores = jnp.einsum('krh,ksh->krs', query, key, preferred_element_type=statistics) * query.shape[-1] ** -0.5
  if rule.softcap is not None:
    scores = rule.softcap * jnp.tanh(scores / rule.softcap)
  seen = visible(of_queries, of_keys, window=rule.window)
  return scores, jnp.tile(seen, (query.shape[1] // seen.shape[0], 1))


def _forward_row(row: _Rows, rule: _Rule) -> tuple[Array, Array]:
  """Returns outputs `[blocks, kv_heads, rows, head_dim]` and log-normalisers `[blocks, kv_heads, rows, 1]`."""

  def walk(block):
    query, of_queries, first, end = block

    def look(j, carry):
      mixed, peak, total = carry
      key, value, of_keys = _at((row.key, row.value, row.of_keys), j)
      scores, seen = _scores(query, key, of_queries, of_keys, rule)
      scores = jnp.where(seen, scores, MASKED)
      higher = jnp.maximum(peak, scores.max(-1, keepdims=True))
      weights, keep = jnp.exp(scores - higher), jnp.exp(peak - higher)
      new = jnp.einsum('krs,ksh->krh', weights.astype(value.dtype), value, preferred_element_type=scores.dtype)
      return mixed * keep + new, higher, total * keep + weights.sum(-1, keepdims=True)

    statistics = jnp.promote_types(query.dtype, jnp.float32)
    column = (*query.shape[:-1], 1)
    start = jnp.zeros(query.shape, statistics), jnp.full(column, FLOOR, statistics), jnp.zeros(column, statistics)
    mixed, peak, total = jax.lax.fori_loop(first, end, look, start)
    # A row that sees a key has a total of at least 1; the floor only affects empty rows.
    total = jnp.maximum(total, 1e-9)
    return (mixed / total).astype(query.dtype), peak + jnp.log(total)

  return jax.lax.map(walk, (row.query, row.of_queries, row.first, row.end))


def _backward_row(row: _Rows, gradient: Array, taken: Array, normalizer: Array, rule: _Rule):
  """Returns the gradients of a row's queries, keys and values, in blocks."""
  statistics = normalizer.dtype

  def walk(sums, block):
    query, of_queries, first, end, gradient, taken, normalizer = block

    def look(j, carry):
      of_query, of_keys_sum, of_values_sum = carry
      key, value, of_keys = _at((row.key, row.value, row.of_keys), j)
      scores, seen = _scores(query, key, of_queries, of_keys, rule)
      weights = jnp.exp(jnp.where(seen, scores, MASKED) - normalizer)
      product = functools.partial(jnp.einsum, preferred_element_type=statistics)
      of_value = product('krs,krh->ksh', weights.astype(gradient.dtype), gradient)
      of_scores = weights * (product('krh,ksh->krs', gradient, value) - taken)
      if rule.softcap is not None:
        of_scores = of_scores * (1 - (scores / rule.softcap) ** 2)
      of_scores = (of_scores * query.shape[-1] ** -0.5).astype(query.dtype)
      of_query = of_query + product('krs,ksh->krh', of_scores, key)
      of_key = product('krs,krh->ksh', of_scores, query)
      return of_query, of_keys_sum.at[j].add(of_key), of_values_sum.at[j].add(of_value)

    of_query, *sums = jax.lax.fori_loop(first, end, look, (jnp.zeros(query.shape, statistics), *sums))
    return tuple(sums), of_query.astype(query.dtype)

  start = jnp.zeros(row.key.shape, statistics), jnp.zeros(row.value.shape, statistics)
  blocks = (row.query, row.of_queries, row.first, row.end, gradient, taken, normalizer)
  (of_key, of_value), of_query = jax.lax.scan(walk, start, blocks)
  return of_query, of_key.astype(row.key.dtype), of_value.astype(row.value.dtype)


def _at(blocks: Any, j: Array) -> Any:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), blocks)
