"""MIX (Trinity-RFT, arXiv:2505.17826): policy gradient on rollouts plus imitation of expert rows.

L = (1 - μ) · L_GRPO(usual rows) + μ · L_SFT(expert rows)

Usual rows are rollouts of the policy; expert rows are answers to imitate. Only usual rows have KL
and entropy terms. Each of the two losses is divided by its own denominator over the whole optimizer
step. If a micro-batch or step has no rows of one kind, it adds nothing to the loss of that kind.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jaxrl_llm.advantages.shaping import MuSchedule
from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.learner.algorithm import (
  Algorithm,
  Annotation,
  Closed,
  Constants,
  Setting,
  Stats,
  Terms,
  term,
)
from jaxrl_llm.learner.effects import MIX, MU, surrogate_needs, without_effect
from jaxrl_llm.learner.policy_gradient import annotate, policy_gradient, policy_terms
from jaxrl_llm.learner.policy_options import PolicyGradientConfig
from jaxrl_llm.objectives.supervised import chord_token_weight, negative_log_likelihood
from jaxrl_llm.ops.logprobs import TokenLogprobs
from jaxrl_llm.ops.reduce import Aggregation, masked_stat


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixConfig(PolicyGradientConfig):
  """MIX (Trinity-RFT, arXiv:2505.17826): GRPO on rollouts and, in the same loss, imitation of
  expert rows.
  """

  mu: MuSchedule = MuSchedule(mu=0.1)
  """Weight μ of the imitation loss, as a schedule over the batches of the stage."""
  expert_loss_agg_mode: Aggregation = 'token-mean'
  expert_token_weight: Literal['none', 'chord'] = 'none'
  """If 'chord', the loss of each expert token is weighted by p(1 - p), where p is the token's
  probability under the policy (CHORD, arXiv:2508.11408).
  """


def mix(config: MixConfig, setting: Setting) -> Algorithm:
  """Builds MIX, whose loss is given in the module docstring. The stage's `experts` configures the
  source and the number of expert rows.
  """
  usual = policy_gradient(config, setting)

  def annotate_both(closed: Closed) -> Annotation:
    """Annotates usual rows like a policy gradient. Expert rows are in the loss regardless of their
    reward.
    """
    expert = np.array([row.is_expert for row in closed.rows], bool)
    chosen = [i for i, is_expert in enumerate(expert) if not is_expert]
    tokens = {name: [column[i] for i in chosen] for name, column in closed.tokens.items()}
    rows = [closed.rows[i] for i in chosen]
    annotation = annotate(config, setting, closed._replace(rows=rows, tokens=tokens))
    advantages: list = [0.0] * len(closed.rows)
    rewards: list = [None] * len(closed.rows)
    in_loss = expert.copy()
    for place, i in enumerate(chosen):
      advantages[i], in_loss[i] = annotation.advantages[place], annotation.in_loss[place]
      rewards[i] = annotation.rewards[place]
    mu = config.mu.at(closed.step)
    constants = {**annotation.constants, 'mu': mu}
    metrics = {**annotation.metrics, 'actor/mu': (mu, 1.0)}
    return annotation._replace(
      advantages=advantages, rewards=rewards, in_loss=in_loss, metrics=metrics, constants=constants
    )

  def loss(outputs: TokenLogprobs, chunks: Chunks, constants: Constants) -> tuple[Terms, Stats]:
    mu = constants['mu']
    terms, stats = policy_terms(
      config, setting, outputs, chunks, constants, chunks.loss_mask & ~chunks.is_expert
    )
    terms = {name: t._replace(weight=(1.0 - mu) * t.weight) for name, t in terms.items()}
    mask = chunks.loss_mask & chunks.is_expert
    nll = negative_log_likelihood(outputs.logprobs)
    if config.expert_token_weight == 'chord':
      nll = nll * chord_token_weight(outputs.logprobs, mask)
    scale = config.loss_scale_factor or float(setting.max_response_length)
    terms['actor/sft_loss'] = term(
      nll, mask, chunks, config.expert_loss_agg_mode, weight=mu, scale=scale
    )
    return terms, stats | {'actor/expert_logprob': masked_stat(outputs.logprobs, mask)}

  no_effect = (
    *without_effect(config, 'mix', MIX | surrogate_needs(config)),
    *without_effect(config.mu, 'mix.mu', MU),
  )
  return usual._replace(
    annotate=annotate_both, loss=loss, constants=usual.constants | {'mu'}, no_effect=no_effect
  )
