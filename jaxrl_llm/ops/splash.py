"""Splash attention, JAX's fused attention kernel for TPUs.

Invariant: the kernel masks by index (causally) and by segment, so queries and keys must be the same
tokens; see `attention`. The module of the kernel is imported where it is used, because the import
takes most of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.ops.fused import fill, without_padding
from jaxrl_llm.ops.places import Places

BLOCKS = (1024, 512, 256, 128)
"""Block sizes in tokens, for queries and for keys, of the forward and of the backward pass. The
compiler has 16 MiB for blocks (VMEM), in which those of 2,048 tokens do not fit for all sizes of
heads and dtypes.
"""
MULTIPLE = BLOCKS[-1]
"""Number of tokens of which the length of a row or a piece must be a multiple."""
_PRODUCTS = 512
"""Number of keys for which scores are computed at a time."""
_STEP, _PAIR, _UTILISATION = 0.35e-6, 18 * 128 / 3, 0.4
"""Cost model of a block: seconds to begin a block (assumed); operations per pair of a query and a
key, in each of the three kernels (4, 6 and 8 times the size of a head); share of the chip's peak at
which they are computed. Heads of fewer than 128 elements cost as much as heads of 128.
"""
_SKIPS_FROM = 4
"""Number of blocks per row from which blocks of other segments are skipped. If there are several
rows, the kernel is then called for one row at a time.
"""


def why_not_splash(dtype: Any) -> str | None:
  """Returns the reason why splash attention does not support this dtype; None if it does. All
  lengths and head sizes are supported.
  """
  if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
    return f'splash computes in float32 and bfloat16, not in {jnp.dtype(dtype).name}'
  return None


def splash_block(
  time: int, *, shards: int, peak_flops: float | None, is_exact: bool = False
) -> int:
  """Returns the block size that takes the least time according to a cost model.

  Large blocks begin less often. Small ones compute fewer scores above the diagonal, and rows need
  less padding.

  Args:
    time: number of tokens of a row.
    shards: number of shards or pieces of a row, each of which has an integral number of blocks.
    peak_flops: bfloat16 operations per second of the chip; None if it is not known. Blocks are then
      those of the slowest known chip.
    is_exact: whether rows must not be padded. `time` is then a multiple of shards · `MULTIPLE`.
  """
  rate = _UTILISATION * (peak_flops or 197e12)

  def seconds(block: int) -> float:
    blocks = splash_length(time, block=block, shards=shards) // block
    return blocks * (blocks + 1) / 2 * (_STEP + block**2 * _PAIR / rate)

  return min((n for n in BLOCKS if not is_exact or time % (shards * n) == 0), key=seconds)


def splash_length(time: int, *, block: int, shards: int = 1) -> int:
  """Returns the length to which a row of `time` tokens is padded, so that each shard contains an
  integral number of blocks.
  """
  step = shards * block
  return -(-time // step) * step


def splash_kernel(
  length: int,
  *,
  block: int,
  window: int | None,
  softcap: float | None,
  shards: int = 1,
  order: Sequence[int] | None = None,
  interpret: bool = False,
) -> Any:
  """Builds the kernel for rows of `length` tokens and any number of heads.

  The kernel is a callable pytree that lists the blocks to visit. Blocks above the diagonal or
  beyond the window are never visited. The backward pass uses two kernels, one for the gradient of
  the queries and one for the gradients of keys and values. The alternative, a single kernel, would
  store a gradient of the queries for each block of keys, which needs memory quadratic in time.

  Args:
    length: result of `splash_length`.
    block: one of `BLOCKS`.
    shards: number of shards of the queries' time axis, if the kernel runs under `jax.shard_map`. In
      that case, pass the kernel to the mapped function as an argument, with its
      `manual_sharding_spec`.
    order: if given, queries are not in the order of the keys: rows are cut into equal pieces, and
      these are the numbers of the pieces in the order of the queries.
    interpret: whether the kernel runs in interpreter mode, which works on any platform; for tests.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as library

  square = (length, length)
  mask = (
    library.CausalMask(square) if window is None else library.LocalMask(square, (window - 1, 0), 0)
  )
  if order is not None:
    mask.q_sequence = mask.q_sequence.reshape(len(order), -1)[list(order)].reshape(-1)
  part = min(block, _PRODUCTS)
  blocks = library.BlockSizes(
    block_q=block, block_kv=block, block_kv_compute=part,
    block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=part,
    block_q_dq=block, block_kv_dq=block,
  )  # fmt: skip
  # All heads share one mask.
  return library.make_splash_mha(
    library.MultiHeadMask([mask]),
    head_shards=1,
    q_seq_shards=shards,
    block_sizes=blocks,
    attn_logits_soft_cap=softcap,
    interpret=interpret,
  )


def run_splash(
  kernel: Any,
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch keys kv_heads head_dim'],
  value: Float[Array, 'batch keys kv_heads head_dim'],
  segment_ids: Int[Array, 'batch time'],
  key_segment_ids: Int[Array, 'batch keys'],
  *,
  block: int,
) -> Float[Array, 'batch time heads head_dim']:
  """Runs a `splash_kernel` on rows that are padded to the kernel's length, or on this device's
  shard of such rows. `block` is the argument of `splash_kernel`.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

  wide = query.astype(jnp.promote_types(query.dtype, jnp.float32))
  query = (wide * query.shape[-1] ** -0.5).astype(query.dtype)

  def by_head(x):
    return jnp.moveaxis(x, 2, 1)

  def row(query, key, value, ids):
    skips = key.shape[1] >= _SKIPS_FROM * block
    return (skipping_segments(kernel, ids, block) if skips else kernel)(query, key, value, ids)

  ids = SegmentIds(segment_ids, key_segment_ids)
  mixed = jax.vmap(row)(by_head(query), by_head(key), by_head(value), ids)
  return without_padding(by_head(mixed), segment_ids)


def skipping_segments(kernel: Any, ids: Any, block: int) -> Any:
  """Returns a kernel for one row, which also skips blocks whose queries and keys have no segment in
  common.

  The library masks segments inside of blocks, but skips blocks only by its mask, which is static or
  an array `[heads, time, keys]`. The blocks that a kernel visits are the values of its fields
  `block_mask` (0 for blocks to skip) and `data_next` (the block of keys, or in the gradient of keys
  and values the block of queries, that each step has in memory). Here, both are computed from the
  segments. Results are the same to the bit, since the skipped blocks would only add zeros.

  The library documents these fields, but does not export their type. If a version of JAX has other
  fields, the kernel is returned as it is, and a warning says so.

  Args:
    kernel: result of `splash_kernel`.
    ids: segment ids of the row's queries and keys (the library's `SegmentIds`). In each, segments
      follow one another, except that queries may consist of pieces.
    block: argument of `splash_kernel`. Pieces consist of whole blocks.
  """
  infos, structure = jax.tree.flatten(kernel, is_leaf=lambda x: x is not kernel)
  if not _has_lists(infos, *(len(x) // block for x in ids)):
    logging.log_first_n(
      logging.WARNING,
      'splash attention: JAX %s lists the blocks to visit in an unknown way; blocks of other '
      'segments are computed, too, with the same results',
      1,
      jax.__version__,
    )
    return kernel
  common = _in_common(*(_spans(x, block) for x in ids))

  def visiting(info: Any, axis: int) -> Any:
    blocks, is_visited = info.data_next[0].astype(jnp.int32), info.block_mask[0]
    is_visited = jnp.where(jnp.take_along_axis(common, blocks, axis), is_visited, 0)
    # While a step is skipped, the block of the next visited step is fetched, or the last one is
    # kept.
    places = jax.lax.broadcasted_iota(jnp.int32, blocks.shape, axis)
    count = blocks.shape[axis]
    following = jax.lax.cummin(jnp.where(is_visited > 0, places, count), axis=axis, reverse=True)
    last = jnp.where(is_visited > 0, places, 0).max(axis, keepdims=True)
    fetched = jnp.take_along_axis(blocks, jnp.where(following < count, following, last), axis)
    return info._replace(
      block_mask=is_visited[None], data_next=fetched[None].astype(info.data_next.dtype)
    )

  forward, of_queries, of_keys = infos
  visits = visiting(forward, 1), visiting(of_queries, 1), visiting(of_keys, 0)
  return jax.tree.unflatten(structure, visits)


def _has_lists(infos: Sequence[Any], query_blocks: int, key_blocks: int) -> bool:
  """Returns whether a kernel consists of the lists of blocks that `skipping_segments` rewrites."""

  def shape(info: Any, name: str) -> tuple[int, ...]:
    return getattr(getattr(info, name, None), 'shape', ())

  shapes = [shape(info, 'block_mask') for info in infos]
  if shapes != [shape(info, 'data_next') for info in infos]:
    return False
  match shapes:
    case [(1, forward, _), (1, of_queries, _), (1, _, of_keys)]:
      return forward == of_queries == query_blocks and of_keys == key_blocks
  return False


def _spans(
  ids: Int[Array, 'time'], block: int
) -> tuple[Int[Array, 'blocks'], Int[Array, 'blocks']]:
  """Returns the lowest and the highest segment of each block. Padding counts as the last segment of
  the row, since padding must see itself in the kernel: the softmax over no keys is not finite.
  """
  ids = jnp.where(ids > 0, ids, jnp.iinfo(ids.dtype).max).reshape(-1, block)
  return ids.min(-1), ids.max(-1)


def _in_common(
  of_queries: tuple[Int[Array, 'blocks'], ...], of_keys: tuple[Int[Array, 'key_blocks'], ...]
) -> Bool[Array, 'blocks key_blocks']:
  """Returns whether the spans of segments of a block of queries and a block of keys overlap."""
  (low, high), (key_low, key_high) = of_queries, of_keys
  return (low[:, None] <= key_high) & (key_low <= high[:, None])


def splash(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch time kv_heads head_dim'],
  value: Float[Array, 'batch time kv_heads head_dim'],
  places: Places,
  *,
  block: int,
  window: int | None = None,
  softcap: float | None = None,
  interpret: bool = False,
) -> Float[Array, 'batch time heads head_dim']:
  """Computes splash attention on one device; see `attention` and `splash_kernel`."""
  time = query.shape[1]
  length = splash_length(time, block=block)
  kernel = splash_kernel(length, block=block, window=window, softcap=softcap, interpret=interpret)
  query, key, value, ids = (fill(x, length) for x in (query, key, value, places.segment_ids))
  return run_splash(kernel, query, key, value, ids, ids, block=block)[:, :time]
