"""An algorithm is a value: which passes it reads, how it annotates a closed batch, its loss terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float64

from jaxrl_llm.advantages.group import group_advantages
from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.plan import Row
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.objectives.divergence import Estimator, kl_estimate
from jaxrl_llm.objectives.policy import clipped_surrogate
from jaxrl_llm.objectives.supervised import negative_log_likelihood
from jaxrl_llm.ops.logprobs import TokenLogprobs
from jaxrl_llm.ops.reduce import Aggregation, Stat, Term, aggregate, masked_stat


class Annotation(NamedTuple):
  """What an algorithm derives from a closed batch before the update; never stored."""

  advantages: Float64[np.ndarray, 'rows']
  in_loss: Bool[np.ndarray, 'rows']
  """Rows that take part in the loss at all (unscorable ones do not)."""
  metrics: Mapping[str, tuple[float, float]]
  """(sum, count) of batch statistics."""


Terms = dict[str, Term]
Stats = dict[str, Stat]


class Algorithm(NamedTuple):
  """`loss(outputs, chunks)` gives named terms and statistics of one micro-batch.

  `reads` names the passes it needs before the update: 'reference'. Denominators of terms depend on `chunks` alone
  (the update computes them first, over the whole optimizer step).
  """

  reads: frozenset[str]
  annotate: Callable[[Sequence[Row]], Annotation]
  loss: Callable[[TokenLogprobs, Chunks], tuple[Terms, Stats]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
  loss_agg_mode: Aggregation = 'token-mean'


def sft(config: SftConfig) -> Algorithm:
  """Supervised fine-tuning: the negative log-likelihood of the demonstrations' completion tokens."""

  def annotate(rows: Sequence[Row]) -> Annotation:
    return Annotation(np.zeros(len(rows)), np.ones(len(rows), bool), {})

  def loss(outputs: TokenLogprobs, chunks: Chunks) -> tuple[Terms, Stats]:
    nll = negative_log_likelihood(outputs.logprobs)
    mask = chunks.loss_mask
    terms = {'actor/sft_loss': _term(nll, mask, chunks, config.loss_agg_mode, weight=1.0)}
    return terms, {'actor/entropy': masked_stat(outputs.entropy, mask)}

  return Algorithm(frozenset(), annotate, loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig:
  """GRPO; the field's names, the project's defaults."""

  clip_ratio_low: float = 0.2
  clip_ratio_high: float = 0.2
  clip_ratio_c: float | None = 3.0
  """Dual clip; None = off."""
  loss_agg_mode: Aggregation = 'token-mean'
  loss_scale_factor: float = 1.0
  """Divisor of seq-mean-token-sum-norm: the maximal response length for Dr.GRPO."""
  norm_adv_by_std: bool = True
  adv_ddof: int = 1
  adv_eps: float = 1e-6
  kl_loss_coef: float = 0.0
  """0 = no KL, and no reference is loaded."""
  kl_loss_type: Estimator = 'k3'
  kl_unbiased_gradient: bool = True
  """Multiplies k3 with the importance ratio, which gives the gradient of the reverse KL."""
  allow_zero_gradient_kl: bool = False
  """k1 in the loss has zero expected gradient on-policy: refused unless this is set."""
  entropy_coeff: float = 0.0


def grpo(config: GrpoConfig) -> Algorithm:
  """Group-relative policy optimization (DeepSeekMath, arXiv:2402.03300) with the field's later options."""
  if config.kl_loss_coef and config.kl_loss_type == 'k1' and not config.allow_zero_gradient_kl:
    raise UserError(
      'grpo: kl_loss_type=k1 in the loss has zero expected gradient on-policy; use k2 or k3, '
      'or set allow_zero_gradient_kl=true'
    )

  def annotate(rows: Sequence[Row]) -> Annotation:
    result = group_advantages(
      [row.reward for row in rows],
      [row.group for row in rows],
      normalize_by_std=config.norm_adv_by_std,
      ddof=config.adv_ddof,
      eps=config.adv_eps,
    )
    unscorable = float((~result.scored).sum())
    metrics = {
      'frac_reward_zero_std': (float(result.zero_std_groups), float(max(result.groups, 1))),
      'num_unscorable': (unscorable, 1.0),
    }
    return Annotation(result.advantages, result.scored, metrics)

  def loss(outputs: TokenLogprobs, chunks: Chunks) -> tuple[Terms, Stats]:
    mask, logprobs = chunks.loss_mask, outputs.logprobs
    term = lambda values, weight: _term(values, mask, chunks, config.loss_agg_mode, weight, config.loss_scale_factor)
    surrogate = clipped_surrogate(
      logprobs,
      chunks.proximal_logprobs,
      chunks.advantages,
      clip_ratio_low=config.clip_ratio_low,
      clip_ratio_high=config.clip_ratio_high,
      clip_ratio_c=config.clip_ratio_c,
    )
    terms = {'actor/pg_loss': term(surrogate.loss, 1.0)}
    stats = {
      'actor/entropy': masked_stat(outputs.entropy, mask),
      'actor/pg_clipfrac': masked_stat(surrogate.clipped.astype(jnp.float32), mask),
      'actor/pg_clipfrac_lower': masked_stat(surrogate.clipped_lower.astype(jnp.float32), mask),
      'actor/ppo_kl': masked_stat(chunks.proximal_logprobs - logprobs, mask),
    }
    if config.entropy_coeff:
      terms['actor/entropy_loss'] = term(-outputs.entropy, config.entropy_coeff)
    if config.kl_loss_coef:
      kl = kl_estimate(logprobs, chunks.reference_logprobs, kind=config.kl_loss_type)
      stats['actor/kl'] = masked_stat(kl, mask)
      if config.kl_loss_type == 'k3' and config.kl_unbiased_gradient:
        kl = kl * jnp.exp(jnp.clip(logprobs - chunks.proximal_logprobs, -20.0, 20.0))
      terms['actor/kl_loss'] = term(kl, config.kl_loss_coef)
    return terms, stats

  reads = frozenset({'reference'} if config.kl_loss_coef else ())
  return Algorithm(reads, annotate, loss)


def _term(values, mask, chunks: Chunks, mode: Aggregation, weight: float, scale: float = 1.0) -> Term:
  numerator, denominator = aggregate(
    values, mask, chunks.segment_ids, segments=chunks.temperature.shape[-1], mode=mode, loss_scale_factor=scale
  )
  return Term(numerator, denominator, weight)
