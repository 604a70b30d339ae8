"""The quickstart with asynchronous rollouts: GRPO one step off-policy, or at a staleness bound of
2, 4 or 8 updates.

The variant is the bound, optionally followed by a plus sign and the loss: 'decoupled' (the default:
the proximal policy is the policy before the update, and importance weights correct for the sampler)
or 'naive' (PPO's ratio is taken with respect to the sampler, as if its weights were current).

Papers:    AReaL, arXiv:2505.24298, for the bound; arXiv:2110.00641 for the decoupled loss.
Command:   python launch/train.py --config=configs/asynchronous.py:bound_4
           python launch/train.py --config=configs/asynchronous.py:bound_4+naive
Hardware:  a laptop's CPU.
Time and result: docs/guides/staleness.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import AlgorithmConfig, Config

BOUNDS = {'synchronous': 0, 'one_step_off': 1, 'bound_2': 2, 'bound_4': 4, 'bound_8': 8}
LOSSES = {'decoupled': {}, 'naive': {'bypass_old_logprobs': True}}


def get_config(variant: str = 'one_step_off') -> Config:
  name, _, loss = variant.partition('+')
  loss = loss or 'decoupled'
  if name not in BOUNDS or loss not in LOSSES:
    raise ValueError(
      f'variant {variant!r}: wanted one of {", ".join(BOUNDS)}, optionally followed by '
      f'+{" or +".join(LOSSES)}'
    )
  config = quickstart.get_config()
  sft, grpo = config.stages
  algorithm = AlgorithmConfig(name='grpo', options={**grpo.algorithm.options, **LOSSES[loss]})
  source = dataclasses.replace(grpo.source, bound=BOUNDS[name])
  stage = dataclasses.replace(grpo, algorithm=algorithm, source=source)
  return dataclasses.replace(config, name=variant.replace('+', '_'), stages=(sft, stage))
