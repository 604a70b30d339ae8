"""Policy-gradient surrogates. A surrogate is a loss per token, to which off-policy correction,
aggregation, and KL and entropy terms are applied later.

Each surrogate is defined by an options dataclass and a function of the tokens and these options
(`Surrogate`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.objectives import policy
from jaxrl_llm.objectives.policy import (
  ClippedSurrogate,
  clipped_surrogate,
  sequence_log_ratio,
  token_log_ratio,
)


class SurrogateTokens(NamedTuple):
  """Tokens of one micro-batch. At masked positions, both logprobs may have any value, even NaN."""

  logprobs: Float[Array, 'chunks time']
  """Logprob of each token under the policy. Only this field has a gradient."""
  proximal_logprobs: Float[Array, 'chunks time']
  """Logprob of each token under the proximal policy. With `bypass_old_logprobs`, this is the
  sampler's logprob.
  """
  advantages: Float[Array, 'chunks time']
  """Advantage of each token, finite even at masked positions."""
  mask: Bool[Array, 'chunks time']
  """Tokens that count in the loss."""
  segment_ids: Int[Array, 'chunks time']
  """Number of the token's sequence within its chunk, from 1; 0 for padding."""
  segments: int
  """Upper bound of the number of sequences in a chunk."""


class TokenLoss(NamedTuple):
  """Return value of a surrogate."""

  loss: Float[Array, 'chunks time']
  """Loss of each token, to be minimised. Values at masked positions are ignored."""
  metrics: Mapping[str, Array] = {}
  """Numbers or flags per token, keyed by metric. The value of a metric is the mean of its numbers
  over the tokens in `mask`.
  """


Surrogate = Callable[[SurrogateTokens, Any], TokenLoss]
"""Function of the tokens and the surrogate's options, traced by JAX. It must not normalise over the
micro-batch, because the loss must not depend on the split into micro-batches.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatioBounds:
  """Bounds of the importance ratio, given as distances from 1."""

  clip_ratio_low: float = 0.2
  clip_ratio_high: float = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualClipBounds(RatioBounds):
  """Bounds of the importance ratio, and a bound of the loss of tokens with a negative advantage."""

  clip_ratio_c: float | None = 3.0
  """Dual-clip bound c: the loss of a token with a negative advantage A is at most -c A. If None,
  there is no such bound.
  """


def clip(tokens: SurrogateTokens, options: DualClipBounds) -> TokenLoss:
  """Returns PPO's loss with a clipped importance ratio; see `clipped_surrogate`."""
  return _clipped(
    token_log_ratio(tokens.logprobs, tokens.proximal_logprobs, tokens.mask), tokens, options
  )


def gspo(tokens: SurrogateTokens, options: DualClipBounds) -> TokenLoss:
  """Returns GSPO's loss, which clips the importance ratio of the sequence; see
  `sequence_log_ratio`.
  """
  logprobs, proximal, _, mask, ids, segments = tokens
  return _clipped(
    sequence_log_ratio(logprobs, proximal, mask, ids, segments=segments), tokens, options
  )


def cispo(tokens: SurrogateTokens, options: RatioBounds) -> TokenLoss:
  """Returns CISPO's loss, log-likelihoods with clipped importance weights; see `policy.cispo`."""
  bounds = dict(clip_ratio_low=options.clip_ratio_low, clip_ratio_high=options.clip_ratio_high)
  log_ratio = token_log_ratio(tokens.logprobs, tokens.proximal_logprobs, tokens.mask)
  return _with_clip_fractions(policy.cispo(log_ratio, tokens.logprobs, tokens.advantages, **bounds))


def _clipped(
  log_ratio: Float[Array, 'chunks time'], tokens: SurrogateTokens, options: DualClipBounds
) -> TokenLoss:
  bounds = dict(clip_ratio_low=options.clip_ratio_low, clip_ratio_high=options.clip_ratio_high)
  surrogate = clipped_surrogate(
    log_ratio, tokens.advantages, clip_ratio_c=options.clip_ratio_c, **bounds
  )
  return _with_clip_fractions(surrogate)


def _with_clip_fractions(surrogate: ClippedSurrogate) -> TokenLoss:
  metrics = {
    'actor/pg_clipfrac': surrogate.clipped,
    'actor/pg_clipfrac_lower': surrogate.clipped_lower,
  }
  return TokenLoss(surrogate.loss, metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SapoOptions:
  """Temperatures of SAPO's gate; higher values keep the policy closer to the proximal policy."""

  tau_pos: float = 1.0
  """Temperature for tokens with a positive advantage."""
  tau_neg: float = 1.05
  """Temperature for tokens with an advantage of 0 or below."""

  def __post_init__(self):
    for name in ('tau_pos', 'tau_neg'):
      if not 0 < getattr(self, name) < math.inf:
        raise UserError(f'sapo.{name}: {getattr(self, name)}, wanted a finite number above 0')


def sapo(tokens: SurrogateTokens, options: SapoOptions) -> TokenLoss:
  """Returns SAPO's loss (arXiv:2511.20347): lossₜ = -f(ρₜ) Aₜ with f(ρ) = 4/τ · σ(τ (ρ - 1)).

  τ is `tau_pos` where Aₜ > 0, otherwise `tau_neg`. The gradient is -4 pₜ (1 - pₜ) ρₜ Aₜ ∇log πₜ,
  where pₜ = σ(τ (ρₜ - 1)).
  """
  ratio = jnp.exp(token_log_ratio(tokens.logprobs, tokens.proximal_logprobs, tokens.mask))
  tau = jnp.where(tokens.advantages > 0, options.tau_pos, options.tau_neg).astype(ratio.dtype)
  gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
  return TokenLoss(-gate * tokens.advantages)


SURROGATES: Mapping[str, tuple[type, Surrogate]] = {
  'clip': (DualClipBounds, clip),
  'gspo': (DualClipBounds, gspo),
  'cispo': (RatioBounds, cispo),
  'sapo': (SapoOptions, sapo),
}
"""Options dataclass and function of each surrogate, keyed by name.

If an algorithm's options class inherits the surrogate's options dataclass, the function receives
the algorithm's options themselves.
"""
