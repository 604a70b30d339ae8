"""A workflow of two turns: a policy whose first answer is wrong reads a hint, and answers again.

  python docs/start/two_turns.py DIRECTORY [KEY=VALUE …]

KEY=VALUE changes the configuration, such as stages.grpo.steps=60. Both answers are trained on, the
hint is not. The script needs PyTorch beside jaxrl_llm, because transformers makes the checkpoint
(tiny.py).
"""

import itertools
import pathlib

from jaxrl_llm.api import Episodes

HINT = 'Again?'


class TwoTurns(Episodes):
  async def play(self, episode):
    episode.observe(episode.task.prompt)
    await episode.act(max_tokens=4)
    reward = await episode.score()
    if reward.value != 1.0:
      episode.observe([{'role': 'user', 'content': HINT}])
      await episode.act(max_tokens=4)


def configuration(directory: pathlib.Path):
  def taskset(name):
    source = str(directory / 'rows.jsonl')
    return TasksetConfig(name=name, source=source, split=name, holdout=0.2)

  return Config(
    name='two-turns',
    policy=PolicyConfig(init_from=str(directory / 'checkpoint')),
    tasksets=(taskset('train'), taskset('eval')),
    rewards=RewardsConfig(
      scorers=(ScorerConfig(name='answer', options={'mode': 'exact', 'extraction': 'whole'}),)
    ),
    rollout=RolloutConfig(
      workflow=WorkflowConfig(kind='two_turns:TwoTurns'),
      max_prompt_length=32,
      max_response_length=32,  # Both answers and the hint.
    ),
    stages=(
      StageConfig(
        name='grpo',
        algorithm=AlgorithmConfig(name='grpo'),
        source=Rollouts(tasksets=('train',), groups_per_batch=16, group_size=8),
        steps=40,
        optimizer=OptimizerConfig(peak_lr=1e-3),
        evaluate_every=20,
      ),
    ),
    evaluation=(SuiteConfig(name='eval', taskset='eval'),),
    compilation_cache='runs/.compilation_cache',
  )


def main(directory: pathlib.Path, changes: dict[str, str]) -> None:
  questions = tiny.questions()
  rows = [{'question': question, 'answer': right} for question, right, _ in questions]
  tiny.write_rows(directory / 'rows.jsonl', rows)
  # The checkpoint has seen right and wrong answers in either turn.
  seen = [
    tiny.said(question, first) + tiny.said(HINT, second)
    for question, *answers in questions
    for first, second in itertools.product(answers, repeat=2)
  ]
  texts = [HINT, *(question for question, *_ in questions)]
  tiny.make_checkpoint(directory / 'checkpoint', 'qwen2', texts, conversations=seen, steps=300)

  result = train(load_config(configuration(directory), changes), directory / 'run')
  measured = [row for row in result.metrics if 'num_turns/mean' in row]
  for row in (measured[0], measured[-1]):
    turns, reward = row['num_turns/mean'], row['critic/rewards/mean']
    print(f'step {row["training/global_step"]}: {turns:.2f} turns, mean reward {reward:.2f}')


if __name__ == '__main__':  # Scorer processes import this file too.
  import tiny

  from jaxrl_llm.api import (
    AlgorithmConfig,
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
    WorkflowConfig,
    load_config,
    train,
  )

  main(*tiny.arguments(__doc__))
