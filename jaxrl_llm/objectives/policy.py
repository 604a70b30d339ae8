"""Policy-gradient losses per token."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class ClippedSurrogate(NamedTuple):
  loss: Float[Array, 'chunks time']
  clipped: Bool[Array, 'chunks time']
  """Tokens whose clipped branch is in force (`actor/pg_clipfrac`)."""
  clipped_lower: Bool[Array, 'chunks time']
  """Tokens with a negative advantage held by the dual clip (`actor/pg_clipfrac_lower`)."""


def clipped_surrogate(
  logprobs: Float[Array, 'chunks time'],
  proximal_logprobs: Float[Array, 'chunks time'],
  advantages: Float[Array, 'chunks time'],
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
  clip_ratio_c: float | None,
  log_ratio_limit: float = 20.0,
) -> ClippedSurrogate:
  """PPO's loss with separate clip ranges and dual clipping.

  ρₜ = exp(clip(logprobsₜ - proximalₜ, ±limit))
  lossₜ = max(-ρₜ Aₜ, -clip(ρₜ, 1 - low, 1 + high) Aₜ);  where Aₜ < 0: min(lossₜ, -c Aₜ)

  `advantages` and `proximal_logprobs` are constants: stop their gradients before calling. Masking and reduction are
  the caller's. Sources: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; dual clip: Ye et al. 2020 (arXiv:1912.09729),
  eq. 5; asymmetric range: DAPO (arXiv:2503.14476), eq. 10. `clip_ratio_c` None switches the dual clip off.
  """
  ratio = jnp.exp(jnp.clip(logprobs - proximal_logprobs, -log_ratio_limit, log_ratio_limit))
  plain = -ratio * advantages
  clipped = -jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high) * advantages
  loss = jnp.maximum(plain, clipped)
  held = jnp.zeros_like(loss, bool)
  if clip_ratio_c is not None:
    bound = -clip_ratio_c * advantages
    held = (advantages < 0) & (loss > bound)
    loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
  return ClippedSurrogate(loss, clipped > plain, held)
