"""Translates the settings that depend on several of verl's keys at the same time."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxrl_llm.app.importers.draft import base_name, lora_targets, step_count, taskset_names
from jaxrl_llm.app.importers.table import Import, integer, number, one_of, text, unless
from jaxrl_llm.app.importers.verl_table import ENGINES, ESTIMATORS, LOSSES
from jaxrl_llm.core.types import Json


def draft(keys: Import, *, stem: str, rows: int | None) -> dict[str, Json]:
  """Adds the settings that depend on several keys to `keys.draft`, and returns the draft.

  Args:
    stem: name of the run if the keys give none.
    rows: number of training rows; None if unknown.
  """
  ours = keys.draft
  ours['name'] = base_name(keys.get('trainer.experiment_name') or stem)
  _algorithm(keys, ours)
  _policy(keys, ours)
  _data(keys, ours)
  _batch(keys, ours)
  _correction(keys, ours)
  _rewards(keys, ours)
  _engine(keys, ours)
  _steps(keys, ours, rows)
  _logs(keys, ours)
  return ours


_A = 'actor_rollout_ref.actor.'


def _algorithm(keys: Import, ours: dict[str, Json]) -> None:
  name = _known(keys, 'algorithm.adv_estimator', ESTIMATORS, 'grpo')
  loss = _known(keys, f'{_A}policy_loss.loss_mode', LOSSES, 'clip')
  if name == 'grpo' and loss != 'clip':
    name = loss
  else:
    ours['policy_loss'] = loss
  both = keys.read(f'{_A}clip_ratio', number)
  low = keys.read(f'{_A}clip_ratio_low', number, both)
  high = keys.read(f'{_A}clip_ratio_high', number, both)
  ours['clip_ratio_low'] = min(low, 1.0)  # Higher values have no effect: ratios are at least 0.
  ours['clip_ratio_high'] = high
  if loss == 'sapo':
    for option in ('clip_ratio_low', 'clip_ratio_high'):
      del ours[option]
      keys.spare(f'{_A}{option}', 'SAPO does not clip')
  if name == 'grpo' and not ours.get('norm_adv_by_std', True):
    name = 'dr_grpo' if ours.get('loss_agg_mode') == 'seq-mean-token-sum-norm' else name
  ours['stages.NAME.algorithm.name'] = name
  if 'kl_loss_coef' in ours:
    ours['kl_unbiased_gradient'] = False
    ours['allow_zero_gradient_kl'] = ours.get('kl_loss_type') == 'k1'
  if 'kl_reward_coef' not in ours:
    for option in ('kl_target', 'kl_horizon'):
      ours.pop(option, None)
  elif name not in ('ppo', 'reinforce_plus_plus'):
    for option in ('kl_reward_coef', 'kl_reward_type'):
      del ours[option]
    keys.refuse(
      'algorithm.use_kl_in_reward', f'{name} has one reward per sample; use the KL loss instead'
    )


def _known(keys: Import, key: str, names: Mapping[str, str], otherwise: str) -> str:
  """Returns this package's name for the value of a key, according to `names`. If `names` lacks the
  value, reports the key as not supported and returns `otherwise`.
  """
  value = str(keys.get(key))
  if value not in names:
    keys.refuse(key, f'wanted one of {", ".join(names)}; {otherwise} is written instead')
  return names.get(value, otherwise)


def _policy(keys: Import, ours: dict[str, Json]) -> None:
  path = os.path.expanduser(keys.read('actor_rollout_ref.model.path', text))
  ours['policy.init_from'] = path
  prefix = 'actor_rollout_ref.model.'
  rank = keys.read(f'{prefix}lora.rank', integer) or keys.read(f'{prefix}lora_rank', integer)
  if not rank:
    for key in ('lora.alpha', 'lora_alpha', 'target_modules'):
      keys.spare(f'{prefix}{key}', 'lora_rank is 0')
  else:
    alpha = keys.read(f'{prefix}lora.alpha', integer) or keys.read(f'{prefix}lora_alpha', integer)
    ours['policy.lora.rank'], ours['policy.lora.alpha'] = rank, alpha
    ours['policy.lora.targets'] = keys.read(f'{prefix}target_modules', lora_targets)
    if isinstance(ours['policy.lora.targets'], str):
      del ours['policy.lora.targets']
  critic = keys.get('critic.model.path')
  if isinstance(critic, str) and ours['stages.NAME.algorithm.name'] == 'ppo':
    if os.path.expanduser(critic) == path:
      keys.spare('critic.model.path', 'a critic starts from the policy, with a new output layer')
    else:
      ours['stages.NAME.critic.init_from'] = os.path.expanduser(critic)


def _files(keys: Import, key: str) -> list[str]:
  value = keys.get(key)
  files = value if isinstance(value, list) else [value]
  if not all(isinstance(file, str) for file in files):
    keys.refuse(key, 'wanted a path, or a list of paths')
    return []
  known = [file for file in files if file.endswith(('.parquet', '.jsonl'))]
  if len(known) < len(files):
    other = next(file for file in files if file not in known)
    keys.refuse(key, f'{other}: a source must be a .parquet or .jsonl file; convert it')
  return [os.path.expanduser(file) for file in known]


def _data(keys: Import, ours: dict[str, Json]) -> None:
  train = _files(keys, 'data.train_files') if 'data.train_files' in keys else []
  held_out = _files(keys, 'data.val_files') if 'data.val_files' in keys else []
  names = taskset_names([*(train or ['train.parquet']), *held_out])
  trained = names[: len(train) or 1]
  tasksets: list[dict[str, Json]] = [
    {'name': name, 'source': file}
    for name, file in zip(names, [*(train or ['train.parquet']), *held_out])
  ]
  size = keys.read('data.train_max_samples', unless(-1, integer))
  for taskset in tasksets[: len(trained)]:
    taskset['size'] = size
  sampled = keys.get('actor_rollout_ref.rollout.val_kwargs.do_sample', False) is True
  v = 'actor_rollout_ref.rollout.val_kwargs.'
  suite: dict[str, Json] = {'tasks': keys.read('data.val_max_samples', unless(-1, integer))}
  if sampled:
    suite['samples'] = keys.read(f'{v}n', integer, 1)
    suite['temperature'] = keys.read(f'{v}temperature', number, 1.0)
    suite['top_p'] = keys.read(f'{v}top_p', number, 1.0)
    suite['top_k'] = keys.read(f'{v}top_k', integer, -1)
  else:
    for key in ('n', 'temperature', 'top_p', 'top_k'):
      keys.spare(f'{v}{key}', 'val_kwargs.do_sample is off: evaluations are greedy')
  ours['tasksets'] = tasksets
  ours['stages.NAME.source.@type'] = 'Rollouts'
  ours['stages.NAME.source.tasksets'] = trained
  ours['evaluation'] = [{'name': name, 'taskset': name, **suite} for name in names[len(trained) :]]


def _batch(keys: Import, ours: dict[str, Json]) -> None:
  batch = ours['stages.NAME.source.groups_per_batch']
  mini = keys.read(f'{_A}ppo_mini_batch_size', integer)
  ours['stages.NAME.minibatches'] = max(1, round(batch / max(mini, 1)))
  if batch % max(mini, 1):
    keys.refuse(
      f'{_A}ppo_mini_batch_size',
      f'it does not divide the {batch} prompts of a batch; stages.NAME.minibatches is rounded to '
      f'{ours["stages.NAME.minibatches"]}',
    )
  longest = ours['rollout.max_prompt_length'] + ours['rollout.max_response_length']
  if keys.get(f'{_A}use_dynamic_bsz') is True:
    tokens = keys.read(f'{_A}ppo_max_token_len_per_gpu', integer)
    if tokens:
      ours['learner.chunks_per_rank'] = max(1, tokens // longest)
    keys.spare(f'{_A}ppo_micro_batch_size_per_gpu', 'use_dynamic_bsz is on')
  else:
    rows = keys.read(f'{_A}ppo_micro_batch_size_per_gpu', integer)
    if rows:
      ours['learner.chunks_per_rank'] = rows
    keys.spare(f'{_A}ppo_max_token_len_per_gpu', 'use_dynamic_bsz is off')
  betas = keys.get(f'{_A}optim.betas')
  if isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, float) for b in betas):
    ours['stages.NAME.optimizer.b1'], ours['stages.NAME.optimizer.b2'] = betas
    if ours['stages.NAME.algorithm.name'] == 'ppo':
      ours['stages.NAME.critic.optimizer.b2'] = betas[1]
  elif f'{_A}optim.betas' in keys:
    keys.refuse(f'{_A}optim.betas', 'wanted two numbers')
  shard = keys.read(f'{_A}fsdp_config.fsdp_size', unless(-1, integer))
  if shard:
    ours['learner.mesh.fsdp'], ours['learner.mesh.data'] = shard, None


def _correction(keys: Import, ours: dict[str, Json]) -> None:
  prefix = 'algorithm.rollout_correction.'
  weights = keys.read(
    f'{prefix}rollout_is', one_of({'token': 'token', 'sequence': 'sequence'}), 'none'
  )
  ours['rollout_is'] = weights or 'none'
  cap = keys.read(f'{_A}tis_imp_ratio_cap', unless(-1, number))
  if cap:
    ours['rollout_is'], ours['rollout_is_threshold'] = 'token', cap
  threshold = keys.get(f'{prefix}rollout_is_threshold')
  if threshold is None or ours['rollout_is'] == 'none':
    keys.spare(f'{prefix}rollout_is_threshold', 'rollout_is is off')
    return
  low, _, high = str(threshold).rpartition('_')
  try:
    ours['rollout_is_threshold'] = float(high)
    if low and ours['rollout_is'] == 'token':
      ours['rollout_is'], ours['rollout_is_lower'] = 'icepop', float(low)
    elif low:
      keys.refuse(f'{prefix}rollout_is_threshold', 'weights of sequences have no lower bound')
  except ValueError:
    keys.refuse(f'{prefix}rollout_is_threshold', 'wanted a number, or low_high')


def _rewards(keys: Import, ours: dict[str, Json]) -> None:
  path = keys.get('custom_reward_function.path')
  if not isinstance(path, str):
    for key in list(keys.named('custom_reward_function.')):
      keys.spare(f'custom_reward_function.{key}', 'custom_reward_function.path is not set')
    ours['rewards.scorers'] = [{'name': 'answer'}]
    return
  name = keys.get('custom_reward_function.name')
  options: dict[str, Json] = {'function': f'{os.path.expanduser(path)}:{name}'}
  arguments = keys.named('custom_reward_function.reward_kwargs.')
  if arguments:
    options['arguments'] = arguments
  stem = os.path.splitext(os.path.basename(path))[0]
  ours['rewards.scorers'] = [{'name': base_name(stem), 'kind': 'verl', 'options': options}]


def _engine(keys: Import, ours: dict[str, Json]) -> None:
  engine = keys.get('actor_rollout_ref.rollout.name')
  ours['rollout.engine'] = ENGINES.get(str(engine), 'vllm')
  if engine not in ENGINES:
    keys.refuse(
      'actor_rollout_ref.rollout.name', 'the engines are embedded and vllm; vllm is written instead'
    )
  if ours['rollout.engine'] != 'vllm':
    for name in [name for name in ours if name.startswith('rollout.vllm.')]:
      del ours[name]


def _steps(keys: Import, ours: dict[str, Json], rows: int | None) -> None:
  ours['stages.NAME.steps'] = step_count(
    keys,
    'trainer.total_training_steps',
    'trainer.total_epochs',
    batch=ours['stages.NAME.source.groups_per_batch'],
    rows=rows,
  )
  updates = ours['stages.NAME.steps'] * ours['stages.NAME.minibatches']
  for prefix, place in ((_A, 'stages.NAME.'), ('critic.', 'stages.NAME.critic.')):
    if prefix == 'critic.' and ours['stages.NAME.algorithm.name'] != 'ppo':
      continue
    steps = keys.read(f'{prefix}optim.lr_warmup_steps', unless(-1, integer))
    share = keys.read(f'{prefix}optim.lr_warmup_steps_ratio', number, 0.0)
    if steps is None:
      ours[f'{place}optimizer.warmup_steps'] = round(share * updates)
    else:
      ours[f'{place}optimizer.warmup_steps'] = steps
      keys.spare(f'{prefix}optim.lr_warmup_steps_ratio', 'lr_warmup_steps is set')


def _logs(keys: Import, ours: dict[str, Json]) -> None:
  loggers = keys.get('trainer.logger')
  loggers = loggers if isinstance(loggers, list) else [loggers]
  other = [
    name for name in loggers if name not in (None, 'console', 'tensorboard', 'file', 'wandb')
  ]
  if 'wandb' in loggers:
    ours['logging.wandb.project'] = keys.get('trainer.project_name', 'verl_examples')
  else:
    keys.spare(
      'trainer.logger', 'a run always prints its steps; logging.tensorboard is on by default'
    )
    keys.spare('trainer.project_name', 'only W&B has projects')
  if other:
    keys.refuse('trainer.logger', f'{other[0]}: for a custom writer, use logging.writers')
