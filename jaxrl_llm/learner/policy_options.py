"""Options of the policy-gradient family, and its named algorithms as sets of defaults."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

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
  """Options of advantage estimation."""

  adv_estimator: AdvEstimator = 'grpo'
  norm_adv_by_std: bool = True
  """grpo: whether to divide by the group's standard deviation."""
  adv_ddof: int = 1
  adv_eps: float = 1e-6
  credit: Literal['trajectory', 'step'] = 'trajectory'
  """grpo, rloo, reinforce_plus_plus_baseline: credit for trajectories recorded step by step.

  trajectory: one advantage for all steps of a trajectory; step: a separate baseline for each step
  index.
  """
  mask_unmixed_groups: bool = False
  """Excludes single-sample and equal-reward groups from the loss and its denominators (DAPO's
  dynamic sampling).
  """
  mask_truncated: bool = False
  """Excludes truncated samples from the loss; rewards stay in the baseline (overlong filtering)."""
  gamma: float = 1.0
  """gae, reinforce_plus_plus: discount per trained token."""
  lam: float = 1.0
  """gae: λ, the decay per trained token of the weights of later errors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapingOptions:
  """Reward shaping before advantage estimation. The metric `critic/score` is the reward before
  shaping, `critic/rewards` the reward after it.
  """

  overlong_buffer_len: int = 0
  """DAPO: responses are penalised from this many tokens before max_response_length on; 0: off."""
  overlong_penalty_factor: float = 1.0
  """DAPO: size of the penalty at max_response_length."""
  length_reward_weight: float = 0.0
  """Weight of Kimi k1.5's length reward, which compares the lengths within a group; 0: off."""
  length_reward_warmup_steps: int = 0
  """Number of initial batches without the length reward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlOptions:
  """KL divergence from the reference policy, which is not loaded if both coefficients are 0."""

  kl_loss_coef: float = 0.0
  kl_loss_type: Estimator = 'k3'
  kl_unbiased_gradient: bool = True
  """k2 and k3 in the loss: multiplies the estimate by the importance ratio, so that the KL term has
  the reverse KL's gradient.
  """
  allow_zero_gradient_kl: bool = False
  """Allows k1 in the loss, which has zero expected gradient on-policy."""
  kl_reward_coef: float = 0.0
  """Coefficient of the KL penalty in token rewards, which only reinforce_plus_plus and gae have."""
  kl_reward_type: Estimator = 'k1'
  kl_target: float | None = None
  """Target of the mean KL per token, to which the coefficient is adapted; None: no adaptation."""
  kl_horizon: float = 10_000.0
  """Horizon of the adaptation, in samples."""
  reference: ReferenceRule = ReferenceRule()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectionOptions:
  """Off-policy correction between the trained policy and the one that sampled."""

  bypass_old_logprobs: bool = False
  """Uses the sampler's logprobs as the proximal ones, which saves a pass but rules out rollout_is
  and rollout_rs.
  """
  rollout_is: Literal['none', 'token', 'sequence', 'icepop'] = 'token'
  """Importance weights of the proximal policy against the sampler.

  none: no weights; token, sequence: weights per token or per sequence, truncated to the bounds;
  icepop: weights per token, 0 outside the bounds.
  """
  rollout_is_threshold: float = 2.0
  """Upper bound of the importance weights."""
  rollout_is_lower: float | None = None
  """Lower bound of the importance weights; None: 0, or 0.5 for icepop."""
  rollout_rs_low: float | None = None
  """Lower bound of a sequence's geometric mean ratio; sequences outside the bounds are masked.
  None: no masking.
  """
  rollout_rs_high: float | None = None
  off_policy_seq_mask: float | None = None
  """Masks tokens with a negative advantage if the mean of (sampler's logprob - current logprob)
  over their sequence exceeds this (DeepSeek-V3.2); None: no masking.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(
  AdvantageOptions, ShapingOptions, KlOptions, CorrectionOptions, DualClipBounds
):
  """Base configuration of the family; the defaults are GRPO's."""

  policy_loss: str = 'clip'
  """Surrogate: a key of `SURROGATES`, or your own as 'module:attribute'.

  clip: PPO's clipped ratio; gspo: the same on the sequence ratio; cispo: clipped weights on
  log-likelihoods; sapo: a soft gate of the ratio.
  """
  policy_loss_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Options of the surrogate in policy_loss; empty if it reads the algorithm's own options."""
  loss_agg_mode: Aggregation = 'token-mean'
  loss_scale_factor: float | None = None
  """Divisor of seq-mean-token-sum-norm; None: max_response_length."""
  entropy_coeff: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(PolicyGradientConfig):
  """Group-relative policy optimization (DeepSeekMath, arXiv:2402.03300), with later options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGrpoConfig(PolicyGradientConfig):
  """Dr.GRPO (arXiv:2503.20783): divides by neither the group's deviation nor response length."""

  norm_adv_by_std: bool = False
  loss_agg_mode: Aggregation = 'seq-mean-token-sum-norm'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DapoConfig(PolicyGradientConfig):
  """DAPO (arXiv:2503.14476): clip-higher, token mean, no unmixed groups; set overlong_buffer_len to
  add its penalty.
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
  """CISPO (MiniMax-M1, arXiv:2506.13585): clip ranges are distances from 1; the default lower bound
  has no effect.
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
  """RLOO (arXiv:2402.14740): leave-one-out mean as baseline, whole sequences."""

  adv_estimator: AdvEstimator = 'rloo'
  loss_agg_mode: Aggregation = 'seq-mean-token-sum'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusConfig(PolicyGradientConfig):
  """REINFORCE++ (arXiv:2501.03262): batch-whitened token returns; KL, if any, in the reward."""

  adv_estimator: AdvEstimator = 'reinforce_plus_plus'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaselineConfig(PolicyGradientConfig):
  """REINFORCE++-baseline: group mean as baseline, then whitening over the batch."""

  adv_estimator: AdvEstimator = 'reinforce_plus_plus_baseline'


@dataclasses.dataclass(frozen=True, kw_only=True)
class PpoConfig(PolicyGradientConfig):
  """PPO (arXiv:1707.06347) with a separate critic network, see the stage's `critic`."""

  adv_estimator: AdvEstimator = 'gae'
  cliprange_value: float | None = 0.5
  """Clip range of values, as a distance from the values before the batch; None: no clipping."""
  critic_warmup: int = 0
  """Number of initial batches that train only the critic."""
  bootstrap_truncated: bool = False
  """Whether the return of a truncated answer ends with the critic's value at the cut. False: it
  ends with 0, as after an end token.
  """


_SHAPING_RANGES = {
  'overlong_penalty_factor': Range(0.0),
  'length_reward_weight': Range(0.0),
  'length_reward_warmup_steps': Range(0),
}
_RANGES = {
  # 0: population standard deviation; 1: sample standard deviation. A ddof of the group size would
  # make every advantage 0.
  'adv_ddof': Range(0, 1),
  'adv_eps': Range(0.0),
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
  """Raises UserError for contradictory or misleading options."""
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
      'above 0; kl_horizon well above the samples of a batch'
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
      'rollout_rs_low and _high mask '
      'nothing; set one of them'
    )


def check_shaping(config: ShapingOptions, setting: Setting, where: str) -> None:
  """Raises UserError for an overlong buffer longer than the response, or for negative penalties."""
  if not 0 <= config.overlong_buffer_len <= setting.max_response_length:
    raise UserError(
      f'{where}.overlong_buffer_len: {config.overlong_buffer_len} of '
      f'max_response_length={setting.max_response_length} tokens; wanted fewer, or 0 for none'
    )
  check_ranges(config, where, _SHAPING_RANGES)
