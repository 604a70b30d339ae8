"""The quickstart's task with LoRA adapters: a base model that copies words learns to spell them
backward, while its own weights stay fixed.

The variant 'base' trains the base model: a randomly initialised policy that learns to copy words,
with all weights trained. The default variant then trains adapters on this model, by SFT on the
quickstart's demonstrations, of which 40 % are right, and by GRPO.

Paper:     Hu et al. 2021 (arXiv:2106.09685).
Command:   python launch/train.py --config=configs/lora.py:base
           python launch/train.py --config=configs/lora.py
Hardware:  a laptop's CPU.
Time and result: docs/guides/lora.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import Config, Demonstrations, LoraConfig


def get_config(variant: str = 'adapters') -> Config:
  config = quickstart.get_config()
  sft, grpo = config.stages
  if variant == 'base':
    copying = Demonstrations(tasksets=('train',), templates=('{word}',), count=3000)
    stage = dataclasses.replace(sft, name='copying', source=copying)
    return dataclasses.replace(config, name='lora_base', stages=(stage,))
  if variant != 'adapters':
    raise ValueError(f'variant {variant!r}: wanted adapters or base')
  policy = dataclasses.replace(
    config.policy, init_from='runs/lora_base', lora=LoraConfig(rank=32, alpha=64)
  )
  # Adapters tolerate, and need, a higher learning rate than full weights.
  faster = dataclasses.replace(grpo, optimizer=dataclasses.replace(grpo.optimizer, peak_lr=1e-3))
  return dataclasses.replace(config, name='lora', policy=policy, stages=(sft, faster))
