"""Estimators of KL(policy || reference) from the sampled tokens."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

Estimator = Literal['k1', 'k2', 'k3']


def kl_estimate(
  logprobs: Float[Array, 'chunks time'],
  reference_logprobs: Float[Array, 'chunks time'],
  *,
  kind: Estimator,
  log_ratio_limit: float = 20.0,
  limit: float = 10.0,
) -> Float[Array, 'chunks time']:
  """Per-token estimate, d = logprobs - reference:  k1 = d;  k2 = d²/2;  k3 = exp(-d) + d - 1.

  Source: Schulman, "Approximating KL divergence" (2020). For k3, -d is limited to ±`log_ratio_limit` and the result
  to ±`limit`, as the field does. As a loss on on-policy samples the gradient of k1 is zero in expectation, that of k2
  is the reverse KL's, and that of k3 is biased unless multiplied by the importance ratio (see the algorithms).
  """
  difference = logprobs - reference_logprobs
  if kind == 'k1':
    return difference
  if kind == 'k2':
    return 0.5 * difference**2
  bounded = jnp.clip(-difference, -log_ratio_limit, log_ratio_limit)
  return jnp.clip(jnp.exp(bounded) - bounded - 1.0, -limit, limit)
