"""Models of realistic sizes with random weights, for compiling GRPO for accelerators without
training.

Papers:    Qwen2.5 (arXiv:2412.15115): the models have the architectures of Qwen2.5.
Command:   python launch/train.py --config=configs/sizes.py:1.5b --dry_run --topology=v5e:4x4
Hardware:  the devices that --topology names need not be present; nothing is trained.
Result:    docs/develop/benchmarks.md has the table. Not run at size.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  LearnerConfig,
  OptimizerConfig,
  PolicyConfig,
  Rollouts,
  StageConfig,
)

SIZES = {
  '0.5b': dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
               num_attention_heads=14, num_key_value_heads=2, head_dim=64, vocab_size=151_936,
               tie_word_embeddings=True),
  '1.5b': dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
               num_attention_heads=12, num_key_value_heads=2, head_dim=128, vocab_size=151_936,
               tie_word_embeddings=True),
  '7b': dict(hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
             num_attention_heads=28, num_key_value_heads=4, head_dim=128, vocab_size=152_064,
             tie_word_embeddings=False),
  '32b': dict(hidden_size=5120, intermediate_size=27_648, num_hidden_layers=64,
              num_attention_heads=40, num_key_value_heads=8, head_dim=128, vocab_size=152_064,
              tie_word_embeddings=False),
}  # fmt: skip


def get_config(size: str = '0.5b') -> Config:
  if size not in SIZES:
    raise ValueError(f'variant {size!r}: wanted one of {", ".join(SIZES)}')
  base = quickstart.get_config()
  model = {**SIZES[size], 'rope_theta': 1e6}
  return dataclasses.replace(
    base,
    name=f'sizes-{size}',
    policy=PolicyConfig(family='qwen2', model=model, dtype='bfloat16',
                        scan_layers=True, remat='full'),
    tasksets=tuple(dataclasses.replace(taskset, size=2000) for taskset in base.tasksets),
    rollout=dataclasses.replace(base.rollout, engine='vllm', max_prompt_length=512,
                                max_response_length=1536,
                                embedded=dataclasses.replace(base.rollout.embedded,
                                                             prefill_buckets=(512,))),
    learner=LearnerConfig(chunks_per_rank=1),
    stages=(
      StageConfig(
        name='grpo',
        algorithm=AlgorithmConfig(name='grpo', options={'kl_loss_coef': 1e-3}),
        source=Rollouts(tasksets=('train',), groups_per_batch=32, group_size=8),
        steps=100,
        minibatches=2,
        optimizer=OptimizerConfig(peak_lr=1e-6),
      ),
    ),
    evaluation=(),
  )  # fmt: skip
