"""Runs TRL's SFTTrainer on the rows and weights of each case; writes what it trained on, the losses
and the weights.

  .venv-peers/bin/python tests/peers/trl_sft.py CASES.json FOLDER

CASES.json holds cases by name: `model` (a directory), `dtype`, `rows` in the order in which they
are trained on, `batch` (rows a step), `steps`, and further `arguments` of SFTConfig. FOLDER gets
NAME.npz for each.

In float64, the name torch.float32 stands for float64: transformers computes norms, rotations and
the loss in float32 whatever the type of the weights, and the formulas are what is to be compared.
"""

import contextlib
import json
import pathlib
import sys

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Trainer(SFTTrainer):
  """Takes the rows in their order, and keeps the losses as they are, unrounded."""

  def __init__(self, *args, **options):
    super().__init__(*args, **options)
    self.losses, self.trained_on = [], []

  def _get_train_sampler(self, dataset=None):
    return SequentialSampler(self.train_dataset)

  def training_step(self, model, inputs, *args, **options):
    for row in zip(inputs['input_ids'], inputs['labels'], inputs['attention_mask'], strict=True):
      ids, labels, there = (x.tolist() for x in row)
      count = sum(there)
      learned = [label != -100 for label in labels[:count]]
      # A label at position 0 predicts nothing.
      self.trained_on.append([ids[:count], [False, *learned[1:]]])
    loss = super().training_step(model, inputs, *args, **options)
    self.losses.append(loss.item())
    return loss


class Until(TrainerCallback):
  def __init__(self, steps):
    self.steps = steps

  def on_step_end(self, args, state, control, **_):
    control.should_training_stop = state.global_step >= self.steps


@contextlib.contextmanager
def wide():
  """In here, the name torch.float32 stands for float64."""
  before = torch.float32, torch.float, torch.Tensor.float
  torch.float32 = torch.float = torch.float64
  torch.Tensor.float = torch.Tensor.double
  try:
    yield
  finally:
    torch.float32, torch.float, torch.Tensor.float = before


def train(case, model, results):
  config = SFTConfig(
    output_dir=str(results.with_suffix('')),
    per_device_train_batch_size=case['batch'],
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=True,
    report_to='none',
    save_strategy='no',
    logging_strategy='no',
    disable_tqdm=True,
    **case['arguments'],
  )
  trainer = Trainer(
    model=model,
    args=config,
    train_dataset=Dataset.from_list(case['rows']),
    processing_class=PreTrainedTokenizerFast.from_pretrained(case['model']),
    callbacks=[Until(case['steps'])],
  )
  trainer.train()
  np.savez(
    results,
    losses=np.array(trainer.losses, np.float64),
    trained_on=np.array(json.dumps(trainer.trained_on)),
    **{f'weights/{name}': x.numpy() for name, x in trainer.model.state_dict().items()},
  )


def main(cases, folder):
  for name, case in json.loads(pathlib.Path(cases).read_text()).items():
    model = AutoModelForCausalLM.from_pretrained(
      case['model'], dtype=torch.float32, attn_implementation='eager'
    )
    results = pathlib.Path(folder) / f'{name}.npz'
    if case['dtype'] == 'float64':
      with wide():
        train(case, model.double(), results)
    else:
      train(case, model, results)


if __name__ == '__main__':
  main(*sys.argv[1:])
