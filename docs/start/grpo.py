"""GRPO for the first time: verl's rows, a reward function of your own, an evaluation, a chat.

  python docs/start/grpo.py DIRECTORY [KEY=VALUE …]

KEY=VALUE changes the configuration, such as stages.grpo.steps=60. The script needs PyTorch beside
jaxrl_llm, because transformers makes the checkpoint (tiny.py) and chats with the trained one.
"""

import pathlib
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  """A reward as verl calls it: 1 for the right letter, and a little for any letter."""
  answer = solution_str.strip()
  return 1.0 if answer == ground_truth else 0.2 if answer in extra_info['letters'] else 0.0


def write_parquet(file: pathlib.Path, questions) -> None:
  """Writes Parquet as verl's preprocessing does."""
  rows = [
    {
      'data_source': 'alphabet',
      'prompt': [{'role': 'user', 'content': question}],
      'ability': 'letters',
      'reward_model': {'style': 'rule', 'ground_truth': right},
      'extra_info': {'index': index, 'letters': [right, wrong]},
    }
    for index, (question, right, wrong) in enumerate(questions)
  ]
  pq.write_table(pa.Table.from_pylist(rows), file)


def configuration(directory: pathlib.Path):
  reward = {'function': f'{__file__}:compute_score'}
  return Config(
    name='first-grpo',
    policy=PolicyConfig(init_from=str(directory / 'checkpoint')),
    tasksets=(
      TasksetConfig(name='train', source=str(directory / 'train.parquet')),
      TasksetConfig(name='test', source=str(directory / 'test.parquet')),
    ),
    rewards=RewardsConfig(scorers=(ScorerConfig(name='letters', kind='verl', options=reward),)),
    rollout=RolloutConfig(max_prompt_length=32, max_response_length=8),
    stages=(
      StageConfig(
        name='grpo',
        algorithm=AlgorithmConfig(name='grpo'),
        source=Rollouts(tasksets=('train',), groups_per_batch=16, group_size=8),
        steps=80,
        optimizer=OptimizerConfig(peak_lr=1e-3),
        evaluate_every=20,
      ),
    ),
    evaluation=(SuiteConfig(name='test', taskset='test'),),
    checkpoint=CheckpointConfig(every_steps=20),
    compilation_cache='runs/.compilation_cache',
  )


def main(directory: pathlib.Path, changes: dict[str, str]) -> None:
  questions = tiny.questions()
  train_side, test_side = questions[:550], questions[550:]
  write_parquet(directory / 'train.parquet', train_side)
  write_parquet(directory / 'test.parquet', test_side)
  # The checkpoint has seen right and wrong answers, and gives either.
  seen = [tiny.said(question, answer) for question, *answers in train_side for answer in answers]
  texts = [question for question, *_ in questions]
  tiny.make_checkpoint(directory / 'checkpoint', 'qwen3', texts, conversations=seen, steps=300)

  result = train(load_config(configuration(directory), changes), directory / 'run')
  # Every commit that was kept, with four samples for each question.
  evaluate = ['evaluate', f'--workdir={result.workdir}', '--config.evaluation.test.samples=4']
  subprocess.run([sys.executable, '-m', 'jaxrl_llm', *evaluate], check=True)
  # The export is a Hugging Face model.
  tiny.chat(result.model, [question for question, *_ in test_side[:4]])


if __name__ == '__main__':  # Scorer processes import this file too, and need the reward alone.
  import tiny

  from jaxrl_llm.api import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    OptimizerConfig,
    PolicyConfig,
    RewardsConfig,
    RolloutConfig,
    Rollouts,
    ScorerConfig,
    StageConfig,
    SuiteConfig,
    TasksetConfig,
    load_config,
    train,
  )

  main(*tiny.arguments(__doc__))
