"""A small run that the doctor finds healthy, and the same run with planted faults."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import numpy as np
from paths import ROOT
from safetensors.numpy import load_file, save_file

from jaxrl_llm.api import (
  AlgorithmConfig,
  Config,
  Demonstrations,
  EmbeddedConfig,
  LearnerConfig,
  LoraConfig,
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
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.spec import SHARED_MEMORY
from jaxrl_llm.tasks.tokenizer import build_tokenizer

_REWARD = ROOT / 'tests' / 'support' / 'fixtures' / 'python_reward.py'
_EMBEDDED = EmbeddedConfig(
  slots=16, prefill_rows=16, prefill_buckets=(24,), decode_steps=8, filters=False
)
_BYTES = TokenizerConfig(kind='bpe', vocab_size=258)
FAULTS = {
  'wrong answer extraction': 'scorers',
  'evaluation leakage': 'leakage',
  'missing eos': 'tokenizer',
  'template that does not round-trip': 'template',
  'all groups without signal': 'signal',
  'swapped KL sign': 'kl_gradient',
  'too little shared memory': 'shared_memory',
  'mismatch over budget': 'mismatch',
  'NaN weights': 'weights',
  'overlong prompts': 'lengths',
}
"""Name of the check that must find each fault."""
IN_BATCHES = (
  'wrong answer extraction',
  'evaluation leakage',
  'all groups without signal',
  'swapped KL sign',
  'mismatch over budget',
)
"""Faults that do not prevent the doctor from trying batches. They can be planted together."""


def write_tasks(folder: pathlib.Path) -> None:
  """Writes sums to two files: 64 for training, and 16 others for evaluation."""
  rows = [
    {'question': f'add {a} and {b}', 'answer': f'{a}+{b}\n#### {a + b}'}
    for a in range(10, 18)
    for b in range(20, 30)
  ]
  write_rows(folder / 'train.jsonl', rows[:64])
  write_rows(folder / 'eval.jsonl', rows[64:])


def write_rows(path: pathlib.Path, rows: list[dict[str, str]]) -> None:
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def healthy(folder: pathlib.Path) -> Config:
  """Returns the configuration of a healthy run: three steps of SFT on sums, then GRPO with a KL
  term. The tasks are in `folder`, and the compilation cache is next to it.
  """
  if not (folder / 'train.jsonl').exists():
    write_tasks(folder)
  tasksets = tuple(
    TasksetConfig(
      name=name,
      source=str(folder / f'{name}.jsonl'),
      domain='math',
      prompt='{question}=',
      truth='{answer:after ####}',
    )
    for name in ('train', 'eval')
  )
  answer = ScorerConfig(name='answer', options={'mode': 'numeric', 'extraction': 'hashes'})
  variety = ScorerConfig(
    name='variety', kind='python', options={'function': f'{_REWARD}:variety'}, weight=0.1
  )
  return Config(
    name='sums',
    policy=PolicyConfig(
      model=dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
      ),
      tokenizer=_BYTES,
    ),
    tasksets=tasksets,
    rewards=RewardsConfig(scorers=(answer, variety)),
    rollout=RolloutConfig(max_prompt_length=24, max_response_length=16, embedded=_EMBEDDED),
    learner=LearnerConfig(chunks_per_rank=4, optimizer=OptimizerConfig(peak_lr=1e-3)),
    stages=(
      StageConfig(
        name='sft',
        algorithm=AlgorithmConfig(name='sft'),
        source=Demonstrations(tasksets=('train',), templates=('{answer}',), sequences_per_batch=16),
        steps=3,
      ),
      StageConfig(
        name='grpo',
        algorithm=AlgorithmConfig(name='grpo', options={'kl_loss_coef': 0.01}),
        source=Rollouts(tasksets=('train',), groups_per_batch=4, group_size=4),
        steps=20,
      ),
    ),
    evaluation=(SuiteConfig(name='held_out', taskset='eval'),),
    compilation_cache=str(folder.parent / 'programs'),
  )


def plant(folder: pathlib.Path, *planted: str) -> Config:
  """Returns the configuration of the healthy run with the faults `planted`. Their files are written
  to `folder`.
  """
  config = healthy(folder)
  for fault in planted:
    config = _PLANTED[fault](config, folder)
  return config


def _replace(config: Config, part: str, **fields: Any) -> Config:
  return dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **fields)})


def _extraction(config: Config, folder: pathlib.Path) -> Config:
  answer, *others = config.rewards.scorers
  boxed = dataclasses.replace(answer, options={**answer.options, 'extraction': 'boxed'})
  return _replace(config, 'rewards', scorers=(boxed, *others))


def _leakage(config: Config, folder: pathlib.Path) -> Config:
  rows = [json.loads(line) for line in (folder / 'train.jsonl').read_text().splitlines()]
  leaked = [{**row, 'question': row['question'].upper()} for row in rows[:16]]
  write_rows(folder / 'eval.jsonl', leaked)
  return config


def _tokenizer(config: Config, folder: pathlib.Path, **fields: Any) -> Config:
  """Makes the run use a tokenizer with changed values in tokenizer_config.json. None removes a
  value.
  """
  path = folder / 'tokenizer'
  build_tokenizer(_BYTES, (), path)
  file = path / 'tokenizer_config.json'
  values = {**json.loads(file.read_text()), **fields}
  values = {name: value for name, value in values.items() if value is not None}
  file.write_text(json.dumps(values))
  return _replace(config, 'policy', tokenizer=TokenizerConfig(path=str(path)))


def _eos(config: Config, folder: pathlib.Path) -> Config:
  return _tokenizer(config, folder, eos_token=None)


def _template(config: Config, folder: pathlib.Path) -> Config:
  config = _tokenizer(config, folder)
  file = folder / 'tokenizer' / 'chat_template.jinja'
  file.write_text(file.read_text().replace("message['content']", "message['content'][4:]"))
  return config


def _signal(config: Config, folder: pathlib.Path) -> Config:
  return _replace(config, 'rewards', scorers=config.rewards.scorers[:1])


def _sign(config: Config, folder: pathlib.Path) -> Config:
  sft, grpo = config.stages
  repelled = dataclasses.replace(grpo.algorithm, name='fixtures.faulty_parts:REPELLED')
  return dataclasses.replace(config, stages=(sft, dataclasses.replace(grpo, algorithm=repelled)))


def _memory(config: Config, folder: pathlib.Path) -> Config:
  """Makes the model so large that two publications exceed the shared memory. Its weights are frozen
  under adapters, so they could be held.
  """
  embed = 4096
  vocabulary = shutil.disk_usage(SHARED_MEMORY).free // (2 * 4 * embed) + 1
  model = {**config.policy.model, 'hidden_size': embed, 'vocab_size': vocabulary}
  config = _replace(
    config, 'policy', model={**model, 'tie_word_embeddings': True}, lora=LoraConfig(rank=1)
  )
  return _replace(
    config, 'rollout', engine='vllm', vllm=VllmConfig(addresses=('http://127.0.0.1:9',))
  )


def _mismatch(config: Config, folder: pathlib.Path) -> Config:
  return _replace(
    config,
    'rollout',
    engine='fixtures.faulty_parts:IMPRECISE',
    engine_options={'embedded': dataclasses.asdict(_EMBEDDED) | {'prefill_buckets': [24]}},
  )


def _weights(config: Config, folder: pathlib.Path) -> Config:
  import jax

  from jaxrl_llm.app.composition.prepare import prepare
  from jaxrl_llm.models.api import build_model
  from jaxrl_llm.models.spec import ModelOptions
  from jaxrl_llm.weights.hf import export

  made = folder / 'made'
  made.mkdir()
  prepared = prepare(config, made)
  model = build_model(prepared.spec, ModelOptions())
  params = jax.tree.map(np.array, jax.jit(model.init)(jax.random.key(0)))
  checkpoint = folder / 'checkpoint'
  export(
    checkpoint,
    params,
    prepared.spec,
    dtype='float32',
    tokenizer_dir=made / 'tokenizer',
    eos_ids=prepared.tokenizer.stop_ids,
    pad_id=prepared.tokenizer.pad_id,
  )
  file = checkpoint / 'model.safetensors'
  tensors = load_file(file)
  tensors['model.norm.weight'] = np.full_like(tensors['model.norm.weight'], np.nan)
  save_file(tensors, file, metadata={'format': 'pt'})
  return _replace(config, 'policy', init_from=str(checkpoint))


def _prompts(config: Config, folder: pathlib.Path) -> Config:
  return _replace(config, 'rollout', max_prompt_length=8)


_PLANTED = {
  'wrong answer extraction': _extraction,
  'evaluation leakage': _leakage,
  'missing eos': _eos,
  'template that does not round-trip': _template,
  'all groups without signal': _signal,
  'swapped KL sign': _sign,
  'too little shared memory': _memory,
  'mismatch over budget': _mismatch,
  'NaN weights': _weights,
  'overlong prompts': _prompts,
}
