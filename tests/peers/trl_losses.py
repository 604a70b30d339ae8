"""TRL's losses and advantages of given numbers, from its own trainers: the forward pass alone is
replaced.

  python trl_losses.py BATCH.npz RESULTS.npz

Runs in the peers' environment (launch/install_peers.sh) and imports nothing of this project. What
each case configures is in the dictionaries below; peers/losses_test.py says which of our arguments
are meant to give the same.
"""

import os
import sys
import tempfile
import types

os.environ |= {'HF_HUB_OFFLINE': '1', 'TRL_EXPERIMENTAL_SILENCE': '1', 'WANDB_DISABLED': 'true'}

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
  LlamaConfig,
  LlamaForCausalLM,
  LlamaForSequenceClassification,
  PreTrainedTokenizerFast,
)
from trl import (
  DPOConfig,
  DPOTrainer,
  GRPOConfig,
  GRPOTrainer,
  RewardConfig,
  RewardTrainer,
  RLOOConfig,
  RLOOTrainer,
)

PAD, EOS, START = 0, 1, 2
SAMPLER = {'rollout': True}
"""The rollouts come with the sampler's own logprobs, as those from vLLM do."""

GRPO = {
  'grpo': {'loss_type': 'grpo'},
  'grpo delta': {'loss_type': 'grpo', 'delta': 1.5},
  'bnpo': {'loss_type': 'bnpo'},
  'dapo in two micro-batches': {
    'loss_type': 'dapo',
    'epsilon_high': 0.28,
    'gradient_accumulation_steps': 2,
  },
  'dr_grpo': {'loss_type': 'dr_grpo', 'scale_rewards': 'none'},
  'cispo': {'loss_type': 'cispo', 'epsilon_high': 1.3},
  'cispo default': {'loss_type': 'cispo'},
  'sapo': {'loss_type': 'sapo'},
  'sapo temperatures': {
    'loss_type': 'sapo',
    'sapo_temperature_pos': 2.0,
    'sapo_temperature_neg': 5.0,
  },
  'sequence': {
    'loss_type': 'grpo',
    'importance_sampling_level': 'sequence',
    'epsilon': 0.03,
    'epsilon_high': 0.04,
  },
  'sequence dapo': {'loss_type': 'dapo', 'importance_sampling_level': 'sequence', 'epsilon': 0.03},
  'kl': {'loss_type': 'dapo', 'beta': 0.3, 'use_bias_correction_kl': False},
  'kl corrected': {'loss_type': 'dapo', 'beta': 0.3},
  'off-policy mask': {'loss_type': 'dapo', 'off_policy_mask_threshold': 0.02},
  'truncated dapo': {'loss_type': 'dapo', 'mask_truncated_completions': True},
  'truncated grpo': {'loss_type': 'grpo', 'mask_truncated_completions': True},
  'token_truncate': {
    'loss_type': 'dapo',
    'vllm_importance_sampling_mode': 'token_truncate',
    'vllm_importance_sampling_clip_max': 1.2,
    **SAMPLER,
  },
  'token_mask': {
    'loss_type': 'dapo',
    'vllm_importance_sampling_mode': 'token_mask',
    'vllm_importance_sampling_clip_min': 0.8,
    'vllm_importance_sampling_clip_max': 1.2,
    **SAMPLER,
  },
  'sequence_truncate': {
    'loss_type': 'dapo',
    'vllm_importance_sampling_mode': 'sequence_truncate',
    'vllm_importance_sampling_clip_max': 1.2,
    **SAMPLER,
  },
}
DPO = {
  'sigmoid': {'loss_type': ['sigmoid'], 'beta': 0.3},
  'sigmoid smoothed': {'loss_type': ['sigmoid'], 'beta': 0.3, 'label_smoothing': 0.2},
  'ipo': {'loss_type': ['ipo'], 'beta': 0.3},
}
REWARD = {'reward model': {}, 'reward model centered': {'center_rewards_coefficient': 0.1}}


def tokenizer():
  words = {'<pad>': PAD, '<eos>': EOS, 'a': START} | {f't{i}': i for i in range(START + 1, 32)}
  found = Tokenizer(models.WordLevel(words, unk_token='a'))
  found.pre_tokenizer = pre_tokenizers.Whitespace()
  return PreTrainedTokenizerFast(tokenizer_object=found, pad_token='<pad>', eos_token='<eos>')


def tiny_models(folder):
  """The trainers insist on having a model; what it computes is never used."""
  size = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, pad_token_id=PAD
  )
  config = LlamaConfig(vocab_size=32, num_labels=1, eos_token_id=EOS, **size)
  LlamaForCausalLM(config).save_pretrained(f'{folder}/lm')
  LlamaForSequenceClassification(config).save_pretrained(f'{folder}/scalar')
  return f'{folder}/lm', f'{folder}/scalar'


def common(folder, options):
  return {
    'output_dir': folder,
    'use_cpu': True,
    'report_to': 'none',
    'bf16': False,
    'disable_tqdm': True,
    **options,
  }


def score(prompts, completions, score, **_):
  return score


def policy_gradient_trainer(cls, options, model, folder, batch, rewards):
  """A trainer whose rollouts, scores and logprobs are the batch's. Returns it with its annotated
  rollouts.
  """
  options = dict(options)
  from_sampler = options.pop('rollout', False)
  inputs = [{'prompt': 'a', 'score': None if np.isnan(r) else float(r)} for r in rewards]
  size = len(inputs) // options.get('gradient_accumulation_steps', 1)
  config = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}[cls]
  args = config(
    **common(folder, options),
    per_device_train_batch_size=size,
    num_generations=int(batch['group_size']),
    num_iterations=2,
    max_completion_length=batch['tokens'].shape[1] + 3,
  )

  def cut(name):
    return [batch[name][i, :length].tolist() for i, length in enumerate(batch['lengths'])]

  def rollout(prompts, trainer):
    fields = {
      'prompt_ids': batch['prompt'].tolist(),
      'completion_ids': cut('tokens'),
      'logprobs': cut('behaviour'),
    }
    return fields | {'env_mask': [list(map(int, row)) for row in cut('mask')]}

  more = {'rollout_func': rollout} if cls is GRPOTrainer else {}
  dataset = Dataset.from_list(inputs)
  trainer = cls(
    model, score, args=args, train_dataset=dataset, processing_class=tokenizer(), **more
  )
  if cls is RLOOTrainer:
    texts = ['a'] * len(inputs)
    trainer._generate = lambda prompts: (batch['prompt'].tolist(), cut('tokens'), texts)

  def logprobs(model, *_, **__):
    if model is trainer.model:
      model = torch.tensor(batch['proximal'])
    elif model is trainer.ref_model:
      model = torch.tensor(batch['reference'])
    return model, torch.zeros_like(model), None

  trainer._get_per_token_logps_and_entropies = logprobs
  # In training both are set by the loop, which does not run here.
  trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
  trainer.use_vllm, trainer._last_loaded_step = from_sampler, trainer.state.global_step
  trainer.model.train()
  return trainer, trainer._generate_and_score_completions(inputs)


def loss_and_gradient(trainer, rollouts, values):
  """Sums over the micro-batches of an optimizer step, as its backward passes do."""
  logprobs = torch.tensor(values, requires_grad=True)
  size, total = trainer.args.per_device_train_batch_size, 0.0
  per_row = {name: x for name, x in rollouts.items() if torch.is_tensor(x) and x.dim() > 0}
  for start in range(0, len(values), size):
    some = {name: x[start : start + size] for name, x in per_row.items()}
    total = total + trainer.compute_loss(logprobs[start : start + size], rollouts | some)
  total.backward()
  return total.item(), logprobs.grad.numpy()


def grpo(batch, model, folder):
  for name, options in GRPO.items():
    trainer, rollouts = policy_gradient_trainer(
      GRPOTrainer, options, model, folder, batch, batch['rewards']
    )
    loss, gradient = loss_and_gradient(trainer, rollouts, batch['logprobs'])
    yield f'{name}/loss', loss
    yield f'{name}/gradient', gradient
    yield f'{name}/advantages', rollouts['advantages'].numpy()
  for name, scale in (('scaled by group', 'group'), ('not scaled', 'none')):
    options = {'scale_rewards': scale}
    _, rollouts = policy_gradient_trainer(
      GRPOTrainer, options, model, folder, batch, batch['odd_rewards']
    )
    yield f'{name}/advantages', rollouts['advantages'].numpy()


def rloo(batch, model, folder):
  trainer, rollouts = policy_gradient_trainer(
    RLOOTrainer, {'beta': 0.0}, model, folder, batch, batch['odd_rewards']
  )
  yield 'rloo/advantages', rollouts['advantages'].numpy()
  # Its ratio is of whole sequences: where the policy is the one that sampled, gradients can be
  # compared.
  _, gradient = loss_and_gradient(trainer, rollouts, batch['proximal'])
  yield 'rloo/gradient', gradient


def dpo(batch, model, folder):
  """The first half of the rows are chosen, the second half rejected."""
  pairs = Dataset.from_list([{'prompt': 'a', 'chosen': 'a t3', 'rejected': 'a t4'}] * 2)
  # One prompt token, which no logprob belongs to.
  completion_mask = torch.tensor(np.pad(batch['mask'], ((0, 0), (1, 0)))).long()
  tokens = torch.tensor(np.concatenate([batch['prompt'], batch['tokens']], axis=1))
  inputs = {
    'input_ids': tokens,
    'attention_mask': torch.ones_like(tokens),
    'completion_mask': completion_mask,
  }
  shape = batch['mask'].shape

  def outputs(logprobs):
    """As its fused head gives them: 0 where a token has no label."""
    zeros = torch.zeros(shape)
    masked = torch.where(torch.tensor(batch['mask']), logprobs, 0.0)
    return types.SimpleNamespace(
      log_probs=masked, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )

  for name, options in DPO.items():
    args = DPOConfig(**common(folder, options))
    trainer = DPOTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer())
    trainer.ref_model = lambda **_: outputs(torch.tensor(batch['reference']))
    logprobs = torch.tensor(batch['logprobs'], requires_grad=True)
    loss = trainer.compute_loss(lambda logprobs=logprobs, **_: outputs(logprobs), inputs)
    loss.backward()
    yield f'{name}/loss', loss.item()
    yield f'{name}/gradient', logprobs.grad.numpy()


def reward_model(batch, model, folder):
  pairs = Dataset.from_list([{'chosen': 'a t3', 'rejected': 'a t4'}] * 2)
  for name, options in REWARD.items():
    args = RewardConfig(**common(folder, options))
    trainer = RewardTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer())
    scores = torch.tensor(batch['scores'], requires_grad=True)
    inputs = {
      'attention_mask': torch.ones(len(scores), 1),
      'margin': torch.full((len(scores) // 2,), float(batch['margin'])),
    }
    given = types.SimpleNamespace(logits=scores[:, None])
    loss = trainer.compute_loss(lambda given=given, **_: given, inputs)
    loss.backward()
    yield f'{name}/loss', loss.item()
    yield f'{name}/gradient', scores.grad.numpy()


def main(source, target):
  batch = dict(np.load(source))
  torch.manual_seed(0)
  with tempfile.TemporaryDirectory() as folder:
    lm, scalar = tiny_models(folder)
    results = {}
    for part, model in ((grpo, lm), (rloo, lm), (dpo, lm), (reward_model, scalar)):
      results |= dict(part(batch, model, folder))
  np.savez(target, **results)


if __name__ == '__main__':
  main(*sys.argv[1:])
