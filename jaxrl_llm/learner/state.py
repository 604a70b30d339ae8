"""The trained state: parameters, optimizer, counters; created sharded, never assembled on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Json, Params
from jaxrl_llm.learner.optimizer import optimizer_shardings
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import Model
from jaxrl_llm.models.heads import replace_head
from jaxrl_llm.parallel import rules

Leaves = Any
"""A tree of arrays, or of what stands for them while a program is traced, sharded or restored."""


@flax.struct.dataclass
class TrainState:
  params: Leaves
  """What is trained: the whole model, or adapters (`models.lora.split`)."""
  opt_state: Leaves
  updates: Leaves
  """i32, updates taken by this optimizer"""
  skipped: Leaves
  """i32, updates skipped in a row, up to now"""


class Learned(NamedTuple):
  """All that a stage learns or learns from."""

  policy: TrainState
  """Or a reward model's, where that is what the stage trains."""
  critic: TrainState | None = None
  reference: Params | None = None
  """As `policy.params`. None where no reference is read, and where it is the policy before each batch."""
  reference_step: int = 0
  """Completed batches of the run when the reference was last set."""
  algorithm_state: Json = None
  """What the algorithm's annotation keeps from batch to batch."""
  base: Params | None = None
  """What the policy's adapters stand on, and the reference's: never trained, donated or committed. None without."""

  def whole(self, params: Params) -> Params:
    """The model of which these are the trained parameters."""
    return lora.join(params, self.base)

  def committed(self) -> dict[str, Leaves]:
    """The arrays that a commit holds, by the name of what they are."""
    roles = {'train': self.policy, 'critic': self.critic, 'reference': self.reference}
    return {name: role for name, role in roles.items() if role is not None}


def param_shardings(model: Model, mesh: Mesh) -> Any:
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return rules.tree_shardings(mesh, model.axes(), shapes)


def trained_shardings(model: Model, mesh: Mesh) -> Any:
  """Of the parameters that are trained."""
  return lora.split(param_shardings(model, mesh), model.spec, model.options)[0]


def init_params(model: Model, mesh: Mesh, *, seed: int) -> Params:
  """Random parameters; the same on every mesh (bits may differ between meshes in the last place)."""
  return jax.jit(model.init, out_shardings=param_shardings(model, mesh))(jax.random.key(seed))


def init_trained(model: Model, mesh: Mesh, *, seed: int) -> Params:
  """Those of `init_params` that are trained, without making the others."""
  trained = lambda key: lora.split(model.init(key), model.spec, model.options)[0]
  return jax.jit(trained, out_shardings=trained_shardings(model, mesh))(jax.random.key(seed))


def place_params(model: Model, mesh: Mesh, params: Mapping[str, Any]) -> Params:
  """Host arrays, of all parameters or of some, onto the mesh; each process holds them and gives its devices a part."""
  shardings = flatten(param_shardings(model, mesh))
  place = lambda array, sharding: jax.make_array_from_callback(
    array.shape, sharding, lambda index: np.ascontiguousarray(array[index])
  )
  return unflatten({name: place(array, shardings[name]) for name, array in flatten(params).items()})


def with_output(model: Model, mesh: Mesh, body: Params, kernel: Array) -> Params:
  """Parameters of `model`, whose output is `kernel`, around the body of another model's; arrays of it are shared."""
  placed = jax.device_put(kernel, param_shardings(model, mesh)['head']['kernel'])
  return replace_head(body, model.spec, placed)


def init_state(
  params: Params, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState:
  """A fresh optimizer for `params`, whose arrays it takes over; its moments in the host's memory with `offload`."""
  whole = rules.replicated(mesh)
  of_params = jax.tree.map(lambda p: p.sharding, params)
  shardings = optimizer_shardings(optimizer, params, of_params, whole, offload=offload)
  opt_state = jax.jit(optimizer.init, out_shardings=shardings)(params)
  zero = lambda: jax.device_put(jnp.zeros((), jnp.int32), whole)
  return TrainState(params=params, opt_state=opt_state, updates=zero(), skipped=zero())


def abstract_state(
  model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState:
  """Shapes, dtypes and shardings of a state, without making one: what a checkpoint is restored to."""
  shapes, _ = lora.split(jax.eval_shape(model.init, jax.random.key(0)), model.spec, model.options)
  shardings = trained_shardings(model, mesh)
  whole = rules.replicated(mesh)
  zero = jax.ShapeDtypeStruct((), jnp.int32)
  state = TrainState(params=shapes, opt_state=jax.eval_shape(optimizer.init, shapes), updates=zero, skipped=zero)
  placed = TrainState(
    params=shardings,
    opt_state=optimizer_shardings(optimizer, shapes, shardings, whole, offload=offload),
    updates=whole,
    skipped=whole,
  )
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed)


def abstract_base(model: Model, mesh: Mesh) -> Params | None:
  """Shapes, dtypes and shardings of what adapters stand on; None without."""
  parts = (jax.eval_shape(model.init, jax.random.key(0)), param_shardings(model, mesh))
  shapes, shardings = (lora.split(part, model.spec, model.options)[1] for part in parts)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def renewed(state: TrainState, optimizer: optax.GradientTransformation) -> TrainState:
  """The same parameters with a fresh optimizer; the schedule goes on."""
  return state.replace(opt_state=with_schedule(optimizer.init(state.params), state.opt_state))


def with_schedule(opt_state: Leaves, other: Leaves) -> Leaves:
  """`opt_state` with the schedule's position of `other`."""
  of_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)
  choose = lambda own, its: its if of_schedule(own) else own
  return jax.tree.map(choose, opt_state, other, is_leaf=of_schedule)


def copy_params(params: Params) -> Params:
  """Own buffers with the same contents and sharding, which a donated update cannot take away."""
  return jax.tree.map(jnp.copy, params)
