"""Options of the policy-gradient family. Each algorithm of the family is a class with its own
defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxrl_llm.advantages.steps import Credit
from jaxrl_llm.config.own import named_pair
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.algorithm import ReferenceRule, Setting
from jaxrl_llm.learner.ranges import Range, check_ranges
from jaxrl_llm.objectives.divergence import Estimator, has_expected_gradient
from jaxrl_llm.objectives.surrogates import (
  SURROGATES,
  DualClipBounds,
  SapoOptions,
  SurrogateTokens,
  TokenLoss,
)
from jaxrl_llm.ops.reduce import Aggregation

AdvEstimator = Literal['grpo', 'rloo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline', 'gae']


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
  """Options of the algorithms' advantage estimation."""

  adv_estimator: AdvEstimator = 'grpo'
  norm_adv_by_std: bool = True
  """Whether advantages are divided by the standard deviation of the group's rewards. Only for
  adv_estimator grpo.
  """
  adv_ddof: int = 1
  adv_eps: float = 1e-6
  credit: Credit = 'trajectory'
  """Method of assigning advantages in trajectories of several steps (`rollout.max_steps`). Only for
  adv_estimator grpo, rloo and reinforce_plus_plus_baseline.

  'trajectory': all steps of a trajectory get the advantage of the trajectory's total reward.
  'step': each step gets the advantage of its return relative to the steps with the same index in
  the other trajectories of the group. 'gigpo': the trajectory's advantage, plus the advantage of
  the step's return relative to the steps of the group with the same prompt (GiGPO,
  arXiv:2505.10978).
  """
  step_gamma: float = 1.0
  """Discount per step in the return of a step. Only for credit 'step' and 'gigpo'."""
  step_weight: float = 1.0
  """Weight of the advantage of the step's return. Only for credit 'gigpo'."""
  mask_unmixed_groups: bool = False
  """Whether groups of one sample and groups with equal rewards are excluded from the loss and its
  denominators (DAPO's dynamic sampling).
  """
  mask_truncated: bool = False
  """Whether truncated samples are excluded from the loss (overlong filtering). Their rewards still
  count in the baseline.
  """
  gamma: float = 1.0
  """Discount per trained token. Only for adv_estimator gae and reinforce_plus_plus."""
  lam: float = 1.0
  """λ of generalized advantage estimation: the decay, per trained token, of the weights of later
  temporal-difference errors. Only for adv_estimator gae.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapingOptions:
  """Reward shaping before advantage estimation. The metric `critic/score` is the reward before
  shaping, and the metric `critic/rewards` is the reward after shaping.
  """

  overlong_buffer_len: int = 0
  """Number of tokens before max_response_length over which DAPO's length penalty grows. If 0, there
  is no penalty.
  """
  overlong_penalty_factor: float = 1.0
  """Size of DAPO's length penalty at max_response_length."""
  length_reward_weight: float = 0.0
  """Weight of Kimi k1.5's length reward, which compares the lengths of the responses within a
  group. If 0, there is no length reward.
  """
  length_reward_warmup_steps: int = 0
  """Number of batches at the beginning of the stage that are trained without the length reward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlOptions:
  """Penalties on the KL divergence from the reference policy. The reference is not loaded if both
  coefficients are 0.
  """

  kl_loss_coef: float = 0.0
  kl_loss_type: Estimator = 'k3'
  kl_unbiased_gradient: bool = True
  """Whether the KL estimate in the loss is multiplied by the importance ratio, so that the KL term
  has the gradient of the reverse KL. Only for kl_loss_type k2 and k3.
  """
  allow_zero_gradient_kl: bool = False
  """Whether kl_loss_type k1 is allowed although its expected gradient on-policy is zero."""
  kl_reward_coef: float = 0.0
  """Coefficient of the KL penalty in the rewards of tokens. Only adv_estimator reinforce_plus_plus
  and gae have rewards per token.
  """
  kl_reward_type: Estimator = 'k1'
  kl_target: float | None = None
  """Target of the mean KL per token. After each batch, the KL coefficient is adapted towards this
  target. If None, the coefficient is constant.
  """
  kl_horizon: float = 10_000.0
  """Horizon, in samples, over which the KL coefficient is adapted towards `kl_target`. The longer
  the horizon, the slower the coefficient changes.
  """
  reference: ReferenceRule = ReferenceRule()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectionOptions:
  """Correction for the difference between the trained policy and the policy that sampled the tokens
  (the sampler).
  """

  bypass_old_logprobs: bool = False
  """Whether the sampler's logprobs are used as the proximal logprobs. This saves a forward pass,
  but rollout_is then has no effect, and rollout_rs_low and rollout_rs_high are refused.
  """
  rollout_is: Literal['none', 'token', 'sequence', 'icepop'] = 'token'
  """Importance weights on the loss: probability ratios of the proximal policy to the sampler.

  'none': no weights. 'token' and 'sequence': weights per token or per sequence, truncated to the
  bounds. 'icepop': weights per token, which are 0 outside the bounds.
  """
  rollout_is_threshold: float = 2.0
  """Upper bound of the importance weights."""
  rollout_is_lower: float | None = None
  """Lower bound of the importance weights. If None, the bound is 0.5 for icepop and 0 otherwise."""
  rollout_rs_low: float | None = None
  """Lower bound of the geometric mean of a sequence's importance ratios. Sequences whose mean is
  outside the bounds are masked. If None, no sequence is masked.
  """
  rollout_rs_high: float | None = None
  off_policy_seq_mask: float | None = None
  """Limit of the mean of (sampler's logprob - current logprob) over a sequence. In sequences above
  this limit, tokens with a negative advantage are masked (DeepSeek-V3.2). If None, no token is
  masked.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(
  AdvantageOptions, ShapingOptions, KlOptions, CorrectionOptions, DualClipBounds
):
  """Base configuration of the policy-gradient family. The defaults are GRPO's."""

  policy_loss: str = 'clip'
  """Surrogate: a key of `SURROGATES`, or 'module:attribute' of a custom surrogate.

  'clip' is PPO's clipped ratio. 'gspo' clips the ratio of the whole sequence. 'cispo' weights
  log-likelihoods by clipped ratios. 'sapo' applies a soft gate to the ratio.
  """
  policy_loss_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Options of the surrogate that policy_loss names. They must be empty if that surrogate reads the
  algorithm's own options.
  """
  loss_agg_mode: Aggregation = 'token-mean'
  loss_scale_factor: float | None = None
  """Divisor in loss_agg_mode seq-mean-token-sum-norm. If None, the divisor is max_response_length.
  """
  entropy_coeff: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(PolicyGradientConfig):
  """Group-relative policy optimization (DeepSeekMath, arXiv:2402.03300), with options that later
  papers introduced.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGrpoConfig(PolicyGradientConfig):
  """Dr.GRPO (arXiv:2503.20783): advantages are not divided by the group's standard deviation, and
  losses are not divided by the response length.
  """

  norm_adv_by_std: bool = False
  loss_agg_mode: Aggregation = 'seq-mean-token-sum-norm'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DapoConfig(PolicyGradientConfig):
  """DAPO (arXiv:2503.14476): GRPO with a higher upper clip bound, token-mean aggregation and
  masking of unmixed groups. To add DAPO's length penalty, set overlong_buffer_len.
  """

  clip_ratio_high: float = 0.28
  mask_unmixed_groups: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class GspoConfig(PolicyGradientConfig):
  """GSPO (arXiv:2507.18071): sequence-level ratio with a narrow clip range."""

  policy_loss: str = 'gspo'
  clip_ratio_low: float = 3e-4
  clip_ratio_high: float = 4e-4
  clip_ratio_c: float | None = None
  loss_agg_mode: Aggregation = 'seq-mean-token-mean'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CispoConfig(PolicyGradientConfig):
  """CISPO (MiniMax-M1, arXiv:2506.13585). Clip ranges are distances from 1, so the default lower
  bound of the weights is 0, which has no effect.
  """

  policy_loss: str = 'cispo'
  clip_ratio_low: float = 1.0
  clip_ratio_high: float = 4.0
  clip_ratio_c: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SapoConfig(PolicyGradientConfig, SapoOptions):
  """SAPO (arXiv:2511.20347): a soft gate of the ratio in place of the clip."""

  policy_loss: str = 'sapo'
  loss_agg_mode: Aggregation = 'seq-mean-token-mean'


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlooConfig(PolicyGradientConfig):
  """RLOO (arXiv:2402.14740): the baseline is the mean reward of the other samples in the group, and
  losses are summed over each sequence.
  """

  adv_estimator: AdvEstimator = 'rloo'
  loss_agg_mode: Aggregation = 'seq-mean-token-sum'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusConfig(PolicyGradientConfig):
  """REINFORCE++ (arXiv:2501.03262): advantages are the returns of tokens, whitened over the batch.
  A KL penalty, if any, is usually part of the reward (kl_reward_coef).
  """

  adv_estimator: AdvEstimator = 'reinforce_plus_plus'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaselineConfig(PolicyGradientConfig):
  """REINFORCE++-baseline: subtracts the group's mean reward, then whitens advantages over the
  batch.
  """

  adv_estimator: AdvEstimator = 'reinforce_plus_plus_baseline'


@dataclasses.dataclass(frozen=True, kw_only=True)
class PpoConfig(PolicyGradientConfig):
  """PPO (arXiv:1707.06347) with a separate critic network. The stage's `critic` configures the
  network.
  """

  adv_estimator: AdvEstimator = 'gae'
  cliprange_value: float | None = 0.5
  """Clip range of the critic's values, as a distance from the values before the batch. If None,
  values are not clipped.
  """
  critic_warmup: int = 0
  """Number of batches at the beginning of the stage that train only the critic."""
  bootstrap_truncated: bool = False
  """Whether the return of a truncated answer ends with the critic's value at the cut. If False, the
  return ends with 0, as after an end token.
  """


_SHAPING_RANGES = {
  'overlong_penalty_factor': Range(0.0),
  'length_reward_weight': Range(0.0),
  'length_reward_warmup_steps': Range(0),
}
_RANGES = {
  # 0 selects the population standard deviation, and 1 the sample standard deviation. A ddof equal
  # to the group size would make every advantage 0.
  'adv_ddof': Range(0, 1),
  'adv_eps': Range(0.0),
  'step_gamma': Range(0.0, 1.0),
  'step_weight': Range(0.0),
  'gamma': Range(0.0, 1.0),
  'lam': Range(0.0, 1.0),
  'kl_loss_coef': Range(0.0),
  'kl_reward_coef': Range(0.0),
  'rollout_is_threshold': Range(0.0, exclusive=True, infinite=True),
  'rollout_is_lower': Range(0.0),
  'rollout_rs_low': Range(0.0),
  'rollout_rs_high': Range(0.0, exclusive=True, infinite=True),
  'off_policy_seq_mask': Range(0.0, infinite=True),
  'clip_ratio_low': Range(0.0, 1.0),
  'clip_ratio_high': Range(0.0, infinite=True),
  'clip_ratio_c': Range(1.0, exclusive=True),
  'loss_scale_factor': Range(0.0, exclusive=True),
  'entropy_coeff': Range(),
}
_CRITIC_RANGES = {'cliprange_value': Range(0.0, exclusive=True), 'critic_warmup': Range(0)}


def name_of(config: PolicyGradientConfig) -> str:
  """Returns the algorithm's name in configurations."""
  return re.sub('(?<!^)([A-Z])', r'_\1', type(config).__name__.removesuffix('Config')).lower()


def surrogate_of(config: PolicyGradientConfig) -> Callable[[SurrogateTokens], TokenLoss]:
  """Returns the surrogate that `policy_loss` names, bound to its options.

  The options are `config` itself if it inherits the surrogate's options class, otherwise
  `policy_loss_options`. Raises UserError for an unknown surrogate or wrong options.
  """
  kind, loss = named_pair(config.policy_loss, 'policy_loss', SURROGATES)
  where = f'{name_of(config)}.policy_loss_options'
  if not isinstance(config, kind):
    return functools.partial(loss, options=from_json(dict(config.policy_loss_options), kind, where))
  if config.policy_loss_options:
    raise UserError(
      f'{where}: {dict(config.policy_loss_options)}, wanted none: policy_loss '
      f'{config.policy_loss!r} takes the options of {name_of(config)}; set '
      f'{", ".join(field.name for field in dataclasses.fields(kind))} there'
    )
  return functools.partial(loss, options=config)


def check(config: PolicyGradientConfig, setting: Setting) -> None:
  """Raises UserError if an option is out of range, if options contradict one another, or if the KL
  term would have no expected gradient.
  """
  where = name_of(config)
  surrogate_of(config)
  check_shaping(config, setting, where)
  ranges = _RANGES | (_CRITIC_RANGES if isinstance(config, PpoConfig) else {})
  if config.policy_loss == 'cispo':  # The maximum weight, 1 + clip_ratio_high, may be below 1.
    ranges |= {'clip_ratio_high': Range(-1.0, exclusive=True, infinite=True)}
  check_ranges(config, where, ranges)
  least = config.rollout_is_lower
  if least is None:
    least = 0.5 if config.rollout_is == 'icepop' else 0.0
  if least >= config.rollout_is_threshold:
    raise UserError(
      f'{where}: no weight is between rollout_is_lower {least} and rollout_is_threshold '
      f'{config.rollout_is_threshold}'
    )
  if config.kl_target is not None and not (config.kl_target > 0 and config.kl_horizon > 0):
    raise UserError(
      f'{where}: kl_target {config.kl_target} and kl_horizon {config.kl_horizon}, wanted both '
      'above 0, and kl_horizon well above the number of samples in a batch'
    )
  if config.adv_estimator == 'gae' and not isinstance(config, PpoConfig):
    raise UserError(f"{where}: adv_estimator 'gae' needs a critic; use algorithm ppo")
  if config.adv_estimator != 'gae' and isinstance(config, PpoConfig):
    raise UserError(
      f'ppo: adv_estimator {config.adv_estimator!r} does not use its critic; use grpo or another'
    )
  zero = not has_expected_gradient(
    config.kl_loss_type, place='loss', unbiased=config.kl_unbiased_gradient
  )
  if config.kl_loss_coef and zero and not config.allow_zero_gradient_kl:
    raise UserError(
      f'{where}: kl_loss_type={config.kl_loss_type} in the loss has zero expected gradient '
      'on-policy; use k2 or k3, or set allow_zero_gradient_kl=true'
    )
  if config.kl_reward_coef and config.adv_estimator not in ('reinforce_plus_plus', 'gae'):
    raise UserError(
      f'{where}: kl_reward_coef needs rewards per token (reinforce_plus_plus or ppo); '
      f'adv_estimator {config.adv_estimator!r} has one per sample: use kl_loss_coef'
    )
  if config.kl_target is not None and bool(config.kl_loss_coef) == bool(config.kl_reward_coef):
    raise UserError(
      f'{where}: kl_target adapts one coefficient; set one of kl_loss_coef and kl_reward_coef'
    )
  if (config.rollout_rs_low is None) != (config.rollout_rs_high is None):
    raise UserError(
      f'{where}: rollout_rs_low and rollout_rs_high go together; set both, or neither'
    )
  if config.rollout_rs_low is not None and config.rollout_rs_low >= config.rollout_rs_high:
    raise UserError(
      f'{where}: no ratio is between rollout_rs_low {config.rollout_rs_low} and rollout_rs_high '
      f'{config.rollout_rs_high}'
    )
  if config.rollout_rs_low is not None and config.bypass_old_logprobs:
    raise UserError(
      f"{where}: with bypass_old_logprobs the proximal logprobs are the sampler's, so "
      'rollout_rs_low and rollout_rs_high would mask nothing; set either bypass_old_logprobs or '
      'these bounds'
    )


def check_shaping(config: ShapingOptions, setting: Setting, where: str) -> None:
  """Raises UserError if the overlong buffer is longer than the maximum response length, if an
  option is negative, or if lengths are rewarded or penalised although trajectories may have several
  sequences.
  """
  if not 0 <= config.overlong_buffer_len <= setting.max_response_length:
    raise UserError(
      f'{where}.overlong_buffer_len: {config.overlong_buffer_len}, wanted at most '
      f'max_response_length={setting.max_response_length} tokens, or 0 for no penalty'
    )
  check_ranges(config, where, _SHAPING_RANGES)
  if setting.max_steps > 1 and (config.overlong_buffer_len or config.length_reward_weight):
    raise UserError(
      f'{where}: overlong_buffer_len {config.overlong_buffer_len} and length_reward_weight '
      f'{config.length_reward_weight} depend on the length of a sequence, and '
      f'rollout.max_steps={setting.max_steps} permits trajectories of several; set both to 0'
    )
