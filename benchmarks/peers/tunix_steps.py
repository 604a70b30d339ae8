"""Tunix's side of benchmarks/steps.py: its trainer's own jitted step on its own model and GRPO
loss.

  python tunix_steps.py FOLDER MICRO_BATCH

Runs in the peers' environment (launch/install_peers.sh) and imports nothing of this project.
Rollouts and scores, which are not measured, are replaced by prepared arrays.
"""

import json
import os
import pathlib
import sys

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
import optax
from serving import padded, serve
from tunix import AgenticGRPOConfig
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.rl import algo_core, common, trainer
from tunix.sft import peft_trainer

LEARNING_RATE = 1e-6
IDS = {'pad_id': 0, 'eos_id': 1}


def load(folder):
  config = json.loads(pathlib.Path(folder, 'config.json').read_text())
  shape = qwen2.ModelConfig(
    num_layers=config['num_hidden_layers'],
    vocab_size=config['vocab_size'],
    embed_dim=config['hidden_size'],
    hidden_dim=config['intermediate_size'],
    num_heads=config['num_attention_heads'],
    head_dim=config['head_dim'],
    num_kv_heads=config['num_key_value_heads'],
    rope_theta=10_000,
    norm_eps=config['rms_norm_eps'],
    use_tied_embedding=config['tie_word_embeddings'],
  )
  return qwen2_params.create_model_from_safe_tensors(folder, shape)


def main(folder, micro_batch):
  arrays, micro_batch = padded(f'{folder}/equal.npz'), int(micro_batch)
  count = len(arrays['advantages'])
  # Tunix's learner sets the temperature from the rollouts' configuration.
  algorithm = AgenticGRPOConfig(beta=0.0)
  algorithm.temperature = 1.0
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE, b2=0.95))
  parts = count // micro_batch
  config = peft_trainer.TrainingConfig(
    eval_every_n_steps=1_000_000, gradient_accumulation_steps=parts if parts > 1 else None
  )
  actor = trainer.Trainer(load(f'{folder}/model'), optimizer, config, dict)

  def loss(model, train_example, algo_config):
    return algo_core.grpo_loss_fn(model, train_example, algo_config, **IDS)

  actor = actor.with_loss_fn(loss, has_aux=True)
  actor = actor.with_gen_model_input_fn(lambda x: {'train_example': x, 'algo_config': algorithm})
  step, _ = actor.jit_train_and_eval_step(cache_nnx_graph=True)
  examples = [
    common.TrainExample(
      **{name: jnp.asarray(x[at : at + micro_batch]) for name, x in arrays.items()},
      ref_per_token_logps=None,
      old_per_token_logps=None,
    )
    for at in range(0, count, micro_batch)
  ]

  def update():
    norms = [jax.block_until_ready(step(example))[2] for example in examples]
    # With several micro-batches each has its own gradient, and the norm of the sum is not
    # available.
    return norms[0] if parts == 1 else float('nan')

  serve({'grpo': update})


if __name__ == '__main__':
  main(*sys.argv[1:])
