"""The platforms' fused attention kernels, from JAX's own collection: splash attention (TPU) and a Triton one (GPU).

Invariant: both are causal by index and compare segments, so they speak of tokens that attend to one another and stand
in order; see `attention`. A kernel is imported where it is used: that takes the better part of a second.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.ops.places import Places

BLOCKS = (512, 256, 128)
"""Tokens of a kernel's block; rows are filled up to a multiple."""
_GPU_KERNEL = 'jax.experimental.pallas.ops.gpu.attention'


def why_not_splash(dtype: Any) -> str | None:
  """What keeps splash attention from inputs of this type; None = nothing does. It takes any length and head size."""
  if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
    return f'splash computes in float32 and bfloat16, not in {jnp.dtype(dtype).name}'
  return None


def why_not_pallas_gpu(dtype: Any, *, window: int | None, softcap: float | None, shards: int) -> str | None:
  """What keeps the GPU's kernel from inputs whose time is cut into `shards`; None = nothing does."""
  if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f'pallas_gpu does not compute in {jnp.dtype(dtype).name}'
  if window is not None or softcap is not None:
    return 'pallas_gpu has neither window nor softcap'
  if shards > 1:
    return 'pallas_gpu counts from the first query, so the sequence cannot be cut'
  if importlib.util.find_spec(_GPU_KERNEL) is None:
    return f'this version of JAX has no {_GPU_KERNEL}'
  return None


def splash_length(time: int, *, shards: int = 1) -> int:
  """Tokens that a row of `time` is filled up to, so that blocks divide each of its shards."""
  # The largest block for which no share grows by more than an eighth; shards² is to divide the length too.
  share = -(-time // shards)
  block = next((n for n in BLOCKS if -(-share // n) * n <= share * 9 / 8), BLOCKS[-1])
  step = math.lcm(shards * block, shards**2)
  return -(-time // step) * step


def splash_kernel(
  length: int, *, window: int | None, softcap: float | None, shards: int = 1, interpret: bool = False
) -> Any:
  """The kernel for rows of that many tokens, of any heads: a pytree of the blocks to visit, and what to do with them.

  Blocks above the diagonal or beyond the window are never visited. The backward pass makes two kernels, one for
  queries and one for keys and values: the single one keeps a gradient of the queries per block of keys, which is
  quadratic in time.

  Args:
    length: of `splash_length`.
    shards: parts that the queries' time is cut into, where it runs under `jax.shard_map` and is passed as an argument
      by its `manual_sharding_spec`.
    interpret: run its program step by step on any platform, for tests.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as library

  square = (length, length)
  if window is None:
    mask = library.CausalMask(square, shard_count=shards)
  else:
    mask = library.LocalMask(square, (window - 1, 0), 0, shard_count=shards)
  n = next(n for n in BLOCKS if length // shards % n == 0)
  blocks = library.BlockSizes(
    block_q=n, block_kv=n, block_q_dkv=n, block_kv_dkv=n, block_q_dq=n, block_kv_dq=n, block_kv_compute=n
  )  # fmt: skip
  # One head's mask stands for all.
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
) -> Float[Array, 'batch time heads head_dim']:
  """Attention by a kernel of `splash_kernel`, of rows filled up to its length, or of this device's shard of them."""
  from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

  wide = query.astype(jnp.promote_types(query.dtype, jnp.float32))
  query = (wide * query.shape[-1] ** -0.5).astype(query.dtype)
  by_head = lambda x: jnp.moveaxis(x, 2, 1)
  mixed = jax.vmap(kernel)(by_head(query), by_head(key), by_head(value), SegmentIds(segment_ids, key_segment_ids))
  return _without_padding(by_head(mixed), segment_ids)


def splash(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch time kv_heads head_dim'],
  value: Float[Array, 'batch time kv_heads head_dim'],
  places: Places,
  *,
  window: int | None = None,
  softcap: float | None = None,
  interpret: bool = False,
) -> Float[Array, 'batch time heads head_dim']:
  """Splash attention on one device; see `attention` and `splash_kernel`."""
  time = query.shape[1]
  length = splash_length(time)
  kernel = splash_kernel(length, window=window, softcap=softcap, interpret=interpret)
  query, key, value, ids = (fill(x, length) for x in (query, key, value, places.segment_ids))
  return run_splash(kernel, query, key, value, ids, ids)[:, :time]


def pallas_gpu(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch time kv_heads head_dim'],
  value: Float[Array, 'batch time kv_heads head_dim'],
  places: Places,
  *,
  interpret: bool = False,
) -> Float[Array, 'batch time heads head_dim']:
  """JAX's Triton kernel, which compares segments as it goes.

  Why not cuDNN: by JAX's public interface it knows segments only as a bias, `[batch, 1, time, time]` in memory, which
  is what is to be avoided. The kernel lowers only where there is a GPU, so nothing here was compiled without one: it
  was held against the reference in Pallas' interpreter. JAX 0.12 says that it will be dropped one day.

  Args:
    interpret: run the kernel's program step by step on any platform, for tests.
  """
  from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

  batch, time, heads, head_dim = query.shape
  length, kv_heads = -(-time // BLOCKS[-1]) * BLOCKS[-1], key.shape[2]
  query, key, value, ids = (fill(x, length) for x in (query, key, value, places.segment_ids))
  # Mapped over the heads that share keys: the kernel indexes what is not mapped, and nothing is copied.
  shared = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
  options = head_dim**-0.5, True, BlockSizes.get_default(), 'triton', None, 2, None, interpret
  mixed = jax.vmap(lambda q: mha(q, key, value, ids, *options), in_axes=3, out_axes=3)(shared)
  return _without_padding(mixed.reshape(query.shape), ids)[:, :time]


def fill(x: Array, length: int) -> Array:
  """`[batch, time, ...]` with zeros after its end; segment 0 is padding."""
  return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


def _without_padding(mixed: Float[Array, 'batch time heads head_dim'], segment_ids: Int[Array, 'batch time']) -> Array:
  """Padding sees padding in the kernels; here it yields 0, and so sends no gradient."""
  return jnp.where(segment_ids[:, :, None, None] > 0, mixed, 0)
