"""Four domains in one run, each with its own scorers: code is run in a sandbox, math is scored by a
rule and a reward model, school questions by a judge, and locations in images by their boxes (the
policy itself reads only text).

Command:   python launch/serve.py --role=reward --model=DIR   (another terminal; prints its address)
           python launch/train.py --config=\
             configs/domains.py:DIRECTORY,REWARD_ADDRESS,JUDGE_ADDRESS,JUDGE_MODEL
           DIRECTORY holds code.jsonl, math.jsonl, k12.jsonl and vision.jsonl, whose rows have the
           fields question and answer; in code.jsonl also tests, and in vision.jsonl also media.
Hardware:  a laptop's CPU runs tests/jobs/domains_test.py, which makes such files, in a minute.
Result:    not run at size.
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
  TasksetConfig,
)

DOMAINS = ('code', 'math', 'k12', 'vision')


def get_config(variant: str = '') -> Config:
  parts = (variant or 'domains,http://127.0.0.1:8500/,http://127.0.0.1:8000,judge').split(',')
  if len(parts) != 4:
    raise ValueError(
      f'variant {variant!r}: wanted DIRECTORY,REWARD_ADDRESS,JUDGE_ADDRESS,JUDGE_MODEL'
    )
  directory, reward_address, judge_address, judge_model = parts
  scorers = (
    ScorerConfig(name='code', domains=('code',), options={'credit': 'fraction'}, deadline_s=60.0),
    ScorerConfig(name='answer', domains=('math',), options={'mode': 'numeric'}),
    ScorerConfig(
      name='preference',
      kind='http',
      domains=('math',),
      weight=0.1,
      options={'addresses': [reward_address]},
      deadline_s=60.0,
    ),
    ScorerConfig(
      name='judge',
      domains=('k12',),
      options={'addresses': [judge_address], 'model': judge_model},
      deadline_s=120.0,
    ),
    ScorerConfig(name='box_iou', domains=('vision',)),
  )
  return Config(
    name='domains',
    policy=PolicyConfig(
      family='qwen3',
      model=dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32),
    ),
    tasksets=tuple(
      TasksetConfig(name=domain, source=f'{directory}/{domain}.jsonl', domain=domain)
      for domain in DOMAINS
    ),
    rewards=RewardsConfig(scorers=scorers, workers=2),
    rollout=RolloutConfig(
      max_prompt_length=32,
      max_response_length=48,
      embedded=EmbeddedConfig(
        slots=32, prefill_rows=8, prefill_buckets=(32,), decode_steps=16, filters=False
      ),
    ),
    learner=LearnerConfig(chunks_per_rank=4, optimizer=OptimizerConfig(peak_lr=3e-3)),
    stages=(
      StageConfig(
        name='sft',
        algorithm=AlgorithmConfig(name='sft'),
        source=Demonstrations(tasksets=DOMAINS, templates=('{answer}',), sequences_per_batch=16),
        steps=120,
      ),
      StageConfig(
        name='grpo',
        algorithm=AlgorithmConfig(name='grpo'),
        source=Rollouts(tasksets=DOMAINS, groups_per_batch=12, group_size=4),
        steps=3,
        optimizer=OptimizerConfig(peak_lr=1e-4),
      ),
    ),
  )
