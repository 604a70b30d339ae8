"""Hidden states to token logprobs, without ever holding `[batch, time, vocab]`: the only place that shifts tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class TokenLogprobs(NamedTuple):
  """Aligned as everything else: entry t speaks of `tokens[t]` given `tokens[:t]`; 0 at a segment's first token."""

  logprobs: Float[Array, 'chunks time']
  entropy: Float[Array, 'chunks time']
  """Entropy in nats of the distribution that `tokens[t]` was drawn from."""


def plan_token_chunk(*, chunks: int, time: int, vocab: int, budget_bytes: int) -> int:
  """The largest divisor of `time` whose float32 logits for all `chunks` rows fit in `budget_bytes` (at least 1)."""
  fits = [n for n in range(1, time + 1) if time % n == 0 and chunks * n * vocab * 4 <= budget_bytes]
  return max(fits, default=1)


def token_logprobs(
  hidden: Float[Array, 'chunks time embed'],
  kernel: Float[Array, 'vocab embed'],
  tokens: Int[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  temperature: Float[Array, 'chunks time'],
  *,
  token_chunk: int,
) -> TokenLogprobs:
  """Logprobs of the tokens under softmax(hidden @ kernel.T / temperature), and that distribution's entropy.

  Logits exist for `token_chunk` positions of every row at a time; with more than one such chunk they are computed
  again in the backward pass, so that they are not kept either. Statistics are at least float32 whatever `hidden` is.

  Args:
    hidden: states after the final norm; state t predicts token t + 1.
    kernel: the unembedding, `[vocab, embed]`.
    tokens: what was drawn.
    segment_ids: 0 = padding; the first token of each segment has no logprob (it gets 0).
    temperature: of each token's sample; the logits are divided by it.
    token_chunk: positions computed at a time; must divide `time`.
  """
  rows, time = tokens.shape
  if time % token_chunk:
    raise ValueError(f'token_chunk {token_chunk} does not divide the {time} positions of a chunk')
  shift = lambda x: jnp.roll(x, -1, axis=1)
  targets, scales = shift(tokens), shift(temperature)
  if token_chunk == time:
    logprobs, entropy = _chunk(hidden, kernel, targets, scales)
  else:
    split = lambda x: jnp.moveaxis(x.reshape(rows, time // token_chunk, token_chunk, *x.shape[2:]), 1, 0)
    body = jax.checkpoint(lambda _, xs: (None, _chunk(xs[0], kernel, xs[1], xs[2])))
    _, parts = jax.lax.scan(body, None, (split(hidden), split(targets), split(scales)))
    logprobs, entropy = (jnp.moveaxis(p, 0, 1).reshape(rows, time) for p in parts)
  continues = (segment_ids > 0) & (segment_ids == jnp.roll(segment_ids, 1, axis=1)) & (jnp.arange(time) > 0)
  back = lambda x: jnp.where(continues, jnp.roll(x, 1, axis=1), 0.0)
  return TokenLogprobs(back(logprobs), back(entropy))


def _chunk(hidden, kernel, targets, temperature):
  """Logprobs of `targets` and entropies, both aligned with the hidden states."""
  statistics = jnp.promote_types(hidden.dtype, jnp.float32)
  logits = jnp.einsum('cte,ve->ctv', hidden, kernel.astype(hidden.dtype), preferred_element_type=statistics)
  logits = logits / temperature[..., None]
  normalizer = jax.nn.logsumexp(logits, axis=-1)
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  entropy = normalizer - (jnp.exp(logits - normalizer[..., None]) * logits).sum(-1)
  return chosen - normalizer, entropy
