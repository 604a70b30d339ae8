"""AdamW with a schedule, and when an update is taken at all."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import optax

from jaxrl_llm.core.types import Params

HOST, DEVICE = 'pinned_host', 'device'
"""JAX's names of the memories."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  peak_lr: float
  """Always explicit."""
  schedule: Literal['constant', 'cosine', 'linear'] = 'constant'
  """After the warm-up: constant, or down from the peak; `end_lr_fraction` of it is reached when the stage is over."""
  warmup_steps: int = 0
  """Updates over which the rate rises linearly: the n-th has n / warmup_steps of the peak."""
  end_lr_fraction: float = 0.0
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  """Applied to kernels and adapters only, not to norms and biases."""
  max_grad_norm: float = 1.0
  """Gradients are scaled down to this global norm."""
  skip_grad_norm: float = 1e3
  """An update whose global gradient norm is above this, or not finite, is skipped and counted."""
  max_skipped_updates: int = 10
  """So many skipped updates in a row stop the run."""
  offload: bool = False
  """The moments lie in the host's memory, pinned, and come to the devices for the update alone."""


_DECAYED = ('kernel', 'lora_a', 'lora_b')


def learning_rate(config: OptimizerConfig, updates: int) -> optax.Schedule:
  """The rate by number of updates taken, for a stage of `updates` updates."""
  decay = max(updates - config.warmup_steps, 1)
  after = {
    'constant': lambda: optax.constant_schedule(config.peak_lr),
    'cosine': lambda: optax.cosine_decay_schedule(config.peak_lr, decay, alpha=config.end_lr_fraction),
    'linear': lambda: optax.linear_schedule(config.peak_lr, config.peak_lr * config.end_lr_fraction, decay),
  }[config.schedule]()
  if not config.warmup_steps:
    return after
  # Update number n is the (n+1)-th: a rate of 0 at n = 0 would waste it.
  warmup = optax.linear_schedule(config.peak_lr / config.warmup_steps, config.peak_lr, config.warmup_steps - 1)
  return optax.join_schedules([warmup, after], [config.warmup_steps])


def build_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
  """Gradient clipping by global norm, then AdamW (Loshchilov & Hutter, arXiv:1711.05101)."""
  # By name: where layers are scanned, norms and biases have two dimensions too.
  decayed = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in _DECAYED, params)
  return optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
    optax.add_decayed_weights(config.weight_decay, mask=decayed),
    optax.scale_by_learning_rate(learning_rate(config, updates)),
  )


def optimizer_shardings(
  optimizer: optax.GradientTransformation, params: Params, shardings, whole, *, offload: bool = False
):
  """Shardings of the optimizer's state: its copies of parameters lie as the parameters do, the rest is `whole`.

  Args:
    offload: the copies lie in the host's memory.
  """
  shapes = jax.eval_shape(optimizer.init, params)
  place = lambda _, sharding: sharding.with_memory_kind(HOST) if offload else sharding
  return optax.tree_map_params(optimizer, place, shapes, shardings, transform_non_params=lambda _: whole)


def on_device(opt_state, shardings, *, after: jax.Array):
  """The state where an update can compute with it, inside a jitted function: what lies on the host is fetched.

  Args:
    after: not before this value is there; until then a gradient's activations need the room.
  """
  if not any(map(is_offloaded, jax.tree.leaves(shardings))):
    return opt_state
  opt_state, _ = jax.lax.optimization_barrier((opt_state, after))
  fetch = lambda x, sharding: jax.device_put(x, sharding.with_memory_kind(DEVICE)) if is_offloaded(sharding) else x
  return jax.tree.map(fetch, opt_state, shardings)


def is_offloaded(sharding: jax.sharding.Sharding) -> bool:
  return sharding.memory_kind == HOST
