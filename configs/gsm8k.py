"""GSM8K from JSONL files: SFT on its solutions, then GRPO on its answers, with a tiny, randomly
initialised model.

Command:   python launch/train.py --config=configs/gsm8k.py:DIRECTORY
           DIRECTORY holds train.jsonl and test.jsonl.
Hardware:  a laptop's CPU runs the ten steps of each stage in minutes; the model is far too small
           to reason.
Result:    not run at size. Start from a real checkpoint with --init_from=DIR, and raise steps
           and lengths.
"""

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  Demonstrations,
  EmbeddedConfig,
  LearnerConfig,
  OptimizerConfig,
  PolicyConfig,
  RewardsConfig,
  RolloutConfig,
  Rollouts,
  ScorerConfig,
  StageConfig,
  SuiteConfig,
  TasksetConfig,
  TokenizerConfig,
)


def get_config(directory: str = 'gsm8k') -> Config:
  def taskset(name):
    return TasksetConfig(
      name=name,
      source=f'{directory}/{name}.jsonl',
      domain='math',
      prompt='{question}\n',
      truth='{answer:after ####}',
    )

  return Config(
    name='gsm8k',
    policy=PolicyConfig(
      family='qwen3',
      model=dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, head_dim=32),
      tokenizer=TokenizerConfig(kind='bpe', template='chatml', vocab_size=2048),
    ),
    tasksets=(taskset('train'), taskset('test')),
    rewards=RewardsConfig(
      scorers=(ScorerConfig(name='answer', options={'mode': 'numeric', 'extraction': 'hashes'}),)
    ),
    rollout=RolloutConfig(
      max_prompt_length=128,
      max_response_length=128,
      embedded=EmbeddedConfig(
        slots=64, prefill_rows=8, prefill_buckets=(64, 128), decode_steps=16, filters=False
      ),
    ),
    learner=LearnerConfig(chunks_per_rank=4, optimizer=OptimizerConfig(peak_lr=1e-3)),
    stages=(
      StageConfig(
        name='sft',
        algorithm=AlgorithmConfig(name='sft'),
        source=Demonstrations(tasksets=('train',), templates=('{answer}',), sequences_per_batch=32),
        steps=10,
      ),
      StageConfig(
        name='grpo',
        algorithm=AlgorithmConfig(name='grpo'),
        source=Rollouts(tasksets=('train',), groups_per_batch=8, group_size=8),
        steps=10,
      ),
    ),
    evaluation=(SuiteConfig(name='test', taskset='test', tasks=64),),
  )
