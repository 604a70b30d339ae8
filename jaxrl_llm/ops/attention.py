"""Attention with shared key-value heads: one contract, the reference that fulfils it plainly, and the other ways.

Invariant: a query that sees no key yields 0 and sends no gradient; nothing here makes a NaN of finite input.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.ops.blockwise import blockwise
from jaxrl_llm.ops.fused import pallas_gpu, splash, why_not_pallas_gpu, why_not_splash
from jaxrl_llm.ops.places import FLOOR, MASKED, Places, visible

Implementation = Literal['masked', 'blockwise', 'splash', 'pallas_gpu']
KERNELS = {'tpu': 'splash', 'gpu': 'pallas_gpu'}
"""The fused kernel of each platform that has one."""
MASKED_SCORES = 1024**2
"""Scores of a head (queries × keys) up to which holding all of them is the faster way; measured on a CPU, see docs."""


class Choice(NamedTuple):
  implementation: Implementation
  reason: str


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
) -> Choice:
  """Which implementation computes this attention, and why.

  Args:
    asked: by the configuration. A fused kernel that is asked for by name computes what is trained on; a cache is read
      as with 'auto'.
    platform: of the devices that it is computed on.
    time: queries of a row.
    keys: of a row.
    same_tokens: whether queries and keys are those of the same tokens.
    dtype: of queries, keys and values.
    shards: parts that the queries' time is cut into.

  Raises:
    UserError: the kernel that is asked for cannot do it.
  """
  if asked in ('masked', 'blockwise'):
    return Choice(asked, 'as configured')
  kernel, missing = KERNELS.get(platform), 'there is no kernel for this platform'
  if kernel == 'splash':
    missing = why_not_splash(dtype)
  if kernel == 'pallas_gpu':
    missing = why_not_pallas_gpu(dtype, window=window, softcap=softcap, shards=shards)
  if same_tokens and asked != 'auto' and asked != kernel:
    raise UserError(f'policy.attention: {asked} does not run on {platform}; choose auto')
  if same_tokens and asked != 'auto' and missing:
    raise UserError(f'policy.attention: {missing}; choose auto')
  if same_tokens and not missing:
    return Choice(kernel, f'the kernel of this platform ({platform})')
  if time * keys <= MASKED_SCORES and (kernel is None or not same_tokens):
    return Choice('masked', f'{time} × {keys} scores a head are few ({platform})')
  return Choice('blockwise', missing or 'a cache is long')


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
) -> Float[Array, 'batch time heads head_dim']:
  """softmax(query · key / √head_dim over the keys that a query sees) · value.

  Query heads g·n … g·n + n - 1 share key-value head g (n = heads / kv_heads). Scores and statistics are at least
  float32.

  Args:
    of_queries: where the queries' tokens stand; `visible` has the rule.
    of_keys: where those of the keys do. The fused kernels want the very object `of_queries` here, which says that they
      are the same tokens; each row then holds its segments one after the other, in the order of their positions,
      which count by one.
    window: how far back a query sees, its own token included; None = to the segment's start.
    softcap: scores s become softcap · tanh(s / softcap).
    implementation: 'masked' holds all scores; 'blockwise' holds a block of them, forward and backward; 'splash' and
      'pallas_gpu' are the kernels of TPUs and of GPUs. See `choose`.

  Raises:
    ValueError: the kernel cannot do this, and why.
  """
  if implementation == 'masked':
    return masked(query, key, value, of_queries, of_keys, window=window, softcap=softcap)
  if implementation == 'blockwise':
    return blockwise(query, key, value, of_queries, of_keys, window=window, softcap=softcap)
  if of_queries is not of_keys:
    raise ValueError(f'attention: {implementation} wants queries and keys of the same tokens')
  if implementation == 'splash':
    return splash(query, key, value, of_queries, window=window, softcap=softcap)
  if missing := why_not_pallas_gpu(query.dtype, window=window, softcap=softcap, shards=1):
    raise ValueError(f'attention: {missing}')
  return pallas_gpu(query, key, value, of_queries)


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
  """The reference: all scores at once, those of unseen keys masked.

  Keys and values are never copied. Weights are cast to the values' dtype for the second product and normalised after
  it, as in flash attention (arXiv:2205.14135), which saves a pass over the scores.
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
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = jnp.where(visible(of_queries, of_keys, window=window)[:, None, None], scores, MASKED)
  peak = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), FLOOR))
  weights = jnp.exp(scores - peak).reshape(batch, kv_heads, group * time, keys)
  mixed = jnp.einsum('bkqs,bskh->bkqh', weights.astype(value.dtype), value, preferred_element_type=statistics)
  # A row with a valid key has a total of at least 1 (its maximum's weight); only the empty rows' 0 is lifted.
  mixed = mixed / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9)
  mixed = jnp.moveaxis(mixed.reshape(batch, kv_heads, group, time, head_dim), 3, 1)
  return mixed.reshape(batch, time, heads, head_dim).astype(query.dtype)
