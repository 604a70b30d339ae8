"""TRL's side of benchmarks/whole_job.py: GRPO from a model to the end of its steps.

  python trl_job.py FOLDER

Runs in the peers' environment (launch/install_peers.sh) and imports nothing of this project. FOLDER
contains the model (`sft/hf`) and the tasks and parameters (`job.json`).
"""

import json
import os
import pathlib
import sys
import tempfile

os.environ |= {'HF_HUB_OFFLINE': '1', 'TRL_EXPERIMENTAL_SILENCE': '1', 'WANDB_DISABLED': 'true'}

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def right(completions, truth, **_):
  """Returns the rewards: 1 for the right answer, else 0."""
  return [float(text == wanted) for text, wanted in zip(completions, truth, strict=True)]


class Evaluation(TrainerCallback):
  """Prints the greedy accuracy before the first step and after every `evaluate_every` steps."""

  def __init__(self, job, tokenizer):
    self._job, self._tokenizer = job, tokenizer

  def on_train_begin(self, args, state, control, model, **_):
    self._evaluate(model, 0)

  def on_step_end(self, args, state, control, model, **_):
    if state.global_step % self._job['evaluate_every'] == 0:
      self._evaluate(model, state.global_step)

  @torch.no_grad()
  def _evaluate(self, model, step):
    tasks, tokenizer = self._job['eval'], self._tokenizer
    was_training = model.training
    model.eval()
    prompts = tokenizer(
      [task['prompt'] for task in tasks],
      return_tensors='pt',
      padding=True,
      padding_side='left',
      add_special_tokens=False,
    )
    tokens = model.generate(
      input_ids=prompts['input_ids'],
      attention_mask=prompts['attention_mask'],
      max_new_tokens=self._job['max_tokens'],
      do_sample=False,
    )
    texts = tokenizer.batch_decode(
      tokens[:, prompts['input_ids'].shape[1] :], skip_special_tokens=True
    )
    accuracy = sum(right(texts, [task['truth'] for task in tasks])) / len(tasks)
    model.train(was_training)
    print(f'evaluation held_out at step {step} (grpo): greedy accuracy {accuracy:.3f}', flush=True)


def main(folder):
  job = json.loads((folder / 'job.json').read_text())
  tokenizer = AutoTokenizer.from_pretrained(folder / 'sft' / 'hf')
  samples = job['groups'] * job['group_size']
  with tempfile.TemporaryDirectory() as scratch:
    trainer = GRPOTrainer(
      str(folder / 'sft' / 'hf'),
      right,
      args=GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        report_to='none',
        save_strategy='no',
        bf16=False,
        disable_tqdm=True,
        logging_steps=1000,
        gradient_checkpointing=False,
        loss_type='grpo',
        beta=0.0,
        epsilon=job['clip'][0],
        epsilon_high=job['clip'][1],
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        num_generations=job['group_size'],
        max_completion_length=job['max_tokens'],
        max_steps=job['steps'],
        learning_rate=job['learning_rate'],
        lr_scheduler_type='polynomial',
        lr_scheduler_kwargs={'power': 1.0, 'lr_end': job['end_learning_rate']},
        adam_beta1=job['betas'][0],
        adam_beta2=job['betas'][1],
        max_grad_norm=job['max_grad_norm'],
        seed=job['seed'],
      ),
      train_dataset=Dataset.from_list(job['train']),
      processing_class=tokenizer,
      callbacks=[Evaluation(job, tokenizer)],
    )
    trainer.train()


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
