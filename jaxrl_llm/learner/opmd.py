"""Online policy mirror descent over whole sequences, as in Kimi k1.5 (arXiv:2501.12599, 2.3.2).

For k responses y to a task, with rewards r, the gradient of the objective is

  1/k Σ ( ∇log π(y) (r - baseline) - τ/2 ∇(log(π(y)/π_ref(y)))² ).

By default, the reference is the policy before each batch, and the optimizer's moments are reset
before each batch. No importance ratio is clipped, and there is no critic.

In a trajectory of several steps, y is a step: each step has its own log ratio and the trajectory's
r - baseline.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_advantages, log_partition_baseline
from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.learner.algorithm import (
  Algorithm,
  Annotation,
  Closed,
  Constants,
  ReferenceRule,
  Setting,
  Stats,
  Terms,
)
from jaxrl_llm.learner.effects import SHAPING, without_effect
from jaxrl_llm.learner.policy_gradient import compared, shaped_rewards
from jaxrl_llm.learner.policy_options import ShapingOptions, check_shaping
from jaxrl_llm.learner.ranges import Range, check_ranges
from jaxrl_llm.objectives.policy import opmd_loss
from jaxrl_llm.ops.logprobs import TokenLogprobs
from jaxrl_llm.ops.reduce import Stat, Term, masked_stat, segment_sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpmdConfig(ShapingOptions):
  """Online policy mirror descent over whole sequences (Kimi k1.5, arXiv:2501.12599). By default,
  the reference is the policy before each batch.
  """

  tau: float = 0.1
  """Strength of the regularisation towards the reference. The Kimi k1.5 paper does not state a
  value.
  """
  baseline: Literal['mean', 'log_partition'] = 'mean'
  """Baseline computed from the rewards r of the group. 'mean' is their mean; 'log_partition' is
  τ·log(mean(exp(r/τ))).
  """
  reference: ReferenceRule = ReferenceRule(every=1)
  renew_optimizer: bool = True
  """Whether the optimizer's moments are reset before each batch."""


def opmd(config: OpmdConfig, setting: Setting) -> Algorithm:
  """Builds online policy mirror descent. The module docstring has the formula."""
  check_shaping(config, setting, 'opmd')
  check_ranges(config, 'opmd', {'tau': Range(0.0, exclusive=config.baseline == 'log_partition')})

  def annotate(closed: Closed) -> Annotation:
    rewards = shaped_rewards(config, setting, closed)
    if config.baseline == 'mean':
      baseline = functools.partial(group_advantages, normalize_by_std=False)
    else:
      baseline = functools.partial(log_partition_baseline, tau=config.tau)
    estimates = compared(closed.rows, rewards, baseline, credit='trajectory')
    metrics = {
      'frac_reward_zero_std': (float(estimates.zero_std_groups), float(max(estimates.groups, 1))),
      'num_unscorable': (float((~estimates.scored).sum()), 1.0),
    }
    return Annotation(estimates.advantages, estimates.scored, metrics, rewards=rewards)

  def loss(outputs: TokenLogprobs, chunks: Chunks, constants: Constants) -> tuple[Terms, Stats]:
    mask, ids, segments = chunks.loss_mask, chunks.segment_ids, chunks.segments

    def summed(values):
      return segment_sums(jnp.where(mask, values, 0.0), ids, segments=segments)

    tokens = summed(jnp.ones_like(outputs.logprobs))
    ratio = summed(outputs.logprobs - chunks.reference_logprobs)
    # Sum in the dtype of the outputs, like all sums over time. The order of summation depends on
    # the mesh, so in a narrower dtype the rounding errors would differ from mesh to mesh.
    advantage = summed(chunks.advantages.astype(tokens.dtype)) / jnp.maximum(tokens, 1.0)
    losses = opmd_loss(ratio, advantage, tau=config.tau)
    has_tokens = tokens > 0
    count = has_tokens.sum().astype(jnp.float32)
    terms = {'actor/pg_loss': Term(jnp.where(has_tokens, losses, 0.0).sum(), count, 1.0)}
    return terms, {
      'actor/entropy': masked_stat(outputs.entropy, mask),
      'actor/log_ratio_sum': Stat(jnp.where(has_tokens, ratio, 0.0).sum(), count),
      'actor/ppo_kl': masked_stat(chunks.reference_logprobs - outputs.logprobs, mask),
    }

  return Algorithm(
    annotate=annotate,
    loss=loss,
    reads=frozenset({'reference'}),
    reference=config.reference,
    renew_optimizer=config.renew_optimizer,
    no_effect=without_effect(config, 'opmd', SHAPING),
  )
