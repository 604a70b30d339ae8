"""TRL's side of benchmarks/steps.py: its trainers' own loss, forward and generation methods, and
their optimizer.

  python trl_steps.py FOLDER MICRO_BATCH

Runs in the peers' environment (launch/install_peers.sh) and imports nothing of this project.
Rollouts, scores and tokenization, which are not measured, are replaced by prepared tensors.
"""

import os
import sys
import tempfile

os.environ |= {'HF_HUB_OFFLINE': '1', 'TRL_EXPERIMENTAL_SILENCE': '1', 'WANDB_DISABLED': 'true'}

import numpy as np
import torch
from datasets import Dataset
from serving import padded, serve
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

LEARNING_RATE = 1e-6
FILES = {
  'grpo': 'equal',
  'grpo, lognormal lengths': 'ragged',
  'grpo, groups': 'groups',
  'grpo, groups with short prompts': 'short_groups',
  'grpo, groups of lognormal lengths': 'lognormal_groups',
}
"""File of each GRPO work's rows. Works whose prompts are not shared use the same files."""


def tokenizer():
  """Returns a tokenizer, which the trainers require."""
  words = Tokenizer(models.WordLevel({'<pad>': 0, '<eos>': 1, 'a': 2}, unk_token='a'))
  return PreTrainedTokenizerFast(tokenizer_object=words, pad_token='<pad>', eos_token='<eos>')


def options(folder):
  return {
    'output_dir': folder,
    'use_cpu': True,
    'report_to': 'none',
    'bf16': False,
    'disable_tqdm': True,
    'gradient_checkpointing': False,
    'learning_rate': LEARNING_RATE,
    'max_grad_norm': 1.0,
  }


def tensors(arrays):
  return {
    name: torch.tensor(x) if x.dtype == np.float32 else torch.tensor(x).long()
    for name, x in arrays.items()
  }


def optimizer_step(trainer, losses):
  """Runs an optimizer step as in the trainers' loop. Returns the gradient's norm."""
  for loss in losses:
    trainer.accelerator.backward(loss())
  norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
  trainer.optimizer.step()
  trainer.model.zero_grad()
  return norm.item()


def grpo_works(folder, scratch, micro_batch):
  rows = {name: tensors(padded(f'{folder}/{name}.npz')) for name in FILES.values()}
  count, new = rows['equal']['completion_ids'].shape
  args = GRPOConfig(
    **options(scratch),
    loss_type='grpo',
    beta=0.0,
    per_device_train_batch_size=micro_batch,
    gradient_accumulation_steps=count // micro_batch,
    num_generations=micro_batch,
    max_completion_length=new,
  )
  dataset = Dataset.from_list([{'prompt': 'a'}] * count)
  trainer = GRPOTrainer(
    f'{folder}/model',
    lambda **_: None,
    args=args,
    train_dataset=dataset,
    processing_class=tokenizer(),
  )
  trainer.current_gradient_accumulation_steps = count // micro_batch
  trainer.create_optimizer()
  trainer.model.train()

  initial = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
  latest = None

  def begin(work):
    """Starts each work with the initial weights and a new optimizer state, as this project's side
    does.
    """
    nonlocal latest
    if work != latest:
      trainer.model.load_state_dict(initial)
      trainer.optimizer.state.clear()
      latest = work

  def update(work, name):
    begin(work)
    parts = [
      {k: x[at : at + micro_batch] for k, x in rows[name].items()}
      for at in range(0, count, micro_batch)
    ]
    return optimizer_step(
      trainer, [lambda part=part: trainer.compute_loss(trainer.model, part) for part in parts]
    )

  def logprobs():
    batch = rows['equal']
    tokens = torch.cat([batch['prompt_ids'], batch['completion_ids']], 1)
    with torch.no_grad():
      found, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, tokens, torch.ones_like(tokens), new, batch_size=micro_batch
      )
    return found.mean().item()

  def generate(name):
    prompts = rows[name]['prompt_ids'].tolist()
    completions = trainer._generate_single_turn(prompts, None, {}, 1)[0]
    return float(len(completions))

  # TRL shares no prompts, so both works with a file are the same there.
  files = FILES | {
    f'{work}, prompts not shared': name for work, name in FILES.items() if 'groups' in work
  }
  return {
    **{work: lambda work=work, name=name: update(work, name) for work, name in files.items()},
    'logprobs': logprobs,
    'generate': lambda: generate('equal'),
    'generate, groups': lambda: generate('groups'),
  }


def dpo_works(folder, scratch, micro_batch):
  """Returns DPO works. Neighbouring rows are pairs; TRL expects a batch's chosen rows before its
  rejected rows.
  """
  arrays = tensors(padded(f'{folder}/equal.npz'))
  tokens = torch.cat([arrays['prompt_ids'], arrays['completion_ids']], 1)
  trained = torch.cat(
    [torch.zeros_like(arrays['prompt_ids']), torch.ones_like(arrays['completion_ids'])], 1
  )
  count = len(tokens)
  args = DPOConfig(
    **options(scratch),
    beta=0.1,
    per_device_train_batch_size=micro_batch // 2,
    gradient_accumulation_steps=count // micro_batch,
  )
  dataset = Dataset.from_list([{'prompt': 'a', 'chosen': 'a a', 'rejected': 'a'}] * 2)
  trainer = DPOTrainer(
    f'{folder}/model', args=args, train_dataset=dataset, processing_class=tokenizer()
  )
  trainer.create_optimizer()
  trainer.model.train()
  parts = []
  for at in range(0, count, micro_batch):
    order = [*range(at, at + micro_batch, 2), *range(at + 1, at + micro_batch, 2)]
    ids = tokens[order]
    parts.append(
      {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'completion_mask': trained[order]}
    )

  def update():
    losses = [
      lambda part=part: trainer.compute_loss(trainer.model, part) / len(parts) for part in parts
    ]
    return optimizer_step(trainer, losses)

  return {'dpo': update}


def main(folder, micro_batch):
  torch.manual_seed(0)
  with tempfile.TemporaryDirectory() as scratch:
    serve(
      grpo_works(folder, scratch, int(micro_batch)) | dpo_works(folder, scratch, int(micro_batch))
    )


if __name__ == '__main__':
  main(*sys.argv[1:])
