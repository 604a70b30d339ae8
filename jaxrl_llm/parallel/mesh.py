"""The device mesh, built only by this module; the compiler propagates shardings over its axes."""

from __future__ import annotations

import dataclasses
import math
import os

import jax
from jax.sharding import AxisType, Mesh

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.slices import arrange

DATA, FSDP, SEQUENCE, TENSOR = AXES = ('data', 'fsdp', 'sequence', 'tensor')
"""Mesh axes by increasing communication; the last one joins devices adjacent in the machine."""
BATCH_AXES = (DATA, FSDP)
"""Mesh axes over which sequences are distributed; the product of their sizes is the number of
data-parallel ranks.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Number of devices along each mesh axis; at most one is None and takes all remaining devices."""

  data: int | None = 1
  """Data parallelism: replicas of the parameters, each with different sequences."""
  fsdp: int | None = None
  """Fully sharded data parallelism: parameters and optimizer state are sharded, parameters are
  gathered where used, and each shard has different sequences.
  """
  sequence: int | None = 1
  """Context parallelism: the tokens of each sequence are sharded, and keys and values are gathered.
  Parameters are sharded as with fsdp.
  """
  tensor: int | None = 1
  """Tensor parallelism: heads, MLP and vocabulary are sharded."""
  slices: int | None = None
  """Number of slices with a fast network within and a slow one between them, which only `data`
  crosses. None: TPU devices know theirs, all others are one; a number makes groups of consecutive
  processes the slices.
  """

  def __post_init__(self):
    if self.slices is not None and self.slices < 1:
      raise UserError(f'mesh.slices: {self.slices}, wanted at least 1')


def available_devices() -> list[jax.Device]:
  """Returns all processes' devices. Raises UserError if JAX finds none on permitted platforms."""
  try:
    return jax.devices()
  except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin for the platform.
    reason = str(error).partition('\n')[0]
    raise UserError(
      f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")}: JAX {jax.__version__} finds no such '
      'device'
      f'{f" ({reason})" if reason else ""}; unset the variable, set JAX_PLATFORMS=cpu, or install '
      'the plugin of the '
      "device (pip install 'jax[cuda12]' or 'jax[tpu]') and look whether its driver runs"
    ) from error


def mesh_sizes(config: MeshConfig, count: int) -> tuple[int, ...]:
  """Returns the mesh's size along each axis of `AXES` on `count` devices. Raises UserError if it
  does not fit them.
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
  """Builds a mesh with the four axes over all devices of all processes."""
  devices = available_devices() if devices is None else devices
  sizes = mesh_sizes(config, len(devices))
  arranged = arrange(devices, sizes, config.slices)
  return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def data_parallel_ranks(mesh: Mesh) -> int:
  """Returns the number of ranks that get different sequences."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
