"""A pretrained model: SmolLM2-135M-Instruct learns to state the next number, by GRPO.

Sampled at temperature 1, the initial model is right about four times in ten, as measured by `jaxrl
curate`. Neither copying the question nor a constant answer is rewarded. The default variant trains
all weights, and the variant 'lora' trains adapters of rank 16.

Command:   bash launch/prepare_smollm2.sh; docs/start/smollm2.md writes the rows
           python launch/train.py --config=configs/smollm2.py[:lora]
Hardware:  a laptop's CPU with 12 GB of free memory.
Time and result: docs/start/smollm2.md.
"""

import dataclasses

from jaxrl_llm.api import (
  AlgorithmConfig,
  CheckpointConfig,
  Config,
  EmbeddedConfig,
  LearnerConfig,
  LoraConfig,
  OptimizerConfig,
  PolicyConfig,
  RewardsConfig,
  RolloutConfig,
  Rollouts,
  ScorerConfig,
  Shot,
  StageConfig,
  SuiteConfig,
  TasksetConfig,
)

TASK = dict(
  source='runs/next_number.jsonl',
  system='Next number.',
  shots=(Shot(question='531', answer='532'),),
  holdout=0.2,
)
PEAK_LR = {'full': 3e-6, 'lora': 1e-4}


def get_config(variant: str = 'full') -> Config:
  if variant not in PEAK_LR:
    raise ValueError(f'variant {variant!r}: wanted one of {", ".join(PEAK_LR)}')
  config = Config(
    name=f'smollm2-{variant}',
    policy=PolicyConfig(init_from='runs/models/smollm2', scan_layers=True),
    tasksets=tuple(TasksetConfig(name=split, split=split, **TASK) for split in ('train', 'eval')),
    rewards=RewardsConfig(
      scorers=(ScorerConfig(name='answer', options={'mode': 'numeric', 'extraction': 'number'}),)
    ),
    rollout=RolloutConfig(
      max_prompt_length=37,
      max_response_length=4,
      embedded=EmbeddedConfig(
        slots=32, prefill_rows=8, prefill_buckets=(37,), decode_steps=4, filters=False
      ),
    ),
    learner=LearnerConfig(chunk_len=164, chunks_per_rank=4),
    stages=(
      StageConfig(
        name='grpo',
        algorithm=AlgorithmConfig(name='grpo', options={'clip_ratio_high': 0.28}),
        source=Rollouts(tasksets=('train',), groups_per_batch=8, group_size=4),
        steps=10,
        optimizer=OptimizerConfig(peak_lr=PEAK_LR[variant]),
        evaluate_every=10,
      ),
    ),
    evaluation=(SuiteConfig(name='held_out', taskset='eval', tasks=64, samples=4),),
    checkpoint=CheckpointConfig(every_steps=5),
    compilation_cache='runs/.compilation_cache',
  )
  if variant == 'full':
    return config
  policy = dataclasses.replace(config.policy, lora=LoraConfig(rank=16, alpha=32))
  return dataclasses.replace(config, policy=policy)
