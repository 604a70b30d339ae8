"""The device mesh: built in this one place, with automatic axes."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh

from jaxrl_llm.core.errors import UserError

DATA, FSDP, TENSOR = AXES = ('data', 'fsdp', 'tensor')
BATCH_AXES = (DATA, FSDP)
"""Mesh axes over which sequences are dealt: their product is the number of data-parallel ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Devices along each mesh axis; at most one may be None, which takes the devices that are left."""

  data: int | None = 1
  fsdp: int | None = None
  tensor: int | None = 1


def build_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
  """A mesh of axes (data, fsdp, tensor) over all devices of all processes."""
  devices = jax.devices() if devices is None else devices
  sizes = [config.data, config.fsdp, config.tensor]
  if sizes.count(None) > 1:
    raise UserError(f'mesh: {config}: at most one axis may be left open (None)')
  fixed = math.prod(s for s in sizes if s is not None)
  if None in sizes:
    sizes[sizes.index(None)] = len(devices) // max(fixed, 1)
  if math.prod(sizes) != len(devices) or min(sizes) < 1:
    raise UserError(
      f'mesh: data={config.data} fsdp={config.fsdp} tensor={config.tensor} does not cover the {len(devices)} devices '
      'there are; change the mesh, or start with another number of devices'
    )
  return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def data_parallel_ranks(mesh: Mesh) -> int:
  """How many ranks get different sequences."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
