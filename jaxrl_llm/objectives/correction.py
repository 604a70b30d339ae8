"""Off-policy correction: weights and masks, without gradient, for tokens that another policy
sampled.

These weights and masks change the numerator of the loss, never its denominator. The denominator
still counts rejected tokens. If the loss were divided by the number of kept tokens instead, the
gradient would be larger by the factor (all tokens) / (kept tokens).

In all functions, `mask` marks the trained tokens that a sampler drew. Where it is False, behaviour
logprobs are ignored, the weight is 1 and the token is kept, so that expert tokens in the same batch
are unaffected.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.ops.reduce import by_segment, segment_sums

Correction = Literal['token', 'sequence', 'icepop']

_LOG_LIMIT = 20.0
"""Limit of the absolute value of a log ratio before it is exponentiated, as in verl."""
_ICEPOP_LOWER = 0.5


def importance_weights(
  proximal_logprobs: Float[Array, 'chunks time'],
  behaviour_logprobs: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  *,
  segments: int,
  mode: Correction,
  threshold: float = 2.0,
  lower: float | None = None,
) -> Float[Array, 'chunks time']:
  """Returns loss weights that correct for the difference d = proximal - behaviour between the
  logprobs.

  token: min(exp(dₜ), C), truncated importance sampling (Yao et al. 2025, "Your efficient RL
  framework secretly brings you off-policy RL training").
  sequence: min(exp(Σ d over the sequence's valid tokens), C), at each of its tokens.
  icepop: exp(dₜ) where lower ≤ exp(dₜ) ≤ C, else 0 (Ring-1T, arXiv:2510.18855).

  The exponents are limited to ±20. The weight is 1 where `mask` is False.

  Args:
    threshold: upper bound C of the ratio. The authors of IcePop use 5.
    lower: lower bound of the ratio. In modes token and sequence, smaller weights are raised to this
      bound, as in OpenRLHF. If None, the bound is 0.5 in mode icepop, and the other modes have no
      lower bound.
  """
  difference = _difference(proximal_logprobs, behaviour_logprobs, mask)
  if mode == 'sequence':
    difference = by_segment(segment_sums(difference, segment_ids, segments=segments), segment_ids)
  raw = jnp.exp(jnp.clip(difference, -_LOG_LIMIT, _LOG_LIMIT))
  if mode == 'icepop':
    least = _ICEPOP_LOWER if lower is None else lower
    weights = jnp.where((raw >= least) & (raw <= threshold), raw, 0.0)
  else:
    weights = jnp.clip(raw, lower, threshold)
  return jnp.where(mask, weights, 1.0)


def sequence_mask(
  proximal_logprobs: Float[Array, 'chunks time'],
  behaviour_logprobs: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  *,
  segments: int,
  low: float,
  high: float,
) -> Bool[Array, 'chunks time']:
  """Returns a mask that is True for the tokens of the sequences to keep.

  A sequence is kept if low ≤ exp(mean of (proximal - behaviour)) ≤ high.

  The mean is over the sequence's valid tokens. NeMo-RL calls this rule seq-mask-TIS and uses bounds
  0.999 and 1.002; SkyRL calls it geometric mask and uses bounds 0.99 and 1.01. Both libraries also
  multiply the kept tokens by their untruncated importance weights. The result is True where `mask`
  is False.
  """
  means = _means(
    _difference(proximal_logprobs, behaviour_logprobs, mask), mask, segment_ids, segments
  )
  ratio = jnp.exp(by_segment(means, segment_ids))
  return ~mask | ((low <= ratio) & (ratio <= high))


def negative_sequence_mask(
  logprobs_old: Float[Array, 'chunks time'],
  logprobs_new: Float[Array, 'chunks time'],
  advantages: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  *,
  segments: int,
  threshold: float,
) -> Bool[Array, 'chunks time']:
  """Returns a mask that is True for the tokens that DeepSeek-V3.2's rule (arXiv:2512.02556) keeps.

  keptₜ = not (Aₜ < 0 and mean over the sequence's valid tokens of (old - new) > threshold)

  Here old is `logprobs_old`, the sampler's own logprobs, and new is `logprobs_new`. The rule drops
  failed samples that are far off-policy. If advantages differ between the tokens of a sequence, the
  sign of each token's own advantage decides. The result is True where `mask` is False.
  """
  means = _means(_difference(logprobs_old, logprobs_new, mask), mask, segment_ids, segments)
  return ~mask | ~((advantages < 0) & (by_segment(means, segment_ids) > threshold))


def _difference(
  first: Float[Array, 'chunks time'],
  second: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
) -> Float[Array, 'chunks time']:
  return jax.lax.stop_gradient(jnp.where(mask, first - second, 0.0))


def _means(
  values: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  segments: int,
) -> Float[Array, 'chunks segments']:
  lengths = segment_sums(mask.astype(values.dtype), segment_ids, segments=segments)
  return segment_sums(values, segment_ids, segments=segments) / jnp.maximum(lengths, 1.0)
