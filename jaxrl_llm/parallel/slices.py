"""Slices: groups of devices with a fast network within each group and a slow network between
groups.

Only the first axis of a mesh, data, crosses slices; all other axes stay within a slice. The traffic
between slices therefore consists mainly of sums of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Shaped

from jaxrl_llm.core.errors import UserError

_AXES = ('data', 'fsdp', 'sequence', 'tensor')
_AUTO = (AxisType.Auto,) * len(_AXES)


@runtime_checkable
class SliceDevice(Protocol):
  """The properties of a device that determine its place in a mesh."""

  platform: str
  process_index: int


def arrange(
  devices: Sequence[SliceDevice], sizes: Sequence[int], count: int | None
) -> Shaped[np.ndarray, 'data fsdp sequence tensor']:
  """Returns the devices in the order of the mesh. The axis data crosses slices; all other axes stay
  within a slice.

  Args:
    devices: all devices of the mesh. TPU devices may also have a `slice_index`.
    sizes: sizes of the mesh axes. Their product is the number of devices.
    count: number of slices. If None, TPU devices report their slice, and other devices form one
      slice.

  Raises:
    UserError: `data` is not a multiple of the number of slices, or the devices do not form `count`
      slices of equal size.
  """
  groups = slices(devices, count)
  data, *within = sizes
  if data % len(groups):
    raise UserError(
      f'mesh: data={data} is not a multiple of the number of slices, {len(groups)}, and only data '
      'may cross slices; change learner.mesh.data, or start with another number of slices'
    )
  # Within a slice, JAX arranges neighbours in the mesh so that they are neighbours in the machine.
  shape = (data // len(groups), *within)
  return np.concatenate(
    [jax.make_mesh(shape, _AXES, axis_types=_AUTO, devices=group).devices for group in groups]
  )


def slices(devices: Sequence[SliceDevice], count: int | None) -> list[list[SliceDevice]]:
  """Returns the devices of each slice, in the order of the slices. The arguments are the same as in
  `arrange`. Raises UserError if the devices do not form `count` slices of equal size.
  """
  if devices[0].platform == 'tpu':
    by_slice: dict[int, list[SliceDevice]] = {}
    for device in devices:
      # If there is only one slice, its devices may lack the attribute `slice_index`.
      by_slice.setdefault(getattr(device, 'slice_index', 0), []).append(device)
    if count not in (None, len(by_slice)):
      raise UserError(
        f'mesh: slices={count}, but the TPU devices are in {len(by_slice)} slices; remove '
        'learner.mesh.slices'
      )
    groups = [by_slice[index] for index in sorted(by_slice)]
  else:
    groups = _process_groups(devices, count or 1)
  if len({len(group) for group in groups}) > 1:
    raise UserError(
      f'mesh: slices of {", ".join(str(len(group)) for group in groups)} devices; wanted equal '
      'sizes: start with whole slices, or the same number of devices in each process'
    )
  return groups


def _process_groups(devices: Sequence[SliceDevice], count: int) -> list[list[SliceDevice]]:
  """Divides the devices into `count` groups, each with the devices of equally many consecutive
  processes. If there is only one process, each group has equally many consecutive devices instead.
  """
  processes = sorted({device.process_index for device in devices})
  units = len(devices) if len(processes) == 1 else len(processes)
  if units % count:
    named = 'devices of the only process' if len(processes) == 1 else 'processes'
    raise UserError(
      f'mesh: slices={count} does not divide the {units} {named}; wanted groups of equal size'
    )
  if len(processes) == 1:
    size = units // count
    return [list(devices[i : i + size]) for i in range(0, units, size)]
  place = {process: i * count // units for i, process in enumerate(processes)}
  groups: list[list[SliceDevice]] = [[] for _ in range(count)]
  for device in devices:
    groups[place[device.process_index]].append(device)
  return groups
