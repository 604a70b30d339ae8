"""PPO for the first time: a critic beside the policy, rewards by a scorer of the library.

  python docs/start/ppo.py DIRECTORY [KEY=VALUE …]

KEY=VALUE changes the configuration, such as stages.ppo.steps=60. The script needs PyTorch beside
jaxrl_llm, because transformers makes the checkpoint (tiny.py) and chats with the trained one.
"""

import pathlib


def configuration(directory: pathlib.Path):
  def taskset(name):
    source = str(directory / 'rows.jsonl')
    return TasksetConfig(name=name, source=source, split=name, holdout=0.2)

  return Config(
    name='first-ppo',
    policy=PolicyConfig(init_from=str(directory / 'checkpoint')),
    tasksets=(taskset('train'), taskset('eval')),
    rewards=RewardsConfig(
      scorers=(ScorerConfig(name='answer', options={'mode': 'exact', 'extraction': 'whole'}),)
    ),
    rollout=RolloutConfig(max_prompt_length=32, max_response_length=8),
    stages=(
      StageConfig(
        name='ppo',
        algorithm=AlgorithmConfig(name='ppo', options={'critic_warmup': 10}),
        # No groups: the critic tells how good an answer is to be expected.
        source=Rollouts(tasksets=('train',), groups_per_batch=128, group_size=1),
        steps=60,
        minibatches=2,
        optimizer=OptimizerConfig(peak_lr=5e-4),
        critic=CriticConfig(optimizer=OptimizerConfig(peak_lr=1e-3)),
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
  # The checkpoint has seen right and wrong answers, and gives either.
  seen = [tiny.said(question, answer) for question, *answers in questions for answer in answers]
  asked = [question for question, *_ in questions]
  tiny.make_checkpoint(directory / 'checkpoint', 'llama', asked, conversations=seen, steps=300)

  result = train(load_config(configuration(directory), changes), directory / 'run')
  print('the policy is in', result.model, 'and its critic in', result.workdir / 'critic')
  tiny.chat(result.model, asked[:4])


if __name__ == '__main__':  # Scorer processes import this file too.
  import tiny

  from jaxrl_llm.api import (
    AlgorithmConfig,
    Config,
    CriticConfig,
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
