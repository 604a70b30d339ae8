"""Detects options that are set but have no effect because of other options or of the algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.config.own import named_pair
from jaxrl_llm.objectives.surrogates import SURROGATES


class Need(NamedTuple):
  """Condition under which an option has an effect."""

  met: Callable[[Any], bool]
  """Function that returns whether the given options satisfy the condition."""
  text: str
  """The condition in words. It completes the message '… has no effect without <text>'."""


def without_effect(options: Any, where: str, needs: Mapping[str, Need]) -> tuple[str, ...]:
  """Returns a message for each option that differs from its default although its condition in
  `needs` is not met.

  Args:
    options: an instance of a dataclass. All its fields have defaults, and the keys of `needs` are
      names of its fields.
    where: dotted path of the options in a configuration, for the messages.
    needs: conditions, keyed by option name.
  """
  default = type(options)()
  changed = [name for name in needs if getattr(options, name) != getattr(default, name)]
  return tuple(
    f'{where}.{name}: {_shown(getattr(options, name))} has no effect without {needs[name].text}'
    for name in changed
    if not needs[name].met(options)
  )


def _shown(value: Any) -> str:
  """Formats a value in one line. For a dataclass, only the fields that differ from their defaults
  are included.
  """
  if not dataclasses.is_dataclass(value):
    return repr(value)
  names = [
    field.name for field in dataclasses.fields(value) if getattr(value, field.name) != field.default
  ]
  return ', '.join(f'{name}={getattr(value, name)!r}' for name in names)


def surrogate_needs(options: Any) -> dict[str, Need]:
  """Returns the needs of the options that only surrogates read: each option has an effect only if
  `policy_loss` names a surrogate that reads the option.
  """

  def fields(kind):
    return kind.__dataclass_fields__.keys() if isinstance(options, kind) else frozenset()

  chosen = fields(named_pair(options.policy_loss, 'policy_loss', SURROGATES)[0])
  readers: dict[str, list[str]] = {}
  for surrogate, (kind, _) in SURROGATES.items():
    for name in fields(kind):
      readers.setdefault(name, []).append(surrogate)
  return {
    name: Need(lambda _, name=name: name in chosen, f'policy_loss {" or ".join(surrogates)}')
    for name, surrogates in readers.items()
  }


def _estimator(*names: str) -> Need:
  return Need(lambda options: options.adv_estimator in names, f'adv_estimator {" or ".join(names)}')


def _deviation(options: Any) -> bool:
  return options.adv_estimator == 'grpo' and options.norm_adv_by_std


def _corrects(options: Any) -> bool:
  return not options.bypass_old_logprobs and options.rollout_is != 'none'


SHAPING = {
  'overlong_penalty_factor': Need(
    lambda options: options.overlong_buffer_len > 0, 'overlong_buffer_len'
  ),
  'length_reward_warmup_steps': Need(
    lambda options: options.length_reward_weight > 0, 'length_reward_weight'
  ),
}
POLICY_GRADIENT = {
  'norm_adv_by_std': _estimator('grpo'),
  'adv_ddof': Need(_deviation, 'adv_estimator grpo and norm_adv_by_std'),
  'adv_eps': Need(_deviation, 'adv_estimator grpo and norm_adv_by_std'),
  'credit': _estimator('grpo', 'rloo', 'reinforce_plus_plus_baseline'),
  'step_gamma': Need(lambda options: options.credit != 'trajectory', 'credit step or gigpo'),
  'step_weight': Need(lambda options: options.credit == 'gigpo', 'credit gigpo'),
  'gamma': _estimator('reinforce_plus_plus', 'gae'),
  'lam': _estimator('gae'),
  **SHAPING,
  'kl_loss_type': Need(lambda options: options.kl_loss_coef > 0, 'kl_loss_coef'),
  'kl_unbiased_gradient': Need(
    lambda options: options.kl_loss_coef > 0 and options.kl_loss_type != 'k1',
    'kl_loss_coef and kl_loss_type k2 or k3',
  ),
  'allow_zero_gradient_kl': Need(
    lambda options: options.kl_loss_coef > 0 and options.kl_loss_type == 'k1',
    'kl_loss_coef and kl_loss_type k1',
  ),
  'kl_reward_type': Need(lambda options: options.kl_reward_coef > 0, 'kl_reward_coef'),
  'kl_horizon': Need(lambda options: options.kl_target is not None, 'kl_target'),
  'reference': Need(
    lambda options: options.kl_loss_coef > 0 or options.kl_reward_coef > 0,
    'kl_loss_coef or kl_reward_coef',
  ),
  'rollout_is': Need(
    lambda options: options.rollout_is == 'none' or not options.bypass_old_logprobs,
    'bypass_old_logprobs=false',
  ),
  'rollout_is_threshold': Need(_corrects, 'bypass_old_logprobs=false and a rollout_is'),
  'rollout_is_lower': Need(_corrects, 'bypass_old_logprobs=false and a rollout_is'),
  'loss_scale_factor': Need(
    lambda options: options.loss_agg_mode == 'seq-mean-token-sum-norm',
    'loss_agg_mode seq-mean-token-sum-norm',
  ),
}
PPO = POLICY_GRADIENT | {
  'bootstrap_truncated': Need(lambda options: not options.mask_truncated, 'mask_truncated=false')
}
MU = {
  'peak': Need(lambda schedule: schedule.kind != 'constant', 'kind linear or chord'),
  'valley': Need(lambda schedule: schedule.kind != 'constant', 'kind linear or chord'),
  'decay_steps': Need(lambda schedule: schedule.kind != 'constant', 'kind linear or chord'),
  'warmup_steps': Need(lambda schedule: schedule.kind == 'chord', 'kind chord'),
}
MIX = POLICY_GRADIENT | {
  'loss_scale_factor': Need(
    lambda options: (
      'seq-mean-token-sum-norm' in (options.loss_agg_mode, options.expert_loss_agg_mode)
    ),
    'loss_agg_mode or expert_loss_agg_mode seq-mean-token-sum-norm',
  )
}
