"""Sums over packed tokens: loss terms with their denominators, and the usual loss aggregations.

Each term of a loss has a numerator and a denominator. Both are summed over micro-batches and ranks,
and divided only once, so that the loss does not depend on how sequences were packed and split.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Aggregation = Literal[
  'token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm'
]


class Term(NamedTuple):
  """A part of a loss. It contributes `weight * sum(numerator) / sum(denominator)`.

  The denominator depends only on the data, never on the model's outputs.
  """

  numerator: Float[Array, '']
  denominator: Float[Array, '']
  weight: float


class Stat(NamedTuple):
  """A metric `total / count`. Both numbers are summed over micro-batches, ranks and optimizer steps
  before the division.
  """

  total: Float[Array, '']
  count: Float[Array, '']


def segment_sums(
  values: Float[Array, 'chunks time'], segment_ids: Int[Array, 'chunks time'], *, segments: int
) -> Float[Array, 'chunks segments']:
  """Sums `values` over each segment 1..`segments` of each chunk. Segment 0, the padding, is
  omitted.
  """

  def sum_chunk(v, s):
    return jax.ops.segment_sum(v, s, num_segments=segments + 1)[1:]

  return jax.vmap(sum_chunk)(values, segment_ids)


def by_segment(
  per_segment: Float[Array, 'chunks segments'], segment_ids: Int[Array, 'chunks time']
) -> Float[Array, 'chunks time']:
  """Returns for each token the value of its segment. Padding gets the value of segment 1."""
  return jnp.take_along_axis(per_segment, jnp.maximum(segment_ids - 1, 0), axis=1)


def aggregate(
  values: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  *,
  segments: int,
  mode: Aggregation,
  loss_scale_factor: float = 1.0,
) -> tuple[Float[Array, ''], Float[Array, '']]:
  """Returns (numerator, denominator) of a masked aggregation of per-token values.

  - token-mean: sum over tokens / number of tokens (DAPO, arXiv:2503.14476).
  - seq-mean-token-sum: sum over tokens / number of sequences.
  - seq-mean-token-mean: sum of the token means of all sequences / number of sequences (GRPO,
    arXiv:2402.03300).
  - seq-mean-token-sum-norm: sum over tokens / (number of sequences * `loss_scale_factor`). If the
    factor is the maximum response length, this is Dr.GRPO's aggregation (arXiv:2503.20783).

  Denominators are whole numbers, so that their sums are exact in any order. Sequences without a
  valid token are not counted. `values` may be anything at masked positions, even NaN.
  """
  values = jnp.where(mask, values, 0.0)
  tokens = mask.astype(jnp.float32)
  if mode == 'token-mean':
    return values.sum(), tokens.sum()
  lengths = segment_sums(tokens, segment_ids, segments=segments)
  sequences = (lengths > 0).sum().astype(jnp.float32)
  if mode == 'seq-mean-token-mean':
    return (
      segment_sums(values, segment_ids, segments=segments) / jnp.maximum(lengths, 1.0)
    ).sum(), sequences
  if mode == 'seq-mean-token-sum':
    return values.sum(), sequences
  return values.sum() / loss_scale_factor, sequences


def masked_stat(values: Float[Array, '*shape'], mask: Bool[Array, '*shape']) -> Stat:
  """Returns a metric whose value is the mean of `values` where `mask` is True."""
  return Stat(jnp.where(mask, values, 0.0).sum(), mask.sum().astype(jnp.float32))
