"""Estimators of KL(policy || reference) computed from sampled tokens. Logprobs may be NaN at masked
positions.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.objectives.policy import token_log_ratio

Estimator = Literal['k1', 'k2', 'k3']


def kl_estimate(
  logprobs: Float[Array, 'chunks time'],
  reference_logprobs: Float[Array, 'chunks time'],
  *,
  kind: Estimator,
  mask: Bool[Array, 'chunks time'] | None = None,
  log_ratio_limit: float = 20.0,
  limit: float = 10.0,
) -> Float[Array, 'chunks time']:
  """Returns an estimate of the KL per token, where d = logprobs - reference.

  k1 = d;  k2 = d²/2;  k3 = exp(-d) + d - 1

  Source: Schulman, "Approximating KL divergence" (2020). For k3, -d is limited to
  ±`log_ratio_limit` and the result to ±`limit`, as is customary.

  The estimates have different gradients if they are used as a loss that is summed over on-policy
  sequences. In expectation, k1 has a gradient of zero, k2 has the gradient of the reverse KL at the
  sampled prefixes, and k3 has the gradient of the forward KL. `unbiased_kl` has the gradient of the
  reverse KL.

  Args:
    mask: tokens that count. Elsewhere the estimate is 0 and has no gradient. If None, all tokens
      count, and all logprobs must be finite.
  """
  difference = logprobs - reference_logprobs
  if mask is not None:
    difference = jnp.where(mask, difference, 0.0)
  if kind == 'k1':
    return difference
  if kind == 'k2':
    return 0.5 * difference**2
  bounded = jnp.clip(-difference, -log_ratio_limit, log_ratio_limit)
  return jnp.clip(jnp.exp(bounded) - bounded - 1.0, -limit, limit)


def unbiased_kl(
  logprobs: Float[Array, 'chunks time'],
  reference_logprobs: Float[Array, 'chunks time'],
  proximal_logprobs: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  *,
  kind: Estimator = 'k3',
  log_ratio_limit: float = 20.0,
  limit: float = 10.0,
  ratio_limit: float = 10.0,
) -> Float[Array, 'chunks time']:
  """Returns a KL estimate times ρₜ = exp(logprobsₜ - proximalₜ), with the gradient of the reverse
  KL.

  The value is ρₜ k2ₜ or ρₜ k3ₜ, where the estimate is limited as in `kl_estimate`. The gradient of
  both kinds is ρₜ dₜ ∇logprobsₜ, where d = logprobs - reference. The mean of this gradient over
  samples of the proximal policy is the gradient of KL(policy || reference).

  Without limits, ρₜ k3ₜ (DeepSeek-V3.2, arXiv:2512.02556) and sg(ρₜ) k2ₜ, where sg stops the
  gradient, have this gradient by themselves. The code computes the gradient directly, so that
  limiting the value changes neither the sign nor the direction of the gradient. Value and gradient
  are 0 where `mask` is False.

  Args:
    ratio_limit: upper limit of ρₜ, in value and gradient. Without it, one token that the proximal
      policy hardly ever samples could outweigh a batch. Where the limit applies, the gradient is
      too small but has the right sign.
    log_ratio_limit: as in `kl_estimate`. It also limits |dₜ| in the gradient.

  Raises:
    ValueError: `kind` is k1. The gradients of ρₜ k1ₜ and ρₜ k3ₜ have the same mean, but the
      gradient of ρₜ k1ₜ has additional noise, ρₜ ∇logprobsₜ.
  """
  if kind == 'k1':
    raise ValueError('unbiased_kl: k1 adds noise of mean zero to the gradient of k3; use k2 or k3')
  kl = kl_estimate(
    logprobs, reference_logprobs, kind=kind, mask=mask, log_ratio_limit=log_ratio_limit, limit=limit
  )
  ratio = jnp.exp(token_log_ratio(logprobs, proximal_logprobs, mask, limit=log_ratio_limit))
  ratio = jnp.minimum(ratio, ratio_limit)
  difference = jnp.where(mask, logprobs - reference_logprobs, 0.0)
  slope = jax.lax.stop_gradient(ratio * jnp.clip(difference, -log_ratio_limit, log_ratio_limit))
  variable = jnp.where(mask, logprobs, 0.0)
  return jax.lax.stop_gradient(ratio * kl) + slope * (variable - jax.lax.stop_gradient(variable))


def has_expected_gradient(
  kind: Estimator, *, place: Literal['loss', 'reward'], unbiased: bool
) -> bool:
  """Returns whether a KL term with these settings moves the policy towards the reference, on
  average over on-policy samples. Below, d = log π - log ref.

  k1 in the loss has no such effect, because E[∇d] = E[∇log π] = 0. If the loss is summed over
  sequences, k1 adds only noise. If the loss is divided by sampled lengths, some gradient remains,
  but it does not point to the reference. `unbiased` makes no difference, because `unbiased_kl` does
  not accept k1.

  k2 in the loss has the reverse KL's gradient, E[d ∇log π]. k3 in the loss has the forward KL's
  gradient, E[(1 - exp(-d)) ∇log π]. This gradient is not zero, but as a gradient of the reverse KL
  it is biased. With `unbiased`, `unbiased_kl` removes the bias.

  In the reward, the value of every estimator is a penalty that acts through the policy gradient.
  The means of k1 and k3 are the KL itself, and the mean of k2 approximates the KL while the policy
  is close to the reference.
  """
  return not (kind == 'k1' and place == 'loss')
