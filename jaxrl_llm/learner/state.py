"""Training state: parameters, optimizer state and counters. Arrays are created sharded, so that a
device needs memory only for its own shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree, Shaped

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Json, Params
from jaxrl_llm.learner.optimizer import optimizer_shardings
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import Model
from jaxrl_llm.models.heads import replace_head
from jaxrl_llm.parallel import rules
from jaxrl_llm.weights.layout import StoredArray

Leaf = TypeVar('Leaf')
"""An array or a description of one, such as its shape or its sharding."""


@flax.struct.dataclass
class TrainState(Generic[Leaf]):
  """State of one trained model."""

  params: Params
  """Trainable parameters: all parameters, or only the adapters and a new head; see
  `models.lora.split`.
  """
  opt_state: PyTree
  """State of the `optax` optimizer of `params`."""
  updates: Leaf
  """i32[], number of updates taken by this optimizer."""
  skipped: Leaf
  """i32[], number of consecutive updates, up to the latest one, that were skipped because of their
  gradient norm.
  """


class Learned(NamedTuple):
  """State of everything that a stage trains or reads while training."""

  policy: TrainState[Array]
  """State of the policy, or of the reward model if the stage trains one."""
  critic: TrainState[Array] | None = None
  reference: Params | None = None
  """Reference parameters, with the structure of `policy.params`. None if the stage reads no
  reference, or if the reference is the policy before each batch.
  """
  reference_step: int = 0
  """Number of batches that the run had completed when the reference was last updated."""
  algorithm_state: Json = None
  """State that the algorithm keeps from batch to batch, such as an adapted KL coefficient."""
  base: Params | None = None
  """Frozen base parameters, to which the adapters of policy and reference are added. They are never
  updated, donated or committed. None if there are no adapters.
  """
  reward_model: Params | None = None
  """Parameters of the reward model that scores rollouts. They are never updated, donated or
  committed. None if the trainer has no reward model.
  """

  def whole(self, params: Params) -> Params:
    """Returns the full model's parameters: `params`, joined with the base parameters if there are
    adapters.
    """
    return lora.join(params, self.base)

  def committed(self) -> dict[str, PyTree]:
    """Returns the arrays to commit, keyed by role."""
    roles = {'train': self.policy, 'critic': self.critic, 'reference': self.reference}
    return {name: role for name, role in roles.items() if role is not None}


def param_shardings(model: Model, mesh: Mesh) -> Any:
  return rules.tree_shardings(mesh, model.axes(), model.shapes())


def trained_shardings(model: Model, mesh: Mesh) -> Any:
  """Returns the shardings of the trainable parameters."""
  return lora.split(param_shardings(model, mesh), model.spec, model.options)[0]


def init_params(model: Model, mesh: Mesh, *, seed: int) -> Params:
  """Initialises random parameters, which are bitwise equal on every mesh."""
  return jax.jit(model.init, out_shardings=param_shardings(model, mesh))(jax.random.key(seed))


def init_trained(model: Model, mesh: Mesh, *, seed: int) -> Params:
  """Initialises only the trainable parameters, with the same values as in `init_params`."""

  def trained(key):
    return lora.split(model.init(key), model.spec, model.options)[0]

  return jax.jit(trained, out_shardings=trained_shardings(model, mesh))(jax.random.key(seed))


def place_params(model: Model, mesh: Mesh, params: Mapping[str, Any]) -> Params:
  """Places host arrays of all or some parameters on the mesh. Each process passes complete arrays,
  and its devices receive only their shards.
  """
  shardings = flatten(param_shardings(model, mesh))
  flat = flatten(params).items()
  return unflatten({name: place_array(array, shardings[name]) for name, array in flat})


def place_array(array: Shaped[np.ndarray, '...'] | StoredArray, sharding: jax.sharding.Sharding):
  """Returns a device array. Each shard is read from `array` only once, and is copied to its devices
  before the next shard is read.
  """
  holders: dict[tuple[tuple[int, int, int], ...], list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(array.shape).items():
    bounds = tuple(part.indices(n) for part, n in zip(index, array.shape, strict=True))
    holders.setdefault(bounds, []).append(device)
  shards = []
  for bounds, devices in holders.items():
    shard = np.ascontiguousarray(array[tuple(slice(*part) for part in bounds)])
    shards += jax.block_until_ready([jax.device_put(shard, device) for device in devices])
  return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def with_output(
  model: Model, mesh: Mesh, body: Params, kernel: Float[Array, 'out embed']
) -> Params:
  """Returns parameters of `model`: `kernel` is the output head, and all other arrays come from
  `body`, the parameters of another model. These arrays are shared, not copied.
  """
  host, sharding = np.asarray(kernel), param_shardings(model, mesh)['head']['kernel']
  placed = jax.make_array_from_callback(
    host.shape, sharding, lambda index: np.ascontiguousarray(host[index])
  )
  return replace_head(body, model.spec, placed)


def init_state(
  params: Params, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState[Array]:
  """Creates a state with `params`, a fresh optimizer state and counters at 0. The arrays of
  `params` are not copied. With `offload`, the moments are in host memory.
  """
  whole = rules.replicated(mesh)
  of_params = jax.tree.map(lambda p: p.sharding, params)
  shardings = optimizer_shardings(optimizer, params, of_params, whole, offload=offload)
  opt_state = jax.jit(optimizer.init, out_shardings=shardings)(params)

  def zero():
    # In a job of several processes, an array made by `jax.device_put` could not be saved in a
    # checkpoint.
    return jax.make_array_from_callback((), whole, lambda _: np.zeros((), np.int32))

  return TrainState(params=params, opt_state=opt_state, updates=zero(), skipped=zero())


def abstract_state(
  model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState[jax.ShapeDtypeStruct]:
  """Returns the shapes, dtypes and shardings of a state, as needed to restore the state from a
  checkpoint. Allocates no arrays.
  """
  shapes, _ = lora.split(model.shapes(), model.spec, model.options)
  shardings = trained_shardings(model, mesh)
  whole = rules.replicated(mesh)
  zero = jax.ShapeDtypeStruct((), jnp.int32)
  state = TrainState(
    params=shapes, opt_state=jax.eval_shape(optimizer.init, shapes), updates=zero, skipped=zero
  )
  placed = TrainState(
    params=shardings,
    opt_state=optimizer_shardings(optimizer, shapes, shardings, whole, offload=offload),
    updates=whole,
    skipped=whole,
  )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
  )


def abstract_base(model: Model, mesh: Mesh) -> Params | None:
  """Returns shapes, dtypes and shardings of the frozen base parameters; None without adapters."""
  parts = (model.shapes(), param_shardings(model, mesh))
  shapes, shardings = (lora.split(part, model.spec, model.options)[1] for part in parts)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )


def renewed(state: TrainState, optimizer: optax.GradientTransformation) -> TrainState:
  """Returns the state with a fresh optimizer state. Only the position in the learning-rate schedule
  is kept.
  """
  return state.replace(opt_state=with_schedule(optimizer.init(state.params), state.opt_state))


def with_schedule(opt_state: PyTree, other: PyTree) -> PyTree:
  """Returns `opt_state` with the schedule position of `other`."""

  def of_schedule(node):
    return isinstance(node, optax.ScaleByScheduleState)

  def choose(fresh, kept):
    return kept if of_schedule(fresh) else fresh

  return jax.tree.map(choose, opt_state, other, is_leaf=of_schedule)


def copy_params(params: Params) -> Params:
  """Copies parameters to new buffers with the same sharding, so that an update that donates the
  originals does not invalidate the copies.
  """
  return jax.tree.map(jnp.copy, params)
