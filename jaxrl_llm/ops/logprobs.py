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


def plan_token_chunk(*, chunks: int, time: int, vocab: int, budget_bytes: int, time_shards: int = 1) -> int:
  """The largest `token_chunk` whose float32 logits fit in `budget_bytes` of a device, at least a position of each part.

  Args:
    chunks: rows of a device.
    time: positions of a whole row.
    vocab: words of a device: the local part where the vocabulary is sharded.
    budget_bytes: for the logits of one chunk.
    time_shards: as in `token_logprobs`.
  """
  part = time // time_shards
  fits = [n for n in range(1, part + 1) if part % n == 0 and chunks * n * vocab * 4 <= budget_bytes]
  return max(fits, default=1) * time_shards


def token_logprobs(
  hidden: Float[Array, 'chunks time embed'],
  kernel: Float[Array, 'vocab embed'],
  tokens: Int[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  temperature: Float[Array, 'chunks time'],
  *,
  token_chunk: int,
  time_shards: int = 1,
  row_shards: int = 1,
) -> TokenLogprobs:
  """Logprobs of the tokens under softmax(hidden @ kernel.T / temperature), and that distribution's entropy.

  Logits exist for `token_chunk` positions of every row at a time, and the backward pass computes them again. With all
  positions in one chunk, which is the choice where it fits, a compiler that sees both passes computes them only once.
  Where `kernel` is sharded over its vocabulary, logits stay so: only maxima, sums and the targets' logits are reduced.

  Statistics are at least float32 whatever `hidden` is. Gradients go to `hidden` and `kernel`; the temperature is data
  and has none.

  Args:
    hidden: states after the final norm; state t predicts token t + 1.
    kernel: the unembedding, `[vocab, embed]`.
    tokens: what was drawn.
    segment_ids: 0 = padding; the first token of each segment has no logprob (it gets 0).
    temperature: of each token's sample; the logits are divided by it.
    token_chunk: positions computed at a time; must divide `time`.
    time_shards: equal contiguous parts that time is cut into over devices; a chunk takes the same local slice of each
      part, so that nothing moves between them. Must divide `token_chunk`.
    row_shards: the same of the rows. The kernel's gradient is summed over both kinds of parts once, after the chunks,
      instead of once in every chunk. Must divide the rows.
  """
  rows, time = tokens.shape
  if time % token_chunk:
    raise ValueError(f'token_chunk {token_chunk} does not divide the {time} positions of a chunk')
  if token_chunk % time_shards:
    raise ValueError(
      f'time_shards {time_shards} does not divide token_chunk {token_chunk}, which is taken from all parts'
    )
  if rows % row_shards:
    raise ValueError(f'row_shards {row_shards} does not divide the {rows} rows')
  local, chunks, positions = rows // row_shards, time // token_chunk, token_chunk // time_shards
  split = lambda x: x.reshape(row_shards, local, time_shards, chunks, positions, *x.shape[2:])
  by_chunk = lambda x: split(jnp.roll(x, -1, axis=1)).transpose(3, 0, 2, 1, 4).reshape(chunks, -1)
  by_row = lambda x: x.reshape(chunks, row_shards, time_shards, local, positions).transpose(1, 3, 2, 0, 4)
  found = _head(split(hidden), kernel, by_chunk(tokens), by_chunk(temperature))
  return TokenLogprobs(*(_delayed(by_row(x).reshape(rows, time), segment_ids) for x in found))


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
  return jnp.einsum('cte,oe->ct', hidden, kernel.astype(hidden.dtype), preferred_element_type=_wide(hidden))


def _delayed(x, segment_ids):
  """Entry t - 1 at t, within segments; 0 at a segment's first token and at padding."""
  continues = (segment_ids > 0) & (segment_ids == jnp.roll(segment_ids, 1, axis=1))
  continues &= jnp.arange(segment_ids.shape[1]) > 0
  return jnp.where(continues, jnp.roll(x, 1, axis=1), 0.0)


@jax.custom_vjp
def _head(hidden, kernel, targets, temperature):
  """Logprobs of `targets` and entropies, `[chunk, position]` like `targets` and `temperature`.

  `hidden` lies as the model made it, `[row part, row, time part, chunk, position, embed]`; the positions of a chunk are
  ordered by row part, time part, row, position.

  With p the softmax of logits z = hidden · kernel / T and H = -Σ p · log p its entropy, the derivatives by z are
  onehot(target) - p of log p[target], as in any softmax cross-entropy, and -p · (log p + H) of H, which follows from
  ∂p[i] / ∂z[j] = p[i] · (δ[i, j] - p[j]). So with cotangents g and h of the two outputs

    d(hidden · kernel) = (g · (onehot(target) - p) - h · p · (log p + H)) / T,

  for which each token's log-normalizer and H are all that is kept beside the arguments (logits are computed again as in
  arXiv:2411.09009).
  """
  return _head_forward(hidden, kernel, targets, temperature)[0]


def _head_forward(hidden, kernel, targets, temperature):
  compute = kernel.astype(hidden.dtype)

  def chunk(xs):
    i, target, scale = xs
    logits = _logits(_states(hidden, i), compute, scale)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    logp = logits - normalizer[..., None]
    # A comparison and a sum need no word of another device; how a gather is partitioned is the compiler's choice.
    chosen = jnp.where(_is_target(logits, target), logits, 0.0).sum(-1)
    return chosen - normalizer, -(jnp.exp(logp) * logp).sum(-1), normalizer

  logprobs, entropy, normalizer = jax.lax.map(chunk, (jnp.arange(len(targets)), targets, temperature))
  return (logprobs, entropy), (hidden, kernel, targets, temperature, normalizer, entropy)


def _head_backward(kept, cotangents):
  hidden, kernel, targets, temperature, normalizer, entropy = kept
  compute = kernel.astype(hidden.dtype)
  by_logprob, by_entropy = (g / temperature for g in cotangents)

  def chunk(sums, xs):
    d_hidden, d_kernel = sums
    i, target, scale, *rest = xs
    normalizer, entropy, by_logprob, by_entropy = (x[..., None] for x in rest)
    states = _states(hidden, i)
    logp = _logits(states, compute, scale) - normalizer
    d_logits = jnp.where(_is_target(logp, target), by_logprob, 0.0)
    d_logits = (d_logits - jnp.exp(logp) * (by_logprob + by_entropy * (logp + entropy))).astype(hidden.dtype)
    d_states = jnp.einsum('tv,ve->te', d_logits, compute, preferred_element_type=d_kernel.dtype)
    by_part = lambda x: x.reshape(len(d_kernel), -1, x.shape[-1])
    d_kernel += jnp.einsum('pte,ptv->pev', by_part(states), by_part(d_logits), preferred_element_type=d_kernel.dtype)
    return (_with_states(d_hidden, i, d_states.astype(hidden.dtype)), d_kernel), None

  # [embed, vocab] takes d_logits as they lie, and only the sum is transposed; a part has its own sum until the end.
  start = jnp.zeros((hidden.shape[0] * hidden.shape[2], *kernel.shape[::-1]), _wide(hidden))
  xs = (jnp.arange(len(targets)), targets, temperature, normalizer, entropy, by_logprob, by_entropy)
  (d_hidden, d_kernel), _ = jax.lax.scan(chunk, (jnp.zeros_like(hidden), start), xs)
  return d_hidden, d_kernel.sum(0).T.astype(kernel.dtype), None, None


_head.defvjp(_head_forward, _head_backward)


def _states(hidden, i):
  """Chunk `i` as `[position, embed]`."""
  return jax.lax.dynamic_index_in_dim(hidden, i, axis=3, keepdims=False).swapaxes(1, 2).reshape(-1, hidden.shape[-1])


def _with_states(hidden, i, states):
  """`hidden` with chunk `i` replaced: the inverse of `_states`."""
  row_parts, rows, time_parts, _, positions, embed = hidden.shape
  chunk = states.reshape(row_parts, time_parts, rows, positions, embed).swapaxes(1, 2)
  return jax.lax.dynamic_update_index_in_dim(hidden, chunk, i, axis=3)


def _logits(states, kernel, temperature):
  return jnp.einsum('te,ve->tv', states, kernel, preferred_element_type=_wide(states)) / temperature[..., None]


def _is_target(logits, target):
  return jnp.arange(logits.shape[-1]) == target[..., None]


def _wide(x):
  return jnp.promote_types(x.dtype, jnp.float32)
