"""Tables of TRL's arguments, one for each trainer: their defaults, and their counterparts in this
package.

Sources: the documentation of TRL's configurations and of transformers' TrainingArguments, TRL 0.20
to 1.16. docs/reference/equality.md lists the losses of TRL that are equal to this package's.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl_llm.app.importers.draft import lora_targets
from jaxrl_llm.app.importers.table import (
  Choice,
  Mapped,
  NotNeeded,
  NotSupported,
  Row,
  Table,
  boolean,
  integer,
  number,
  one_of,
  text,
)
from jaxrl_llm.core.types import Json

TRAINERS = ('sft', 'dpo', 'reward', 'grpo', 'rloo')
"""Trainers whose arguments can be imported."""

_DTYPES = {
  **dict.fromkeys(('bfloat16', 'torch.bfloat16'), 'bfloat16'),
  **dict.fromkeys(('float32', 'torch.float32'), 'float32'),
}
_SCHEDULES = {
  'linear': 'linear',
  'cosine': 'cosine',
  'constant': 'constant',
  'constant_with_warmup': 'constant',
}
LOSSES: Mapping[str, Mapping[str, Json]] = {
  'grpo': {'loss_agg_mode': 'seq-mean-token-mean'},
  'bnpo': {'loss_agg_mode': 'token-mean'},
  'dapo': {'loss_agg_mode': 'token-mean'},
  'dr_grpo': {'loss_agg_mode': 'seq-mean-token-sum-norm'},
  'cispo': {'loss_agg_mode': 'token-mean', 'clip_ratio_low': 1.0},
  'sapo': {'loss_agg_mode': 'seq-mean-token-mean'},
}
"""Options of this package's algorithms, keyed by TRL's loss type."""
CORRECTIONS: Mapping[str, Mapping[str, Json]] = {
  'token_truncate': {'rollout_is': 'token'},
  'token_mask': {'rollout_is': 'icepop', 'rollout_is_lower': 0.0},
  'sequence_truncate': {'rollout_is': 'sequence'},
}
"""Options of this package's algorithms, keyed by TRL's mode of importance sampling."""
REWARDS: Mapping[str, Mapping[str, Json]] = {
  'accuracy_reward': {'name': 'answer'},
  'reasoning_accuracy_reward': {'name': 'answer'},
  'think_format_reward': {
    'name': 'format',
    'options': {'template': '<think>{think}</think>{answer}'},
  },
  'get_soft_overlong_punishment': {
    'name': 'overlong',
    'options': {'max_length': 1280, 'buffer': 256},
  },
}
"""This package's scorers, keyed by the name of TRL's reward function."""

_RUN = NotNeeded('pass --workdir=DIR to jaxrl train; the same command resumes the run')
_LOGGED = NotNeeded('metrics.jsonl, TensorBoard files and report.html are written by default')
_LAUNCHED = NotNeeded(
  'learner.mesh sets the sharding; jaxrl launch starts jobs on several machines'
)
_LOADED = NotNeeded('rows are read directly and kept in memory')
_GENERATION = NotSupported('training needs samples from the whole distribution')
_QUANTISED = NotSupported('weights are float32 or bfloat16')
_NO_ADAPTER = NotSupported('an option of LoRA that this package does not have')
_NO_CODE = NotSupported('code in a checkpoint is never run')
_TEMPLATE = NotSupported("the checkpoint's tokenizer and chat template are always used")
_PADDED = NotNeeded('sequences are packed into chunks of fixed shapes')
_PACKED = NotNeeded('sequences are always packed, and never attend to each other')


def _off(row: Row, why: str = 'always off') -> Choice:
  return Choice({False: NotNeeded(why)}, row)


def _with_vllm(row: Row) -> Choice:
  return Choice({True: row}, NotNeeded('use_vllm is off'), of='use_vllm')


def _with_lora(row: Row) -> Choice:
  return Choice({True: row}, NotNeeded('use_peft is off'), of='use_peft')


COMMON: Table = {
  'model_name_or_path': Mapped('policy.init_from', text),
  'model_revision': Choice(
    {'main': NotNeeded('the default')},
    NotSupported('download that revision, and name its directory in policy.init_from'),
  ),
  'dtype': Mapped('policy.dtype', one_of(_DTYPES)),
  'torch_dtype': Mapped('policy.dtype', one_of(_DTYPES)),
  'bf16': Mapped('policy.dtype', one_of({True: 'bfloat16', False: 'float32'})),
  'fp16': _off(NotSupported('activations are float32 or bfloat16')),
  'tf32': NotNeeded('XLA chooses the precision of matrix products'),
  'bf16_full_eval': NotNeeded('evaluations use policy.dtype'),
  'attn_implementation': NotNeeded('policy.attention chooses by platform and length'),
  'model_init_kwargs': NotSupported('set options of the model in policy.*'),
  'trust_remote_code': _off(_NO_CODE),
  'gradient_checkpointing': Mapped('policy.remat', one_of({True: 'full', False: 'none'})),
  'gradient_checkpointing_kwargs': NotNeeded('an option of PyTorch'),
  'activation_offloading': Choice(
    {False: NotNeeded('the default')}, Mapped('policy.remat', one_of({True: 'offload'}))
  ),
  'use_peft': Mapped('policy.lora'),
  'lora_r': _with_lora(Mapped('policy.lora.rank', integer)),
  'lora_alpha': _with_lora(Mapped('policy.lora.alpha', integer)),
  'lora_target_modules': _with_lora(Mapped('policy.lora.targets', lora_targets)),
  'lora_dropout': Choice({0: NotNeeded('always 0')}, NotSupported('adapters have no dropout')),
  'lora_task_type': NotNeeded('determined by the algorithm'),
  'lora_bias': Choice({'none': NotNeeded('the only value')}, _NO_ADAPTER),
  'lora_*': _NO_ADAPTER,
  'use_rslora': _off(_NO_ADAPTER),
  'use_dora': _off(_NO_ADAPTER),
  'load_in_4bit': _off(_QUANTISED),
  'load_in_8bit': _off(_QUANTISED),
  'bnb_4bit_*': NotNeeded('weights are not quantised'),
  'use_bnb_nested_quant': NotNeeded('weights are not quantised'),
  'dataset_name': Mapped('tasksets, examples, preferences'),
  'dataset_config': Mapped('tasksets.NAME.options'),
  'dataset_train_split': Mapped('tasksets.NAME.source'),
  'dataset_test_split': Mapped('tasksets.NAME.source'),
  'eval_dataset': Mapped('tasksets.NAME.source'),
  'load_dataset.*': _LOADED,
  'dataset_streaming': _LOADED,
  'datasets': Mapped('tasksets, examples, preferences'),
  'streaming': _LOADED,
  'test_split_size': NotSupported('set the holdout and split of the source'),
  'dataset_num_proc': _LOADED,
  'dataset_kwargs': _LOADED,
  'ignore_bias_buffers': NotNeeded('an option of DistributedDataParallel'),
  'output_dir': _RUN,
  'overwrite_output_dir': _RUN,
  'resume_from_checkpoint': _RUN,
  'run_name': Mapped('name'),
  'do_train': NotNeeded('use jaxrl train'),
  'do_eval': NotNeeded('determined by stages.NAME.evaluate_every'),
  'do_predict': NotNeeded('use jaxrl evaluate'),
  'per_device_train_batch_size': Mapped('stages.NAME.source'),
  'gradient_accumulation_steps': Mapped('stages.NAME.source'),
  'per_device_eval_batch_size': NotNeeded('an evaluation determines its own batches'),
  'eval_accumulation_steps': NotNeeded('an evaluation determines its own batches'),
  'auto_find_batch_size': NotNeeded(
    'jaxrl train --dry_run prints the memory that each program needs'
  ),
  'num_train_epochs': Mapped('stages.NAME.steps'),
  'max_steps': Mapped('stages.NAME.steps'),
  'learning_rate': Mapped('stages.NAME.optimizer.peak_lr', number),
  'lr_scheduler_type': Mapped('stages.NAME.optimizer.schedule', one_of(_SCHEDULES)),
  'lr_scheduler_kwargs': NotSupported('set stages.NAME.optimizer.end_lr_fraction'),
  'warmup_steps': Mapped('stages.NAME.optimizer.warmup_steps'),
  'warmup_ratio': Mapped('stages.NAME.optimizer.warmup_steps'),
  'weight_decay': Mapped('stages.NAME.optimizer.weight_decay', number),
  'adam_beta1': Mapped('stages.NAME.optimizer.b1', number),
  'adam_beta2': Mapped('stages.NAME.optimizer.b2', number),
  'adam_epsilon': Mapped('stages.NAME.optimizer.eps', number),
  'max_grad_norm': Mapped('stages.NAME.optimizer.max_grad_norm', number),
  'optim': Choice(
    {
      name: NotNeeded('AdamW is used')
      for name in ('adamw_torch', 'adamw_torch_fused', 'adamw_hf', 'adamw_apex_fused')
    },
    NotSupported('the optimizer is AdamW'),
  ),
  'optim_args': NotSupported('the optimizer is AdamW'),
  'seed': Mapped('seed', integer),
  'data_seed': NotNeeded('`seed` determines every order'),
  'full_determinism': NotNeeded('runs with the embedded engine are deterministic'),
  'eval_strategy': Mapped('evaluation, stages.NAME.evaluate_every'),
  'eval_steps': Mapped('stages.NAME.evaluate_every'),
  'eval_on_start': _off(NotSupported('evaluate the initial policy with jaxrl evaluate')),
  'save_steps': Mapped('checkpoint.every_steps'),
  'save_strategy': NotNeeded(
    'commits are always written: checkpoint.every_steps, checkpoint.every_minutes'
  ),
  'save_total_limit': Mapped('checkpoint.keep', integer),
  'load_best_model_at_end': NotNeeded('the commit with the best evaluation is kept'),
  'metric_for_best_model': NotNeeded(
    'the accuracy of the first evaluation suite determines the best commit'
  ),
  'greater_is_better': NotNeeded(
    'the accuracy of the first evaluation suite determines the best commit'
  ),
  'save_*': NotNeeded('a commit contains everything that resuming needs'),
  'logging_*': _LOGGED,
  'log_*': _LOGGED,
  'report_to': Mapped('logging.wandb'),
  'project': _LOGGED,
  'trackio_space_id': _LOGGED,
  'disable_tqdm': _LOGGED,
  'num_completions_to_print': NotNeeded('report.html shows rollouts'),
  'push_to_hub': _off(NotSupported('run jaxrl convert --push_to_hub=USER/NAME after the run')),
  'hub_*': NotNeeded('see jaxrl convert --push_to_hub'),
  'disable_dropout': NotNeeded('models are trained without dropout'),
  'router_aux_loss_coef': NotNeeded('mixture-of-experts models are not supported'),
  'pad_to_multiple_of': _PADDED,
  'padding_free': _PACKED,
  'pad_token': _PADDED,
  'eos_token': _TEMPLATE,
  'chat_template_path': _TEMPLATE,
  'processing_class': NotNeeded("the checkpoint's tokenizer is used"),
  'use_liger_kernel': NotNeeded('XLA compiles and fuses every program'),
  'torch_compile': NotNeeded('XLA compiles and fuses every program'),
  'torch_compile_*': NotNeeded('XLA compiles and fuses every program'),
  'torch_empty_cache_steps': NotNeeded('XLA allocates memory in advance'),
  'remove_unused_columns': _LOADED,
  'group_by_length': _PACKED,
  'dataloader_*': _LOADED,
  'ddp_*': _LAUNCHED,
  'fsdp': _LAUNCHED,
  'fsdp_*': _LAUNCHED,
  'deepspeed': _LAUNCHED,
  'parallelism_config': _LAUNCHED,
  'accelerator_config': _LAUNCHED,
  'accelerate_config': _LAUNCHED,
  'config_file': _LAUNCHED,
  'num_processes': Mapped('stages.NAME.source'),
  'num_machines': _LAUNCHED,
  'machine_rank': _LAUNCHED,
  'main_process_*': _LAUNCHED,
  'mixed_precision': NotNeeded('determined by policy.dtype'),
  'nproc_per_node': Mapped('stages.NAME.source'),
  'nnodes': _LAUNCHED,
  'env': NotNeeded('set environment variables yourself'),
  'callbacks': NotSupported('callbacks are not supported; see metrics.jsonl and events.jsonl'),
  'compute_metrics': NotSupported('write a metric of answers as a scorer: rewards.scorers'),
  'formatting_func': NotSupported('convert rows to text with the templates of the source'),
}
"""Table of the arguments that all trainers have in common."""

_REFERENCE: Table = {
  'sync_ref_model': Mapped('reference'),
  'ref_model_sync_steps': Mapped('reference'),
  'ref_model_mixup_alpha': Mapped('reference'),
  'ref_model': NotSupported('the reference is the policy at the start of its stage'),
}
_ONLINE: Table = {
  'max_prompt_length': Mapped('rollout.max_prompt_length', integer),
  'max_completion_length': Mapped('rollout.max_response_length', integer),
  'num_generations': Mapped('stages.NAME.source.group_size', integer),
  'num_generations_eval': Mapped('evaluation.NAME.samples'),
  'generation_batch_size': Mapped('stages.NAME.source.groups_per_batch'),
  'steps_per_generation': Mapped('stages.NAME.minibatches'),
  'num_iterations': Mapped('stages.NAME.epochs', integer),
  'reward_funcs': Mapped('rewards.scorers'),
  'reward_weights': Mapped('rewards.scorers'),
  'reward_model_name_or_path': NotSupported(
    'set reward_model.init_from and use the scorer reward_model; or serve the model and use the '
    'scorer http; or use the scorer judge'
  ),
  'reward_processing_classes': NotNeeded('a served reward model has its own tokenizer'),
  'temperature': Mapped('stages.NAME.source.temperature', number),
  'top_p': Choice({1: NotNeeded('the only value')}, _GENERATION),
  'top_k': Choice({0: NotNeeded('always off'), -1: NotNeeded('always off')}, _GENERATION),
  'min_p': _GENERATION,
  'repetition_penalty': Choice({1: NotNeeded('always off')}, _GENERATION),
  'generation_kwargs': _GENERATION,
  'chat_template_kwargs': NotSupported('rollouts set no variables of the chat template'),
  'cache_implementation': NotNeeded('engines keep their own cache'),
  'ds3_gather_for_generation': _LAUNCHED,
  'shuffle_dataset': Choice(
    {True: NotNeeded('the default')},
    Mapped('stages.NAME.source.sampler.order', one_of({False: 'sequential'})),
  ),
  'mask_truncated_completions': Mapped('mask_truncated', boolean),
  'use_vllm': Mapped('rollout.engine', one_of({True: 'vllm', False: 'embedded'})),
  'vllm_gpu_memory_utilization': _with_vllm(
    Mapped('rollout.vllm.args.gpu_memory_utilization', number)
  ),
  'vllm_tensor_parallel_size': _with_vllm(
    Mapped('rollout.vllm.args.tensor_parallel_size', integer)
  ),
  'vllm_max_model_length': _with_vllm(Mapped('rollout.vllm.args.max_model_len', integer)),
  'vllm_structured_outputs_regex': _GENERATION,
  'vllm_guided_decoding_regex': _GENERATION,
  'vllm_mode': NotNeeded('a run starts its own servers, or uses those at rollout.vllm.addresses'),
  'use_transformers_*': NotNeeded('the engines are embedded and vllm'),
  'transformers_*': NotNeeded('the engines are embedded and vllm'),
  'tools': NotSupported('multi-turn rollouts and tools need a workflow: rollout.workflow'),
  'rollout_func': NotSupported('write a custom rollout as a workflow: rollout.workflow'),
  'environment_factory': NotSupported('write an environment as a workflow: rollout.workflow'),
  'max_tool_calling_iterations': NotSupported(
    'multi-turn rollouts and tools need a workflow: rollout.workflow'
  ),
  **_REFERENCE,
}
_LATER: Table = {
  'vllm_*': NotNeeded("an internal option of TRL's engine"),
}
GRPO: Table = {
  **COMMON,
  **_ONLINE,
  'beta': Mapped('kl_loss_coef', number),
  'use_bias_correction_kl': Mapped('kl_unbiased_gradient', boolean),
  'epsilon': Mapped('clip_ratio_low, clip_ratio_high'),
  'epsilon_high': Mapped('clip_ratio_high'),
  'delta': Mapped('clip_ratio_c', number),
  'loss_type': Mapped('loss_agg_mode, policy_loss'),
  'importance_sampling_level': Mapped('policy_loss'),
  'scale_rewards': Mapped('norm_adv_by_std'),
  'multi_objective_aggregation': Choice(
    {'sum_then_normalize': NotNeeded('the only value')},
    NotSupported('scores are always summed before they are normalised'),
  ),
  'sapo_temperature_pos': Choice(
    {'sapo': Mapped('tau_pos', number)}, NotNeeded('used only by SAPO'), of='loss_type'
  ),
  'sapo_temperature_neg': Choice(
    {'sapo': Mapped('tau_neg', number)}, NotNeeded('used only by SAPO'), of='loss_type'
  ),
  'vespo_*': NotNeeded('used only by VESPO'),
  'entropy_coef': Mapped('entropy_coeff', number),
  'use_adaptive_entropy': _off(NotSupported('the entropy coefficient is constant')),
  'entropy_*': NotNeeded('the entropy coefficient is constant'),
  'top_entropy_quantile': Choice(
    {1: NotNeeded('the only value')},
    NotSupported('the loss covers every token'),
  ),
  'off_policy_mask_threshold': Mapped('off_policy_seq_mask', number),
  'vllm_importance_sampling_correction': Mapped('rollout_is'),
  'vllm_importance_sampling_mode': _with_vllm(Mapped('rollout_is')),
  'vllm_importance_sampling_cap': _with_vllm(Mapped('rollout_is_threshold', number)),
  'vllm_importance_sampling_clip_max': _with_vllm(Mapped('rollout_is_threshold', number)),
  'vllm_importance_sampling_clip_min': _with_vllm(Mapped('rollout_is_lower', number)),
  'cast_lm_head_to_fp32': NotNeeded('logits are always float32'),
  **_LATER,
}
RLOO: Table = {
  **COMMON,
  **_ONLINE,
  'beta': NotSupported(
    "RLOO's KL penalty in the reward is not supported; kl_loss_coef adds a KL loss"
  ),
  'epsilon': Mapped('clip_ratio_low, clip_ratio_high'),
  'epsilon_high': Mapped('clip_ratio_high'),
  'normalize_advantages': _off(NotSupported('advantages of RLOO are not normalised')),
  'reward_clip_range': NotSupported('rewards are not clipped'),
  **_LATER,
}
SFT: Table = {
  **COMMON,
  'max_length': Mapped('rollout.max_prompt_length, rollout.max_response_length'),
  'max_seq_length': Mapped('rollout.max_prompt_length, rollout.max_response_length'),
  'packing': _PACKED,
  'packing_strategy': _PACKED,
  'eval_packing': _PACKED,
  'shuffle_dataset': NotNeeded('examples are always shuffled'),
  'truncation_mode': Choice(
    {'keep_start': NotNeeded('the only mode')},
    NotSupported('the start of a row that is too long is kept'),
  ),
  'dataset_text_field': Choice({'text': NotNeeded('the default')}, Mapped('examples.NAME.text')),
  'completion_only_loss': Mapped('examples.NAME.loss_on'),
  'assistant_only_loss': Mapped('examples.NAME.loss_on'),
  'loss_type': Choice(
    {
      'nll': NotNeeded('the only loss'),
      'chunked_nll': NotNeeded('logits are computed in chunks of tokens'),
    },
    NotSupported('the loss is the negative log-likelihood'),
  ),
}
DPO: Table = {
  **COMMON,
  **_REFERENCE,
  'beta': Mapped('beta', number),
  'loss_type': Mapped('loss_type'),
  'loss_weights': NotSupported(
    'DPO has one loss; sft_loss_coef adds the SFT loss of the chosen answers'
  ),
  'rpo_alpha': Mapped('sft_loss_coef', number),
  'label_smoothing': Mapped('label_smoothing', number),
  'max_length': Mapped('rollout.max_prompt_length, rollout.max_response_length'),
  'max_prompt_length': Mapped('rollout.max_prompt_length', integer),
  'max_completion_length': Mapped('rollout.max_response_length', integer),
  'truncation_mode': NotSupported('pairs that are too long are left out and counted'),
  'f_divergence_type': Choice(
    {'reverse_kl': NotNeeded('the only divergence')},
    NotSupported('the divergence is the reverse KL'),
  ),
  'f_alpha_divergence_coef': NotNeeded('the divergence is the reverse KL'),
  'use_weighting': _off(NotSupported('all pairs have the same weight')),
  'ld_alpha': NotSupported('all tokens of an answer have the same weight'),
  'discopop_tau': NotNeeded('used only by DiscoPOP'),
  'precompute_ref_log_probs': NotNeeded('the reference is evaluated with each batch'),
  'precompute_ref_batch_size': NotNeeded('the reference is evaluated with each batch'),
  'model_adapter_name': _NO_ADAPTER,
  'ref_adapter_name': _NO_ADAPTER,
}
REWARD: Table = {
  **COMMON,
  'max_length': Mapped('rollout.max_prompt_length, rollout.max_response_length'),
  'center_rewards_coefficient': Mapped('center_rewards_coefficient', number),
}
TABLES: Mapping[str, Table] = {
  'sft': SFT,
  'dpo': DPO,
  'reward': REWARD,
  'grpo': GRPO,
  'rloo': RLOO,
}
"""Table of arguments for each trainer, keyed by trainer."""

_COMMON_DEFAULTS: Mapping[str, Json] = {
  'adam_beta2': 0.999,
  'bf16': True,
  'dataset_test_split': 'test',
  'dataset_train_split': 'train',
  'gradient_accumulation_steps': 1,
  'gradient_checkpointing': True,
  'lr_scheduler_type': 'linear',
  'max_steps': -1,
  'num_processes': 1,
  'num_train_epochs': 3,
  'per_device_train_batch_size': 8,
  'use_peft': False,
}
_ONLINE_DEFAULTS: Mapping[str, Json] = {
  **_COMMON_DEFAULTS,
  'epsilon': 0.2,
  'max_completion_length': 512,
  'max_prompt_length': 512,
  'use_vllm': False,
}
DEFAULTS: Mapping[str, Mapping[str, Json]] = {
  'sft': {**_COMMON_DEFAULTS, 'learning_rate': 2e-5, 'max_length': 1024},
  'dpo': {**_COMMON_DEFAULTS, 'learning_rate': 1e-6, 'max_length': 1024, 'beta': 0.1},
  'reward': {**_COMMON_DEFAULTS, 'learning_rate': 1e-4, 'max_length': 1024},
  'grpo': {
    **_ONLINE_DEFAULTS,
    'beta': 0.0,
    'importance_sampling_level': 'token',
    'learning_rate': 1e-6,
    'loss_type': 'dapo',
    'num_generations': 8,
    'scale_rewards': 'group',
    'vllm_importance_sampling_clip_max': 3.0,
    'vllm_importance_sampling_correction': True,
    'vllm_importance_sampling_mode': 'sequence_mask',
  },
  'rloo': {**_ONLINE_DEFAULTS, 'learning_rate': 1e-6, 'num_generations': 2},
}
"""TRL's defaults, keyed by trainer, for the arguments that determine settings of this package and
whose defaults may differ from this package's.
"""
