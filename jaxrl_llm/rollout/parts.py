"""Parts of sharded arrays that the devices cut out and gather at a time."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Shaped

Leaf = Shaped[jax.Array, '...'] | jax.ShapeDtypeStruct
"""An array, or its shape and sharding if the programs are only compiled (`Gatherer.programs`)."""


class Part(NamedTuple):
  """Part of an array that a device program cuts out: the whole array, one of its stacked layers, or
  some rows of either.
  """

  name: str
  """Parameter name in the unrolled tree, in which every layer has its own arrays."""
  inputs: tuple[Leaf, ...]
  """The array and, if it is a kernel with an adapter, the adapter's matrices A and B."""
  layer: int | None
  """Index of the layer; None if the array is not a stack of all layers."""
  group: int = 0
  """Index of the part's group of rows; see `Cut.groups`."""
  start: int = 0
  """Index of the part's first row within its group of rows."""
  skipped: int = 0
  """Number of rows at the beginning of the part that the previous part also contains."""


class Batch(NamedTuple):
  """Parts that the processes get at the same time, one part each."""

  names: tuple[str | None, ...]
  """Parameter name of each process's part in the unrolled tree; None if the process needs no part.
  It then receives a copy of another one.
  """
  inputs: tuple[tuple[Leaf, ...], ...]
  """Inputs of each process's part, see `Part.inputs`; only one entry if the array stacks layers."""
  layers: tuple[int, ...]
  """Index of the layer of each process's part; 0 if the array is not a stack of all layers."""
  group: int
  """See `Part.group`."""
  start: int
  """See `Part.start`."""
  skipped: int
  """See `Part.skipped`."""


class Cut(NamedTuple):
  """Description of how arrays of one shape and sharding are cut into parts. It is the key under
  which the compiled program is cached.
  """

  shape: tuple[int, ...]
  """Shape of the array, without the axis along which layers are stacked."""
  dtype: np.dtype
  """Data type to which the parts are converted."""
  stacked: bool
  spec: PartitionSpec | None
  """Sharding of the axes of `shape` over the mesh; None if the array is on one device."""
  adapted: bool
  groups: int
  """Number of groups of consecutive rows; the groups lie on different devices."""
  rows: int
  """Number of rows that a part takes from each group. If the array is not cut, this is the number
  of all rows.
  """
  staged: bool
  """Whether each part contains rows of every group. The host must then assemble the array."""

  @property
  def length(self) -> int:
    """Number of rows in a group."""
    return (self.shape[0] if self.shape else 1) // self.groups

  @property
  def whole(self) -> bool:
    return not self.shape or self.rows == self.shape[0]


def stacked_name(name: str) -> str:
  """Returns a parameter's name in the scanned tree, in which layers are stacked, given its name in
  the unrolled tree.
  """
  first, *rest = name.split('/')
  return '/'.join([first, *rest[1:]]) if first == 'layers' else name


def in_layer(name: str) -> bool:
  """Returns whether a parameter belongs to a layer."""
  return name.startswith('layers/')


def is_stacked(name: str) -> bool:
  """Returns whether a parameter stacks the arrays of all layers."""
  return in_layer(name) and not name.split('/')[1].isdigit()


def starts(cut: Cut) -> Iterator[tuple[int, int, int]]:
  """Yields (group, first row within the group, number of rows already in the previous part) for
  each part. All parts have the same number of rows, so the last part of a group may overlap the
  previous part.
  """
  for group in range(1 if cut.staged else cut.groups):
    for start in range(0, cut.length, cut.rows):
      first = max(0, min(start, cut.length - cut.rows))
      yield group, first, start - first


_Item = TypeVar('_Item', bound=tuple)
_AHEAD = 2
"""Number of parts that the devices compute and copy ahead of the part in use."""


def ahead(computed: Iterator[_Item]) -> Iterator[_Item]:
  """Yields the items of `computed`, each after the devices have begun to compute the next ones. The
  last element of an item must be arrays on the devices.
  """
  begun: collections.deque[_Item] = collections.deque()
  for item in computed:
    begun.append(item)
    if len(begun) > _AHEAD:
      # The devices must not run further ahead, because each part in flight needs memory.
      jax.block_until_ready(begun[0][-1])
      yield begun.popleft()
  yield from begun


def to_host(array: Shaped[jax.Array, '*shape']) -> Shaped[np.ndarray, '*shape']:
  """Returns the array on the host. The result may be a view of a device buffer if each of the
  array's devices holds the whole array.
  """
  if array.is_fully_replicated:
    return np.asarray(array.addressable_data(0))
  # `np.asarray` would keep the result in memory for as long as the array exists.
  whole = np.empty(array.shape, array.dtype)
  for shard in array.addressable_shards:
    if shard.replica_id == 0:
      whole[shard.index] = shard.data
  return whole
