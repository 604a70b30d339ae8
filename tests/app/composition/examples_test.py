"""Examples as a run prepares them: their files, their batches, and what is refused before any
training.
"""

import dataclasses
import json

import pytest

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  Examples,
  ExamplesConfig,
  LearnerConfig,
  OptimizerConfig,
  PolicyConfig,
  RewardsConfig,
  RolloutConfig,
  ScorerConfig,
  StageConfig,
  SuiteConfig,
  TasksetConfig,
  TokenizerConfig,
)
from jaxrl_llm.app.composition.prepare import prepare
from jaxrl_llm.app.composition.static_rows import held_out_file, static_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.data.streams import all_rows


@pytest.fixture
def config(tmp_path):
  chat = tmp_path / 'chat.jsonl'
  roles = ('user', 'assistant')
  chat.write_text(
    '\n'.join(
      json.dumps({'messages': [{'role': role, 'content': f'{role} {i}'} for role in roles]})
      for i in range(20)
    )
  )
  return Config(
    name='chat',
    policy=PolicyConfig(tokenizer=TokenizerConfig(template='chatml')),
    examples=tuple(
      ExamplesConfig(name=name, source=str(chat), split=split, holdout=0.3)
      for name, split in (('chat', 'train'), ('unseen', 'eval'))
    ),
    rollout=RolloutConfig(max_prompt_length=40, max_response_length=40),
    learner=LearnerConfig(optimizer=OptimizerConfig(peak_lr=1e-3)),
    stages=(
      StageConfig(
        name='sft',
        algorithm=AlgorithmConfig(name='sft'),
        source=Examples(train='chat', held_out='unseen', sequences_per_batch=4),
        steps=2,
      ),
    ),
  )


def with_source(config, **fields):
  (stage,) = config.stages
  source = dataclasses.replace(stage.source, **fields)
  return dataclasses.replace(config, stages=(dataclasses.replace(stage, source=source),))


def with_examples(config, **fields):
  examples = tuple(dataclasses.replace(source, **fields) for source in config.examples)
  return dataclasses.replace(config, examples=examples)


def test_both_sides_are_written_once(config, tmp_path):
  prepared = prepare(config, tmp_path / 'run')
  (stage,) = config.stages
  trained = all_rows(tmp_path / 'run', static_file(stage))
  measured = all_rows(tmp_path / 'run', held_out_file(stage))
  assert len(trained) + len(measured) == 20 and not {r.uid for r in trained} & {
    r.uid for r in measured
  }
  assert all(row.uid.startswith('chat:') and row.is_expert for row in trained)
  assert sorted(prepared.lengths['sft']) == sorted(row.length for row in trained)
  file = tmp_path / 'run' / static_file(stage)
  before = file.stat().st_mtime_ns
  prepare(config, tmp_path / 'run')
  assert file.stat().st_mtime_ns == before


def test_shared_prompts_are_refused(config, tmp_path):
  whole = with_examples(config, split='all')
  with pytest.raises(UserError, match=r'examples chat \(training\) and unseen \(held out\) share'):
    prepare(whole, tmp_path / 'run')
  tasks = tmp_path / 'tasks.jsonl'
  tasks.write_text('\n'.join(json.dumps({'prompt': f'user {i}', 'answer': ''}) for i in range(20)))
  suite = dataclasses.replace(
    config,
    tasksets=(TasksetConfig(name='tasks', source=str(tasks)),),
    rewards=RewardsConfig(scorers=(ScorerConfig(name='answer'),)),
    evaluation=(SuiteConfig(name='suite', taskset='tasks'),),
  )
  with pytest.raises(UserError, match=r'examples chat \(training\) and suite \(held out\) share'):
    prepare(suite, tmp_path / 'run')


@pytest.mark.parametrize(
  ('change', 'reason'),
  [
    (lambda c: with_source(c, train='chatt'), r"no examples 'chatt'; configured are \['chat', "),
    (lambda c: with_source(c, held_out='x'), "stages.sft.source: no examples 'x'; configured are"),
    (lambda c: with_source(c, sequences_per_batch=64), r'sequences of examples chat do not fill'),
    (lambda c: with_examples(c, source='none.jsonl'), 'none.jsonl: no such file'),
    (lambda c: with_examples(c, name='chat'), "examples: 2 are called 'chat'"),
    (
      lambda c: dataclasses.replace(
        c, policy=dataclasses.replace(c.policy, model={'vocab_size': 8})
      ),
      'vocab_size: 8, and the tokenizer has',
    ),
  ],
)
def test_a_run_that_cannot_train_ends_before_it_begins(config, tmp_path, change, reason):
  with pytest.raises(UserError, match=reason):
    prepare(change(config), tmp_path / 'run')


def test_examples_that_are_their_own_held_out_side_are_refused(config, tmp_path):
  with pytest.raises(UserError, match=r'examples chat \(training\) and chat \(held out\) share'):
    prepare(with_source(config, held_out='chat'), tmp_path / 'run')
