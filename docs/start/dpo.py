"""DPO for the first time: preference pairs in each of their three forms.

  python docs/start/dpo.py DIRECTORY [KEY=VALUE …]

KEY=VALUE changes the configuration, such as stages.dpo.steps=80. The script needs PyTorch beside
jaxrl_llm, because transformers makes the checkpoint (tiny.py) and chats with the trained one.
"""

import pathlib

import tiny

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  OptimizerConfig,
  Pairs,
  PolicyConfig,
  PreferenceSource,
  RolloutConfig,
  StageConfig,
  load_config,
  train,
)


def texts(question: str, chosen: str, rejected: str) -> dict:
  return {'prompt': question, 'chosen': chosen, 'rejected': rejected}


def explicit_prompt(question: str, chosen: str, rejected: str) -> dict:
  """Messages in `prompt`, which may be of several turns, and an answer's message in the others."""
  return {
    'prompt': [{'role': 'user', 'content': question}],
    'chosen': [{'role': 'assistant', 'content': chosen}],
    'rejected': [{'role': 'assistant', 'content': rejected}],
  }


def implicit_prompt(question: str, chosen: str, rejected: str) -> dict:
  """Whole conversations, which differ in their last message alone."""
  return {'chosen': tiny.said(question, chosen), 'rejected': tiny.said(question, rejected)}


def configuration(directory: pathlib.Path, form: str) -> Config:
  def pairs(name, split):
    source = str(directory / f'{form}.jsonl')
    return PreferenceSource(name=name, source=source, split=split, holdout=0.2)

  return Config(
    name='first-dpo',
    policy=PolicyConfig(init_from=str(directory / 'checkpoint')),
    preferences=(pairs('pairs', 'train'), pairs('held_out', 'eval')),
    rollout=RolloutConfig(max_prompt_length=32, max_response_length=8),
    stages=(
      StageConfig(
        name='dpo',
        algorithm=AlgorithmConfig(name='dpo', options={'beta': 0.1}),
        source=Pairs(train='pairs', held_out='held_out', sequences_per_batch=64),
        steps=40,
        optimizer=OptimizerConfig(peak_lr=5e-4),
        evaluate_every=20,
      ),
    ),
    compilation_cache='runs/.compilation_cache',
  )


def main(directory: pathlib.Path, changes: dict[str, str]) -> None:
  questions = tiny.questions()
  for form in (texts, explicit_prompt, implicit_prompt):
    rows = [form(*question) for question in questions]
    tiny.write_rows(directory / f'{form.__name__}.jsonl', rows)
  # The checkpoint has seen right and wrong answers, and gives either.
  seen = [tiny.said(question, answer) for question, *answers in questions for answer in answers]
  asked = [question for question, *_ in questions]
  tiny.make_checkpoint(directory / 'checkpoint', 'llama', asked, conversations=seen, steps=300)

  for form in (texts, explicit_prompt, implicit_prompt):
    config = load_config(configuration(directory, form.__name__), changes)
    result = train(config, directory / form.__name__)
    won = result.metrics[-1]['val-core/held_out/rewards/accuracies']
    print(f'{form.__name__}: share of held-out pairs whose chosen answer wins: {won:.3f}')
  tiny.chat(result.model, asked[:4])


if __name__ == '__main__':
  main(*tiny.arguments(__doc__))
