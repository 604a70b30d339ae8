"""Kimi k1.5's pipeline on the quickstart's task: two SFT stages, RL, RL with a length reward, and
long2short, which merges weights, imitates the shortest correct answers, and trains on preferences
for them with DPO.

The stages follow sections 2.1 to 2.4 of the paper, at toy size. `long_cot` stands for the paper's
small, clean data set of long reasoning; it has only right answers. `rl` has a curriculum: it begins
with short words. `rl_length` continues it with the length reward, which is added only when the
policy answers well. `merge` starts from the mean of the weights of `long_cot` and `rl_length`, and
only generates samples. `shortest` and `dpo` learn from these samples.

A variant without_STAGE omits a stage, or the curriculum, to show what it contributes.

Paper:     Kimi k1.5 (arXiv:2501.12599).
Command:   jaxrl train --config=kimi
           jaxrl train --config=kimi:without_curriculum
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  LaterWeights,
  OptimizerConfig,
  SamplerConfig,
  ScorerConfig,
  SelectionConfig,
  StageConfig,
  Stored,
  TasksetConfig,
)

LENGTH = ScorerConfig(name='length', weight=0.0)
"""Scorer that rewards short answers. Only the stage `rl_length` gives this scorer a weight above 0,
so that evaluations measure correctness alone.
"""
SHORT = {'min_word_len': 3, 'max_word_len': 4}
"""Options of the taskset with which the curriculum begins: words of 3 or 4 letters. The words of
the other tasksets have up to 5 letters.
"""
CURRICULUM = SamplerConfig(
  weights={'short': 1.0, 'train': 0.0},
  schedule=(LaterWeights(from_batch=40, weights={'short': 0.0, 'train': 1.0}),),
)
LEFT_OUT = ('long_cot', 'curriculum', 'rl_length', 'shortest', 'dpo')
"""Parts that a variant may omit."""


def get_config(variant: str = '') -> Config:
  left_out = variant.removeprefix('without_')
  if variant and (left_out not in LEFT_OUT or left_out == variant):
    known = ', '.join(f'without_{name}' for name in LEFT_OUT)
    raise ValueError(f'variant {variant!r}: wanted one of {known}')
  config = quickstart.get_config()
  sft, grpo = config.stages
  answered = dataclasses.replace(grpo.source, rewards={'verifier': 1.0})
  merged = (
    'sft' if left_out == 'long_cot' else 'long_cot',
    'rl' if left_out == 'rl_length' else 'rl_length',
  )
  first = answered
  if left_out != 'curriculum':
    first = dataclasses.replace(answered, tasksets=('short', 'train'), sampler=CURRICULUM)
  stages = (
    dataclasses.replace(sft, steps=400),
    dataclasses.replace(
      sft,
      name='long_cot',
      source=dataclasses.replace(sft.source, weights=(1.0, 0.0), count=256),
      steps=30,
      optimizer=dataclasses.replace(sft.optimizer, peak_lr=3e-4),
    ),
    dataclasses.replace(grpo, name='rl', source=first, steps=140, evaluate_every=None),
    dataclasses.replace(
      grpo,
      name='rl_length',
      source=dataclasses.replace(grpo.source, rewards={'verifier': 1.0, 'length': 0.2}),
      steps=40,
      evaluate_every=None,
      keep_optimizer=True,
    ),
    dataclasses.replace(
      grpo,
      name='merge',
      init_from=merged,
      source=dataclasses.replace(answered, groups_per_batch=64, group_size=8, rollout_only=True),
      steps=15,
      evaluate_every=None,
    ),
    _long2short('shortest', 'sft', 'shortest_correct', OptimizerConfig(peak_lr=3e-4, b2=0.99)),
    _long2short('dpo', 'dpo', 'pairs', OptimizerConfig(peak_lr=3e-5, b2=0.99)),
  )
  rewards = dataclasses.replace(config.rewards, scorers=(*config.rewards.scorers, LENGTH))
  short = TasksetConfig(
    name='short', split='train', **{**quickstart.TASKS['spell_backward'], 'options': SHORT}
  )
  return dataclasses.replace(
    config,
    name=f'kimi_{variant}'.rstrip('_'),
    tasksets=(*config.tasksets, short),
    rewards=rewards,
    stages=tuple(stage for stage in stages if stage.name != left_out),
  )


def _long2short(
  name: str, algorithm: str, selection: str, optimizer: OptimizerConfig
) -> StageConfig:
  """Returns a stage that learns from the merged model's answers."""
  source = Stored(
    stages=('merge',),
    tasksets=('train',),
    selection=SelectionConfig(kind=selection),
    sequences_per_batch=64,
  )
  return StageConfig(
    name=name,
    algorithm=AlgorithmConfig(name=algorithm),
    source=source,
    steps=60,
    optimizer=optimizer,
  )
