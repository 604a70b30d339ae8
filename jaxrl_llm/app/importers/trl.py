"""Translates the settings that depend on several of TRL's arguments at the same time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.app.importers.draft import UNKNOWN_STEPS, base_name, row_count
from jaxrl_llm.app.importers.table import Import, integer, number
from jaxrl_llm.app.importers.trl_table import CORRECTIONS, LOSSES, REWARDS
from jaxrl_llm.core.types import Json

_ALGORITHMS = {'sft': 'sft', 'dpo': 'dpo', 'reward': 'reward_model', 'grpo': 'grpo', 'rloo': 'rloo'}


def draft(
  keys: Import, trainer: str, *, stem: str, rows: int | None, functions: str | None
) -> dict[str, Json]:
  """Adds the settings that depend on several arguments to `keys.draft`, and returns the draft.

  Args:
    trainer: one of TRAINERS.
    stem: name of the run if the arguments give none.
    rows: number of training rows; None if unknown.
    functions: Python file that may define reward functions; None if there is none.
  """
  ours = keys.draft
  ours['name'] = base_name(keys.get('run_name') or stem)
  ours['stages.NAME.algorithm.name'] = _ALGORITHMS[trainer]
  _adapters(keys, ours)
  _data(keys, ours, trainer)
  _batch(keys, ours, trainer)
  if trainer in ('grpo', 'rloo'):
    _rewards(keys, ours, functions)
    _surrogate(keys, ours, trainer)
  else:
    _lengths(keys, ours)
  if trainer in ('grpo', 'rloo', 'dpo'):
    _reference(keys, ours)
  if trainer == 'dpo':
    _preference_loss(keys, ours)
  _steps(keys, ours, rows)
  _logs(keys, ours)
  return ours


def _adapters(keys: Import, ours: dict[str, Json]) -> None:
  if 'policy.init_from' not in ours:
    ours['policy.init_from'] = 'MODEL'
    keys.notes.append('no model is named: replace MODEL in policy.init_from')
  if keys.get('use_peft') is True:
    ours.setdefault('policy.lora.rank', 16)
    ours.setdefault('policy.lora.alpha', 32)
    ours.setdefault('policy.lora.targets', ['query', 'value'])  # PEFT's usual default targets.


def _source(name: str, split: str) -> str:
  return name if name.endswith(('.jsonl', '.parquet')) else f'datasets:{name}#{split}'


def _data(keys: Import, ours: dict[str, Json], trainer: str) -> None:
  name, config = keys.get('dataset_name'), keys.get('dataset_config')
  split, test = (keys.get(f'dataset_{part}_split') for part in ('train', 'test'))
  parts = [(name, config, split)] if isinstance(name, str) else []
  mixture = keys.get('datasets')
  if isinstance(mixture, list):
    for item in mixture:
      if isinstance(item, Mapping) and isinstance(item.get('path'), str):
        parts.append((item['path'], item.get('name'), item.get('split') or split))
      else:
        keys.refuse('datasets', 'wanted a list of {path, name, split}')
  sources: list[dict[str, Json]] = [
    {
      'name': f'train_{i + 1}' if len(parts) > 1 else 'train',
      'source': _source(str(path), str(part)),
      'options': {'name': subset} if isinstance(subset, str) else None,
    }
    for i, (path, subset, part) in enumerate(parts)
  ]
  if not sources:
    sources = [{'name': 'train', 'source': 'train.jsonl'}]
    keys.notes.append('no dataset is named: replace train.jsonl, the source')
  evaluates = isinstance(name, str) and keys.get('eval_strategy', 'no') not in ('no', None, False)
  if evaluates:
    options = sources[0].get('options')
    sources.append({'name': 'test', 'source': _source(name, str(test)), 'options': options})
  else:
    keys.spare('eval_strategy', 'the default is no evaluation')
    for key in ('dataset_test_split', 'eval_steps'):
      keys.spare(key, 'eval_strategy is no')
  train = [source['name'] for source in sources if source['name'] != 'test']
  if trainer in ('grpo', 'rloo'):
    ours['tasksets'] = sources
    ours['stages.NAME.source.@type'] = 'Rollouts'
    ours['stages.NAME.source.tasksets'] = train
    if evaluates:
      samples = keys.read('num_generations_eval', integer, 0)
      ours['evaluation'] = [{'name': 'test', 'taskset': 'test', 'samples': samples}]
    return
  if len(train) > 1:
    keys.refuse('datasets', f'{trainer} reads a single dataset; write all rows to one file')
    sources = [source for source in sources if source['name'] in (train[0], 'test')]
  if trainer == 'sft':
    _examples(keys, sources)
  ours['examples' if trainer == 'sft' else 'preferences'] = sources
  ours['stages.NAME.source.@type'] = 'Examples' if trainer == 'sft' else 'Pairs'
  ours['stages.NAME.source.train'] = train[0]
  if evaluates:
    ours['stages.NAME.source.held_out'] = 'test'


def _examples(keys: Import, sources: list[dict[str, Json]]) -> None:
  """Sets `loss_on`, the tokens that the SFT loss covers, and the template of a text column that is
  not named 'text'. TRL's default for the loss is the completion or, in rows without one, the whole
  text.
  """
  column = keys.get('dataset_text_field')
  loss_on = 'answers' if keys.get('assistant_only_loss') is True else 'completions'
  if keys.get('completion_only_loss') is False and loss_on == 'completions':
    loss_on = 'all'
  for source in sources:
    if loss_on != 'answers':
      source['loss_on'] = loss_on
    if isinstance(column, str) and column != 'text':
      source['text'] = f'{{{column}}}'


def _batch(keys: Import, ours: dict[str, Json], trainer: str) -> None:
  rows = keys.read('per_device_train_batch_size', integer)
  accumulated = keys.read('gradient_accumulation_steps', integer)
  processes = keys.read('nproc_per_node', integer) or keys.read('num_processes', integer)
  batch = rows * processes
  if trainer not in ('grpo', 'rloo'):
    unit = 1 if trainer == 'sft' else 2
    ours['stages.NAME.source.sequences_per_batch'] = batch * accumulated * unit
    return
  steps = keys.read('steps_per_generation', integer)
  whole = keys.read('generation_batch_size', integer)
  if whole is None:
    whole = batch * (steps or accumulated)
  size = ours['stages.NAME.source.group_size']
  ours['stages.NAME.source.groups_per_batch'] = max(1, whole // size)
  ours['stages.NAME.minibatches'] = max(1, whole // (batch * accumulated))
  if whole % size:
    keys.refuse('num_generations', f'it does not divide the {whole} completions of a batch')


def _rewards(keys: Import, ours: dict[str, Json], functions: str | None) -> None:
  named = keys.get('reward_funcs')
  names = named if isinstance(named, list) else [named] if named is not None else []
  weights = keys.get('reward_weights')
  scorers: list[dict[str, Json]] = []
  for index, name in enumerate(map(str, names)):
    if name in REWARDS:
      scorer: dict[str, Any] = dict(REWARDS[name])
    elif name.startswith('def ') and functions is not None:
      name = name.removeprefix('def ')
      scorer = {
        'name': base_name(name),
        'kind': 'trl',
        'options': {'function': f'{functions}:{name}'},
      }
    elif '.' in name:
      module, _, attribute = name.rpartition('.')
      scorer = {
        'name': base_name(attribute),
        'kind': 'trl',
        'options': {'function': f'{module}:{attribute}'},
      }
    else:
      keys.refuse('reward_funcs', f'{name}: wanted {", ".join(REWARDS)}, or module.function')
      continue
    if isinstance(weights, list) and index < len(weights):
      scorer['weight'] = weights[index]
    while scorer['name'] in [other['name'] for other in scorers]:
      scorer['kind'] = scorer.get('kind', scorer['name'])
      scorer['name'] += '_2'
    scorers.append(scorer)
  ours['rewards.scorers'] = scorers or [{'name': 'answer'}]
  if any(name in ('accuracy_reward', 'reasoning_accuracy_reward') for name in names):
    for taskset in ours['tasksets']:
      taskset['truth'] = '{solution}'  # TRL's function reads the column `solution`.


def _surrogate(keys: Import, ours: dict[str, Json], trainer: str) -> None:
  low = keys.read('epsilon', number)
  ours['clip_ratio_low'] = low
  ours['clip_ratio_high'] = keys.read('epsilon_high', number, low)
  ours.setdefault('clip_ratio_c', None)
  ours['rollout_is'] = 'none'
  if trainer == 'rloo':
    return
  ours['adv_eps'] = 1e-4
  loss = keys.get('loss_type')
  if loss not in LOSSES:
    keys.refuse('loss_type', f'wanted one of {", ".join(LOSSES)}; dapo is written instead')
    loss = 'dapo'
  ours.update(LOSSES[loss])
  if loss == 'cispo':
    ours['clip_ratio_high'] = ours['clip_ratio_high'] - 1
  if loss == 'sapo':
    for option in ('clip_ratio_low', 'clip_ratio_high', 'clip_ratio_c'):
      del ours[option]
    for key in ('epsilon', 'epsilon_high', 'delta'):
      keys.spare(key, 'SAPO does not clip')
  name = loss if loss in ('cispo', 'sapo') else 'grpo'
  level = keys.get('importance_sampling_level')
  if level == 'sequence' and name == 'grpo':
    name = 'gspo'
  elif level != 'token' and name != 'gspo':
    keys.refuse('importance_sampling_level', 'wanted token, or sequence with a clipped loss')
  scale = keys.get('scale_rewards')
  ours['norm_adv_by_std'] = scale in ('group', True)
  if scale not in ('group', True, 'none', False):
    ours['norm_adv_by_std'] = True
    keys.refuse('scale_rewards', 'rewards are scaled within their group; group is written instead')
  if not ours['norm_adv_by_std']:
    del ours['adv_eps']
    if loss == 'dr_grpo' and name == 'grpo':
      name = 'dr_grpo'
  ours['stages.NAME.algorithm.name'] = name
  if not ours.get('kl_loss_coef'):
    ours.pop('kl_unbiased_gradient', None)
  _correction(keys, ours)


def _correction(keys: Import, ours: dict[str, Json]) -> None:
  mode = keys.get('vllm_importance_sampling_mode')
  bounds = ('rollout_is_threshold', 'rollout_is_lower')
  if keys.get('use_vllm') is not True:
    keys.spare('vllm_importance_sampling_correction', 'use_vllm is off')
  elif keys.get('vllm_importance_sampling_correction') is True and mode in CORRECTIONS:
    ours.update({**CORRECTIONS[mode], **{name: ours[name] for name in bounds if name in ours}})
    return
  elif keys.get('vllm_importance_sampling_correction') is True:
    why = f'{mode}: wanted one of {", ".join(CORRECTIONS)}; no correction is written'
    keys.refuse('vllm_importance_sampling_correction', why)
    keys.refuse('vllm_importance_sampling_mode', why)
  for name in bounds:
    ours.pop(name, None)


def _lengths(keys: Import, ours: dict[str, Json]) -> None:
  longest = keys.read('max_length', integer) or keys.read('max_seq_length', integer)
  prompt = ours.setdefault('rollout.max_prompt_length', max(1, longest // 2))
  ours.setdefault('rollout.max_response_length', max(1, longest - prompt))


def _reference(keys: Import, ours: dict[str, Json]) -> None:
  names = ('ref_model_sync_steps', 'ref_model_mixup_alpha')
  if keys.get('sync_ref_model') is not True:
    for name in ('sync_ref_model', *names):
      keys.spare(name, 'the reference stays fixed')
    return
  every, alpha = (keys.get(name, usual) for name, usual in zip(names, (512, 0.6)))
  if alpha == 1:
    ours['reference'] = {'every': every}
  elif every == 1 and isinstance(alpha, float):
    ours['reference'] = {'ema': 1 - alpha}
  else:
    keys.refuse(
      'sync_ref_model',
      'wanted ref_model_mixup_alpha=1 (replaced), or ref_model_sync_steps=1 (averaged)',
    )


def _preference_loss(keys: Import, ours: dict[str, Json]) -> None:
  loss = keys.get('loss_type', 'sigmoid')
  loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
  if loss in ('sigmoid', 'ipo'):
    ours['loss_type'] = loss
  else:
    keys.refuse('loss_type', 'wanted sigmoid or ipo; sigmoid is written instead')


def _steps(keys: Import, ours: dict[str, Json], rows: int | None) -> None:
  updates = ours.get('stages.NAME.minibatches', 1) * ours.get('stages.NAME.epochs', 1)
  most = keys.read('max_steps', integer)
  epochs = keys.read('num_train_epochs', number)
  batch = ours.get('stages.NAME.source.groups_per_batch')
  if batch is None:
    unit = 1 if ours['stages.NAME.source.@type'] == 'Examples' else 2
    batch = ours['stages.NAME.source.sequences_per_batch'] // unit
  if most > 0:
    ours['stages.NAME.steps'] = math.ceil(most / updates)
    keys.spare('num_train_epochs', 'max_steps is set')
  else:
    keys.spare('max_steps', 'num_train_epochs determines the number of steps')
    sources = [
      source['source']
      for part in ('tasksets', 'examples', 'preferences')
      for source in ours.get(part, ())
      if source['name'] != 'test'
    ]
    counts = [row_count(source) for source in sources]
    if rows is None and None not in counts:
      rows = sum(counts)
    if rows is None:
      ours['stages.NAME.steps'] = UNKNOWN_STEPS
      formula = f'{epochs:g} epochs are {epochs:g} * rows / {batch} steps'
      keys.comments['StageConfig', 'steps'] = formula
      keys.notes.append(
        f'the number of training rows is unknown, so {UNKNOWN_STEPS} steps are written instead: '
        f'{formula}; pass --rows=N, or set stages.NAME.steps'
      )
    else:
      ours['stages.NAME.steps'] = max(1, math.ceil(epochs * rows / batch))
  share = keys.read('warmup_ratio', number, 0.0)
  warmup = keys.read('warmup_steps', number)
  if warmup is not None and 0 < warmup < 1:
    share, warmup = warmup, None
  every = updates * ours['stages.NAME.steps']
  if warmup or share:
    ours['stages.NAME.optimizer.warmup_steps'] = int(warmup) if warmup else math.ceil(share * every)
  for key, name in (
    ('eval_steps', 'stages.NAME.evaluate_every'),
    ('save_steps', 'checkpoint.every_steps'),
  ):
    steps = keys.read(key, number)
    if steps and (key != 'eval_steps' or keys.get('eval_strategy') == 'steps'):
      ours[name] = max(1, round(steps * every if steps < 1 else steps) // updates)


def _logs(keys: Import, ours: dict[str, Json]) -> None:
  named = keys.get('report_to')
  places = named if isinstance(named, list) else [named]
  other = [place for place in places if place not in (None, 'none', 'tensorboard', 'wandb')]
  if 'wandb' in places:
    ours['logging.wandb'] = {}
  elif not other:
    keys.spare('report_to', 'logging.tensorboard is on by default')
  if other:
    keys.refuse('report_to', f'{other[0]}: for a custom writer, use logging.writers')
