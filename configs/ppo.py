"""PPO with a critic, on the quickstart's task: spelling backward from demonstrations of mixed
quality.

Paper:     Schulman et al. 2017 (arXiv:1707.06347); γ = λ = 1 as DeepSeek-R1's ablation
           advises (arXiv:2501.12948).
Command:   python launch/train.py --config=configs/ppo.py
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import AlgorithmConfig, Config, CriticConfig, OptimizerConfig, Rollouts


def get_config(task: str = '') -> Config:
  config = quickstart.get_config(task)
  sft, grpo = config.stages
  ppo = dataclasses.replace(
    grpo,
    name='ppo',
    # For 120 batches, only the critic is trained. The share of the returns' variance that the
    # critic explains rises during this time, and falls later, as the policy's mistakes become rare.
    algorithm=AlgorithmConfig(name='ppo', options={'clip_ratio_high': 0.28, 'critic_warmup': 120}),
    steps=260,
    minibatches=4,
    # Groups have one sample, because a critic learns more from 256 different words than from 32
    # words that are attempted eight times each.
    source=Rollouts(tasksets=('train',), groups_per_batch=256, group_size=1),
    optimizer=OptimizerConfig(peak_lr=3e-4, schedule='linear', end_lr_fraction=0.1, b2=0.99),
    critic=CriticConfig(optimizer=OptimizerConfig(peak_lr=1e-3, b2=0.99)),
    evaluate_every=65,
  )
  return dataclasses.replace(config, name='ppo', stages=(sft, ppo))
