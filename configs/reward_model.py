"""A reward model trained on pairs of a right and a wrong answer: the reversed word and the copied
word.

Paper:     Bradley and Terry 1952; Ouyang et al. 2022 (arXiv:2203.02155), section 3.5.
Command:   python launch/train.py --config=configs/reward_model.py
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

import dataclasses

import dpo

from jaxrl_llm.api import AlgorithmConfig, Config, OptimizerConfig, Pairs, StageConfig


def get_config() -> Config:
  config = dpo.get_config('pairs')
  stage = StageConfig(
    name='reward_model',
    algorithm=AlgorithmConfig(name='reward_model'),
    source=Pairs(train='train_pairs', held_out='eval_pairs', sequences_per_batch=64),
    steps=300,
    optimizer=OptimizerConfig(peak_lr=1e-3, schedule='cosine', b2=0.99),
    evaluate_every=50,
  )
  return dataclasses.replace(config, name='reward_model', stages=(stage,), evaluation=())
