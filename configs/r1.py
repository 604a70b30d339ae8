"""DeepSeek-R1's pipeline on the quickstart's task: cold start, reasoning RL, rejection sampling,
SFT of the base model on the selected answers, and RL with all rewards.

The stages are those of section 2.3 of the paper, at toy size. `reasoning` rewards only the answer.
`collect` only generates samples from its result. `distil` starts again from the base weights and
imitates the correct answers. `all_rewards` also penalises answers that reach the length limit. In
the paper, the last stage has a reward model for helpfulness instead, and the stage `reasoning` also
rewards language consistency (the scorer `language`, which needs texts of several words).

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
  Rollouts,
  ScorerConfig,
  SelectionConfig,
  StageConfig,
  Stored,
)

LEFT_OUT = ('cold_start', 'reasoning', 'all_rewards')
"""Stages that a variant may omit."""


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
    dataclasses.replace(grpo, name='all_rewards', steps=70, evaluate_every=None),
  )
  concise = ScorerConfig(name='overlong', weight=0.5, options={'max_length': 7, 'buffer': 1})
  return dataclasses.replace(
    config,
    name=f'r1_{variant}'.rstrip('_'),
    rewards=dataclasses.replace(config.rewards, scorers=(*config.rewards.scorers, concise)),
    stages=tuple(stage for stage in stages if stage.name != left_out),
  )
