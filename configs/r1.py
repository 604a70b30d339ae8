"""DeepSeek-R1's pipeline on the quickstart's task: cold start, reasoning RL, rejection sampling,
SFT of the base model on the selected answers, a reward model, and RL with all rewards.

The stages follow section 2.3 of the paper, at toy size. `reasoning` rewards only the answer.
`collect` only generates samples, with the weights that `reasoning` has trained. `distil` starts
again from the base weights and imitates the correct answers. `helpfulness` trains a reward model on
pairs of a better and a worse sample of `collect`, starting from the weights of `distil` with a new
head. `all_rewards` continues with the policy of `distil`; it adds the score of the reward model,
and penalises answers that reach the length limit. In the paper, the reward model learns from
preferences about open questions, and the stage `reasoning` also rewards language consistency (the
scorer `language`, which needs texts of several words).

The variant without_STAGE omits a stage, to show what the stage contributes.

Paper:     DeepSeek-R1 (arXiv:2501.12948).
Command:   jaxrl train --config=r1
           jaxrl train --config=r1:without_reasoning
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  RewardModelConfig,
  Rollouts,
  ScorerConfig,
  SelectionConfig,
  StageConfig,
  Stored,
)

LEFT_OUT = ('cold_start', 'reasoning', 'helpfulness', 'all_rewards')
"""Stages that a variant may omit. Without `all_rewards`, there is no `helpfulness` either."""


def get_config(variant: str = '') -> Config:
  left_out = variant.removeprefix('without_')
  if variant and (left_out not in LEFT_OUT or left_out == variant):
    known = ', '.join(f'without_{name}' for name in LEFT_OUT)
    raise ValueError(f'variant {variant!r}: wanted one of {known}')
  config = quickstart.get_config()
  sft, grpo = config.stages
  rollouts, imitation = grpo.source, dataclasses.replace(sft.optimizer, peak_lr=1e-3)
  stages = (
    dataclasses.replace(sft, name='cold_start'),
    dataclasses.replace(
      grpo,
      name='reasoning',
      source=dataclasses.replace(rollouts, rewards={'verifier': 1.0}),
      steps=140,
    ),
    StageConfig(
      name='collect',
      algorithm=grpo.algorithm,
      source=Rollouts(
        tasksets=('train',),
        groups_per_batch=64,
        group_size=4,
        rewards={'verifier': 1.0},
        rollout_only=True,
      ),
      steps=20,
      optimizer=grpo.optimizer,
    ),
    StageConfig(
      name='distil',
      algorithm=AlgorithmConfig(name='sft'),
      init_from=('base',),
      source=Stored(
        stages=('collect',),
        tasksets=('train',),
        selection=SelectionConfig(kind='above', min_reward=1.0),
        sequences_per_batch=64,
      ),
      steps=600,
      optimizer=dataclasses.replace(imitation, peak_lr=3e-3),
    ),
    StageConfig(
      name='helpfulness',
      algorithm=AlgorithmConfig(name='reward_model', options={'center_rewards_coefficient': 0.01}),
      source=Stored(
        stages=('collect',),
        tasksets=('train',),
        selection=SelectionConfig(kind='margin', margin=1.0),
        sequences_per_batch=64,
      ),
      steps=60,
      optimizer=imitation,
    ),
    dataclasses.replace(
      grpo,
      name='all_rewards',
      # The reward model also ranks wrong answers. In a group without a right answer, the small
      # scores of the reward model would count as much as a right answer if they were divided by
      # their standard deviation.
      algorithm=dataclasses.replace(
        grpo.algorithm, options={**grpo.algorithm.options, 'norm_adv_by_std': False}
      ),
      steps=70,
      evaluate_every=None,
    ),
  )
  concise = ScorerConfig(name='overlong', weight=0.5, options={'max_length': 7, 'buffer': 1})
  helpful = ScorerConfig(name='helpful', kind='reward_model', weight=0.1)
  omitted, scorers, reward_model = {left_out}, (*config.rewards.scorers, concise), None
  if left_out in ('helpfulness', 'all_rewards'):
    omitted.add('helpfulness')
  else:
    scorers = (*scorers, helpful)
    reward_model = RewardModelConfig(init_from='stage:helpfulness', dtype='float32')
  return dataclasses.replace(
    config,
    name=f'r1_{variant}'.rstrip('_'),
    rewards=dataclasses.replace(config.rewards, scorers=scorers),
    reward_model=reward_model,
    stages=tuple(stage for stage in stages if stage.name not in omitted),
  )
