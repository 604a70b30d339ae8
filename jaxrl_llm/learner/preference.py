"""Learning from preference pairs: DPO for policies, Bradley-Terry for reward models.

The two sequences of a pair are always in the same micro-batch, because the loss combines them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.algorithm import (
  Algorithm,
  Constants,
  ReferenceRule,
  Setting,
  Stats,
  Terms,
  plain,
  term,
)
from jaxrl_llm.learner.ranges import Range, check_ranges
from jaxrl_llm.objectives.preference import (
  bradley_terry_loss,
  centering_penalty,
  dpo_loss,
  pair_sums,
)
from jaxrl_llm.objectives.supervised import negative_log_likelihood
from jaxrl_llm.ops.logprobs import SequenceScores, TokenLogprobs
from jaxrl_llm.ops.reduce import Stat, Term, by_segment, masked_stat, segment_sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoConfig:
  """Direct preference optimization (arXiv:2305.18290) on static pairs or pairs from rollouts."""

  beta: float = 0.1
  loss_type: Literal['sigmoid', 'ipo'] = 'sigmoid'
  """Loss of a pair. 'sigmoid' is DPO's loss, which sums the logprobs of an answer's tokens. 'ipo'
  is IPO's loss, which averages the logprobs.
  """
  label_smoothing: float = 0.0
  """Probability that a preference label is wrong (cDPO). Only for loss_type sigmoid."""
  sft_loss_coef: float = 0.0
  """Weight of an additional loss, the mean negative log-likelihood of the chosen answers' tokens.
  """
  reference: ReferenceRule = ReferenceRule()


def dpo(config: DpoConfig, setting: Setting) -> Algorithm:
  """Builds direct preference optimization (arXiv:2305.18290) or IPO (arXiv:2310.12036)."""
  # With label_smoothing above 0.5, the loss would prefer the rejected response.
  ranges = {
    'beta': Range(0.0, exclusive=True),
    'label_smoothing': Range(0.0, 0.5),
    'sft_loss_coef': Range(0.0),
  }
  check_ranges(config, 'dpo', ranges)
  if config.loss_type == 'ipo' and config.label_smoothing:
    raise UserError(
      f'dpo: label_smoothing={config.label_smoothing} has no meaning for ipo; set it to 0'
    )

  def loss(outputs: TokenLogprobs, chunks: Chunks, constants: Constants) -> tuple[Terms, Stats]:
    mask, ids, segments = chunks.loss_mask, chunks.segment_ids, chunks.segments
    tokens = segment_sums(mask.astype(jnp.float32), ids, segments=segments)

    def sequence(logprobs):
      sums = segment_sums(jnp.where(mask, logprobs, 0.0), ids, segments=segments)
      return sums / jnp.maximum(tokens, 1.0) if config.loss_type == 'ipo' else sums

    # Subtract per token before summing. Sums of thousands of logprobs would lose the digits that
    # their difference needs.
    ratio = sequence(outputs.logprobs - chunks.reference_logprobs)
    margin, present = pair_sums(ratio, chunks.pair, chunks.label)
    losses = dpo_loss(
      margin,
      jnp.zeros_like(margin),
      beta=config.beta,
      label_smoothing=config.label_smoothing,
      kind=config.loss_type,
    )
    terms = {'actor/dpo_loss': _pair_term(losses, present)}
    if config.sft_loss_coef:
      chosen = mask & (by_segment(chunks.label, ids) > 0)
      nll = negative_log_likelihood(outputs.logprobs)
      terms['actor/sft_loss'] = term(nll, chosen, chunks, 'token-mean', weight=config.sft_loss_coef)
    stats, policy = _pair_stats(config.beta * margin, present), sequence(outputs.logprobs)
    for name, sign in (('chosen', 1), ('rejected', -1)):
      of_sign = (chunks.label == sign) & (chunks.pair > 0)
      stats[f'logps/{name}'] = masked_stat(policy, of_sign)
      stats[f'rewards/{name}'] = masked_stat(config.beta * ratio, of_sign)
    return terms, stats | {'actor/entropy': masked_stat(outputs.entropy, mask)}

  return Algorithm(
    annotate=lambda closed: plain(closed.rows),
    loss=loss,
    reads=frozenset({'reference'}),
    reference=config.reference,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
  """Bradley-Terry reward model. Each sequence of a pair gets one score, at its last token."""

  margin: float = 0.0
  """Margin by which the score of the chosen answer should exceed the score of the rejected
  answer.
  """
  center_rewards_coefficient: float = 0.0
  """Weight of the penalty (r_chosen + r_rejected)², which keeps scores centred at 0."""


def reward_model(config: RewardModelConfig, setting: Setting) -> Algorithm:
  """Builds a reward model with the loss -log σ(r_chosen - r_rejected - margin), plus the centring
  penalty if it is configured. The reward r of a sequence is the score at its last token.
  """
  check_ranges(
    config, 'reward_model', {'margin': Range(), 'center_rewards_coefficient': Range(0.0)}
  )

  def loss(outputs: SequenceScores, chunks: Chunks, constants: Constants) -> tuple[Terms, Stats]:
    difference, present = pair_sums(outputs.scores, chunks.pair, chunks.label)
    losses = bradley_terry_loss(difference, target_margin=config.margin)
    terms = {'actor/rm_loss': _pair_term(losses, present)}
    if config.center_rewards_coefficient:
      # `pair_sums` multiplies by the label a second time. As label² is 1, the result is the sum of
      # the pair's scores instead of their difference.
      both, _ = pair_sums(outputs.scores * chunks.label, chunks.pair, chunks.label)
      terms['actor/center_loss'] = _pair_term(
        centering_penalty(both), present, config.center_rewards_coefficient
      )
    stats = _pair_stats(difference, present)
    for name, sign in (('chosen', 1), ('rejected', -1)):
      stats[f'rewards/{name}'] = masked_stat(
        outputs.scores, (chunks.label == sign) & (chunks.pair > 0)
      )
    return terms, stats

  return Algorithm(annotate=lambda closed: plain(closed.rows), loss=loss, head='scalar')


def _pair_term(
  losses: Float[Array, 'pairs'], there: Bool[Array, 'pairs'], weight: float = 1.0
) -> Term:
  return Term(jnp.where(there, losses, 0.0).sum(), there.sum().astype(jnp.float32), weight)


def _pair_stats(margins: Float[Array, 'pairs'], there: Bool[Array, 'pairs']) -> Stats:
  """Returns the accuracy and the mean margin, under TRL's metric names. A margin of 0 counts as
  half correct, because a policy equal to its reference prefers neither answer.
  """
  hits = jnp.where(margins > 0, 1.0, jnp.where(margins < 0, 0.0, 0.5))
  count = there.sum().astype(jnp.float32)

  def total(values):
    return Stat(jnp.where(there, values, 0.0).sum(), count)

  return {'rewards/accuracies': total(hits), 'rewards/margins': total(margins)}
