"""Estimators of KL(policy || reference) from sampled tokens; masked positions may be NaN."""

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
  """Per-token estimate, d = logprobs - reference:  k1 = d;  k2 = d²/2;  k3 = exp(-d) + d - 1.

  Source: Schulman, "Approximating KL divergence" (2020). For k3, -d is limited to
  ±`log_ratio_limit` and the result to ±`limit`, as is customary. As a loss on on-policy samples,
  summed over sequences, k1 has zero gradient in expectation, k2 has the gradient of the reverse KL
  at the sampled prefixes, and k3 that of the forward KL (`unbiased_kl` has that of the reverse KL).

  Args:
    mask: tokens that count; elsewhere the estimate is 0 and has no gradient. None: all, which must
      then be finite.
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
  """A KL estimate times ρₜ = exp(logprobsₜ - proximalₜ), with the gradient of the reverse KL.

  Value: ρₜ k2ₜ or ρₜ k3ₜ, the estimate limited as in `kl_estimate`. Gradient of both kinds: ρₜ dₜ
  ∇logprobsₜ. Its mean over samples of the proximal policy is the gradient of KL(policy ||
  reference). Without limits, ρₜ k3ₜ (DeepSeek-V3.2, arXiv:2512.02556) and sg(ρₜ) k2ₜ have this
  gradient. The code computes the gradient directly, so that a limit of the value changes neither
  its sign nor its direction. Value and gradient are 0 where `mask` is False.

  Args:
    ratio_limit: upper limit of ρₜ, in value and gradient: one token that the proximal policy hardly
      ever draws would otherwise outweigh a batch. Where the limit applies, the gradient is too
      small but has the right sign.
    log_ratio_limit: as in `kl_estimate`; also limits |dₜ| in the gradient.

  Raises:
    ValueError: `kind` is k1. ρₜ k1ₜ has the same mean gradient as k3, with the noise of ρₜ
      ∇logprobsₜ added.
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
  """Whether a KL term with these settings moves the policy, on average over on-policy samples.

  k1 in the loss does not: E[∇(log π - log ref)] = E[∇log π] = 0. Summed over sequences, it adds
  only noise; divided by sampled lengths, the remaining gradient does not point to the reference
  either. `unbiased` does not help: `unbiased_kl` refuses k1.

  k2 in the loss has the reverse KL's gradient, E[d ∇log π]. k3 in the loss has the forward KL's
  gradient, E[(1 - exp(-d)) ∇log π]. It is not zero, but it is a biased gradient of the reverse KL;
  `unbiased` (`unbiased_kl`) removes the bias.

  In the reward every estimator is a penalty whose value acts through the policy gradient: the means
  of k1 and k3 are the KL itself, that of k2 is close to it.
  """
  return not (kind == 'k1' and place == 'loss')
