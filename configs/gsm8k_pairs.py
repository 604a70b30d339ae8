"""DPO and a reward model from pairs of a right and a wrong solution to the same GSM8K question.

There are three variants. 'sft' learns to write solutions to the training questions. 'dpo' and
'reward_model' start from the result of 'sft' and learn from pairs. The pairs answer the questions
of the test split, which are divided into five folds. One fold is held out.

Command:   python launch/train.py --config=configs/gsm8k_pairs.py:sft,DIRECTORY
           python launch/train.py --config=configs/gsm8k_pairs.py:dpo,DIRECTORY \
             --init_from=RUN_OF_SFT
           ... --config.preferences.train.fold=2 --config.preferences.held_out.fold=2
           DIRECTORY holds train.jsonl and preference_pairs.jsonl. benchmarks/preferences.py runs
           all variants on all folds.
Hardware:  a laptop's CPU; the model is far too small to reason.
Result:    docs/develop/benchmarks.md. Not run at size.
"""

import dataclasses

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  Demonstrations,
  EmbeddedConfig,
  LearnerConfig,
  OptimizerConfig,
  Pairs,
  PolicyConfig,
  PreferenceSource,
  RolloutConfig,
  StageConfig,
  TasksetConfig,
  TokenizerConfig,
)

RATES = {'dpo': 1e-4, 'reward_model': 3e-4}


def get_config(variant: str = 'sft,gsm8k') -> Config:
  kind, _, directory = variant.partition(',')
  if kind not in ('sft', *RATES) or not directory:
    raise ValueError(
      f'variant {variant!r}: wanted sft,DIRECTORY, dpo,DIRECTORY or reward_model,DIRECTORY'
    )
  config = Config(
    name=f'gsm8k_pairs_{kind}',
    policy=PolicyConfig(
      family='qwen3',
      model=dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, head_dim=32),
      tokenizer=TokenizerConfig(kind='bpe', template='chatml', vocab_size=2048),
    ),
    tasksets=(
      TasksetConfig(
        name='solutions', source=f'{directory}/train.jsonl', domain='math', prompt='{question}'
      ),
    ),
    rollout=RolloutConfig(
      max_prompt_length=256,
      max_response_length=256,
      embedded=EmbeddedConfig(prefill_buckets=(256,)),
    ),
    learner=LearnerConfig(chunk_len=512, chunks_per_rank=4),
    stages=(
      StageConfig(
        name='sft',
        algorithm=AlgorithmConfig(name='sft'),
        source=Demonstrations(
          tasksets=('solutions',), templates=('{answer}',), sequences_per_batch=32
        ),
        steps=200,
        optimizer=OptimizerConfig(peak_lr=2e-3, schedule='cosine', b2=0.99),
      ),
    ),
  )
  if kind == 'sft':
    return config
  pairs = dict(source=f'{directory}/preference_pairs.jsonl', domain='math', fold=0, folds=5)
  stage = StageConfig(
    name=kind,
    algorithm=AlgorithmConfig(name=kind),
    source=Pairs(train='train', held_out='held_out', sequences_per_batch=32),
    steps=48,
    optimizer=OptimizerConfig(peak_lr=RATES[kind], schedule='cosine', b2=0.99, weight_decay=0.1),
    evaluate_every=24,
  )
  return dataclasses.replace(
    config,
    tasksets=(),
    preferences=(
      PreferenceSource(name='train', split='train', **pairs),
      PreferenceSource(name='held_out', split='eval', **pairs),
    ),
    stages=(stage,),
  )
