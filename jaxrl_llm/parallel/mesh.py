"""The device mesh, which is built only in this module. The compiler propagates shardings over the
axes of the mesh.
"""

from __future__ import annotations

import dataclasses
import math
import os

import jax
from jax.sharding import AxisType, Mesh

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.slices import arrange

DATA, FSDP, SEQUENCE, TENSOR = AXES = ('data', 'fsdp', 'sequence', 'tensor')
"""Mesh axes in the order of increasing communication. Devices along the last axis are adjacent in
the machine.
"""
BATCH_AXES = (DATA, FSDP)
"""Mesh axes over which sequences are distributed. The product of the sizes of these axes is the
number of data-parallel ranks.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Number of devices along each mesh axis. At most one axis may be None; this axis gets all
  remaining devices.
  """

  data: int | None = 1
  """Data parallelism. Each replica of the parameters gets different sequences."""
  fsdp: int | None = None
  """Fully sharded data parallelism. Parameters and optimizer state are sharded, and parameters are
  gathered where they are used. Each shard gets different sequences.
  """
  sequence: int | None = 1
  """Context parallelism. The tokens of each sequence are sharded, and keys and values are gathered.
  Parameters are sharded as with fsdp.
  """
  tensor: int | None = 1
  """Tensor parallelism. Attention heads, MLP and vocabulary are sharded."""
  slices: int | None = None
  """Number of slices. The network within a slice is fast and the network between slices is slow, so
  only the axis `data` crosses slices. If None, TPU devices report their slice, and devices of other
  platforms form one slice. On TPUs, a given number must equal the actual number of slices. On other
  platforms, the processes, or the devices of a single process, are divided into that many
  consecutive groups.
  """

  def __post_init__(self):
    if self.slices is not None and self.slices < 1:
      raise UserError(f'mesh.slices: {self.slices}, wanted at least 1')


def available_devices() -> list[jax.Device]:
  """Returns the devices of all processes. Raises UserError if JAX finds none on the permitted
  platforms.
  """
  try:
    return jax.devices()
  # An AssertionError means that the platform has no plugin.
  except (RuntimeError, AssertionError) as error:
    reason = str(error).partition('\n')[0]
    raise UserError(
      f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")}: JAX {jax.__version__} finds no such '
      'device'
      f'{f" ({reason})" if reason else ""}; unset the variable, set JAX_PLATFORMS=cpu, or install '
      'the plugin of the '
      "device (pip install 'jax[cuda12]' or 'jax[tpu]') and check that its driver works"
    ) from error


def mesh_sizes(config: MeshConfig, count: int) -> tuple[int, ...]:
  """Returns the size of the mesh along each axis of `AXES` for `count` devices. Raises UserError if
  the configuration does not match the number of devices.
  """
  sizes = [getattr(config, axis) for axis in AXES]
  if sizes.count(None) > 1:
    raise UserError(f'mesh: {config}: at most one axis may be left open (None)')
  fixed = math.prod(s for s in sizes if s is not None)
  if None in sizes:
    sizes[sizes.index(None)] = count // max(fixed, 1)
  if math.prod(sizes) != count or min(sizes) < 1:
    wanted = ' '.join(f'{axis}={getattr(config, axis)}' for axis in AXES)
    raise UserError(
      f'mesh: {wanted} does not match the number of devices, {count}; change the mesh, or start '
      'with another number of devices'
    )
  return tuple(sizes)


def build_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
  """Builds a mesh with the four axes of `AXES`. If `devices` is None, the mesh has all devices of
  all processes.
  """
  devices = available_devices() if devices is None else devices
  sizes = mesh_sizes(config, len(devices))
  arranged = arrange(devices, sizes, config.slices)
  return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def leading_devices(mesh: Mesh) -> list[jax.Device]:
  """Returns the devices of the mesh that belong to process 0, in the order of their ids."""
  devices = [device for device in mesh.devices.flat if device.process_index == 0]
  return sorted(devices, key=lambda device: device.id)


def data_parallel_ranks(mesh: Mesh) -> int:
  """Returns the number of data-parallel ranks, which get different sequences."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
