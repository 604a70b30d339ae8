"""Attention with shared key-value heads: one contract, the reference that fulfils it plainly, and the other ways.

Invariant: a query that sees no key yields 0 and sends no gradient; nothing here makes a NaN of finite input.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.ops.blockwise import BLOCK, blockwise
from jaxrl_llm.ops.fused import pallas_gpu, splash, why_not_pallas_gpu, why_not_splash
from jaxrl_llm.ops.places import FLOOR, MASKED, Places, visible

Implementation = Literal['masked', 'blockwise', 'splash', 'pallas_gpu']
KERNELS = {'tpu': 'splash', 'gpu': 'pallas_gpu'}
"""The fused kernel of each platform that has one."""
MASKED_SCORES = 256 * 256
"""Scores of a head (queries × keys of a row) up to which masked attention is as fast on a CPU; at 512 × 512 blockwise
takes a third of the time or less, whatever the heads and however many segments."""


class Choice(NamedTuple):
  implementation: Implementation
  reason: str
  block: int
  """Tokens of a block, for blockwise attention: on a CPU what its caches hold, else what hides the cost of a step."""


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
    asked: by the configuration. A fused kernel that is asked for by name is for tokens that attend to one another; a
      cache is read as with 'auto'.
    platform: of the devices that it is computed on.
    time: queries of a row.
    keys: of a row.
    same_tokens: whether queries and keys are those of the same tokens.
    dtype: of queries, keys and values.
    shards: parts that the queries' time is cut into.

  Raises:
    UserError: the kernel that is asked for cannot do it.
  """
  block = 128 if platform == 'cpu' else 512
  if asked in ('masked', 'blockwise'):
    return Choice(asked, 'as configured', block)
  kernel, why_not = KERNELS.get(platform), None
  if same_tokens and asked not in ('auto', kernel):
    raise UserError(f'policy.attention: {asked} does not run on this platform ({platform}); choose auto')
  if kernel == 'splash':
    why_not = why_not_splash(dtype)
  if kernel == 'pallas_gpu':
    why_not = why_not_pallas_gpu(dtype, window=window, softcap=softcap, shards=shards)
  if same_tokens and asked != 'auto' and why_not:
    raise UserError(f'policy.attention: {why_not}; choose auto')
  if same_tokens and kernel and not why_not:
    return Choice(kernel, f'the kernel of {platform}', block)
  few = time * keys <= MASKED_SCORES
  return Choice('masked' if few else 'blockwise', why_not or f'{time} × {keys} scores on {platform}', block)


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
    block: tokens of a block, for 'blockwise'.
    interpret: run a kernel's program step by step on any platform, for tests.

  Raises:
    ValueError: the kernel cannot do this, and why.
  """
  if implementation == 'masked':
    return masked(query, key, value, of_queries, of_keys, window=window, softcap=softcap)
  if implementation == 'blockwise':
    return blockwise(query, key, value, of_queries, of_keys, window=window, softcap=softcap, block=block)
  if of_queries is not of_keys:
    raise ValueError(f'attention: {implementation} wants queries and keys of the same tokens')
  if implementation == 'splash':
    return splash(query, key, value, of_queries, window=window, softcap=softcap, interpret=interpret)
  if missing := why_not_pallas_gpu(query.dtype, window=window, softcap=softcap, shards=1):
    raise ValueError(f'attention: {missing}')
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
