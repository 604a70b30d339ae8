"""Policy-gradient losses per token (`opmd_loss`: per sequence). Logprobs may be NaN at masked
positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.ops.reduce import by_segment, segment_sums


class ClippedSurrogate(NamedTuple):
  loss: Float[Array, 'chunks time']
  clipped: Bool[Array, 'chunks time']
  """Tokens at which the clip takes effect (`actor/pg_clipfrac`)."""
  clipped_lower: Bool[Array, 'chunks time']
  """Tokens with a negative advantage whose loss is limited by the dual-clip bound
  (`actor/pg_clipfrac_lower`).
  """


def token_log_ratio(
  logprobs: Float[Array, 'chunks time'],
  proximal_logprobs: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  *,
  limit: float = 20.0,
) -> Float[Array, 'chunks time']:
  """Returns PPO's log ratio, clip(logprobsₜ - proximalₜ, ±limit); it is 0 outside `mask`.

  The default limit is verl's. Where the limit applies, the gradient is 0. `proximal_logprobs` must
  be constants: stop their gradients before calling.
  """
  return jnp.clip(jnp.where(mask, logprobs - proximal_logprobs, 0.0), -limit, limit)


def sequence_log_ratio(
  logprobs: Float[Array, 'chunks time'],
  proximal_logprobs: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  *,
  segments: int,
  limit: float = 10.0,
) -> Float[Array, 'chunks time']:
  """Returns the log ratio of each token's sequence in GSPO (arXiv:2507.18071); it is 0 outside
  `mask`.

  sₜ = min(logprobsₜ - sg(logprobsₜ) + sg(mean over valid tokens of (logprobs - proximal)), limit)

  This is GSPO-token in the paper; sg stops the gradient. sₜ has the value of the sequence's log
  ratio but the gradient of the token's own logprob, so that advantages and weights may differ
  between tokens. The default upper limit is verl's. Where the limit applies, the gradient is 0.
  """
  policy = jnp.where(mask, logprobs, 0.0)
  held = jax.lax.stop_gradient(policy)
  difference = held - jnp.where(mask, jax.lax.stop_gradient(proximal_logprobs), 0.0)
  lengths = segment_sums(mask.astype(difference.dtype), segment_ids, segments=segments)
  means = segment_sums(difference, segment_ids, segments=segments) / jnp.maximum(lengths, 1.0)
  return jnp.where(mask, jnp.minimum(policy - held + by_segment(means, segment_ids), limit), 0.0)


def clipped_surrogate(
  log_ratio: Float[Array, 'chunks time'],
  advantages: Float[Array, 'chunks time'],
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
  clip_ratio_c: float | None,
) -> ClippedSurrogate:
  """Returns PPO's loss with separate clip ranges and dual clip. Given a sequence's log ratio, this
  is GSPO's loss.

  ρₜ = exp(log_ratioₜ)
  lossₜ = max(-ρₜ Aₜ, -clip(ρₜ, 1 - low, 1 + high) Aₜ);  where Aₜ < 0: min(lossₜ, -c Aₜ)

  `log_ratio` is the result of `token_log_ratio` or `sequence_log_ratio`, which bound and mask the
  log ratio. `advantages` must be constants: stop their gradients before calling. The caller masks
  and reduces the result. If `clip_ratio_c` (c) is None, there is no dual clip. Sources: Schulman et
  al. 2017 (arXiv:1707.06347), eq. 7; for the dual clip, Ye et al. 2020 (arXiv:1912.09729), eq. 5;
  for the asymmetric range, DAPO (arXiv:2503.14476), eq. 10.
  """
  ratio = jnp.exp(log_ratio)
  plain = -ratio * advantages
  clipped = -jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high) * advantages
  loss = jnp.maximum(plain, clipped)
  held = jnp.zeros_like(loss, bool)
  if clip_ratio_c is not None:
    bound = -clip_ratio_c * advantages
    held = (advantages < 0) & (loss > bound)
    loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
  return ClippedSurrogate(loss, clipped > plain, held)


def cispo(
  log_ratio: Float[Array, 'chunks time'],
  logprobs: Float[Array, 'chunks time'],
  advantages: Float[Array, 'chunks time'],
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
) -> ClippedSurrogate:
  """Returns the loss of CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE with clipped importance
  weights. Every token keeps its gradient.

  lossₜ = -sg(clip(exp(log_ratioₜ), 1 - low, 1 + high)) Aₜ logprobsₜ

  The bounds are distances from 1, as in verl (in TRL, the upper bound is absolute); sg stops the
  gradient. `advantages` are constants and must be finite even at masked positions, where `logprobs`
  may be NaN. `clipped` in the result marks the tokens whose weight was clipped.
  """
  ratio = jnp.exp(jax.lax.stop_gradient(log_ratio))
  weight = jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
  return ClippedSurrogate(
    -weight * advantages * logprobs, weight != ratio, jnp.zeros_like(ratio, bool)
  )


def opmd_loss(
  log_ratio_sum: Float[Array, 'chunks segments'],
  advantages: Float[Array, 'chunks segments'],
  *,
  tau: float,
) -> Float[Array, 'chunks segments']:
  """Returns the loss per sequence of Kimi k1.5's online policy mirror descent (arXiv:2501.12599).

  loss = -A s + τ/2 s²,  s = sum over the sequence's valid tokens of (logprobs - reference)

  The gradient of this loss, -A ∇log π + τ/2 ∇s², equals the gradient in the paper. If
  A = r - baseline, where the baseline is the group's mean reward or the log-partition function, the
  loss equals (A - τ s)² / (2 τ) minus the constant A² / (2 τ). `advantages` must be constants.
  """
  return -log_ratio_sum * advantages + 0.5 * tau * log_ratio_sum**2
