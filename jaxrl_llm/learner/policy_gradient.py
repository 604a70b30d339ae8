"""The policy-gradient family: one loss of exchangeable parts.

GRPO, Dr.GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++ and PPO differ in how advantages are estimated, how the importance
ratio is bounded, how tokens are aggregated, and in whether there is a critic; nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float64

from jaxrl_llm.advantages import tokens as by_token
from jaxrl_llm.advantages.group import GroupAdvantages, group_advantages, leave_one_out, step_credit
from jaxrl_llm.advantages.shaping import (
  AdaptiveKl,
  adapted,
  length_rewards,
  overlong_penalty,
  warmup_weight,
)
from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.plan import Row
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
from jaxrl_llm.learner.policy_options import PolicyGradientConfig, PpoConfig, ShapingOptions, check
from jaxrl_llm.objectives import correction
from jaxrl_llm.objectives.divergence import kl_estimate, unbiased_kl
from jaxrl_llm.objectives.policy import (
  ClippedSurrogate,
  cispo,
  clipped_surrogate,
  sequence_log_ratio,
  token_log_ratio,
)
from jaxrl_llm.objectives.value import value_loss
from jaxrl_llm.ops.logprobs import TokenLogprobs, TokenValues
from jaxrl_llm.ops.reduce import masked_stat


def policy_gradient(config: PolicyGradientConfig, setting: Setting) -> Algorithm:
  """The algorithm that a configuration of the family describes."""
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
    on_host.add('values')

  def loss(outputs: TokenLogprobs, chunks: Chunks, constants: Constants) -> tuple[Terms, Stats]:
    return policy_terms(config, setting, outputs, chunks, constants, chunks.loss_mask)

  return Algorithm(
    annotate=lambda closed: annotate(config, setting, closed),
    loss=loss,
    reads=frozenset(reads),
    on_host=frozenset(on_host),
    constants=frozenset({'kl_coef'} if config.kl_loss_coef else ()),
    reference=config.reference,
    critic_loss=(lambda outputs, chunks, _: _critic_terms(config, outputs, chunks)) if critic else None,
    critic_warmup=config.critic_warmup if critic else 0,
  )


def annotate(config: PolicyGradientConfig, setting: Setting, closed: Closed) -> Annotation:
  """Shaped rewards, then advantages; unscorable rows leave the loss."""
  rows = closed.rows
  scored = np.array([row.reward is not None for row in rows], bool)
  rewards = shaped_rewards(config, setting, closed)
  metrics = {'num_unscorable': (float((~scored).sum()), 1.0)}
  coefs, kl_metrics, state = _kl(config, closed)
  metrics |= kl_metrics
  groups = _group_advantages(config, closed, rewards)
  metrics['frac_reward_zero_std'] = (float(groups.zero_std_groups), float(max(groups.groups, 1)))
  in_loss = scored & groups.scored & np.array([not row.masked for row in rows], bool)
  if config.mask_unmixed_groups:
    in_loss &= _mixed(rows)
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
  return Annotation(advantages, in_loss, metrics, returns=returns, rewards=rewards, constants=constants, state=state)


def _token_advantages(
  config: PolicyGradientConfig,
  closed: Closed,
  rewards: Sequence[float | None],
  groups: GroupAdvantages,
  masks: Sequence[np.ndarray],
  coef: float,
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
  """Whitened advantages per token of each row, and with a critic what it is to learn."""
  returns = None
  if config.adv_estimator == 'reinforce_plus_plus_baseline':
    advantages = [np.where(mask, a, 0.0) for mask, a in zip(masks, groups.advantages, strict=True)]
  else:
    dense = _token_rewards(config, closed, rewards, masks, coef)
    if config.adv_estimator == 'gae':
      values = [np.asarray(value, np.float64) for value in closed.tokens['values']]
      found = [
        by_token.masked_gae(reward, value, mask, gamma=config.gamma, lam=config.lam)
        for reward, value, mask in zip(dense, values, masks, strict=True)
      ]
      advantages, returns = [a for a, _ in found], [r for _, r in found]
    else:
      advantages = [by_token.token_returns(r, m, gamma=config.gamma) for r, m in zip(dense, masks, strict=True)]
  return by_token.whiten(advantages, masks), returns


def shaped_rewards(config: ShapingOptions, setting: Setting, closed: Closed) -> list[float | None]:
  """Rewards with the length terms; None stays None."""
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
  return [None if row.reward is None else row.reward + float(more) for row, more in zip(rows, extra, strict=True)]


def with_turns(rows: Sequence[Row], rewards: Sequence[float | None]) -> list[float | None]:
  """What a whole trajectory is worth where advantages are one per sample: its reward and those of its turns."""
  return [None if r is None else r + math.fsum(row.turn_rewards) for row, r in zip(rows, rewards, strict=True)]


def _group_advantages(config: PolicyGradientConfig, closed: Closed, rewards: Sequence[float | None]) -> GroupAdvantages:
  rows = closed.rows
  rewards, groups = with_turns(rows, rewards), [row.group for row in rows]
  if config.adv_estimator == 'rloo':
    estimate = leave_one_out
  else:
    by_std = config.norm_adv_by_std and config.adv_estimator == 'grpo'
    estimate = lambda r, g: group_advantages(r, g, normalize_by_std=by_std, ddof=config.adv_ddof, eps=config.adv_eps)
  if any(row.trajectory for row in rows):
    trajectories = [row.trajectory or row.uid for row in rows]
    steps = [row.step_index for row in rows]
    return step_credit(rewards, groups, trajectories, steps, credit=config.credit, advantages=estimate)
  return estimate(rewards, groups)


def _mixed(rows: Sequence[Row]) -> Bool[np.ndarray, 'rows']:
  """Rows of groups with two different scores, whatever lengths have made of them."""
  values: dict[str, set[float]] = {}
  for row in rows:
    if row.reward is not None:
      values.setdefault(row.group, set()).add(row.reward)
  return np.array([len(values.get(row.group, ())) > 1 for row in rows], bool)


def _token_rewards(config, closed: Closed, rewards, masks, coef: float) -> list[Float64[np.ndarray, '...']]:
  """Each row's reward at its last trained token, its turns' at theirs, and the KL penalty at each."""
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


def _kl(config: PolicyGradientConfig, closed: Closed) -> tuple[_KlCoefficients, dict[str, tuple[float, float]], Any]:
  """The KL coefficients in force, their metrics, and the state after this batch."""
  coefs, state = _KlCoefficients(config.kl_loss_coef, config.kl_reward_coef), None
  if not any(coefs):
    return coefs, {}, None
  measured = _measured_kl(config, closed) if 'reference_logprobs' in closed.tokens else None
  if config.kl_target is not None:
    start = coefs.loss or coefs.reward  # One of them, see `check`.
    coef = start if closed.state is None else float(closed.state['kl_coef'])
    coefs = _KlCoefficients(*(coef if given else 0.0 for given in coefs))
    control = AdaptiveKl(init_coef=start, target=config.kl_target, horizon=config.kl_horizon)
    total, count = measured
    state = {'kl_coef': adapted(coef, total / max(count, 1.0), len(closed.rows), control)}
  metrics = {'actor/kl_coef': (coefs.loss or coefs.reward, 1.0)}
  return coefs, metrics if measured is None else metrics | {'actor/kl_measured': measured}, state


def _measured_kl(config: PolicyGradientConfig, closed: Closed) -> tuple[float, float]:
  """Sum over the trained tokens of log π_prox - log π_ref, and their number."""
  total, count = 0.0, 0
  tokens = zip(_proximal(config, closed), closed.tokens['reference_logprobs'], closed.tokens['loss_mask'], strict=True)
  for p, q, mask in tokens:
    total += float((p[mask].astype(np.float64) - q[mask].astype(np.float64)).sum())
    count += int(mask.sum())
  return total, float(count)


def _critic_metrics(values, returns, masks) -> dict[str, tuple[float, float]]:
  """Of the values before the batch, against what they are to learn."""
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
  """Policy, entropy and KL terms of the tokens in `mask`."""
  logprobs, segments = outputs.logprobs, chunks.temperature.shape[-1]
  proximal = chunks.behaviour_logprobs if config.bypass_old_logprobs else chunks.proximal_logprobs
  scale = config.loss_scale_factor or float(setting.max_response_length)
  of = lambda values, weight: term(values, mask, chunks, config.loss_agg_mode, weight=weight, scale=scale)
  surrogate = _surrogate(config, logprobs, proximal, chunks, mask)
  stats = {
    'actor/entropy': masked_stat(outputs.entropy, mask),
    'actor/pg_clipfrac': masked_stat(surrogate.clipped.astype(jnp.float32), mask),
    'actor/pg_clipfrac_lower': masked_stat(surrogate.clipped_lower.astype(jnp.float32), mask),
    'actor/ppo_kl': masked_stat(proximal - logprobs, mask),
  }
  weights, found = _weights(config, logprobs, proximal, chunks, mask, segments)
  stats |= found
  terms = {'actor/pg_loss': of(surrogate.loss * weights, 1.0)}
  if config.entropy_coeff:
    terms['actor/entropy_loss'] = of(-outputs.entropy, config.entropy_coeff)
  if config.kl_loss_coef:
    reference = chunks.reference_logprobs
    stats['actor/kl'] = masked_stat(kl_estimate(logprobs, reference, kind=config.kl_loss_type, mask=mask), mask)
    if config.kl_loss_type != 'k1' and config.kl_unbiased_gradient:
      kl = unbiased_kl(logprobs, reference, proximal, mask, kind=config.kl_loss_type)
    else:
      kl = kl_estimate(logprobs, reference, kind=config.kl_loss_type, mask=mask)
    terms['actor/kl_loss'] = of(kl, constants['kl_coef'])
  return terms, stats


def _surrogate(config, logprobs, proximal, chunks: Chunks, mask) -> ClippedSurrogate:
  clip = dict(clip_ratio_low=config.clip_ratio_low, clip_ratio_high=config.clip_ratio_high)
  if config.policy_loss == 'cispo':
    return cispo(token_log_ratio(logprobs, proximal, mask), logprobs, chunks.advantages, **clip)
  if config.policy_loss == 'gspo':
    segments = chunks.temperature.shape[-1]
    ratio = sequence_log_ratio(logprobs, proximal, mask, chunks.segment_ids, segments=segments)
  else:
    ratio = token_log_ratio(logprobs, proximal, mask)
  return clipped_surrogate(ratio, chunks.advantages, clip_ratio_c=config.clip_ratio_c, **clip)


def _weights(config, logprobs, proximal, chunks: Chunks, mask, segments: int) -> tuple[Array, Stats]:
  """What each token's loss is multiplied with against off-policy samples; denominators keep all tokens."""
  behaviour, ids = chunks.behaviour_logprobs, chunks.segment_ids
  weights, stats = jnp.ones_like(logprobs), {}
  if config.rollout_is != 'none' and not config.bypass_old_logprobs:
    lower = 0.5 if config.rollout_is == 'icepop' and config.rollout_is_lower is None else config.rollout_is_lower
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
      proximal, behaviour, mask, ids, segments=segments, low=config.rollout_rs_low, high=config.rollout_rs_high
    )
    stats['rollout_corr/rollout_rs_masked_fraction'] = masked_stat(1.0 - kept, mask)
    weights = weights * kept
  if config.off_policy_seq_mask is not None:
    kept = correction.negative_sequence_mask(
      behaviour, logprobs, chunks.advantages, mask, ids, segments=segments, threshold=config.off_policy_seq_mask
    )
    stats['actor/off_policy_masked_fraction'] = masked_stat(1.0 - kept, mask)
    weights = weights * kept
  return weights, stats


def _critic_terms(config: PpoConfig, outputs: TokenValues, chunks: Chunks) -> tuple[Terms, Stats]:
  mask = chunks.loss_mask
  found = value_loss(outputs.values, chunks.values, chunks.returns, cliprange_value=config.cliprange_value, mask=mask)
  terms = {'critic/vf_loss': term(found.loss, mask, chunks, 'token-mean')}
  return terms, {
    'critic/vf_clipfrac': masked_stat(found.clipped.astype(jnp.float32), mask),
    'critic/vpred_mean': masked_stat(outputs.values, mask),
  }
