"""Hidden states to token logprobs, values and scores, without ever holding `[batch, time, vocab]`.

The only place that shifts tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.ops.reduce import segment_sums


class TokenLogprobs(NamedTuple):
  """Aligned as everything else: entry t speaks of `tokens[t]` given `tokens[:t]`; 0 at a segment's first token."""

  logprobs: Float[Array, 'chunks time']
  entropy: Float[Array, 'chunks time']
  """Entropy in nats of the distribution that `tokens[t]` was drawn from."""


class TokenValues(NamedTuple):
  """Entry t is the value of the state before `tokens[t]`, which is `tokens[:t]`; 0 at a segment's first token."""

  values: Float[Array, 'chunks time']


class SequenceScores(NamedTuple):
  """One score for each segment, read at its last token; 0 for segments that are not there."""

  scores: Float[Array, 'chunks segments']


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
  return TokenLogprobs(_delayed(logprobs, segment_ids), _delayed(entropy, segment_ids))


def token_values(
  hidden: Float[Array, 'chunks time embed'], kernel: Float[Array, 'one embed'], segment_ids: Int[Array, 'chunks time']
) -> TokenValues:
  """hidden · kernel of the position before each token, in at least float32."""
  return TokenValues(_delayed(_scalar(hidden, kernel), segment_ids))


def sequence_scores(
  hidden: Float[Array, 'chunks time embed'],
  kernel: Float[Array, 'one embed'],
  segment_ids: Int[Array, 'chunks time'],
  *,
  segments: int,
) -> SequenceScores:
  """hidden · kernel of each segment's last token, in at least float32.

  Args:
    segments: upper bound of segments in a chunk.
  """
  last = (segment_ids > 0) & (segment_ids != jnp.roll(segment_ids, -1, axis=1))
  last = last.at[:, -1].set(segment_ids[:, -1] > 0)
  return SequenceScores(segment_sums(jnp.where(last, _scalar(hidden, kernel), 0.0), segment_ids, segments=segments))


def _scalar(hidden, kernel):
  wide = jnp.promote_types(hidden.dtype, jnp.float32)
  return jnp.einsum('cte,oe->ct', hidden, kernel.astype(hidden.dtype), preferred_element_type=wide)


def _delayed(x, segment_ids):
  """Entry t - 1 at t, within segments; 0 at a segment's first token and at padding."""
  continues = (segment_ids > 0) & (segment_ids == jnp.roll(segment_ids, 1, axis=1))
  continues &= jnp.arange(segment_ids.shape[1]) > 0
  return jnp.where(continues, jnp.roll(x, 1, axis=1), 0.0)


def _chunk(hidden, kernel, targets, temperature):
  """Logprobs of `targets` and entropies, both aligned with the hidden states."""
  statistics = jnp.promote_types(hidden.dtype, jnp.float32)
  logits = jnp.einsum('cte,ve->ctv', hidden, kernel.astype(hidden.dtype), preferred_element_type=statistics)
  logits = logits / temperature[..., None]
  normalizer = jax.nn.logsumexp(logits, axis=-1)
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  entropy = normalizer - (jnp.exp(logits - normalizer[..., None]) * logits).sum(-1)
  return chosen - normalizer, entropy
