"""Attention with shared key-value heads: its interface, its reference implementation, and the
choice among implementations.

Invariant: the output of a query that sees no key is 0 and has no gradient. Finite inputs never
produce NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.ops.blockwise import BLOCK, blockwise
from jaxrl_llm.ops.fused import (
  MASK_SCORES,
  cudnn,
  pallas_gpu,
  tokamax,
  why_not_cudnn,
  why_not_pallas_gpu,
  why_not_tokamax,
)
from jaxrl_llm.ops.places import FLOOR, MASKED, Places, visible
from jaxrl_llm.ops.splash import MULTIPLE, splash, splash_block, why_not_splash

Implementation = Literal['masked', 'blockwise', 'splash', 'cudnn', 'tokamax', 'pallas_gpu']
SHARES_PREFIXES: frozenset[Implementation] = frozenset({'masked', 'blockwise', 'cudnn', 'tokamax'})
"""Implementations in which segments may share prefixes (`Places.seen_until`)."""
KERNELS: Mapping[str, tuple[Implementation, ...]] = {
  'tpu': ('splash',),
  'gpu': ('cudnn', 'tokamax', 'pallas_gpu'),
}
"""Fused kernels of each platform that has any, in the order in which they are tried."""
CHECKED = frozenset({'gpu'})
"""Platforms whose kernels are used only after a check on the devices of the run (`self_check`)."""
SKIP_BLOCKS: frozenset[Implementation] = frozenset({'blockwise', 'splash'})
"""Implementations that skip blocks of keys that no query of a block sees. Only with these does the
work of a device depend on which queries it has.
"""
MASKED_SCORES = 256 * 256
"""Number of scores per head (queries × keys of a row) up to which masked attention is as fast as
blockwise attention on a CPU. At 512 × 512, blockwise attention takes at most a third of the time of
masked attention, for any number of heads and segments.
"""


class Choice(NamedTuple):
  implementation: Implementation
  reason: str
  block: int
  """Block size in tokens, for blockwise and splash attention. On a CPU, blocks are small enough to
  fit in the caches. On other platforms, they are large enough to hide the fixed cost per block.
  """
  is_balanced: bool = False
  """Whether each shard of the queries' time axis has an early and a late piece of every row, as
  `parallel.balance` describes, instead of consecutive tokens.
  """


def is_absent(asked: str, platform: str) -> bool:
  """Returns whether `asked`, a value of `policy.attention`, is a fused kernel that only other
  platforms have.
  """
  kernels = KERNELS.get(platform, ())
  return asked not in kernels and any(asked in others for others in KERNELS.values())


def choose(
  asked: Implementation | Literal['auto'],
  *,
  platform: str,
  time: int,
  keys: int,
  same_tokens: bool,
  dtype: Any,
  window: int | None = None,
  softcap: float | None = None,
  shards: int = 1,
  may_balance: bool = True,
  peak_flops: float | None = None,
) -> Choice:
  """Chooses the implementation of an attention. The result includes the reason for the choice.

  On a platform in `CHECKED`, 'auto' stands for an implementation in plain JAX. At the start of a
  run, the first of the platform's kernels that is correct there takes the place of 'auto'
  (`models.attention.proven`).

  Args:
    asked: implementation from the configuration. A fused kernel named here is used only if
      `same_tokens` is true; otherwise, as in attention over a KV cache, the choice is that of
      'auto'.
    platform: platform of the devices.
    time: number of queries per row.
    keys: number of keys per row.
    same_tokens: whether queries and keys belong to the same tokens.
    dtype: dtype of queries, keys and values.
    shards: number of shards of the queries' time axis.
    may_balance: whether the shards may be balanced. They are if the implementation skips blocks
      and the pieces of a row have equal lengths.
    peak_flops: bfloat16 operations per second of a TPU, which determine the block size of splash
      attention; None if unknown.

  Raises:
    UserError: the configured kernel does not run on the platform, or does not support these inputs.
  """
  rule = dict(time=time, keys=keys, dtype=dtype, window=window, softcap=softcap, shards=shards)
  if asked in ('masked', 'blockwise'):
    implementation, reason = asked, 'as configured'
  else:
    implementation, reason = _kernel(asked, platform, same_tokens, rule)
  if implementation is None:
    implementation = 'masked' if time * keys <= MASKED_SCORES else 'blockwise'
  block = 128 if platform == 'cpu' else 512
  is_balanced = False
  if shards > 1 and same_tokens and implementation in SKIP_BLOCKS:
    why = _why_not_balanced(implementation, time, shards) if may_balance else 'as configured'
    is_balanced = why is None
    reason += '; balanced shards' if is_balanced else f'; consecutive shards: {why}'
  parts = 2 * shards if is_balanced else shards
  if implementation == 'splash':
    block = splash_block(time, shards=parts, peak_flops=peak_flops, is_exact=is_balanced)
  elif is_balanced:
    block = _dividing(time // parts, block)
  return Choice(implementation, reason, block, is_balanced)


def _why_not_balanced(implementation: Implementation, time: int, shards: int) -> str | None:
  """Returns why rows of `time` tokens cannot be cut into two equal pieces per shard; None if they
  can. Pieces for splash attention must consist of whole blocks.
  """
  multiple = 2 * shards * (MULTIPLE if implementation == 'splash' else 1)
  return f'{time} tokens are no multiple of {multiple}' if time % multiple else None


def _kernel(
  asked: Implementation | Literal['auto'],
  platform: str,
  same_tokens: bool,
  rule: Mapping[str, Any],
) -> tuple[Implementation | None, str]:
  """Returns the fused kernel, or None if there is none to be used, and the reason.

  Args:
    asked: a kernel or 'auto'. This and the following arguments are those of `choose`.
    rule: arguments of `unsupported`.

  Raises:
    UserError: the configured kernel does not run on the platform, or does not support these inputs.
  """
  kernels = KERNELS.get(platform, ())
  if same_tokens and is_absent(asked, platform):
    raise UserError(
      f'policy.attention: {asked} does not run on this platform ({platform}); choose auto'
    )
  is_open = asked == 'auto' and (not kernels or platform in CHECKED)
  if not same_tokens or is_open:
    return None, f'{rule["time"]} × {rule["keys"]} scores on {platform}'
  kernel = kernels[0] if asked == 'auto' else asked
  why_not = unsupported(kernel, **rule)
  if why_not and asked != 'auto':
    raise UserError(f'policy.attention: {why_not}; choose auto')
  if why_not:
    return None, why_not
  return kernel, 'as configured' if asked != 'auto' else f'the kernel of {platform}'


def _dividing(piece: int, block: int) -> int:
  """Returns a block size of at most `block` that divides a piece of `piece` tokens. No block then
  has queries of both pieces of a shard. If only small blocks do so, `block` is returned.
  """
  largest = min(block, piece)
  return next((n for n in range(largest, largest // 4, -1) if piece % n == 0), block)


def unsupported(
  kernel: Implementation,
  *,
  time: int,
  keys: int,
  dtype: Any,
  window: int | None = None,
  softcap: float | None = None,
  shards: int = 1,
) -> str | None:
  """Returns the reason why a fused kernel does not support inputs with these properties; None if it
  may support them. The arguments are those of `choose`.
  """
  if kernel == 'splash':
    return why_not_splash(dtype)
  if kernel == 'cudnn':
    return why_not_cudnn(dtype, time=time, keys=keys, softcap=softcap)
  if kernel == 'tokamax':
    return why_not_tokamax(dtype, shards=shards)
  return why_not_pallas_gpu(dtype, window=window, softcap=softcap, shards=shards)


def why_not_shared(implementation: Implementation, *, time: int, keys: int) -> str | None:
  """Returns the reason why segments of rows with this many queries and keys cannot share prefixes;
  None if they can.
  """
  if implementation not in SHARES_PREFIXES:
    return f'{implementation} does not share prefixes'
  if implementation in ('cudnn', 'tokamax') and time * keys > MASK_SCORES:
    return f'with shared prefixes, {implementation} needs a mask of {time} × {keys} elements a row'
  return None


def attention(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch keys kv_heads head_dim'],
  value: Float[Array, 'batch keys kv_heads head_dim'],
  of_queries: Places,
  of_keys: Places,
  *,
  window: int | None = None,
  softcap: float | None = None,
  implementation: Implementation,
  block: int = BLOCK,
  interpret: bool = False,
) -> Float[Array, 'batch time heads head_dim']:
  """Returns softmax(query · key / √head_dim) · value, where the softmax is over the keys that a
  query sees.

  Key-value head g is shared by the query heads g·n … g·n + n - 1, where n = heads / kv_heads.
  Scores and softmax statistics are computed in at least float32.

  Args:
    of_queries: places of the queries' tokens. `visible` defines which keys a query sees.
    of_keys: places of the keys' tokens. For a fused kernel except 'cudnn', this must be the same
      object as `of_queries`, which states that queries and keys belong to the same tokens. The
      segments of each row must then follow one another, with consecutive positions.
    window: number of tokens that a query sees, including its own; None for no limit.
    softcap: if given, scores s become softcap · tanh(s / softcap).
    implementation: 'masked' materialises all scores. 'blockwise' materialises one block of scores
      at a time, in the forward and the backward pass. 'splash' is the fused kernel for TPUs;
      'cudnn', 'tokamax' and 'pallas_gpu' are those for GPUs. See `choose`.
    block: block size in tokens, for 'blockwise' and 'splash'.
    interpret: whether a fused kernel runs in interpreter mode, which works on any platform; for
      tests.

  Raises:
    ValueError: the kernel does not support these inputs; the message says why.
  """
  if implementation == 'masked':
    return masked(query, key, value, of_queries, of_keys, window=window, softcap=softcap)
  if implementation == 'blockwise':
    return blockwise(
      query, key, value, of_queries, of_keys, window=window, softcap=softcap, block=block
    )
  if of_queries is not of_keys and implementation != 'cudnn':
    raise ValueError(f'attention: {implementation} needs queries and keys of the same tokens')
  sizes = dict(time=query.shape[1], keys=key.shape[1])
  shares = of_keys.seen_until is not None
  if shares and (apart := why_not_shared(implementation, **sizes)):
    raise ValueError(f'attention: {apart}')
  sizes |= dict(dtype=query.dtype)
  if missing := unsupported(implementation, **sizes, window=window, softcap=softcap):
    raise ValueError(f'attention: {missing}')
  if implementation == 'splash':
    rule = dict(window=window, softcap=softcap, interpret=interpret)
    return splash(query, key, value, of_queries, block=block, **rule)
  if implementation == 'cudnn':
    return cudnn(query, key, value, of_queries, of_keys, window=window)
  if implementation == 'tokamax':
    return tokamax(query, key, value, of_queries, window=window, softcap=softcap)
  return pallas_gpu(query, key, value, of_queries, interpret=interpret)


def masked(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch keys kv_heads head_dim'],
  value: Float[Array, 'batch keys kv_heads head_dim'],
  of_queries: Places,
  of_keys: Places,
  *,
  window: int | None = None,
  softcap: float | None = None,
) -> Float[Array, 'batch time heads head_dim']:
  """Computes `attention` with all scores at once and masks the scores of unseen keys. This is the
  reference implementation.

  Keys and values are never copied. The softmax weights are cast to the dtype of the values for the
  product with them. The result is normalised after this product, as in flash attention
  (arXiv:2205.14135), which saves a pass over the scores.
  """
  batch, time, heads, head_dim = query.shape
  kv_heads, keys = key.shape[2], key.shape[1]
  group = heads // kv_heads
  statistics = jnp.promote_types(query.dtype, jnp.float32)
  # Let the query heads that share keys be rows of one matrix product, because XLA executes plain
  # batched products fastest.
  rows = jnp.moveaxis(query.reshape(batch, time, kv_heads, group, head_dim), 1, 3)
  rows = rows.reshape(batch, kv_heads, group * time, head_dim)
  scores = _products(rows, key, statistics)
  scores = scores.reshape(batch, kv_heads, group, time, keys) * head_dim**-0.5
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = jnp.where(visible(of_queries, of_keys, window=window)[:, None, None], scores, MASKED)
  peak = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), FLOOR))
  weights = jnp.exp(scores - peak).reshape(batch, kv_heads, group * time, keys)
  mixed = jnp.einsum(
    'bkqs,bskh->bkqh', weights.astype(value.dtype), value, preferred_element_type=statistics
  )
  # If a query sees a key, its total is at least 1, the weight of its largest score. The bound 1e-9
  # therefore only affects queries that see none.
  mixed = mixed / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9)
  mixed = jnp.moveaxis(mixed.reshape(batch, kv_heads, group, time, head_dim), 3, 1)
  return mixed.reshape(batch, time, heads, head_dim).astype(query.dtype)


def _products(
  rows: Float[Array, 'batch kv_heads rows head_dim'],
  key: Float[Array, 'batch keys kv_heads head_dim'],
  dtype: jnp.dtype,
) -> Float[Array, 'batch kv_heads rows keys']:
  """Returns the products of all rows of queries with all keys of their head."""

  def plain(rows, key):
    return jnp.einsum('bkqh,bskh->bkqs', rows, key, preferred_element_type=dtype)

  # With many more keys than rows, as in a decode step, XLA:CPU takes a third less time if the keys
  # are the first factor. Without the barrier, XLA swaps the factors back.
  def turned(rows, key):
    products = jnp.einsum('bskh,bkqh->bksq', key, rows, preferred_element_type=dtype)
    return jnp.swapaxes(jax.lax.optimization_barrier(products), 2, 3)

  if key.shape[1] < 8 * rows.shape[2]:
    return plain(rows, key)
  return jax.lax.platform_dependent(rows, key, cpu=turned, default=plain)
