"""DPO on the quickstart's task: pairs of a right and a wrong answer, from templates or from the
policy's rollouts.

'pairs' (the default) learns from static pairs, in which the reversed word is preferred to the
copied word. 'online' samples groups, and pairs the shortest correct answer with a wrong one, or
with a correct one at least 1.5 times as long (Kimi k1.5, arXiv:2501.12599, section 2.4).
'rejection' instead imitates the shortest correct answer (same section).

Paper:     Rafailov et al. 2023 (arXiv:2305.18290).
Command:   python launch/train.py --config=configs/dpo.py:online
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  OptimizerConfig,
  Pairs,
  PreferenceSource,
  SelectionConfig,
)


def get_config(variant: str = 'pairs') -> Config:
  if variant not in ('pairs', 'online', 'rejection'):
    raise ValueError(f'variant {variant!r}: wanted one of pairs, online, rejection')
  config = quickstart.get_config()
  sft, grpo = config.stages
  # Without a little imitation, training would lower the likelihood of right answers, too, and not
  # only of wrong ones.
  dpo = AlgorithmConfig(name='dpo', options={'sft_loss_coef': 0.2} if variant == 'pairs' else {})
  optimizer = OptimizerConfig(peak_lr=1e-4, b2=0.99)
  if variant == 'pairs':
    stage = dataclasses.replace(
      grpo,
      name='dpo',
      algorithm=dpo,
      source=Pairs(train='train_pairs', held_out='eval_pairs', sequences_per_batch=64),
      steps=200,
      optimizer=optimizer,
      evaluate_every=50,
    )
  else:
    selection = SelectionConfig(kind='pairs' if variant == 'online' else 'shortest_correct')
    algorithm = dpo if variant == 'online' else AlgorithmConfig(name='sft')
    source = dataclasses.replace(grpo.source, selection=selection, max_dropped_groups=1000)
    stage = dataclasses.replace(
      grpo, name=variant, algorithm=algorithm, source=source, optimizer=optimizer
    )
  pairs = (
    PreferenceSource(
      name='train_pairs', source='taskset:train', chosen='{answer}', wrong=('{word}',), size=3000
    ),
    PreferenceSource(
      name='eval_pairs', source='taskset:eval', chosen='{answer}', wrong=('{word}',), size=500
    ),
  )
  preferences = pairs if variant == 'pairs' else ()
  return dataclasses.replace(
    config, name=f'dpo_{variant}', preferences=preferences, stages=(sft, stage)
  )
