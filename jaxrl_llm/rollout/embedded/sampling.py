"""Token sampling: draws a token from logits with counter-based random numbers, and computes the
token's logprob.

Invariant: a row's sample depends only on that row's logits, settings, key and position, not on the
other rows, the row's index, or earlier calls. A token of probability zero is never sampled.

Sampling inverts the cumulative distribution in two levels. The first selects a block of the
vocabulary, the second selects a token within the block, and each needs one uniform random number.
The Gumbel trick would need one random number for every token of the vocabulary. On a CPU, inversion
is 20 times as fast as the Gumbel trick for a vocabulary of 32k tokens, and 2.7 times as fast for a
vocabulary of 32 tokens, which is a single block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Real, UInt32

BLOCK = 256
"""Number of tokens per block of the vocabulary. A smaller vocabulary is a single block."""


class Draw(NamedTuple):
  """One sampled token per row."""

  tokens: Int32[Array, 'rows']
  logprobs: Float32[Array, 'rows']
  """Logprob of each token under the distribution that it was drawn from, which is scaled by the
  temperature and then filtered. For a greedy row, it is the logprob under the unscaled and
  unfiltered distribution.
  """


def row_key(*, seed: int, words: tuple[int, ...], sample_index: int) -> UInt32[np.ndarray, '2']:
  """Returns the random key of a completion as two words. They are the xxh3-64 hash of the seed, the
  sample index and the words of the request's key.
  """
  counters = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, sample_index, *words], '<u4')
  return np.array(divmod(xxhash.xxh3_64_intdigest(counters.tobytes()), 1 << 32), np.uint32)


def draw(
  logits: Float32[Array, 'rows vocab'],
  keys: UInt32[Array, 'rows 2'],
  positions: Int[Array, 'rows'],
  temperature: Float[Array, 'rows'],
) -> Draw:
  """Samples from softmax(logits / temperature). At temperature 0, takes the first token with the
  largest logit.

  Args:
    logits: logits of the next token.
    keys: random key of each row's completion, see `row_key`.
    positions: position of the sampled token in its sequence.
    temperature: temperature of each row, at least 0; 0 is greedy.
  """
  greedy = temperature == 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  return _choose(scaled, scaled, keys, positions, greedy)


def draw_filtered(
  logits: Float32[Array, 'rows vocab'],
  keys: UInt32[Array, 'rows 2'],
  positions: Int[Array, 'rows'],
  temperature: Float[Array, 'rows'],
  top_k: Int[Array, 'rows'],
  top_p: Float[Array, 'rows'],
) -> Draw:
  """Samples like `draw`, but only from tokens that pass top-k and then top-p. Both filters use the
  temperature-scaled distribution, and top-p considers only the tokens that top-k kept.

  Tokens tied with the last kept token are kept too. Logprobs are computed under the filtered and
  renormalised distribution. Greedy rows are not filtered. The threshold of each filter is found by
  a bitwise search, which passes over the row 32 times. For a vocabulary of 32k tokens, this is 8
  times as fast as a sort.

  Args:
    logits: as in `draw`.
    keys: as in `draw`.
    positions: as in `draw`.
    temperature: as in `draw`.
    top_k: number of tokens to keep, -1 for all.
    top_p: probability mass to keep, 1 for all.
  """
  greedy = temperature == 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  ranks = _ordered_bits(scaled)
  needed = jnp.where(top_k < 0, logits.shape[-1], jnp.minimum(top_k, logits.shape[-1]))
  kept = ranks >= _threshold(ranks, jnp.ones_like(scaled), needed)[:, None]
  weights = jnp.where(kept, jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
  nucleus = _threshold(ranks, weights, top_p * weights.sum(-1))
  kept &= (ranks >= nucleus[:, None]) | (top_p >= 1)[:, None]
  kept |= greedy[:, None]
  return _choose(scaled, jnp.where(kept, scaled, -jnp.inf), keys, positions, greedy)


def _choose(scaled, allowed, keys, positions, greedy) -> Draw:
  """Samples from softmax(allowed). In greedy rows, takes the argmax of `scaled` instead. All
  logprobs are computed under softmax(allowed).
  """
  uniforms = jax.vmap(_uniforms)(keys, positions)
  top = allowed.max(-1, keepdims=True)
  weights = jnp.exp(allowed - top)
  sampled, total = _invert(weights, uniforms)
  tokens = jnp.where(greedy, _first_true(scaled == scaled.max(-1, keepdims=True)), sampled)
  chosen = jnp.take_along_axis(allowed, tokens[:, None], axis=1)[:, 0]
  return Draw(tokens, chosen - top[:, 0] - jnp.log(total))


def _uniforms(key: UInt32[Array, '2'], position: Int[Array, '']) -> Float32[Array, '2']:
  """Returns two uniform numbers in [0, 1) for one token."""
  key = jax.random.fold_in(jax.random.wrap_key_data(key, impl='threefry2x32'), position)
  return jax.random.uniform(key, (2,), jnp.float32)


def _invert(
  weights: Float32[Array, 'rows vocab'], uniforms: Float32[Array, 'rows 2']
) -> tuple[Int32[Array, 'rows'], Float32[Array, 'rows']]:
  """Samples one index per row in proportion to `weights`. Returns (indices, sums of weights)."""
  rows, vocab = weights.shape
  if vocab <= BLOCK:
    return _first_above(weights, uniforms[:, 0]), weights.sum(-1)
  blocks = -(-vocab // BLOCK)
  grid = jnp.pad(weights, ((0, 0), (0, blocks * BLOCK - vocab))).reshape(rows, blocks, BLOCK)
  sums = grid.sum(-1)
  block = _first_above(sums, uniforms[:, 0])
  inside = jnp.take_along_axis(grid, block[:, None, None], axis=1)[:, 0]
  return block * BLOCK + _first_above(inside, uniforms[:, 1]), sums.sum(-1)


def _first_above(
  weights: Float32[Array, 'rows n'], uniforms: Float32[Array, 'rows']
) -> Int32[Array, 'rows']:
  """Returns for each row the first index whose cumulative weight exceeds the row's uniform number
  times the total weight.

  If rounding makes the product equal to the total weight, no index qualifies, and the index of the
  largest weight is returned. Indices of weight 0 are excluded, because a parallel cumulative sum
  need not be monotone and could otherwise select one of them.
  """
  cumulative = jnp.cumsum(weights, axis=-1)
  above = (cumulative > uniforms[:, None] * cumulative[:, -1:]) & (weights > 0)
  largest = weights == weights.max(-1, keepdims=True)
  return _first_true(jnp.where(above.any(-1, keepdims=True), above, largest))


def _first_true(mask: Bool[Array, 'rows n']) -> Int32[Array, 'rows']:
  """Returns the index of the first true entry in each row, or the last index if no entry is true.
  The implementation uses min because XLA vectorises it, unlike argmax.
  """
  last = mask.shape[-1] - 1
  return jnp.where(mask, jnp.arange(mask.shape[-1], dtype=jnp.int32), last).min(-1)


def _ordered_bits(values: Float32[Array, 'rows n']) -> UInt32[Array, 'rows n']:
  """Maps floats to integers that sort in the same order. -0 and +0 map to the same integer."""
  bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
  return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(
  ranks: UInt32[Array, 'rows n'], weights: Float32[Array, 'rows n'], needed: Real[Array, 'rows']
) -> UInt32[Array, 'rows']:
  """Returns for each row the largest t such that the weights whose rank is at least t sum to at
  least `needed`, or 0 if there is no such t.
  """

  def step(i, threshold):
    candidate = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
    reached = jnp.where(ranks >= candidate[:, None], weights, 0.0).sum(-1) >= needed
    return jnp.where(reached, candidate, threshold)

  return jax.lax.fori_loop(0, 32, step, jnp.zeros(ranks.shape[0], jnp.uint32))
