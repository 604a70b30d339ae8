"""Losses that imitate given tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def negative_log_likelihood(logprobs: Float[Array, 'chunks time']) -> Float[Array, 'chunks time']:
  """Returns lossₜ = -log p(tokenₜ | tokens before it). The caller masks and reduces the losses."""
  return -logprobs


def chord_token_weight(
  logprobs: Float[Array, 'chunks time'], mask: Bool[Array, 'chunks time'] | None = None
) -> Float[Array, 'chunks time']:
  """Returns CHORD's weight of an expert token's loss (arXiv:2508.11408), φₜ = pₜ (1 - pₜ).

  The weight has no gradient. Its maximum is 1/4, at p = 1/2. It vanishes for tokens that the policy
  already predicts and for very unlikely tokens.

  Args:
    mask: tokens that count. Elsewhere the weight is 0. If None, all tokens count, and all logprobs
      must be finite.
  """
  if mask is not None:
    logprobs = jnp.where(mask, logprobs, -jnp.inf)
  logprobs = jax.lax.stop_gradient(logprobs)
  # Use expm1, because 1 - exp(logprobs) loses its significant digits to cancellation where the
  # probability is near 1.
  return -jnp.exp(logprobs) * jnp.expm1(logprobs)
