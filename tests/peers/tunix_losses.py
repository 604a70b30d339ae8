"""Tunix's losses and advantages of given numbers, from its own functions: the model returns given
logits or values.

  python tunix_losses.py BATCH.npz RESULTS.npz

Runs in the peers' environment (launch/install_peers.sh) and imports nothing of this project. What
each case configures is in the dictionaries below; peers/losses_test.py says which of our arguments
are meant to give the same.
"""

import os
import sys

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix import AgenticGRPOConfig, PPOConfig
from tunix.rl import algo_core, common
from tunix.rl.grpo import dapo_learner
from tunix.rl.ppo import ppo_learner
from tunix.sft.dpo import dpo_trainer

PAD, EOS = 0, 1
IDS = {'pad_id': PAD, 'eos_id': EOS}

GRPO = {
  'sequence-mean-token-mean': {},
  'token-mean': {'loss_agg_mode': 'token-mean'},
  'sequence-mean-token-scale': {'loss_agg_mode': 'sequence-mean-token-scale'},
  'seq-mean-token-sum': {'loss_agg_mode': 'seq-mean-token-sum'},
  'sequence-mean-token-sum-norm': {
    'loss_agg_mode': 'sequence-mean-token-sum-norm',
    'epsilon_high': 0.28,
  },
  'dual clip': {'epsilon_c': 1.5},
  'gspo-token': {'loss_algo': 'gspo-token', 'epsilon': 0.03, 'epsilon_high': 0.04},
  'sampler_is': {'sampler_is': 'token', 'sampler_is_threshold': 1.2},
  'kl': {'beta': 0.3, 'kl_loss_mode': 'kl'},
  'mse_kl': {'beta': 0.3, 'kl_loss_mode': 'mse_kl'},
  'low_var_kl': {'beta': 0.3, 'kl_loss_mode': 'low_var_kl'},
}
PPO = {
  'ppo': {'epsilon_low': 0.2, 'epsilon_high': 0.28},
  'ppo dual clip': {'epsilon_c': 1.5},
  'ppo entropy': {'entropy_coef': 0.1},
}
DPO = {'dpo': {'beta': 0.3}, 'dpo smoothed': {'beta': 0.3, 'label_smoothing': 0.2}}
KL = {
  'divergence kl': {'method': 'kl'},
  'divergence mse_kl': {'method': 'mse_kl'},
  'divergence low_var_kl': {'method': 'low_var_kl'},
  'divergence low_var_kl clamped': {'method': 'low_var_kl', 'clamp_value': 10.0},
}


class Given(nnx.Module):
  """A model whose outputs are its parameters."""

  def __init__(self, outputs):
    self.outputs = nnx.Param(outputs)

  def __call__(self, tokens, positions, cache=None, attention_mask=None, segment_ids=None):
    return self.outputs[...], None


def value_and_gradient(loss, outputs):
  value, gradient = nnx.value_and_grad(lambda model: loss(model)[0])(Given(outputs))
  return float(value), np.asarray(gradient['outputs'][...])


def results(name, loss, outputs):
  value, gradient = value_and_gradient(loss, outputs)
  yield f'{name}/loss', value
  yield f'{name}/gradient', gradient


def example(batch, *, reference=False, weights=None):
  """PPO's own, which has all that GRPO's has."""
  return ppo_learner.TrainExample(
    prompt_ids=batch['prompt'],
    prompt_mask=jnp.ones_like(batch['prompt']),
    completion_ids=batch['tokens'],
    completion_mask=batch['mask'].astype(jnp.float32),
    advantages=batch['token_advantages'],
    ref_per_token_logps=batch['reference'] if reference else None,
    old_per_token_logps=batch['proximal'],
    sampler_is_weights=weights,
    returns=batch['returns'],
    old_values=batch['old_values'],
  )


def policy(batch):
  for name, options in GRPO.items():
    options = {'beta': 0.0, **options}
    dual = options.pop('epsilon_c', None)
    config = AgenticGRPOConfig(**options)
    # Its learner sets the one from the rollouts' configuration; the other is read where it is
    # there.
    config.temperature, config.epsilon_c = float(batch['temperature']), dual
    weights = None
    if config.sampler_is:
      # Its learner forms them in the midst of a training step.
      ratio = jnp.exp(batch['proximal'] - batch['behaviour'])
      weights = jnp.minimum(ratio, config.sampler_is_threshold) * batch['mask']
    given = example(batch, reference=config.beta > 0, weights=weights)

    def loss(model, given=given, config=config):
      return algo_core.grpo_loss_fn(model, given, config, **IDS)

    yield from results(name, loss, batch['logits'])
  for name, options in PPO.items():
    config = PPOConfig(**options)
    given = example(batch)

    def loss(model, given=given, config=config):
      return algo_core.ppo_policy_loss_fn(model, given, config, **IDS)

    yield from results(name, loss, batch['logits'])


def critic(batch):
  given = example(batch)

  def loss(model):
    return algo_core.ppo_value_loss_fn(model, given, 0.2, **IDS)

  yield from results('value loss', loss, batch['new_values'][..., None])


def divergences(batch):
  for name, options in KL.items():

    def found(logprobs, o=options):
      return common.compute_kl_divergence(logprobs, batch['far_reference'], **o)

    yield f'{name}/values', np.asarray(found(batch['logprobs']))
    yield f'{name}/gradient', np.asarray(jax.grad(lambda x, f=found: f(x).sum())(batch['logprobs']))


def advantages(batch):
  rewards, size = np.asarray(batch['rewards']), int(batch['group_size'])
  yield 'grpo/advantages', algo_core.compute_advantages(rewards, size)
  yield 'drgrpo/advantages', np.asarray(algo_core.compute_drgrpo_advantages(batch['rewards'], size))
  yield 'rloo/advantages', np.asarray(algo_core.compute_rloo_advantages(batch['rewards'], size))
  equal = np.full(10, 2.3, np.float32)
  yield 'grpo of equal rewards/advantages', algo_core.compute_advantages(equal, len(equal))
  for name, gamma, lam in (('gae', 0.9, 0.8), ('gae undiscounted', 1.0, 1.0)):
    mask = batch['mask'].astype(jnp.float32)
    found, returns = algo_core.compute_gae_advantages(
      batch['token_rewards'], batch['old_values'], mask, gamma, lam
    )
    yield f'{name}/advantages', np.asarray(found)
    yield f'{name}/returns', np.asarray(returns)


def overlong(batch):
  buffer = {'overlong_buffer_length': 4, 'overlong_buffer_penalty': 2.0, 'max_response_length': 10}
  texts = ['x' * int(length) for length in batch['overlong_lengths']]
  yield (
    'overlong/rewards',
    np.array(dapo_learner.reward_shaping([], texts, None, overlong_buffer=buffer)),
  )


def dpo(batch):
  """The first half of the rows are chosen, the second half rejected."""
  tokens = jnp.concatenate([batch['prompt'], batch['tokens']], axis=1)
  mask = batch['mask'].astype(jnp.float32)
  reference = (batch['reference'] * mask).sum(-1)
  half = len(reference) // 2
  given = dpo_trainer.TrainExample(
    input_ids=tokens,
    positions=jnp.zeros_like(tokens),
    attention_mask=jnp.ones_like(tokens),
    ref_chosen_logps=reference[:half],
    ref_rejected_logps=reference[half:],
    completion_mask=mask,
    logits_to_keep=batch['tokens'].shape[1],
  )
  for name, options in DPO.items():

    def loss(model, options=options):
      return dpo_trainer.dpo_loss_fn(model, given, **options)

    yield from results(name, loss, batch['logits'])


def main(source, target):
  batch = {name: jnp.asarray(x) for name, x in np.load(source).items()}
  found = {}
  for part in (policy, critic, divergences, advantages, overlong, dpo):
    found |= dict(part(batch))
  np.savez(target, **found)


if __name__ == '__main__':
  main(*sys.argv[1:])
