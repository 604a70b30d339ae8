"""MIX on a task on which GRPO alone has no signal, because the initial policy copies the word and
never spells it backward.

Three variants start from the same policy: 'mix' (rollouts and 200 expert rows in one update),
'grpo' (only rollouts, which give no signal) and 'sft' (only the expert rows; accuracy reaches a
plateau).

Paper:     Trinity-RFT (arXiv:2505.17826), section 3.3.
Command:   python launch/train.py --config=configs/mix.py:mix
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import AlgorithmConfig, Config, Demonstrations, ExpertsConfig, OptimizerConfig

EXPERTS = dict(tasksets=('train',), templates=('{answer}',), count=200)


def get_config(variant: str = 'mix') -> Config:
  if variant not in ('mix', 'grpo', 'sft'):
    raise ValueError(f'variant {variant!r}: wanted one of mix, grpo, sft')
  config = quickstart.get_config()
  sft, grpo = config.stages
  copying = dataclasses.replace(
    sft,
    name='copying',
    steps=200,
    source=Demonstrations(tasksets=('train',), templates=('{word}',), count=3000),
    optimizer=OptimizerConfig(peak_lr=3e-3, schedule='cosine', b2=0.99),
  )
  optimizer = OptimizerConfig(peak_lr=5e-4, b2=0.99)
  if variant == 'sft':
    stage = dataclasses.replace(
      sft,
      name='sft',
      source=Demonstrations(**EXPERTS),
      steps=700,
      optimizer=optimizer,
      evaluate_every=100,
    )
  else:
    clip = {'clip_ratio_high': 0.28}
    stage = dataclasses.replace(
      grpo,
      name=variant,
      steps=700,
      algorithm=AlgorithmConfig(name='grpo', options=clip),
      optimizer=optimizer,
      evaluate_every=100,
    )
  if variant == 'mix':
    stage = dataclasses.replace(
      stage,
      algorithm=AlgorithmConfig(name='mix', options={**clip, 'mu': {'mu': 0.3}}),
      source=dataclasses.replace(grpo.source, experts=ExpertsConfig(**EXPERTS, ratio=0.2)),
    )
  return dataclasses.replace(config, name=f'mix_{variant}', stages=(copying, stage))
