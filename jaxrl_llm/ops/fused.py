"""Fused attention kernels for GPUs: cuDNN, the kernels of tokamax, and JAX's Triton kernel.

Invariant: except for cuDNN, the kernels mask by index (causally) and by segment, so queries and
keys must be the same tokens in the same order; see `attention`. The module of a kernel is imported
where it is used, because the import takes most of a second. No kernel for GPUs has run on one yet.
A run uses such a kernel only after a check on its own devices (`ops.self_check`).

Shared prefixes (`Places.seen_until`) need kernels that take a mask as an array: cuDNN and tokamax.
JAX's Triton kernel could only combine a prefix and a branch through the log-sum-exps of their
scores, but its public function returns these without a gradient. It also takes one array of segment
ids for queries and keys, so no call of it computes a branch's view of its prefix alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_llm.ops.places import Places, visible

_MULTIPLE = 128
"""Number of tokens to a multiple of which `pallas_gpu` pads rows."""
MASK_SCORES = 8192 * 8192
"""Number of scores per head (queries × keys of a row) up to which a kernel is given a mask as an
array, which has as many elements, 134 MB in bfloat16.
"""
_GPU_KERNEL = 'jax.experimental.pallas.ops.gpu.attention'


def why_not_pallas_gpu(
  dtype: Any, *, window: int | None, softcap: float | None, shards: int
) -> str | None:
  """Returns the reason why the GPU kernel does not support inputs with these properties; None if it
  supports them. `shards` is the number of shards of the time axis.
  """
  if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f'pallas_gpu does not compute in {jnp.dtype(dtype).name}'
  if window is not None or softcap is not None:
    return 'pallas_gpu supports neither window nor softcap'
  if shards > 1:
    return 'pallas_gpu numbers tokens from its first query, so the time axis cannot be sharded'
  if importlib.util.find_spec(_GPU_KERNEL) is None:
    return f'this version of JAX has no {_GPU_KERNEL}'
  return None


def why_not_cudnn(dtype: Any, *, time: int, keys: int, softcap: float | None) -> str | None:
  """Returns the reason why `cudnn` does not support inputs with these properties; None if it may
  support them. The version of cuDNN, the GPU and the size of the heads matter too.

  Args:
    time: number of queries per row.
    keys: number of keys per row.
  """
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
    return f'cudnn does not compute in {jnp.dtype(dtype).name}'
  if softcap is not None:
    return 'cudnn supports no softcap'
  if time * keys > MASK_SCORES:
    return f'cudnn needs a mask of {time} × {keys} elements for each row'
  return None


def why_not_tokamax(dtype: Any, *, shards: int) -> str | None:
  """Returns the reason why `tokamax` does not support inputs with these properties; None if it may
  support them. `shards` is the number of shards of the time axis.
  """
  if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f'tokamax does not compute in {jnp.dtype(dtype).name}'
  if shards > 1:
    return 'tokamax numbers tokens from its first query, so the time axis cannot be sharded'
  if importlib.util.find_spec('tokamax') is None:
    return 'tokamax is not installed'
  return None


def cudnn(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch keys kv_heads head_dim'],
  value: Float[Array, 'batch keys kv_heads head_dim'],
  of_queries: Places,
  of_keys: Places,
  *,
  window: int | None = None,
  library: Literal['cudnn', 'xla'] = 'cudnn',
) -> Float[Array, 'batch time heads head_dim']:
  """Runs cuDNN's flash attention.

  JAX's public interface to cuDNN has no packed segments. Therefore the visible keys are passed as a
  mask `[batch, 1, time, keys]`. Thanks to the mask, the queries may be a shard of the keys' tokens,
  and segments may share prefixes.

  Args:
    library: implementation of `jax.nn.dot_product_attention`. 'xla' runs on any platform; for
      tests.
  """
  mixed = jax.nn.dot_product_attention(
    query,
    key,
    value,
    mask=visible(of_queries, of_keys, window=window)[:, None],
    is_causal=of_queries is of_keys,
    implementation=library,
  )
  return without_padding(mixed, of_queries.segment_ids)


def tokamax(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch time kv_heads head_dim'],
  value: Float[Array, 'batch time kv_heads head_dim'],
  places: Places,
  *,
  window: int | None = None,
  softcap: float | None = None,
  kernels: Sequence[str] = ('mosaic', 'triton'),
) -> Float[Array, 'batch time heads head_dim']:
  """Runs the first of tokamax's kernels that supports the inputs and the device.

  If segments share prefixes, the visible keys are passed as a mask `[batch, 1, time, time]`.

  Args:
    kernels: names of kernels. 'xla_chunked' runs on any platform.
  """
  import tokamax as library

  if places.seen_until is None:
    before = places.positions if window is None else jnp.minimum(places.positions, window - 1)
    # tokamax takes a window in place of segments. As an array, it has one width per query: a query
    # sees as many tokens before it as its segment has.
    seen = dict(local_window_size=(before[:, None, :], 0))
  else:
    seen = dict(mask=visible(places, places, window=window)[:, None], is_causal=True)
  mixed = library.dot_product_attention(
    query,
    key,
    value,
    **seen,
    logits_soft_cap=softcap,
    implementation=tuple(kernels),
  )
  return without_padding(mixed, places.segment_ids)


def pallas_gpu(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch time kv_heads head_dim'],
  value: Float[Array, 'batch time kv_heads head_dim'],
  places: Places,
  *,
  interpret: bool = False,
) -> Float[Array, 'batch time heads head_dim']:
  """Runs JAX's Triton kernel, which compares segment ids inside the kernel.

  The kernel compiles for an absent H100. Tests compare it with the reference implementation in
  Pallas's interpreter mode. JAX 0.12 announces that the kernel will be removed.

  Args:
    interpret: whether the kernel runs in interpreter mode, which works on any platform; for tests.
  """
  from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

  batch, time, heads, head_dim = query.shape
  length, kv_heads = -(-time // _MULTIPLE) * _MULTIPLE, key.shape[2]
  query, key, value, ids = (fill(x, length) for x in (query, key, value, places.segment_ids))
  # Map the kernel over the query heads that share a key-value head. Keys and values are not mapped,
  # so they are indexed without being copied.
  shared = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
  options = head_dim**-0.5, True, BlockSizes.get_default(), 'triton', None, 2, None, interpret
  mixed = jax.vmap(lambda q: mha(q, key, value, ids, *options), in_axes=3, out_axes=3)(shared)
  return without_padding(mixed.reshape(query.shape), ids)[:, :time]


def fill(
  x: Shaped[Array, 'batch time *rest'], length: int
) -> Shaped[Array, 'batch {length} *rest']:
  """Pads the time axis with zeros to `length`. The segment id 0 means padding."""
  return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


def without_padding(
  mixed: Float[Array, 'batch time heads head_dim'], segment_ids: Int[Array, 'batch time']
) -> Float[Array, 'batch time heads head_dim']:
  """Sets the outputs at padding to 0. In the kernels, padding sees padding. Without this step, the
  outputs at padding would therefore have gradients.
  """
  return jnp.where(segment_ids[:, :, None, None] > 0, mixed, 0)
