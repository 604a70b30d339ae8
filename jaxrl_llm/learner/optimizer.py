"""AdamW with a learning-rate schedule, and the function that applies an update."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from jaxrl_llm.core.types import Params
from jaxrl_llm.parallel.memory import DEVICE, HOST, is_on_host


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """AdamW with a learning-rate schedule and gradient clipping."""

  peak_lr: float
  """Peak learning rate. This option has no default."""
  schedule: Literal['constant', 'cosine', 'linear'] = 'constant'
  """Shape of the learning rate after the warm-up. 'constant' stays at the peak. 'cosine' and
  'linear' decay from the peak to `end_lr_fraction` times the peak at the end of the stage.
  """
  warmup_steps: int = 0
  """Number of updates over which the learning rate rises linearly: in update n, counting from 1, it
  is n / warmup_steps of the peak.
  """
  end_lr_fraction: float = 0.0
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  """Weight decay, applied only to kernels and adapters, not to norms and biases."""
  max_grad_norm: float = 1.0
  """Global norm to which gradients are clipped."""
  skip_grad_norm: float = 1e3
  """Limit of the global gradient norm. An update whose gradient norm exceeds this limit or is not
  finite is skipped and counted.
  """
  max_skipped_updates: int = 10
  """Number of consecutive skipped updates after which the run stops."""
  offload: bool | Literal['auto'] = 'auto'
  """Whether the moments are kept in pinned host memory. For the update, they are moved to the
  devices one parameter at a time. If 'auto', the memory plan decides (`learner.memory_bytes`);
  without a memory plan, the moments stay on the devices.
  """

  @property
  def offloads(self) -> bool:
    """Whether the moments are in host memory. With 'auto', this is False; a memory plan replaces
    'auto' by its decision.
    """
    return self.offload is True


MAY_CHANGE = (
  *('peak_lr', 'schedule', 'warmup_steps', 'end_lr_fraction', 'b1', 'b2', 'eps', 'weight_decay'),
  *('max_grad_norm', 'skip_grad_norm', 'max_skipped_updates'),
)
"""Fields that may change between two updates, because the moments and the position in the schedule
remain valid.
"""
_DECAYED = ('kernel', 'lora_a', 'lora_b')


def learning_rate(config: OptimizerConfig, updates: int) -> optax.Schedule:
  """Returns the learning rate of a stage of `updates` updates, as a function of the number of
  updates taken so far.
  """
  decay = max(updates - config.warmup_steps, 1)
  after = {
    'constant': lambda: optax.constant_schedule(config.peak_lr),
    'cosine': lambda: optax.cosine_decay_schedule(
      config.peak_lr, decay, alpha=config.end_lr_fraction
    ),
    'linear': lambda: optax.linear_schedule(
      config.peak_lr, config.peak_lr * config.end_lr_fraction, decay
    ),
  }[config.schedule]()
  if not config.warmup_steps:
    return after
  # The warm-up starts above 0, because a learning rate of 0 would waste the first update.
  warmup = optax.linear_schedule(
    config.peak_lr / config.warmup_steps, config.peak_lr, config.warmup_steps - 1
  )
  return optax.join_schedules([warmup, after], [config.warmup_steps])


def build_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
  """Builds AdamW (Loshchilov & Hutter, arXiv:1711.05101) for gradients that are already clipped.

  Every transformation treats each parameter independently, because `apply_update` may update one
  parameter at a time.
  """

  # Select the parameters to decay by name. Their rank does not identify them: with scanned layers,
  # norms and biases have two dimensions too.
  def decayed(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in _DECAYED, params)

  return optax.chain(
    optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
    optax.add_decayed_weights(config.weight_decay, mask=decayed),
    optax.scale_by_learning_rate(learning_rate(config, updates)),
  )


def optimizer_shardings(
  optimizer: optax.GradientTransformation,
  params: Params,
  shardings,
  whole,
  *,
  offload: bool = False,
):
  """Returns the shardings of the optimizer state. A moment is sharded like its parameter, and every
  other array has the sharding `whole`.

  Args:
    offload: whether the moments are in host memory.
  """
  shapes = jax.eval_shape(optimizer.init, params)

  def place(_, sharding):
    return sharding.with_memory_kind(HOST) if offload else sharding

  return optax.tree_map_params(
    optimizer, place, shapes, shardings, transform_non_params=lambda _: whole
  )


def apply_update(
  optimizer: optax.GradientTransformation,
  grads: Params,
  opt_state,
  params: Params,
  shardings,
  *,
  take: Bool[Array, ''],
) -> tuple[Params, Any]:
  """Returns the parameters and the optimizer state after one update; if `take` is false, both are
  unchanged.

  Call this function inside a jitted function. Offloaded moments are moved to the devices one
  parameter at a time. The moments of a parameter are moved only after the moments of the previous
  parameter are back on the host, so that a device stores the moments of one parameter at a time. No
  moment is moved before `take` is known, because until then the activations need the memory.

  Args:
    grads: clipped gradients.
    shardings: shardings of `opt_state`.
  """
  if not any(map(is_on_host, jax.tree.leaves(shardings))):
    return _applied(optimizer, grads, opt_state, params, take)
  structure = jax.tree.structure(params)

  def like_params(node):
    return jax.tree.structure(node) == structure

  nodes, of_state = jax.tree.flatten(opt_state, is_leaf=like_params)
  copies = [jax.tree.leaves(node) if like_params(node) else None for node in nodes]
  places = [jax.tree.leaves(node) for node in jax.tree.leaves(shardings, is_leaf=like_params)]
  moved, before = [], take
  for i, ((path, param), grad) in enumerate(
    zip(jax.tree.leaves_with_path(params), jax.tree.leaves(grads), strict=True)
  ):
    # Keep the parameter's name: it decides whether weight decay applies.
    def as_tree(leaf, name=path[-1].key):
      return {name: leaf}

    ready, _ = jax.lax.optimization_barrier(([copy and copy[i] for copy in copies], before))
    fetched = [
      node if copy is None else as_tree(jax.device_put(leaf, place[i].with_memory_kind(DEVICE)))
      for node, copy, leaf, place in zip(nodes, copies, ready, places, strict=True)
    ]
    param, state = _applied(
      optimizer, as_tree(grad), of_state.unflatten(fetched), as_tree(param), take
    )
    ((param,), after) = jax.tree.leaves(param), of_state.flatten_up_to(state)
    back = [
      node if copy is None else jax.device_put(*jax.tree.leaves(node), place[i])
      for node, copy, place in zip(after, copies, places, strict=True)
    ]
    before = param, back
    moved.append(before)
  params, states = zip(*moved, strict=True)
  whole = [
    column[0] if copy is None else structure.unflatten(column)
    for copy, column in zip(copies, zip(*states, strict=True))
  ]
  return structure.unflatten(params), of_state.unflatten(whole)


def _applied(optimizer, grads, opt_state, params, take):
  steps, after = optimizer.update(grads, opt_state, params)

  def choose(new, old):
    return jax.tree.map(lambda a, b: jnp.where(take, a, b), new, old)

  return choose(optax.apply_updates(params, steps), params), choose(after, opt_state)


def clipped(grads: Params, config: OptimizerConfig) -> Params:
  """Clips gradients to global norm `max_grad_norm`."""
  clip = optax.clip_by_global_norm(config.max_grad_norm)
  return clip.update(grads, clip.init(grads))[0]
