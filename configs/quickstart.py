"""The quickstart: a randomly initialised policy learns to spell words backward, by SFT and then
GRPO.

Demonstrations are of mixed quality: 40 % are right, and 60 % copy the word. SFT imitates both
kinds, so the accuracy that it reaches is determined by the data and not by early stopping. GRPO
raises this accuracy, because the verifier rewards only right answers.

Command:   bash launch/quickstart.sh
           bash launch/quickstart.sh --config=configs/quickstart.py:number_sorting  (a second task)
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

from jaxrl_llm.api import (
  AlgorithmConfig,
  CheckpointConfig,
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
)

TASKS = {
  'spell_backward': dict(
    source='reasoning_gym:spell_backward',
    options={'min_word_len': 3, 'max_word_len': 5},
    prompt='{word}>',
    truth='{answer}',
    match='[a-z]+>',
    size=60_000,
    holdout=0.2,
  ),
  'number_sorting': dict(
    source='reasoning_gym:number_sorting',
    options={
      'min_numbers': 4,
      'max_numbers': 4,
      'min_decimals': 0,
      'max_decimals': 0,
      'min_value': 10,
      'max_value': 99,
    },
    prompt='{direction:.1}{original_numbers:csv}>',
    truth='[{sorted_numbers:csv}]',
    match='a[0-9,]+>',
    size=20_000,
    holdout=0.1,
  ),
}
DEMONSTRATIONS = {
  'spell_backward': ('{answer}', '{word}'),
  'number_sorting': ('[{sorted_numbers:csv}]', '[{original_numbers:csv}]'),
}
"""Templates of right and wrong demonstrations, keyed by task."""
LENGTHS = {'spell_backward': (6, 7), 'number_sorting': (13, 14)}
"""Maximum lengths of prompt and answer in tokens, keyed by task."""


def get_config(task: str = '') -> Config:
  task = task or 'spell_backward'
  if task not in TASKS:
    raise ValueError(f'variant {task!r}: wanted one of {", ".join(TASKS)}')
  prompt, response = LENGTHS[task]
  return Config(
    name='quickstart',
    policy=PolicyConfig(
      family='llama',
      model=dict(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=1e4,
        # With a vocabulary of only 30 tokens, a tied embedding cannot serve as input and output
        # matrix at once: accuracy stays below 0.7.
        tie_word_embeddings=False,
      ),
    ),
    tasksets=tuple(
      TasksetConfig(name=split, split=split, **TASKS[task]) for split in ('train', 'eval')
    ),
    rewards=RewardsConfig(scorers=(ScorerConfig(name='verifier'),)),
    rollout=RolloutConfig(
      max_prompt_length=prompt,
      max_response_length=response,
      embedded=EmbeddedConfig(
        slots=128, prefill_rows=16, prefill_buckets=(prompt,), decode_steps=8, filters=False
      ),
    ),
    learner=LearnerConfig(chunk_len=64, chunks_per_rank=12),
    stages=(
      StageConfig(
        name='sft',
        algorithm=AlgorithmConfig(name='sft'),
        source=Demonstrations(
          tasksets=('train',),
          templates=DEMONSTRATIONS[task],
          weights=(0.4, 0.6),
          count=3000,
          sequences_per_batch=64,
        ),
        steps=500,
        optimizer=OptimizerConfig(peak_lr=3e-3, schedule='cosine', b2=0.99),
      ),
      StageConfig(
        name='grpo',
        algorithm=AlgorithmConfig(name='grpo', options={'clip_ratio_high': 0.28}),
        source=Rollouts(tasksets=('train',), groups_per_batch=16, group_size=8),
        steps=280,
        optimizer=OptimizerConfig(peak_lr=5e-4, schedule='linear', end_lr_fraction=0.1, b2=0.99),
        evaluate_every=70,
      ),
    ),
    evaluation=(SuiteConfig(name='held_out', taskset='eval', tasks=512),),
    checkpoint=CheckpointConfig(every_steps=50),
    compilation_cache='runs/.compilation_cache',
  )
