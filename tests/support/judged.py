"""A configuration whose second stage trains a reward model. The third stage uses it to score
rollouts.
"""

import dataclasses

from jaxrl_llm.api import Config, RewardModelConfig, RewardsConfig, ScorerConfig, load_config

STEPS = {'sft': 12, 'preferred': 4, 'grpo': 4}
"""Number of steps of each stage, as a job runs it."""


def get_config() -> Config:
  trained = load_config('reward_model')
  sft, grpo = load_config('quickstart').stages
  (preferred,) = trained.stages
  return dataclasses.replace(
    trained,
    name='judged',
    rewards=RewardsConfig(
      scorers=(
        ScorerConfig(name='verifier', options={'partial_credit': True}),
        ScorerConfig(name='helpful', kind='reward_model', weight=0.5),
      )
    ),
    reward_model=RewardModelConfig(init_from='stage:preferred', dtype='float32'),
    stages=(sft, dataclasses.replace(preferred, name='preferred'), grpo),
    evaluation=load_config('quickstart').evaluation,
  )
