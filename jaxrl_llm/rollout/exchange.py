"""Exchange of parts of arrays among the devices of the trainer's processes. Each process gets a
part for itself, and all get theirs at the same time.

Invariant: a device receives only a piece of the part of its own process. The traffic of a device is
thus that of the pieces, and not that of the parts of all processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Shaped

_Axes = tuple[str, ...]


class Exchange:
  """Layout in which the devices of each process hold the pieces of one part, one piece each."""

  def __init__(self, mesh: Mesh, processes: Sequence[int]):
    """
    Args:
      processes: number of the process of each device of the mesh, in the order of
        `mesh.devices.flat`. The numbers begin at 0, and each process has equally many devices.
    """
    self._mesh = mesh
    self._processes = np.array(processes).reshape(mesh.devices.shape)
    self.count = 1 + max(processes)
    """Number of processes."""
    self.pieces = len(processes) // self.count
    """Number of pieces of a part, which is the number of devices of a process."""

  @classmethod
  def of(cls, mesh: Mesh, processes: Sequence[int] | None = None) -> Exchange | None:
    """Returns the exchange among the devices of a mesh; None if processes have different numbers of
    devices in it.

    Args:
      processes: see `__init__`; None for the processes to which the devices belong.
    """
    if processes is None:
      processes = [device.process_index for device in mesh.devices.flat]
    counts = np.bincount(processes)
    return cls(mesh, processes) if len(set(counts.tolist())) == 1 else None

  def exchange(
    self,
    parts: Shaped[jax.Array, 'processes groups rows *rest'],
    spec: Sequence[str | _Axes | None],
    group: Int[jax.Array, ''] | None = None,
  ) -> Shaped[jax.Array, 'devices piece_groups piece_rows *rest']:
    """Returns the pieces of the parts. Each device of the mesh holds one of them; see `received`.

    A piece has consecutive rows of every group. If the number of rows is not a multiple of the
    number of pieces, the last row is repeated at the end.

    Args:
      parts: a part for each process.
      spec: sharding of the groups, and of the axes after the rows, over the mesh. The other axes
        are not sharded.
      group: index of the group to return. If None, the pieces have rows of all groups.
    """
    rows = parts.shape[2]
    if padding := -rows % self.pieces:
      index = np.minimum(np.arange(rows + padding), rows - 1)
      parts = jnp.take(parts, index, axis=2)
    groups, *rest = [() if axes is None else _tuple(axes) for axes in spec]
    sharded = {1: groups, **dict(enumerate(rest, 3))}
    order = self._order([*sharded.values()])
    source = PartitionSpec(None, groups or None, None, *(axes or None for axes in rest))
    # Each position has a device; the piece that goes there is taken from its process's part.
    places = self._places(order)
    identity = places == [divmod(i, self.pieces) for i in range(len(places))]
    permutation = np.array([process * self.pieces + piece for process, piece in places])
    replicas = order[: len(order) - len([axis for axes in sharded.values() for axis in axes])]

    def move(x):
      count, local, _, *others = x.shape
      x = x.reshape(count, local, self.pieces, -1, *others).swapaxes(1, 2)
      x = x.reshape(count * self.pieces, local, -1, *others)
      if not identity:
        x = x[permutation]
      if replicas:
        # The devices that hold the same data serve different positions.
        length = len(places) // math.prod(self._mesh.shape[axis] for axis in replicas)
        first = jax.lax.axis_index(replicas) * length
        x = jax.lax.dynamic_slice_in_dim(x, first, length)
      for axis, names in sharded.items():
        if names:
          x = jax.lax.all_to_all(x, names, split_axis=0, concat_axis=axis, tiled=True)
      return x if group is None else jax.lax.dynamic_index_in_dim(x, group, axis=1)

    moved = jax.shard_map(
      move, mesh=self._mesh, in_specs=source, out_specs=PartitionSpec(order), check_vma=False
    )
    return moved(parts)

  def sharding(self, spec: Sequence[str | _Axes | None]) -> NamedSharding:
    """Returns the sharding of the result of `exchange`."""
    order = self._order([() if axes is None else _tuple(axes) for axes in spec])
    return NamedSharding(self._mesh, PartitionSpec(order))

  def received(
    self, pieces: Shaped[jax.Array, 'devices *shape'], number: int
  ) -> Iterator[tuple[int, Shaped[np.ndarray, '*shape']]]:
    """Yields (index of the piece, piece) for the pieces of the part of process `number`, which are
    on devices of this process.
    """
    places = self._places(_tuple(pieces.sharding.spec[0]))
    for shard in pieces.addressable_shards:
      process, piece = places[shard.index[0].start or 0]
      if process == number:
        yield piece, np.asarray(shard.data)[0]

  def _order(self, sharded: Sequence[_Axes]) -> _Axes:
    """Returns the mesh axes in the order in which they number the positions of the result: first
    those over which the parts are replicated.
    """
    used = [axis for axes in sharded for axis in axes]
    return (*[axis for axis in self._mesh.axis_names if axis not in used], *used)

  def _places(self, order: Sequence[str]) -> list[tuple[int, int]]:
    """Returns (number of the process, index of the piece) for each position of the result."""
    axes = [self._mesh.axis_names.index(axis) for axis in order]
    seen = [0] * self.count
    places = []
    for process in self._processes.transpose(axes).flat:
      places.append((int(process), seen[process]))
      seen[process] += 1
    return places


def _tuple(axes: str | _Axes) -> _Axes:
  return (axes,) if isinstance(axes, str) else tuple(axes)
