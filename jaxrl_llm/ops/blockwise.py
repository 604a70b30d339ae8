"""FlashAttention-2 in plain JAX. On any platform, the memory needed by the forward and the backward
pass is linear in the sequence length.

Source: Dao 2023 (arXiv:2307.08691), algorithms 1 and 2, with the online softmax of Milakov and
Gimelshein 2018 (arXiv:1805.02867). Invariant: only one block of scores is materialised at a time.
For a block of queries Q and a block of keys K, the scores are S = Q Kᵀ / √head_dim.

Forward pass: for each Q, iterate over the blocks K, V that Q may see. Start with row_max = -∞,
row_sum = 0 and acc = 0.

  row_max' = max(row_max, rowmax(S));  P = exp(S - row_max');  rescale = exp(row_max - row_max')
  row_sum' = rescale · row_sum + rowsum(P);  acc' = rescale · acc + P V
  at the end:  O = acc / row_sum;  lse = row_max + log(row_sum)

Backward pass: besides Q, K and V, the inputs are O, lse (the log of the sum of exponentials) and
dO. P is recomputed instead of stored. The symbol ∘ is the elementwise product.

  delta = rowsum(dO ∘ O)
  P = exp(S - lse);  dP = dO Vᵀ;  dS = P ∘ (dP - delta)
  dV += Pᵀ dO;  dQ += dS K / √head_dim;  dK += dSᵀ Q / √head_dim
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.ops.places import FLOOR, MASKED, Places, visible

BLOCK = 128
"""Default number of queries in a block, and of keys in a block."""


_Queries = Float[Array, 'batch time heads head_dim']
_Keys = Float[Array, 'batch keys kv_heads head_dim']
# Types of the arrays of one row of the batch, split into blocks.
_QueryBlocks = Float[Array, 'blocks kv_heads rows head_dim']
_KeyBlocks = Float[Array, 'key_blocks kv_heads key_block head_dim']
_Statistic = Float[Array, 'blocks kv_heads rows 1']


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
  """Computes `attention` block by block.

  Each block of queries iterates only over the blocks of keys that it may see. If a row contains
  packed segments in order, blocks of keys that contain only later tokens or unrelated segments
  therefore cost nothing. Unrelated segments are those that share no prefix with the queries'
  segments. Rows of the batch are processed sequentially, each with its own blocks.
  """
  return _attend(query, key, value, of_queries, of_keys, _Rule(window, softcap, block))


class _Residuals(NamedTuple):
  """Values that the forward pass saves for the backward pass."""

  query: _Queries
  key: _Keys
  value: _Keys
  of_queries: Places
  of_keys: Places
  out: _Queries
  lse: Float[Array, 'batch blocks kv_heads rows 1']


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
  query: _Queries, key: _Keys, value: _Keys, of_queries: Places, of_keys: Places, rule: _Rule
) -> _Queries:
  return _forward(query, key, value, of_queries, of_keys, rule)[0]


def _forward(
  query: _Queries, key: _Keys, value: _Keys, of_queries: Places, of_keys: Places, rule: _Rule
) -> tuple[_Queries, _Residuals]:
  rows = _Rows.of(query, key, value, of_queries, of_keys, rule)
  out, lse = jax.lax.map(lambda row: _forward_row(row, rule), rows)
  out = _unblocked(out, like=query)
  return out, _Residuals(query, key, value, of_queries, of_keys, out, lse)


def _backward(
  rule: _Rule, residuals: _Residuals, dout: _Queries
) -> tuple[_Queries, _Keys, _Keys, None, None]:
  """Returns the gradients of queries, keys and values. The `Places` of queries and keys have no
  gradients.
  """
  *arguments, out, lse = residuals
  rows = _Rows.of(*arguments, rule)
  delta = (out.astype(lse.dtype) * dout.astype(lse.dtype)).sum(-1, keepdims=True)
  blocked = functools.partial(_blocked, kv_heads=residuals.key.shape[2], block=rows.query_block)
  dq, dk, dv = jax.lax.map(
    lambda row: _backward_row(*row, rule), (rows, blocked(dout), blocked(delta), lse)
  )
  return (
    _unblocked(dq, like=residuals.query),
    _unblocked(dk, like=residuals.key),
    _unblocked(dv, like=residuals.value),
    None,
    None,
  )


_attend.defvjp(_forward, _backward)


class _Rows(NamedTuple):
  """Arguments split into blocks. The query heads that share keys become rows of one matrix product,
  so that `rows` = heads / kv_heads · block.
  """

  query: Float[Array, '*batch blocks kv_heads rows head_dim']
  key: Float[Array, '*batch key_blocks kv_heads key_block head_dim']
  value: Float[Array, '*batch key_blocks kv_heads key_block head_dim']
  of_queries: Places
  """Places of the queries, `[*batch, blocks, block]`."""
  of_keys: Places
  visits: Int[Array, '*batch blocks key_blocks']
  """Indices of the blocks of keys that each block of queries may see, followed by all other
  indices.
  """
  count: Int[Array, '*batch blocks']
  """Number of blocks of keys that each block of queries may see."""

  @property
  def query_block(self) -> int:
    return self.of_queries.positions.shape[-1]

  @classmethod
  def of(
    cls, query: _Queries, key: _Keys, value: _Keys, of_queries: Places, of_keys: Places, rule: _Rule
  ) -> _Rows:
    kv_heads = key.shape[2]
    block, key_block = min(rule.block, query.shape[1]), min(rule.block, key.shape[1])
    of_queries, of_keys = _placed(of_queries, block), _placed(of_keys, key_block)
    visits, count = _visits(of_queries, of_keys, rule.window)
    return cls(
      _blocked(query, kv_heads=kv_heads, block=block),
      _blocked(key, kv_heads=kv_heads, block=key_block),
      _blocked(value, kv_heads=kv_heads, block=key_block),
      of_queries,
      of_keys,
      visits,
      count,
    )


def _blocked(
  x: Float[Array, 'batch time heads n'], *, kv_heads: int, block: int
) -> Float[Array, 'batch blocks kv_heads rows n']:
  """Pads time with zeros and splits it into blocks. A block has `rows` = (heads / kv_heads) · block
  rows for each key-value head.
  """
  batch, time, heads, n = x.shape
  x = jnp.pad(x, ((0, 0), (0, -time % block), (0, 0), (0, 0)))
  x = x.reshape(batch, -1, block, kv_heads, heads // kv_heads, n)
  return x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, -1, kv_heads, heads // kv_heads * block, n)


def _unblocked(
  x: Float[Array, 'batch blocks kv_heads rows n'], *, like: Float[Array, 'batch time heads n']
) -> Float[Array, 'batch time heads n']:
  """Inverts `_blocked`. The result has the shape and dtype of `like`."""
  batch, time, heads, n = like.shape
  blocks, kv_heads = x.shape[1:3]
  x = x.reshape(batch, blocks, kv_heads, heads // kv_heads, -1, n).transpose(0, 1, 4, 2, 3, 5)
  return x.reshape(batch, -1, heads, n)[:, :time].astype(like.dtype)


def _placed(places: Places, block: int) -> Places:
  """Splits places into blocks and pads the last block."""

  def fill(x):
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(x.shape[0], -1, block)

  return jax.tree.map(fill, places)


def _visits(
  of_queries: Places, of_keys: Places, window: int | None
) -> tuple[Int[Array, 'batch blocks key_blocks'], Int[Array, 'batch blocks']]:
  """Returns two arrays for each block of queries: the indices of the blocks of keys that it must
  visit, in ascending order and followed by all other indices, and the number of blocks to visit.

  Tokens are ordered by segment, then by position. For a block of queries, a block of keys is left
  out in three cases: all keys come after the last query; every segment that sees one of the keys
  comes before the first query's segment; or the first query's segment is the last that sees one of
  the keys, and all keys that it sees are beyond the first query's window. Even if the tokens of a
  row are not in this order, no key that a query may attend to is left out.
  """
  low, low_at, high, high_at = (x[..., :, None] for x in _span(of_queries))
  key_low, key_low_at, _, _ = (x[..., None, :] for x in _span(of_keys))
  last = of_keys.last_segments
  key_last = last.max(-1)
  key_last_at = jnp.where(last == key_last[..., None], of_keys.positions, 0).max(-1)
  key_last, key_last_at = key_last[..., None, :], key_last_at[..., None, :]
  begun = (key_low < high) | ((key_low == high) & (key_low_at <= high_at))
  near = True if window is None else low_at - key_last_at < window
  seen = begun & ((key_last > low) | ((key_last == low) & near))
  return jnp.argsort(~seen, axis=-1, stable=True), seen.sum(-1)


def _span(places: Places) -> tuple[Int[Array, 'batch blocks'], ...]:
  """Returns four values for each block: the lowest segment, the lowest position in that segment,
  the highest segment, and the highest position in that segment.

  Padding is ignored. For a block that contains only padding, the lowest segment is above all real
  segments and the highest is 0.
  """
  segments, positions = places[:2]
  top = jnp.iinfo(segments.dtype).max
  low = jnp.where(segments > 0, segments, top).min(-1)
  high = jnp.maximum(segments, 0).max(-1)
  low_at = jnp.where(segments == low[..., None], positions, jnp.iinfo(positions.dtype).max).min(-1)
  high_at = jnp.where(segments == high[..., None], positions, 0).max(-1)
  return low, low_at, high, high_at


def _scores(
  query: Float[Array, 'kv_heads rows head_dim'],
  key: Float[Array, 'kv_heads keys head_dim'],
  of_queries: Places,
  of_keys: Places,
  rule: _Rule,
) -> tuple[Float[Array, 'kv_heads rows keys'], Bool[Array, 'rows keys']]:
  """Returns the scores of a block, scaled and capped but not masked, and the visibility mask of the
  block.
  """
  statistics = jnp.promote_types(query.dtype, jnp.float32)
  scores = (
    jnp.einsum('krh,ksh->krs', query, key, preferred_element_type=statistics)
    * query.shape[-1] ** -0.5
  )
  if rule.softcap is not None:
    scores = rule.softcap * jnp.tanh(scores / rule.softcap)
  seen = visible(of_queries, of_keys, window=rule.window)
  return scores, jnp.tile(seen, (query.shape[1] // seen.shape[0], 1))


def _forward_row(row: _Rows, rule: _Rule) -> tuple[_QueryBlocks, _Statistic]:
  """Returns the outputs and the lse (log of the sum of exponentials) of one row of the batch."""

  def attend_block(queries):
    query, of_queries, visits, count = queries

    def add_keys(i, carry):
      acc, row_max, row_sum = carry
      j = visits[i]
      key, value, of_keys = _at((row.key, row.value, row.of_keys), j)
      scores, seen = _scores(query, key, of_queries, of_keys, rule)
      scores = jnp.where(seen, scores, MASKED)
      new_max = jnp.maximum(row_max, scores.max(-1, keepdims=True))
      p, rescale = jnp.exp(scores - new_max), jnp.exp(row_max - new_max)
      pv = jnp.einsum(
        'krs,ksh->krh', p.astype(value.dtype), value, preferred_element_type=scores.dtype
      )
      return acc * rescale + pv, new_max, row_sum * rescale + p.sum(-1, keepdims=True)

    statistics = jnp.promote_types(query.dtype, jnp.float32)
    column = (*query.shape[:-1], 1)
    start = (
      jnp.zeros(query.shape, statistics),
      jnp.full(column, FLOOR, statistics),
      jnp.zeros(column, statistics),
    )
    acc, row_max, row_sum = jax.lax.fori_loop(0, count, add_keys, start)
    # If a query sees a key, its sum is at least 1. The bound 1e-9 therefore only affects queries
    # that see none.
    row_sum = jnp.maximum(row_sum, 1e-9)
    return (acc / row_sum).astype(query.dtype), row_max + jnp.log(row_sum)

  return jax.lax.map(attend_block, (row.query, row.of_queries, row.visits, row.count))


def _backward_row(
  row: _Rows, dout: _QueryBlocks, delta: _Statistic, lse: _Statistic, rule: _Rule
) -> tuple[_QueryBlocks, _KeyBlocks, _KeyBlocks]:
  """Returns the gradients of the queries, keys and values of one row of the batch."""
  statistics = lse.dtype

  def add_queries(sums, queries):
    query, of_queries, visits, count, dout, delta, lse = queries

    def add_keys(i, carry):
      dq, dk, dv = carry
      j = visits[i]
      key, value, of_keys = _at((row.key, row.value, row.of_keys), j)
      scores, seen = _scores(query, key, of_queries, of_keys, rule)
      p = jnp.exp(jnp.where(seen, scores, MASKED) - lse)
      product = functools.partial(jnp.einsum, preferred_element_type=statistics)
      dv_j = product('krs,krh->ksh', p.astype(dout.dtype), dout)
      ds = p * (product('krh,ksh->krs', dout, value) - delta)
      if rule.softcap is not None:
        ds = ds * (1 - (scores / rule.softcap) ** 2)
      ds = (ds * query.shape[-1] ** -0.5).astype(query.dtype)
      dq = dq + product('krs,ksh->krh', ds, key)
      dk_j = product('krs,krh->ksh', ds, query)
      return dq, dk.at[j].add(dk_j), dv.at[j].add(dv_j)

    dq, *sums = jax.lax.fori_loop(0, count, add_keys, (jnp.zeros(query.shape, statistics), *sums))
    return tuple(sums), dq.astype(query.dtype)

  start = jnp.zeros(row.key.shape, statistics), jnp.zeros(row.value.shape, statistics)
  queries = (row.query, row.of_queries, row.visits, row.count, dout, delta, lse)
  (dk, dv), dq = jax.lax.scan(add_queries, start, queries)
  return dq, dk.astype(row.key.dtype), dv.astype(row.value.dtype)


def _at(blocks: Any, j: Int[Array, '']) -> Any:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), blocks)
