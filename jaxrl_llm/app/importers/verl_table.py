"""Table of verl's keys: their defaults, and their counterparts in this package.

Sources: verl's documentation of its configuration and its `ppo_trainer.yaml`, versions 0.4 to 0.9.
docs/reference/equality.md lists the losses of verl that are equal to this package's.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl_llm.app.importers.table import (
  Choice,
  Mapped,
  NotNeeded,
  NotSupported,
  Row,
  Table,
  any_value,
  boolean,
  integer,
  number,
  one_of,
  text,
  unless,
)
from jaxrl_llm.core.types import Json

DEFAULTS: Mapping[str, Json] = {
  'actor_rollout_ref.actor.clip_ratio': 0.2,
  'actor_rollout_ref.actor.clip_ratio_c': 3.0,
  'actor_rollout_ref.actor.fsdp_config.dtype': 'bfloat16',
  'actor_rollout_ref.actor.kl_loss_coef': 0.001,
  'actor_rollout_ref.actor.kl_loss_type': 'low_var_kl',
  'actor_rollout_ref.actor.loss_agg_mode': 'token-mean',
  'actor_rollout_ref.actor.optim.betas': [0.9, 0.999],
  'actor_rollout_ref.actor.optim.lr': 1e-6,
  'actor_rollout_ref.actor.optim.weight_decay': 0.01,
  'actor_rollout_ref.actor.policy_loss.loss_mode': 'vanilla',
  'actor_rollout_ref.actor.ppo_mini_batch_size': 256,
  'actor_rollout_ref.actor.tau_neg': 1.05,
  'actor_rollout_ref.actor.tau_pos': 1.0,
  'actor_rollout_ref.actor.use_kl_loss': False,
  'actor_rollout_ref.model.enable_gradient_checkpointing': True,
  'actor_rollout_ref.model.lora_alpha': 16,
  'actor_rollout_ref.model.lora_rank': 0,
  'actor_rollout_ref.model.path': '~/models/deepseek-llm-7b-chat',
  'actor_rollout_ref.model.target_modules': 'all-linear',
  'actor_rollout_ref.rollout.gpu_memory_utilization': 0.5,
  'actor_rollout_ref.rollout.n': 1,
  'actor_rollout_ref.rollout.name': 'vllm',
  'algorithm.adv_estimator': 'gae',
  'algorithm.kl_ctrl.horizon': 10000,
  'algorithm.kl_ctrl.kl_coef': 0.001,
  'algorithm.kl_ctrl.target_kl': 0.1,
  'algorithm.kl_ctrl.type': 'fixed',
  'algorithm.kl_penalty': 'kl',
  'algorithm.use_kl_in_reward': False,
  'critic.optim.lr': 1e-5,
  'critic.optim.weight_decay': 0.01,
  'custom_reward_function.name': 'compute_score',
  'data.max_prompt_length': 512,
  'data.max_response_length': 512,
  'data.train_batch_size': 1024,
  'reward_model.enable': False,
  'trainer.total_epochs': 30,
}
"""verl's defaults, for the keys that determine settings of this package and whose defaults may
differ from this package's.
"""

ESTIMATORS: Mapping[str, str] = {
  'grpo': 'grpo',
  'grpo_vectorized': 'grpo',
  'gae': 'ppo',
  'rloo': 'rloo',
  'rloo_vectorized': 'rloo',
  'reinforce_plus_plus': 'reinforce_plus_plus',
  'reinforce_plus_plus_baseline': 'reinforce_plus_plus_baseline',
}
"""This package's algorithms, keyed by verl's advantage estimator."""
LOSSES: Mapping[str, str] = {
  'vanilla': 'clip',
  'gspo': 'gspo',
  'cispo': 'cispo',
  'sapo': 'sapo',
}
"""Names of this package's surrogates, keyed by verl's loss mode."""
_ESTIMATES = {
  **dict.fromkeys(('kl', 'k1'), 'k1'),
  **dict.fromkeys(('mse', 'k2'), 'k2'),
  **dict.fromkeys(('low_var_kl', 'k3'), 'k3'),
}
ENGINES: Mapping[str, str] = {'vllm': 'vllm', 'hf': 'embedded'}
_SCHEDULES = {'constant': 'constant', 'cosine': 'cosine'}
_DTYPES = {
  **dict.fromkeys(('bfloat16', 'bf16'), 'bfloat16'),
  **dict.fromkeys(('float32', 'fp32'), 'float32'),
}

_PACKED = NotNeeded('micro-batches are made by packing; learner.chunks_per_rank limits their size')
_COMPILED = NotNeeded('XLA compiles and fuses every program')
_RAY = NotNeeded('Ray is not used; jaxrl launch starts the processes of a job')
_PROFILED = NotNeeded(
  'a run always records its timeline, see report.html; logging.profile_steps traces steps with '
  'jax.profiler'
)
_ONE_MESH = NotNeeded('learner.mesh shards policy, reference and critic alike')
_MEGATRON = NotNeeded('an option of Megatron')
_VLLM = NotNeeded("an internal option of verl's engine")
_ROWS = NotNeeded("rows in verl's format are read directly")
_NO_CRITIC = NotNeeded('only PPO (adv_estimator=gae) has a critic')
_NO_IMAGES = NotSupported('policies read text only')
_NO_TURNS = NotSupported('multi-turn rollouts and tools need a workflow: rollout.workflow')
_NO_REWARD_MODEL = NotSupported(
  'set reward_model.init_from and use the scorer reward_model; or serve the model and use the '
  'scorer http; or use the scorer judge'
)
_NO_CODE = NotSupported('code in a checkpoint is never run')
_NO_FILTER = NotSupported('training needs samples from the whole distribution')


def _if_used(row: Row) -> Choice:
  """Returns the table row of a key that is treated like `row`, but only if a reward model is
  enabled.
  """
  return Choice({True: row}, NotNeeded('reward_model.enable is off'), of='reward_model.enable')


def _for_critic(row: Row) -> Choice:
  return Choice({'gae': row}, _NO_CRITIC, of='algorithm.adv_estimator')


def _off(row: Row, why: str = 'always off') -> Choice:
  """Returns the table row of a key that is not needed if its value is false, for the reason `why`.
  Other values are treated like `row`.
  """
  return Choice({False: NotNeeded(why)}, row)


_ACTOR: Table = {
  'optim.lr': Mapped('stages.NAME.optimizer.peak_lr', number),
  'optim.lr_warmup_steps': Mapped('stages.NAME.optimizer.warmup_steps'),
  'optim.lr_warmup_steps_ratio': Mapped('stages.NAME.optimizer.warmup_steps'),
  'optim.lr_scheduler_type': Mapped('stages.NAME.optimizer.schedule', one_of(_SCHEDULES)),
  'optim.warmup_style': Mapped('stages.NAME.optimizer.schedule', one_of(_SCHEDULES)),
  'optim.lr_decay_style': Mapped('stages.NAME.optimizer.schedule', one_of(_SCHEDULES)),
  'optim.lr_decay_steps': NotSupported('a learning-rate schedule ends with its stage'),
  'optim.min_lr_ratio': Mapped('stages.NAME.optimizer.end_lr_fraction', number),
  'optim.min_lr': NotSupported('set stages.NAME.optimizer.end_lr_fraction, a fraction of the peak'),
  'optim.weight_decay': Mapped('stages.NAME.optimizer.weight_decay', number),
  'optim.betas': Mapped('stages.NAME.optimizer.b1, stages.NAME.optimizer.b2'),
  'optim.clip_grad': Mapped('stages.NAME.optimizer.max_grad_norm', number),
  'optim.total_training_steps': NotNeeded(
    'the number of updates follows from the length of the stage'
  ),
  'optim.optimizer': Choice(
    {'AdamW': NotNeeded('the only optimizer'), 'adam': NotNeeded('AdamW is used')},
    NotSupported('the optimizer is AdamW'),
  ),
  'optim.override_optimizer_config.*': NotNeeded("an option of PyTorch's or Megatron's optimizer"),
  'grad_clip': Mapped('stages.NAME.optimizer.max_grad_norm', number),
  'ppo_mini_batch_size': Mapped('stages.NAME.minibatches'),
  'ppo_epochs': Mapped('stages.NAME.epochs', integer),
  'ppo_micro_batch_size': _PACKED,
  'ppo_micro_batch_size_per_gpu': Mapped('learner.chunks_per_rank'),
  'ppo_max_token_len_per_gpu': Mapped('learner.chunks_per_rank'),
  'use_dynamic_bsz': NotNeeded('sequences are always packed'),
  'clip_ratio': Mapped('clip_ratio_low, clip_ratio_high'),
  'clip_ratio_low': Mapped('clip_ratio_low'),
  'clip_ratio_high': Mapped('clip_ratio_high'),
  'clip_ratio_c': Choice(
    {'vanilla': Mapped('clip_ratio_c', number)},
    NotNeeded('this loss has no dual clip'),
    of='actor_rollout_ref.actor.policy_loss.loss_mode',
  ),
  'loss_agg_mode': Mapped(
    'loss_agg_mode',
    one_of(
      {
        mode: mode
        for mode in (
          *('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean'),
          'seq-mean-token-sum-norm',
        )
      }
    ),
  ),
  'loss_scale_factor': Mapped('loss_scale_factor', number),
  'policy_loss.loss_mode': Mapped('stages.NAME.algorithm.name, policy_loss'),
  'policy_loss.*': NotSupported('an option of a loss that this package does not have'),
  'tau_pos': Choice(
    {'sapo': Mapped('tau_pos', number)},
    NotNeeded('used only by SAPO'),
    of='actor_rollout_ref.actor.policy_loss.loss_mode',
  ),
  'tau_neg': Choice(
    {'sapo': Mapped('tau_neg', number)},
    NotNeeded('used only by SAPO'),
    of='actor_rollout_ref.actor.policy_loss.loss_mode',
  ),
  'entropy_coeff': Mapped('entropy_coeff', number),
  'use_kl_loss': Choice({True: Mapped('kl_loss_coef')}, NotNeeded('the default has no KL term')),
  'kl_loss_coef': Choice(
    {True: Mapped('kl_loss_coef', number)},
    NotNeeded('use_kl_loss is off'),
    of='actor_rollout_ref.actor.use_kl_loss',
  ),
  'kl_loss_type': Choice(
    {True: Mapped('kl_loss_type', one_of(_ESTIMATES))},
    NotNeeded('use_kl_loss is off'),
    of='actor_rollout_ref.actor.use_kl_loss',
  ),
  'tis_imp_ratio_cap': Mapped('rollout_is, rollout_is_threshold'),
  'shuffle': NotNeeded('sequences are dealt to minibatches by a seeded permutation'),
  'data_loader_seed': NotNeeded('`seed` determines every order'),
  'ulysses_sequence_parallel_size': Mapped('learner.mesh.sequence', integer),
  'fsdp_config.ulysses_sequence_parallel_size': Mapped('learner.mesh.sequence', integer),
  'megatron.context_parallel_size': Mapped('learner.mesh.sequence', integer),
  'megatron.tensor_model_parallel_size': Mapped('learner.mesh.tensor', integer),
  'megatron.pipeline_model_parallel_size': Choice(
    {1: NotNeeded('the pipeline has one stage')},
    NotSupported('pipeline parallelism is not supported; shard with learner.mesh.fsdp'),
  ),
  'megatron.expert_model_parallel_size': Choice(
    {1: NotNeeded('experts are not sharded')},
    NotSupported('mixture-of-experts models are not supported'),
  ),
  'megatron.param_offload': _off(NotSupported('parameters always stay on the devices')),
  'megatron.optimizer_offload': Mapped('stages.NAME.optimizer.offload', boolean),
  'megatron.grad_offload': NotNeeded('gradients exist only during an update'),
  'megatron.seed': NotNeeded('`seed` determines every order'),
  'megatron.*': _MEGATRON,
  'fsdp_config.fsdp_size': Mapped('learner.mesh.fsdp'),
  'fsdp_config.param_offload': _off(NotSupported('parameters always stay on the devices')),
  'fsdp_config.optimizer_offload': Mapped('stages.NAME.optimizer.offload', boolean),
  'fsdp_config.offload_policy': _off(NotSupported('parameters always stay on the devices')),
  'fsdp_config.model_dtype': Mapped('policy.param_dtype', one_of(_DTYPES)),
  'fsdp_config.dtype': Mapped('policy.dtype', one_of(_DTYPES)),
  'fsdp_config.*': _ONE_MESH,
  'strategy': _ONE_MESH,
  'freeze_vision_tower': _off(_NO_IMAGES),
  'checkpoint.*': NotNeeded('a commit contains everything that resuming needs'),
  'use_torch_compile': _COMPILED,
  'use_fused_kernels': _COMPILED,
  'use_remove_padding': NotNeeded('sequences are always packed'),
  'entropy_checkpointing': NotNeeded('logits are computed in chunks of tokens'),
  'entropy_from_logits_with_chunking': NotNeeded('logits are computed in chunks of tokens'),
  'calculate_entropy': NotNeeded('the entropy is always measured'),
  'router_replay.*': NotSupported('mixture-of-experts models are not supported'),
  'profiler.*': _PROFILED,
}

_ROLLOUT: Table = {
  'name': Mapped('rollout.engine'),
  'n': Mapped('stages.NAME.source.group_size', integer),
  'temperature': Mapped('stages.NAME.source.temperature', number),
  'top_p': Choice({1: NotNeeded('the only value')}, _NO_FILTER),
  'top_k': Choice({-1: NotNeeded('always off'), 0: NotNeeded('always off')}, _NO_FILTER),
  'do_sample': Choice({True: NotNeeded('always on')}, NotSupported('training needs sampling')),
  'tensor_model_parallel_size': Mapped('rollout.vllm.args.tensor_parallel_size', integer),
  'pipeline_model_parallel_size': Mapped('rollout.vllm.args.pipeline_parallel_size', integer),
  'data_parallel_size': NotNeeded('rollout.vllm.servers sets the number of servers'),
  'expert_parallel_size': Choice(
    {1: NotNeeded('experts are not sharded')},
    NotSupported('mixture-of-experts models are not supported'),
  ),
  'gpu_memory_utilization': Mapped('rollout.vllm.args.gpu_memory_utilization', number),
  'max_num_batched_tokens': Mapped('rollout.vllm.args.max_num_batched_tokens', integer),
  'max_num_seqs': Mapped('rollout.vllm.args.max_num_seqs', integer),
  'max_model_len': Mapped('rollout.vllm.args.max_model_len', integer),
  'enable_chunked_prefill': Mapped('rollout.vllm.args.enable_chunked_prefill', boolean),
  'enable_prefix_caching': Mapped('rollout.vllm.args.enable_prefix_caching', boolean),
  'enforce_eager': Mapped('rollout.vllm.args.enforce_eager', boolean),
  'quantization': Mapped('rollout.vllm.args.quantization', text),
  'engine_kwargs.vllm.*': Mapped('rollout.vllm.args.*', any_value),
  'engine_kwargs.*': NotSupported('the engines are embedded and vllm'),
  'dtype': Mapped('rollout.vllm.dtype', one_of(_DTYPES)),
  'prompt_length': NotNeeded('rollout.max_prompt_length is set by data.max_prompt_length'),
  'response_length': NotNeeded('rollout.max_response_length is set by data.max_response_length'),
  'ignore_eos': _off(NotSupported('a response always ends at the end token')),
  'mode': NotNeeded('requests are always asynchronous'),
  'calculate_log_probs': NotNeeded('engines always return logprobs'),
  'val_kwargs.n': Mapped('evaluation.NAME.samples'),
  'val_kwargs.do_sample': Mapped('evaluation.NAME.samples'),
  'val_kwargs.temperature': Mapped('evaluation.NAME.temperature'),
  'val_kwargs.top_p': Mapped('evaluation.NAME.top_p'),
  'val_kwargs.top_k': Mapped('evaluation.NAME.top_k'),
  'multi_turn.format': NotNeeded("the model's own chat template is used"),
  'multi_turn.*': _NO_TURNS,
  'agent.num_workers': NotNeeded('rollout.explorers sets the number of processes'),
  'agent.*': _NO_TURNS,
  'over_sample_rate': Choice(
    {0: NotNeeded('always 0')}, NotSupported('groups are never cut short')
  ),
  'skip_rollout': _off(NotSupported('jaxrl replay repeats an update from stored rollouts')),
  'enable_rollout_routing_replay': _off(
    NotSupported('mixture-of-experts models are not supported')
  ),
  'log_prob_micro_batch_size': _PACKED,
  'log_prob_micro_batch_size_per_gpu': _PACKED,
  'log_prob_use_dynamic_bsz': _PACKED,
  'log_prob_max_token_len_per_gpu': _PACKED,
  'profiler.*': _PROFILED,
  'trace.*': NotNeeded('every rollout is stored; report.html shows rollouts'),
  'free_cache_engine': _VLLM,
  'layered_summon': _VLLM,
  'load_format': _VLLM,
  'multi_stage_wake_up': _VLLM,
  'disable_log_stats': _VLLM,
  'skip_tokenizer_init': _VLLM,
  'checkpoint_engine.*': _VLLM,
  'prometheus.*': _VLLM,
  'logprobs_mode': _VLLM,
  'scheduling_policy': _VLLM,
  'cudagraph_capture_sizes': _VLLM,
}

_MODEL: Table = {
  'path': Mapped('policy.init_from'),
  'torch_dtype': Mapped('policy.dtype', one_of(_DTYPES)),
  'enable_gradient_checkpointing': Mapped('policy.remat', one_of({True: 'full', False: 'none'})),
  'enable_activation_offload': Choice(
    {False: NotNeeded('the default')}, Mapped('policy.remat', one_of({True: 'offload'}))
  ),
  'lora_rank': Mapped('policy.lora.rank'),
  'lora.rank': Mapped('policy.lora.rank'),
  'lora_alpha': Mapped('policy.lora.alpha'),
  'lora.alpha': Mapped('policy.lora.alpha'),
  'target_modules': Mapped('policy.lora.targets'),
  'exclude_modules': NotSupported('list the projections in policy.lora.targets'),
  'lora_adapter_path': NotSupported('merge the adapter into the checkpoint first'),
  'lora.*': NotSupported('an option of LoRA that this package does not have'),
  'override_config.*': NotSupported("the checkpoint's own config.json decides"),
  'tokenizer_path': NotSupported("the checkpoint's tokenizer is always used"),
  'custom_chat_template': NotSupported("the checkpoint's chat template is always used"),
  'external_lib': NotSupported('model families are built in'),
  'trust_remote_code': _off(_NO_CODE),
  'use_remove_padding': NotNeeded('sequences are always packed'),
  'use_fused_kernels': _COMPILED,
  'fused_kernel_options.*': _COMPILED,
  'use_liger': _COMPILED,
  'tiled_mlp.*': _COMPILED,
  'use_shm': NotNeeded('checkpoints are read in place'),
  'mtp.*': NotSupported('multi-token prediction is not supported'),
}

_CRITIC: Table = {
  'optim.lr': Mapped('stages.NAME.critic.optimizer.peak_lr', number),
  'optim.weight_decay': Mapped('stages.NAME.critic.optimizer.weight_decay', number),
  'optim.clip_grad': Mapped('stages.NAME.critic.optimizer.max_grad_norm', number),
  'optim.lr_warmup_steps': Mapped('stages.NAME.critic.optimizer.warmup_steps'),
  'optim.lr_warmup_steps_ratio': Mapped('stages.NAME.critic.optimizer.warmup_steps'),
  'optim.lr_scheduler_type': Mapped('stages.NAME.critic.optimizer.schedule', one_of(_SCHEDULES)),
  'optim.warmup_style': Mapped('stages.NAME.critic.optimizer.schedule', one_of(_SCHEDULES)),
  'grad_clip': Mapped('stages.NAME.critic.optimizer.max_grad_norm', number),
  'model.path': Mapped('stages.NAME.critic.init_from'),
  'model.fsdp_config.optimizer_offload': Mapped('stages.NAME.critic.optimizer.offload', boolean),
  'fsdp.optimizer_offload': Mapped('stages.NAME.critic.optimizer.offload', boolean),
  'model.fsdp_config.param_offload': _off(NotSupported('parameters always stay on the devices')),
  'fsdp.param_offload': _off(NotSupported('parameters always stay on the devices')),
  'model.enable_gradient_checkpointing': NotNeeded('policy.remat applies to the critic too'),
  'model.trust_remote_code': _off(_NO_CODE),
  'cliprange_value': Mapped('cliprange_value', number),
  'loss_agg_mode': Choice(
    {'token-mean': NotNeeded('the only mode')}, NotSupported("the critic's loss is a token-mean")
  ),
  'ppo_epochs': NotNeeded('stages.NAME.epochs applies to the critic too'),
  'ppo_mini_batch_size': NotNeeded('stages.NAME.minibatches applies to the critic too'),
  '*': NotNeeded("the policy's setting applies to the critic too"),
}

TABLE: Table = {
  'data.train_files': Mapped('tasksets, stages.NAME.source.tasksets'),
  'data.val_files': Mapped('tasksets, evaluation'),
  'data.train_max_samples': Mapped('tasksets.NAME.size'),
  'data.val_max_samples': Mapped('evaluation.NAME.tasks'),
  'data.train_batch_size': Mapped('stages.NAME.source.groups_per_batch', integer),
  'data.gen_batch_size': NotNeeded('dropped groups are replaced automatically'),
  'data.val_batch_size': NotNeeded('an evaluation always runs its whole suite'),
  'data.max_prompt_length': Mapped('rollout.max_prompt_length', integer),
  'data.max_response_length': Mapped('rollout.max_response_length', integer),
  'data.shuffle': Choice(
    {True: NotNeeded('the default')},
    Mapped('stages.NAME.source.sampler.order', one_of({False: 'sequential'})),
  ),
  'data.seed': Mapped('seed', integer),
  'data.filter_overlong_prompts': Choice(
    {True: NotNeeded('prompts that are too long are always skipped and counted')},
    NotSupported('prompts that are too long are always skipped and counted'),
  ),
  'data.truncation': Choice(
    {'error': NotNeeded('prompts that are too long are always skipped and counted')},
    NotSupported('prompts are never truncated; those that are too long are skipped and counted'),
  ),
  'data.prompt_key': Choice(
    {'prompt': _ROWS}, NotSupported('name the column `prompt`, or set tasksets.NAME.prompt')
  ),
  'data.reward_fn_key': Choice(
    {'data_source': _ROWS}, NotSupported('name the column `data_source`')
  ),
  'data.image_key': Choice({'images': _ROWS}, _NO_IMAGES),
  'data.video_key': Choice({'videos': _ROWS}, _NO_IMAGES),
  'data.trust_remote_code': _off(_NO_CODE),
  'data.custom_cls.*': NotSupported('write the rows of the custom dataset to a file'),
  'data.sampler.*': NotSupported('set the order of tasks in stages.NAME.source.sampler'),
  'data.datagen.*': NotSupported('for procedural tasks, use the source reasoning_gym:NAME'),
  'data.apply_chat_template_kwargs.*': NotSupported(
    'rollouts set no variables of the chat template'
  ),
  'data.tokenizer': NotSupported("the checkpoint's tokenizer is always used"),
  'data.tool_config_path': _NO_TURNS,
  'data.*': NotNeeded("an option of verl's data loading"),
  **{f'actor_rollout_ref.actor.{key}': row for key, row in _ACTOR.items()},
  **{f'actor_rollout_ref.rollout.{key}': row for key, row in _ROLLOUT.items()},
  **{f'actor_rollout_ref.model.{key}': row for key, row in _MODEL.items()},
  'actor_rollout_ref.ref.*': NotNeeded('the reference is a copy of the policy, on the same mesh'),
  'actor_rollout_ref.hybrid_engine': NotNeeded('determined by rollout.engine'),
  'actor_rollout_ref.nccl_timeout': NotNeeded('coordination has its own deadlines'),
  'algorithm.adv_estimator': Mapped('stages.NAME.algorithm.name'),
  'algorithm.norm_adv_by_std_in_grpo': Mapped('norm_adv_by_std', boolean),
  'algorithm.gamma': Mapped('gamma', number),
  'algorithm.lam': Mapped('lam', number),
  'algorithm.use_kl_in_reward': Choice(
    {True: Mapped('kl_reward_coef')}, NotNeeded('the default has no KL term')
  ),
  'algorithm.kl_penalty': Choice(
    {True: Mapped('kl_reward_type', one_of(_ESTIMATES))},
    NotNeeded('use_kl_in_reward is off'),
    of='algorithm.use_kl_in_reward',
  ),
  'algorithm.kl_ctrl.kl_coef': Choice(
    {True: Mapped('kl_reward_coef', number)},
    NotNeeded('use_kl_in_reward is off'),
    of='algorithm.use_kl_in_reward',
  ),
  'algorithm.kl_ctrl.type': Choice(
    {'adaptive': Mapped('kl_target, kl_horizon')},
    NotNeeded('the default is a constant coefficient'),
  ),
  'algorithm.kl_ctrl.target_kl': Choice(
    {'adaptive': Mapped('kl_target', number)},
    NotNeeded('kl_ctrl.type is fixed'),
    of='algorithm.kl_ctrl.type',
  ),
  'algorithm.kl_ctrl.horizon': Choice(
    {'adaptive': Mapped('kl_horizon', number)},
    NotNeeded('kl_ctrl.type is fixed'),
    of='algorithm.kl_ctrl.type',
  ),
  'algorithm.filter_groups.enable': Mapped(
    'stages.NAME.source.selection.kind', one_of({True: 'mixed', False: 'all'})
  ),
  'algorithm.filter_groups.metric': NotNeeded('groups are selected by their rewards'),
  'algorithm.filter_groups.max_num_gen_batches': NotSupported(
    'set the limit in groups: stages.NAME.source.max_dropped_groups'
  ),
  'algorithm.rollout_correction.rollout_is': Mapped('rollout_is'),
  'algorithm.rollout_correction.rollout_is_threshold': Mapped(
    'rollout_is_threshold, rollout_is_lower'
  ),
  'algorithm.rollout_correction.rollout_is_batch_normalize': _off(
    NotSupported('importance weights are not divided by their mean')
  ),
  'algorithm.rollout_correction.bypass_mode': Mapped('bypass_old_logprobs', boolean),
  'algorithm.rollout_correction.loss_type': Choice(
    {'ppo_clip': NotNeeded('the default')},
    NotSupported("see docs/reference/equality.md: policy_loss='cispo'"),
  ),
  'algorithm.rollout_correction.*': NotSupported(
    'for rejection sampling, set rollout_rs_low and rollout_rs_high'
  ),
  'algorithm.*': NotSupported('an option of an algorithm that this package does not have'),
  **{f'critic.{key}': _for_critic(row) for key, row in _CRITIC.items()},
  'trainer.critic_warmup': _for_critic(Mapped('critic_warmup', integer)),
  'custom_reward_function.path': Mapped('rewards.scorers'),
  'custom_reward_function.name': Mapped('rewards.scorers'),
  'custom_reward_function.reward_kwargs.*': Mapped('rewards.scorers'),
  'reward_model.enable': _off(_NO_REWARD_MODEL, 'off by default'),
  'reward_model.reward_manager': Choice(
    {
      name: NotNeeded('scorers replace reward managers; they may receive whole groups')
      for name in ('naive', 'dapo', 'prime', 'batch')
    },
    NotSupported('write a custom reward manager as a scorer: rewards.scorers'),
  ),
  'reward_model.reward_kwargs.overlong_buffer_cfg.enable': Choice(
    {True: Mapped('overlong_buffer_len')}, NotNeeded('the default has no penalty')
  ),
  'reward_model.reward_kwargs.overlong_buffer_cfg.len': Choice(
    {True: Mapped('overlong_buffer_len', integer)},
    NotNeeded('overlong_buffer_cfg.enable is off'),
    of='reward_model.reward_kwargs.overlong_buffer_cfg.enable',
  ),
  'reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor': Choice(
    {True: Mapped('overlong_penalty_factor', number)},
    NotNeeded('overlong_buffer_cfg.enable is off'),
    of='reward_model.reward_kwargs.overlong_buffer_cfg.enable',
  ),
  'reward_model.reward_kwargs.overlong_buffer_cfg.log': NotNeeded(
    'critic/score and critic/rewards show the penalty'
  ),
  'reward_model.reward_kwargs.max_resp_len': NotNeeded('rollout.max_response_length is used'),
  'reward_model.reward_kwargs.*': NotSupported('set options of scorers in rewards.scorers'),
  'reward_model.sandbox_fusion.*': NotSupported(
    'use the scorer code, which runs programs in a sandbox'
  ),
  'reward_model.launch_reward_fn_async': NotNeeded('scorers always run during generation'),
  'reward_model.use_reward_loop': NotNeeded('scorers always run during generation'),
  'reward_model.num_workers': Mapped('rewards.workers', integer),
  'reward_model.*': _if_used(_NO_REWARD_MODEL),
  'reward_manager.*': NotNeeded('scorers replace reward managers; they may receive whole groups'),
  'trainer.experiment_name': Mapped('name'),
  'trainer.project_name': Mapped('logging.wandb.project'),
  'trainer.logger': Mapped('logging.wandb.project'),
  'trainer.total_epochs': Mapped('stages.NAME.steps'),
  'trainer.total_training_steps': Mapped('stages.NAME.steps'),
  'trainer.test_freq': Mapped('stages.NAME.evaluate_every', unless(-1, integer)),
  'trainer.save_freq': Mapped('checkpoint.every_steps', unless(-1, integer)),
  'trainer.max_actor_ckpt_to_keep': Mapped('checkpoint.keep', integer),
  'trainer.max_ckpt_to_keep': Mapped('checkpoint.keep', integer),
  'trainer.max_critic_ckpt_to_keep': NotNeeded('a commit contains the critic too'),
  'trainer.val_before_train': _off(
    NotSupported('evaluate the initial policy with jaxrl evaluate'),
    'evaluations run only after training steps',
  ),
  'trainer.val_only': _off(NotSupported('use jaxrl evaluate')),
  'trainer.resume_mode': NotNeeded('the same command resumes the run'),
  'trainer.resume_from_path': NotSupported(
    'the same command with the same --workdir resumes the run'
  ),
  'trainer.default_local_dir': NotNeeded('pass --workdir=DIR to jaxrl train'),
  'trainer.default_hdfs_dir': NotSupported('runs are written to a directory'),
  'trainer.rollout_data_dir': NotNeeded(
    "rollouts are written to the run's rollouts/ (logging.transcript_tokens)"
  ),
  'trainer.validation_data_dir': NotNeeded("all answers are written to the run's evals/"),
  'trainer.log_val_generations': NotNeeded('report.html shows them'),
  'trainer.n_gpus_per_node': NotNeeded('the mesh uses all devices of the job'),
  'trainer.nnodes': NotNeeded('jaxrl launch starts a job on several machines'),
  'trainer.device': NotNeeded('JAX finds its devices'),
  'trainer.balance_batch': NotNeeded('batches are always balanced over ranks'),
  'trainer.use_legacy_worker_impl': NotNeeded("an option of verl's own classes"),
  'trainer.*': NotNeeded("an option of verl's own loop"),
  'ray_kwargs.*': _RAY,
  'ray_init.*': _RAY,
  'transfer_queue.*': _RAY,
  '--config-path': NotNeeded('an option of Hydra'),
  '--config-name': Choice(
    {
      name: NotNeeded("the importer knows verl's defaults")
      for name in (
        *('ppo_trainer', 'ppo_trainer.yaml'),
        *('ppo_megatron_trainer', 'ppo_megatron_trainer.yaml'),
      )
    },
    NotSupported('import that YAML file too, and merge the two configurations by hand'),
  ),
  'hydra.*': NotNeeded('an option of Hydra'),
  'hydra': NotNeeded('an option of Hydra'),
  'defaults': NotNeeded("a list of files for Hydra; the importer knows verl's defaults"),
  'global_profiler.*': _PROFILED,
  '*._target_': NotNeeded('the name of a verl class'),
}
"""Table of verl's keys."""
