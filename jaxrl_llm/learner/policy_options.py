"""The options of the policy-gradient family, and its named algorithms as sets of defaults."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.algorithm import ReferenceRule, Setting
from jaxrl_llm.learner.ranges import Range, check_ranges
from jaxrl_llm.objectives.divergence import Estimator, has_expected_gradient
from jaxrl_llm.ops.reduce import Aggregation

AdvEstimator = Literal['grpo', 'rloo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline', 'gae']
PolicyLoss = Literal['clip', 'gspo', 'cispo']


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
  """How rewards become advantages."""

  adv_estimator: AdvEstimator = 'grpo'
  norm_adv_by_std: bool = True
  """grpo: divide by the group's standard deviation."""
  adv_ddof: int = 1
  adv_eps: float = 1e-6
  credit: Literal['trajectory', 'step'] = 'trajectory'
  """Of trajectories recorded step by step (grpo, rloo): one advantage for all steps, or a baseline for each step."""
  mask_unmixed_groups: bool = False
  """Groups of one and groups of equal rewards leave the loss, and so its denominators (DAPO's dynamic sampling)."""
  mask_truncated: bool = False
  """Samples cut by the length limit leave the loss; their rewards stay in the baseline (overlong filtering)."""
  gamma: float = 1.0
  """gae, reinforce_plus_plus: discount per trained token."""
  lam: float = 1.0
  """gae."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapingOptions:
  """What is added to rewards before advantages are estimated; `critic/score` is before, `critic/rewards` after."""

  overlong_buffer_len: int = 0
  """DAPO: responses longer than max_response_length minus this are penalised; 0 = off. Tokens of the response."""
  overlong_penalty_factor: float = 1.0
  """DAPO: the penalty at full length."""
  length_reward_weight: float = 0.0
  """Kimi k1.5's length reward, relative to the group; 0 = off."""
  length_reward_warmup_steps: int = 0
  """Batches before it counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlOptions:
  """Divergence from the reference, which is not loaded where both coefficients are 0."""

  kl_loss_coef: float = 0.0
  kl_loss_type: Estimator = 'k3'
  kl_unbiased_gradient: bool = True
  """k2 and k3 in the loss: multiplied with the importance ratio, which gives the gradient of the reverse KL."""
  allow_zero_gradient_kl: bool = False
  """k1 in the loss has zero expected gradient on-policy: refused unless this is set."""
  kl_reward_coef: float = 0.0
  """Penalty on each token's reward; needs token rewards (reinforce_plus_plus, gae)."""
  kl_reward_type: Estimator = 'k1'
  kl_target: float | None = None
  """The coefficient (of the loss, or of the reward) is adapted to keep the mean KL per token here; None = fixed."""
  kl_horizon: float = 10_000.0
  """Samples over which the adaption acts."""
  reference: ReferenceRule = ReferenceRule()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectionOptions:
  """What is done about the difference between the policy that trains and the one that sampled."""

  bypass_old_logprobs: bool = False
  """The sampler's logprobs are the proximal ones: one pass less, and no correction."""
  rollout_is: Literal['none', 'token', 'sequence', 'icepop'] = 'token'
  """Importance weights of the proximal policy against the sampler's, truncated; 'icepop' drops what it would cut."""
  rollout_is_threshold: float = 2.0
  """Largest weight."""
  rollout_is_lower: float | None = None
  """Least weight; None = 0 ('icepop': 0.5)."""
  rollout_rs_low: float | None = None
  """Sequences whose mean ratio (geometric) is outside [low, high] are masked; None = none are."""
  rollout_rs_high: float | None = None
  off_policy_seq_mask: float | None = None
  """Sequences with negative advantage and mean(sampler's - current logprob) above this are masked (DeepSeek-V3.2)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(AdvantageOptions, ShapingOptions, KlOptions, CorrectionOptions):
  """The field's names, the project's defaults, which are GRPO's."""

  policy_loss: PolicyLoss = 'clip'
  """clip: PPO's; gspo: the same on the sequence's ratio; cispo: clipped weights on log-likelihoods."""
  clip_ratio_low: float = 0.2
  clip_ratio_high: float = 0.2
  clip_ratio_c: float | None = 3.0
  """Dual clip; None = off."""
  loss_agg_mode: Aggregation = 'token-mean'
  loss_scale_factor: float | None = None
  """Divisor of seq-mean-token-sum-norm; None = max_response_length."""
  entropy_coeff: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoConfig(PolicyGradientConfig):
  """Group-relative policy optimization (DeepSeekMath, arXiv:2402.03300) with the field's later options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGrpoConfig(PolicyGradientConfig):
  """Dr.GRPO (arXiv:2503.20783): neither the group's deviation nor a response's own length in a denominator."""

  norm_adv_by_std: bool = False
  loss_agg_mode: Aggregation = 'seq-mean-token-sum-norm'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DapoConfig(PolicyGradientConfig):
  """DAPO (arXiv:2503.14476): clip-higher, token mean, no unmixed groups; overlong_buffer_len gives its penalty."""

  clip_ratio_high: float = 0.28
  mask_unmixed_groups: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class GspoConfig(PolicyGradientConfig):
  """GSPO (arXiv:2507.18071): the ratio of whole sequences, and its narrow range."""

  policy_loss: PolicyLoss = 'gspo'
  clip_ratio_low: float = 3e-4
  clip_ratio_high: float = 4e-4
  clip_ratio_c: float | None = None
  loss_agg_mode: Aggregation = 'seq-mean-token-mean'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CispoConfig(PolicyGradientConfig):
  """CISPO (MiniMax-M1, arXiv:2506.13585): ranges are distances from 1; no lower bound in effect."""

  policy_loss: PolicyLoss = 'cispo'
  clip_ratio_low: float = 1.0
  clip_ratio_high: float = 4.0
  clip_ratio_c: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlooConfig(PolicyGradientConfig):
  """RLOO (arXiv:2402.14740): the other samples' mean as baseline, whole sequences."""

  adv_estimator: AdvEstimator = 'rloo'
  loss_agg_mode: Aggregation = 'seq-mean-token-sum'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusConfig(PolicyGradientConfig):
  """REINFORCE++ (arXiv:2501.03262): token returns, whitened over the batch; KL, if any, in the reward."""

  adv_estimator: AdvEstimator = 'reinforce_plus_plus'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaselineConfig(PolicyGradientConfig):
  """REINFORCE++-baseline: the group's mean first, then whitening over the batch."""

  adv_estimator: AdvEstimator = 'reinforce_plus_plus_baseline'


@dataclasses.dataclass(frozen=True, kw_only=True)
class PpoConfig(PolicyGradientConfig):
  """PPO (arXiv:1707.06347) with a critic: a network of its own, see the stage's `critic`."""

  adv_estimator: AdvEstimator = 'gae'
  cliprange_value: float | None = 0.5
  """Values move at most so far from what they were at the batch's close; None = freely."""
  critic_warmup: int = 0
  """Batches at the beginning that train the critic alone."""
  bootstrap_truncated: bool = False
  """After an answer cut by the length limit comes the critic's value of where it was cut; False: 0, as after an end."""


_SHAPING_RANGES = {
  'overlong_penalty_factor': Range(0.0),
  'length_reward_weight': Range(0.0),
  'length_reward_warmup_steps': Range(0),
}
_RANGES = {
  # The population's deviation or the sample's. With the group size, every advantage would be 0.
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
  """The algorithm's name in a configuration."""
  return re.sub('(?<!^)([A-Z])', r'_\1', type(config).__name__.removesuffix('Config')).lower()


def check(config: PolicyGradientConfig, setting: Setting) -> None:
  """Raises UserError for options that contradict each other, or do something else than they seem to."""
  where = name_of(config)
  check_shaping(config, setting, where)
  ranges = _RANGES | (_CRITIC_RANGES if isinstance(config, PpoConfig) else {})
  if config.policy_loss == 'cispo':  # The cap of a weight, 1 + clip_ratio_high, may be below 1.
    ranges |= {'clip_ratio_high': Range(-1.0, exclusive=True, infinite=True)}
  check_ranges(config, where, ranges)
  least = config.rollout_is_lower
  if least is None:
    least = 0.5 if config.rollout_is == 'icepop' else 0.0
  if least >= config.rollout_is_threshold:
    raise UserError(
      f'{where}: no weight is between rollout_is_lower {least} and rollout_is_threshold {config.rollout_is_threshold}'
    )
  if config.kl_target is not None and not (config.kl_target > 0 and config.kl_horizon > 0):
    raise UserError(
      f'{where}: kl_target {config.kl_target} and kl_horizon {config.kl_horizon}, wanted both above 0; kl_horizon well '
      'above the samples of a batch'
    )
  if config.adv_estimator == 'gae' and not isinstance(config, PpoConfig):
    raise UserError(f"{where}: adv_estimator 'gae' needs a critic; use algorithm ppo")
  if config.adv_estimator != 'gae' and isinstance(config, PpoConfig):
    raise UserError(f'ppo: adv_estimator {config.adv_estimator!r} makes no use of its critic; use grpo or another')
  zero = not has_expected_gradient(config.kl_loss_type, place='loss', unbiased=config.kl_unbiased_gradient)
  if config.kl_loss_coef and zero and not config.allow_zero_gradient_kl:
    raise UserError(
      f'{where}: kl_loss_type={config.kl_loss_type} in the loss has zero expected gradient on-policy; use k2 or k3, '
      'or set allow_zero_gradient_kl=true'
    )
  if config.kl_reward_coef and config.adv_estimator not in ('reinforce_plus_plus', 'gae'):
    raise UserError(
      f'{where}: kl_reward_coef needs rewards per token (reinforce_plus_plus or ppo); adv_estimator '
      f'{config.adv_estimator!r} has one per sample: use kl_loss_coef'
    )
  if config.kl_target is not None and bool(config.kl_loss_coef) == bool(config.kl_reward_coef):
    raise UserError(f'{where}: kl_target adapts one coefficient; set kl_loss_coef or kl_reward_coef, one of them')
  if (config.rollout_rs_low is None) != (config.rollout_rs_high is None):
    raise UserError(f'{where}: rollout_rs_low and rollout_rs_high are set together, or neither')
  if config.rollout_rs_low is not None and config.rollout_rs_low >= config.rollout_rs_high:
    raise UserError(
      f'{where}: no ratio is between rollout_rs_low {config.rollout_rs_low} and rollout_rs_high '
      f'{config.rollout_rs_high}'
    )
  if config.rollout_rs_low is not None and config.bypass_old_logprobs:
    raise UserError(
      f"{where}: with bypass_old_logprobs the proximal logprobs are the sampler's, so rollout_rs_low and _high mask "
      'nothing; set one of them'
    )


def check_shaping(config: ShapingOptions, setting: Setting, where: str) -> None:
  """Raises UserError for length terms that no response could meet, and for penalties that would reward."""
  if not 0 <= config.overlong_buffer_len <= setting.max_response_length:
    raise UserError(
      f'{where}.overlong_buffer_len: {config.overlong_buffer_len} of max_response_length={setting.max_response_length} '
      'tokens; wanted a part of it, or 0 for none'
    )
  check_ranges(config, where, _SHAPING_RANGES)
