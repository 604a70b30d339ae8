"""Placement of the embedded engine's arrays: on one device, or over a mesh of the devices of this
process.

On a mesh, weights are sharded as the trainer's policy is (`parallel.rules`) over the axis `tensor`,
and replicated over the axis `data`. Decode slots are sharded over `data`, and the heads of their KV
cache over `tensor`. Weights are not sharded over `data`, because a decode step uses every weight
for only a few tokens: gathering weights in every step would take longer than computing with them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.parallel import rules
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh

_CACHE_AXES = ('batch', 'kv_heads', None, None)
"""Logical axes of the keys or values of a KV cache, the only arrays of slots with four axes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedMesh:
  """Mesh of devices on which the embedded engine samples. It has all devices of process 0, whatever
  the trainer's mesh. At most one axis may be None; this axis gets all remaining devices.
  """

  data: int | None = None
  """Number of groups of devices. The decode slots are divided among the groups, and each group has
  all weights.
  """
  tensor: int | None = 1
  """Number of devices in a group, over which attention heads, KV cache, MLP and vocabulary are
  sharded. It must divide the number of the model's key-value heads.
  """

  def __post_init__(self):
    for axis in ('data', 'tensor'):
      if (size := getattr(self, axis)) is not None and size < 1:
        raise UserError(f'rollout.embedded.mesh.{axis}: got {size}, wanted at least 1')
    if self.data is None and self.tensor is None:
      raise UserError('rollout.embedded.mesh: data and tensor are both None; set at least one')


@dataclasses.dataclass(frozen=True)
class Placement:
  """Devices of the engine's programs, and the shardings of the arrays of these programs."""

  device: jax.Device
  """The engine's only device, or the first of several."""
  mesh: Mesh | None = None
  """None if the engine samples on one device, without a mesh."""

  @property
  def whole(self) -> Sharding:
    """Sharding of an array that every device has completely."""
    return SingleDeviceSharding(self.device) if self.mesh is None else rules.replicated(self.mesh)

  def model(self, model: Model) -> Model:
    """Returns the model that computes with this placement: the given model, or, on a mesh, one that
    shards its activations. Its parameters are in the unrolled form.
    """
    if self.mesh is None:
      return model
    options = dataclasses.replace(model.options, scan_layers=False)
    return build_model(model.spec, options, self.mesh)

  def of_params(self, model: Model, shapes: Any) -> Any:
    """Returns the shardings of the unrolled parameters of a model that `model` has returned."""
    if self.mesh is None:
      return jax.tree.map(lambda _: self.whole, shapes)
    return rules.tree_shardings(self.mesh, model.axes(), shapes)

  def of_rows(self, tree: Any) -> Any:
    """Returns the shardings of arrays whose first axis is decode slots or prefilled prompts. If the
    size of `data` does not divide the number of prompts, every group of devices has all of them.
    """

    def of_array(array: jax.ShapeDtypeStruct) -> Sharding:
      if self.mesh is None:
        return self.whole
      others = (None,) * (len(array.shape) - 1)
      axes = _CACHE_AXES if len(array.shape) == 4 else ('batch', *others)
      return rules.sharding(self.mesh, axes, array.shape)

    return jax.tree.map(of_array, tree)


def place(
  config: EmbeddedMesh | None, devices: Sequence[jax.Device], *, spec: ModelSpec, slots: int
) -> Placement:
  """Returns the placement that a configuration describes.

  Args:
    config: the configured mesh. If None, only the first device is used.
    devices: devices of process 0.
    spec: architecture of the model.
    slots: number of decode slots.

  Raises:
    UserError: the devices cannot form the mesh, or the mesh cannot divide the slots or the model's
      key-value heads.
  """
  if config is None:
    return Placement(devices[0])
  where, count = 'rollout.embedded.mesh', len(devices)
  fixed = math.prod(size for size in (config.data, config.tensor) if size is not None)
  data, tensor = (count // fixed if size is None else size for size in (config.data, config.tensor))
  if data * tensor != count:
    wanted = f'data={config.data} tensor={config.tensor}'
    raise UserError(
      f'{where}: {wanted} does not match the number of devices of process 0, {count}; change the '
      'mesh, or start process 0 with another number of devices'
    )
  if spec.num_key_value_heads % tensor:
    raise UserError(
      f'{where}: tensor={tensor} does not divide the {spec.num_key_value_heads} key-value heads of '
      f'the model; choose a divisor of {spec.num_key_value_heads}, and data for the other devices'
    )
  if slots % data:
    raise UserError(
      f'{where}: data={data} does not divide rollout.embedded.slots, {slots}; choose a multiple of '
      f'{data} slots'
    )
  mesh = build_mesh(MeshConfig(data=data, fsdp=1, tensor=tensor), list(devices))
  return Placement(mesh.devices.flat[0], mesh)
