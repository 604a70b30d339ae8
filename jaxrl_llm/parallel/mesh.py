"""The devices, and the mesh of them: built in this one place, with automatic axes."""

from __future__ import annotations

import dataclasses
import math
import os

import jax
from jax.sharding import AxisType, Mesh

from jaxrl_llm.core.errors import UserError

DATA, FSDP, SEQUENCE, TENSOR = AXES = ('data', 'fsdp', 'sequence', 'tensor')
"""From the axis that talks least to the one that talks most: neighbours in a mesh are neighbours in a machine."""
BATCH_AXES = (DATA, FSDP)
"""Mesh axes over which sequences are dealt: their product is the number of data-parallel ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Devices along each mesh axis; at most one may be None, which takes the devices that are left."""

  data: int | None = 1
  """Copies of the parameters, each with sequences of its own."""
  fsdp: int | None = None
  """Parameters and optimizer state are cut, and gathered where they are used; each part has sequences of its own."""
  sequence: int | None = 1
  """Each sequence's tokens are cut, and its keys and values gathered (context parallel); parameters as with fsdp."""
  tensor: int | None = 1
  """Heads, MLP and vocabulary are cut."""


def available_devices() -> list[jax.Device]:
  """The devices of all processes; UserError where JAX has none on the platforms that it may use."""
  try:
    return jax.devices()
  except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin for the platform.
    reason = str(error).partition('\n')[0]
    raise UserError(
      f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")}: JAX {jax.__version__} has no such device here'
      f'{f" ({reason})" if reason else ""}; unset the variable, set JAX_PLATFORMS=cpu, or install the plugin of the '
      "device (pip install 'jax[cuda12]' or 'jax[tpu]') and look whether its driver runs"
    ) from error


def build_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
  """A mesh of the four axes over all devices of all processes."""
  devices = available_devices() if devices is None else devices
  sizes = [getattr(config, axis) for axis in AXES]
  if sizes.count(None) > 1:
    raise UserError(f'mesh: {config}: at most one axis may be left open (None)')
  fixed = math.prod(s for s in sizes if s is not None)
  if None in sizes:
    sizes[sizes.index(None)] = len(devices) // max(fixed, 1)
  if math.prod(sizes) != len(devices) or min(sizes) < 1:
    wanted = ' '.join(f'{axis}={getattr(config, axis)}' for axis in AXES)
    raise UserError(
      f'mesh: {wanted} does not cover the {len(devices)} devices there are; change the mesh, or start with another '
      'number of devices'
    )
  return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def data_parallel_ranks(mesh: Mesh) -> int:
  """How many ranks get different sequences."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
