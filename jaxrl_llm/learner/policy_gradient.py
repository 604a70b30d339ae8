"""The policy-gradient family: one loss with interchangeable parts.

GRPO, Dr.GRPO, DAPO, GSPO, CISPO, SAPO, RLOO, REINFORCE++ and PPO differ only in advantage
estimation, the surrogate (the loss of each token), token aggregation, the rows that are masked, and
whether there is a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Bool, Float64

from jaxrl_llm.advantages import tokens as by_token
from jaxrl_llm.advantages.group import (
  GroupAdvantages,
  group_advantages,
  leave_one_out,
  unequal,
)
from jaxrl_llm.advantages.shaping import (
  AdaptiveKl,
  adapted,
  length_rewards,
  overlong_penalty,
  warmup_weight,
)
from jaxrl_llm.advantages.steps import Estimate, along_chains, chains, step_credit
from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.plan import Row
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.score import total_value
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
from jaxrl_llm.learner.effects import POLICY_GRADIENT, PPO, surrogate_needs, without_effect
from jaxrl_llm.learner.policy_options import (
  PolicyGradientConfig,
  PpoConfig,
  ShapingOptions,
  check,
  name_of,
  surrogate_of,
)
from jaxrl_llm.objectives import correction
from jaxrl_llm.objectives.divergence import kl_estimate, unbiased_kl
from jaxrl_llm.objectives.surrogates import SurrogateTokens
from jaxrl_llm.objectives.value import value_loss
from jaxrl_llm.ops.logprobs import TokenLogprobs, TokenValues
from jaxrl_llm.ops.reduce import masked_stat


def policy_gradient(config: PolicyGradientConfig, setting: Setting) -> Algorithm:
  """Builds the algorithm described by a configuration of the family."""
  check(config, setting)
  reads = {'reference'} if config.kl_loss_coef or config.kl_reward_coef else set()
  reads |= set() if config.bypass_old_logprobs else {'proximal'}
  on_host: set[Any] = set()
  if config.adv_estimator in ('reinforce_plus_plus', 'reinforce_plus_plus_baseline', 'gae'):
    on_host.add('loss_mask')
  if config.kl_reward_coef or config.kl_target is not None:
    proximal = 'behaviour_logprobs' if config.bypass_old_logprobs else 'proximal_logprobs'
    on_host |= {'loss_mask', proximal, 'reference_logprobs'}
  critic = config.adv_estimator == 'gae'
  if critic:
    reads.add('values')
    on_host |= {'values', 'next_values'} if config.bootstrap_truncated else {'values'}

  def loss(outputs: TokenLogprobs, chunks: Chunks, constants: Constants) -> tuple[Terms, Stats]:
    return policy_terms(config, setting, outputs, chunks, constants, chunks.loss_mask)

  needs = (PPO if critic else POLICY_GRADIENT) | surrogate_needs(config)
  return Algorithm(
    annotate=lambda closed: annotate(config, setting, closed),
    loss=loss,
    reads=frozenset(reads),
    on_host=frozenset(on_host),
    constants=frozenset({'kl_coef'} if config.kl_loss_coef else ()),
    reference=config.reference,
    critic_loss=(lambda outputs, chunks, _: _critic_terms(config, outputs, chunks))
    if critic
    else None,
    critic_warmup=config.critic_warmup if critic else 0,
    corrects=config.rollout_is != 'none' or config.bypass_old_logprobs,
    credits_tokens=config.adv_estimator in ('reinforce_plus_plus', 'gae'),
    no_effect=without_effect(config, name_of(config), needs),
  )


def annotate(config: PolicyGradientConfig, setting: Setting, closed: Closed) -> Annotation:
  """Shapes the rewards of a closed batch, estimates advantages, and selects the rows in the loss.

  A row is excluded from the loss if it is unscorable or masked, if its trajectory has values that
  are not finite, or if an option of `config` excludes it.
  """
  rows = closed.rows
  scored = np.array([row.reward is not None for row in rows], bool)
  rewards = shaped_rewards(config, setting, closed)
  metrics = {'num_unscorable': (float((~scored).sum()), 1.0)}
  finite = _finite_rows(closed)
  if closed.tokens.keys() - {'loss_mask'}:
    metrics['num_not_finite'] = (float((~finite).sum()), 1.0)
  coefs, kl_metrics, state = _kl(config, closed, finite)
  metrics |= kl_metrics
  groups = _group_advantages(config, closed, rewards)
  metrics['frac_reward_zero_std'] = (float(groups.zero_std_groups), float(max(groups.groups, 1)))
  in_loss = scored & groups.scored & finite & np.array([not row.masked for row in rows], bool)
  if config.mask_unmixed_groups:
    in_loss &= _mixed(config, rows)
  if config.mask_truncated:
    in_loss &= np.array([not row.truncated for row in rows], bool)
  if config.adv_estimator in ('grpo', 'rloo'):
    advantages, returns = groups.advantages, None
  else:
    masks = [mask & live for mask, live in zip(closed.tokens['loss_mask'], in_loss, strict=True)]
    advantages, returns = _token_advantages(config, closed, rewards, groups, masks, coefs.reward)
    if returns is not None:
      metrics |= _critic_metrics(closed.tokens['values'], returns, masks)
  constants = {'kl_coef': coefs.loss} if config.kl_loss_coef else {}
  return Annotation(
    advantages, in_loss, metrics, returns=returns, rewards=rewards, constants=constants, state=state
  )


def _finite_rows(closed: Closed) -> Bool[np.ndarray, 'rows']:
  """Returns, for each row, whether it belongs to a trajectory whose columns are finite at all
  positions that are read. Logs a warning for each row with non-finite values.

  Raises:
    RunError: no row is finite.
  """
  finite, line = np.ones(len(closed.rows), bool), ''
  for name in sorted(closed.tokens.keys() - {'loss_mask'}):
    for i, (row, values, mask) in enumerate(
      zip(closed.rows, closed.tokens[name], closed.tokens['loss_mask'], strict=True)
    ):
      # Only one entry of `next_values` is read: the value after the last token of a truncated row.
      read = (
        mask if name != 'next_values' else row.truncated & (np.arange(row.length) == row.length - 1)
      )
      bad = np.flatnonzero(read & ~np.isfinite(values))
      if len(bad) and finite[i]:
        finite[i] = False
        place = f'{name} of row {row.uid} is {values[bad[0]]} at token {bad[0]}'
        line = (
          f'batch {closed.step} of the stage: {place}, and not finite at {len(bad)} of the '
          f'{read.sum()} tokens read'
        )
        logging.warning('%s; the row is left out of the loss', line)
  for chain in _chains(closed.rows):
    finite[chain] = finite[chain].all()
  if line and not finite.any():
    raise RunError(
      f'{line}, and no row of the batch is finite; resume from an earlier commit, with a lower '
      'learning rate for the model that diverged'
    )
  return finite


def _token_advantages(
  config: PolicyGradientConfig,
  closed: Closed,
  rewards: Sequence[float | None],
  groups: GroupAdvantages,
  masks: Sequence[np.ndarray],
  coef: float,
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
  """Returns the whitened advantages of each row's tokens, and the critic's targets, which are None
  if the algorithm has no critic.
  """
  returns = None
  if config.adv_estimator == 'reinforce_plus_plus_baseline':
    advantages = [np.where(mask, a, 0.0) for mask, a in zip(masks, groups.advantages, strict=True)]
  else:
    dense = _token_rewards(config, closed, rewards, masks, coef)
    if config.adv_estimator == 'gae':
      values = [np.asarray(value, np.float64) for value in closed.tokens['values']]
      last_values = _last_values(config, closed)

      def gae(last: int, reward, value, mask):
        how = {'gamma': config.gamma, 'lam': config.lam, 'last_value': last_values[last]}
        return np.stack(by_token.masked_gae(reward, value, mask, **how))

      estimates = along_chains(_chains(closed.rows), gae, dense, values, masks)
      advantages, returns = [a for a, _ in estimates], [r for _, r in estimates]
    else:

      def discounted(_: int, reward, mask):
        return by_token.token_returns(reward, mask, gamma=config.gamma)

      advantages = along_chains(_chains(closed.rows), discounted, dense, masks)
  return by_token.whiten(advantages, masks), returns


def _last_values(config: PpoConfig, closed: Closed) -> list[float]:
  """Returns the value of each row's final state: the critic's value if the row is truncated and
  `bootstrap_truncated` is set, otherwise 0. Only the last row of each trajectory uses it.
  """
  if not config.bootstrap_truncated:
    return [0.0] * len(closed.rows)
  values = closed.tokens['next_values']
  return [
    float(value[-1]) if row.truncated else 0.0
    for row, value in zip(closed.rows, values, strict=True)
  ]


def shaped_rewards(config: ShapingOptions, setting: Setting, closed: Closed) -> list[float | None]:
  """Returns each row's reward plus the configured length terms. Unscorable rows keep the reward
  None.
  """
  rows = closed.rows
  extra = np.zeros(len(rows))
  lengths = [row.length - row.prompt_len for row in rows]
  if config.overlong_buffer_len:
    extra += overlong_penalty(
      lengths,
      max_length=setting.max_response_length,
      buffer=config.overlong_buffer_len,
      factor=config.overlong_penalty_factor,
    )
  weight = warmup_weight(
    closed.step, warmup_steps=config.length_reward_warmup_steps, weight=config.length_reward_weight
  )
  if weight:
    correct = [None if row.reward is None else row.correct for row in rows]
    extra += weight * length_rewards(lengths, correct, [row.group for row in rows])
  return [
    None if row.reward is None else row.reward + float(more)
    for row, more in zip(rows, extra, strict=True)
  ]


def _chains(rows: Sequence[Row]) -> list[list[int]]:
  """Returns the row numbers of each trajectory, in the order of its steps."""
  return chains(
    [row.group for row in rows],
    [row.trajectory or '' for row in rows],
    [row.step_index for row in rows],
  )


def totals(rows: Sequence[Row], rewards: Sequence[float | None]) -> list[float | None]:
  """Returns each row's total, which is its reward plus the rewards of its turns. Advantages per
  sample are estimated from these totals.
  """
  return [total_value(reward, row.turn_rewards) for row, reward in zip(rows, rewards, strict=True)]


def _group_advantages(
  config: PolicyGradientConfig, closed: Closed, rewards: Sequence[float | None]
) -> GroupAdvantages:
  if config.adv_estimator == 'rloo':
    estimate = leave_one_out
  else:
    by_std = config.norm_adv_by_std and config.adv_estimator == 'grpo'

    def estimate(r, g):
      return group_advantages(
        r, g, normalize_by_std=by_std, ddof=config.adv_ddof, eps=config.adv_eps
      )

  return _compared(config, closed.rows, rewards, estimate)


def _compared(
  config: PolicyGradientConfig,
  rows: Sequence[Row],
  rewards: Sequence[float | None],
  estimate: Estimate,
) -> GroupAdvantages:
  """Estimates the advantages of `rows` with `estimate`. Depending on `config.credit`, whole
  trajectories or their steps are compared.
  """
  how = {'credit': config.credit, 'gamma': config.step_gamma, 'weight': config.step_weight}
  return compared(rows, rewards, estimate, **how)


def compared(
  rows: Sequence[Row],
  rewards: Sequence[float | None],
  estimate: Estimate,
  **credit: Any,
) -> GroupAdvantages:
  """Applies `estimate` to the rewards of the rows, including turn rewards. If rows are steps of
  trajectories, `step_credit` decides which rows are compared.

  Args:
    credit: options of `step_credit`.
  """
  values, groups = totals(rows, rewards), [row.group for row in rows]
  if not any(row.trajectory for row in rows):
    return estimate(values, groups)
  return step_credit(
    values,
    groups,
    [row.trajectory or '' for row in rows],
    [row.step_index for row in rows],
    states=[row.prompt_digest for row in rows],
    advantages=estimate,
    **credit,
  )


def _mixed(config: PolicyGradientConfig, rows: Sequence[Row]) -> Bool[np.ndarray, 'rows']:
  """Returns, for each row, whether its baseline averages at least two different totals. These
  totals exclude length terms.
  """
  return _compared(config, rows, [row.reward for row in rows], unequal).advantages > 0


def _token_rewards(
  config, closed: Closed, rewards, masks, coef: float
) -> list[Float64[np.ndarray, '...']]:
  """Returns rewards per token. A row's reward is placed at its last trained token and each turn's
  reward at the turn's last token; KL penalties are added if `kl_reward_coef` is set.
  """
  dense = [
    by_token.place_rewards(mask, reward or 0.0, row.turn_rewards)
    for row, reward, mask in zip(closed.rows, rewards, masks, strict=True)
  ]
  if not config.kl_reward_coef:
    return dense
  reference = closed.tokens['reference_logprobs']
  return [
    r + by_token.kl_penalty(p, q, m, kind=config.kl_reward_type, coef=coef)
    for r, p, q, m in zip(dense, _proximal(config, closed), reference, masks, strict=True)
  ]


def _proximal(config: PolicyGradientConfig, closed: Closed) -> Sequence[np.ndarray]:
  return closed.tokens['behaviour_logprobs' if config.bypass_old_logprobs else 'proximal_logprobs']


class _KlCoefficients(NamedTuple):
  loss: float
  reward: float


def _kl(
  config: PolicyGradientConfig, closed: Closed, finite: Bool[np.ndarray, 'rows']
) -> tuple[_KlCoefficients, dict[str, tuple[float, float]], Any]:
  """Returns the current KL coefficients, the KL metrics and the state for the next batch. Only rows
  selected by `finite` are measured.
  """
  coefs, state = _KlCoefficients(config.kl_loss_coef, config.kl_reward_coef), None
  if not any(coefs):
    return coefs, {}, None
  measured = _measured_kl(config, closed, finite) if 'reference_logprobs' in closed.tokens else None
  if config.kl_target is not None:
    start = coefs.loss or coefs.reward  # `check` ensures that exactly one coefficient is set.
    coef = start if closed.state is None else float(closed.state['kl_coef'])
    coefs = _KlCoefficients(*(coef if given else 0.0 for given in coefs))
    control = AdaptiveKl(init_coef=start, target=config.kl_target, horizon=config.kl_horizon)
    total, count = measured
    state = {'kl_coef': adapted(coef, total / max(count, 1.0), len(closed.rows), control)}
  metrics = {'actor/kl_coef': (coefs.loss or coefs.reward, 1.0)}
  return coefs, metrics if measured is None else metrics | {'actor/kl_measured': measured}, state


def _measured_kl(
  config: PolicyGradientConfig, closed: Closed, finite: Bool[np.ndarray, 'rows']
) -> tuple[float, float]:
  """Returns the sum of log π_prox - log π_ref over the trained tokens of the rows selected by
  `finite`, and the number of these tokens.
  """
  total, count = 0.0, 0
  masks = [mask & live for mask, live in zip(closed.tokens['loss_mask'], finite, strict=True)]
  for p, q, mask in zip(
    _proximal(config, closed), closed.tokens['reference_logprobs'], masks, strict=True
  ):
    total += float((p[mask].astype(np.float64) - q[mask].astype(np.float64)).sum())
    count += int(mask.sum())
  return total, float(count)


def _critic_metrics(values, returns, masks) -> dict[str, tuple[float, float]]:
  """Returns metrics that compare the critic's values before the update with their targets."""
  v = np.concatenate([np.asarray(x, np.float64)[m] for x, m in zip(values, masks, strict=True)])
  r = np.concatenate([x[m] for x, m in zip(returns, masks, strict=True)])
  if not len(r):
    return {}
  explained = 1.0 - float(np.var(r - v) / np.var(r)) if r.max() > r.min() else 0.0
  count = float(len(r))
  return {
    'critic/vf_explained_var': (explained, 1.0),
    'critic/values/mean': (float(v.sum()), count),
    'critic/returns/mean': (float(r.sum()), count),
  }


def policy_terms(
  config: PolicyGradientConfig,
  setting: Setting,
  outputs: TokenLogprobs,
  chunks: Chunks,
  constants: Constants,
  mask: Bool[Array, 'chunks time'],
) -> tuple[Terms, Stats]:
  """Returns the policy, entropy and KL terms over the tokens in `mask`, and their statistics."""
  logprobs, segments = outputs.logprobs, chunks.segments
  proximal = chunks.behaviour_logprobs if config.bypass_old_logprobs else chunks.proximal_logprobs
  scale = config.loss_scale_factor or float(setting.max_response_length)

  def of(values, weight):
    return term(values, mask, chunks, config.loss_agg_mode, weight=weight, scale=scale)

  tokens = SurrogateTokens(
    logprobs, proximal, chunks.advantages, mask, chunks.segment_ids, segments
  )
  losses, metrics = surrogate_of(config)(tokens)
  stats = {
    'actor/entropy': masked_stat(outputs.entropy, mask),
    **{name: masked_stat(values.astype(jnp.float32), mask) for name, values in metrics.items()},
    'actor/ppo_kl': masked_stat(proximal - logprobs, mask),
  }
  weights, weight_stats = _weights(config, logprobs, proximal, chunks, mask, segments)
  stats |= weight_stats
  terms = {'actor/pg_loss': of(losses * weights, 1.0)}
  if config.entropy_coeff:
    terms['actor/entropy_loss'] = of(-outputs.entropy, config.entropy_coeff)
  if config.kl_loss_coef:
    reference = chunks.reference_logprobs
    stats['actor/kl'] = masked_stat(
      kl_estimate(logprobs, reference, kind=config.kl_loss_type, mask=mask), mask
    )
    if config.kl_loss_type != 'k1' and config.kl_unbiased_gradient:
      kl = unbiased_kl(logprobs, reference, proximal, mask, kind=config.kl_loss_type)
    else:
      kl = kl_estimate(logprobs, reference, kind=config.kl_loss_type, mask=mask)
    terms['actor/kl_loss'] = of(kl, constants['kl_coef'])
  return terms, stats


def _weights(
  config, logprobs, proximal, chunks: Chunks, mask, segments: int
) -> tuple[Array, Stats]:
  """Returns loss weights per token that correct for off-policy samples, and statistics of the
  weights. Tokens with weight 0 still count in the denominators of the loss.
  """
  behaviour, ids = chunks.behaviour_logprobs, chunks.segment_ids
  weights, stats = jnp.ones_like(logprobs), {}
  if config.rollout_is != 'none' and not config.bypass_old_logprobs:
    lower = (
      0.5
      if config.rollout_is == 'icepop' and config.rollout_is_lower is None
      else config.rollout_is_lower
    )
    weights = correction.importance_weights(
      proximal,
      behaviour,
      mask,
      ids,
      segments=segments,
      mode=config.rollout_is,
      threshold=config.rollout_is_threshold,
      lower=lower,
    )
    stats['rollout_corr/rollout_is_weight'] = masked_stat(weights, mask)
  if config.rollout_rs_low is not None:
    kept = correction.sequence_mask(
      proximal,
      behaviour,
      mask,
      ids,
      segments=segments,
      low=config.rollout_rs_low,
      high=config.rollout_rs_high,
    )
    stats['rollout_corr/rollout_rs_masked_fraction'] = masked_stat(1.0 - kept, mask)
    weights = weights * kept
  if config.off_policy_seq_mask is not None:
    kept = correction.negative_sequence_mask(
      behaviour,
      logprobs,
      chunks.advantages,
      mask,
      ids,
      segments=segments,
      threshold=config.off_policy_seq_mask,
    )
    stats['actor/off_policy_masked_fraction'] = masked_stat(1.0 - kept, mask)
    weights = weights * kept
  return weights, stats


def _critic_terms(config: PpoConfig, outputs: TokenValues, chunks: Chunks) -> tuple[Terms, Stats]:
  mask = chunks.loss_mask
  losses = value_loss(
    outputs.values, chunks.values, chunks.returns, cliprange_value=config.cliprange_value, mask=mask
  )
  terms = {'critic/vf_loss': term(losses.loss, mask, chunks, 'token-mean')}
  return terms, {
    'critic/vf_clipfrac': masked_stat(losses.clipped.astype(jnp.float32), mask),
    'critic/vpred_mean': masked_stat(outputs.values, mask),
  }
