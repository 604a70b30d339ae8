"""Memory kinds: where the arrays of a tree are stored, and how they move between device memory,
host memory and files.

Invariant: moving an array preserves its bits. An array that is moved back has its former values,
sharding and memory kind, so programs compiled for it run without recompilation.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree, Shaped

from jaxrl_llm.core.errors import RunError

HOST, DEVICE = 'pinned_host', 'device'
"""JAX's names for host memory and device memory."""


class StoredShard(NamedTuple):
  """A file with the part of an array that one device holds."""

  device: jax.Device
  shape: tuple[int, ...]
  file: pathlib.Path
  digest: str
  """64-bit XXH3 digest of the bytes written to the file."""


@dataclasses.dataclass(frozen=True, eq=False)
class StoredArray:
  """An array whose shards on this process's devices are stored in files."""

  shape: tuple[int, ...]
  dtype: Any
  shards: tuple[StoredShard, ...]
  """One shard for each of this process's devices that holds a part of the array, including
  replicas.
  """


def is_on_host(sharding: Sharding) -> bool:
  return sharding.memory_kind == HOST


def is_on_device(leaf: Any) -> bool:
  """Returns whether a leaf of a tree is an array in device memory."""
  return isinstance(leaf, jax.Array) and not is_on_host(leaf.sharding)


def device_bytes(tree: PyTree, device: jax.Device) -> int:
  """Returns the number of bytes that the arrays of a tree use in the memory of one device."""
  return shard_bytes([leaf for leaf in jax.tree.leaves(tree) if is_on_device(leaf)], device)


def shard_bytes(tree: PyTree, device: jax.Device) -> int:
  """Returns the size in bytes of those shards of a tree's arrays that belong to one device,
  regardless of the memory that stores them.
  """
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
    if device in leaf.sharding.addressable_devices
  )


def live_bytes(device: jax.Device) -> int:
  """Returns the number of bytes that all arrays of this process use in the memory of one device.
  Arrays that share a buffer, such as an array and its shards, count once.
  """
  buffers: dict[int, int] = {}
  for array in jax.live_arrays():
    if array.is_deleted() or not is_on_device(array):
      continue
    for shard in array.addressable_shards:
      if shard.device == device and shard.data.nbytes:
        buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
  return sum(buffers.values())


def shardings_of(tree: PyTree) -> list[Sharding]:
  """Returns the sharding of each array of a tree, in the order of its leaves."""
  return [leaf.sharding for leaf in jax.tree.leaves(tree)]


def to_host(tree: PyTree) -> PyTree:
  """Moves the arrays of a tree to host memory, one at a time, and frees their former memory. Arrays
  that are already in host memory are not moved.
  """

  def move(leaf):
    return _copied(leaf, leaf.sharding.with_memory_kind(HOST)) if is_on_device(leaf) else leaf

  return jax.tree.map(move, tree)


def destroyed(tree: PyTree) -> PyTree:
  """Frees the arrays of a tree. In the result, each array is replaced by a `jax.ShapeDtypeStruct`
  with the same shape, dtype and sharding.
  """

  def free(leaf):
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    leaf.delete()
    return like

  return jax.tree.map(free, tree)


def to_disk(tree: PyTree, directory: pathlib.Path) -> PyTree:
  """Writes the arrays of a tree to files and frees their memory. In the result, each array is
  replaced by a `StoredArray`.

  The files are not synced to disk, because no later process reads them.

  Raises:
    RunError: a file cannot be written.
  """
  leaves, structure = jax.tree.flatten(tree)
  directory.mkdir(parents=True, exist_ok=True)
  stored = [
    leaf if isinstance(leaf, StoredArray) else _written(leaf, directory / str(i))
    for i, leaf in enumerate(leaves)
  ]
  return structure.unflatten(stored)


def restored(tree: PyTree, homes: Sequence[Sharding]) -> PyTree:
  """Moves the arrays of a tree from host memory, or from the files that `to_disk` wrote, to the
  memory that programs expect, one at a time. Frees the host memory and removes the files.

  Args:
    homes: sharding that each array gets, in the order of the leaves.

  Raises:
    RunError: a file of `to_disk` cannot be read, or its content has changed since it was written.
  """
  leaves, structure = jax.tree.flatten(tree)

  def move(leaf, home):
    if isinstance(leaf, StoredArray):
      return _read(leaf, home)
    return leaf if leaf.sharding == home else _copied(leaf, home)

  return structure.unflatten([move(*pair) for pair in zip(leaves, homes, strict=True)])


def _copied(array: Shaped[jax.Array, '...'], sharding: Sharding) -> jax.Array:
  """Copies an array to another memory of the same devices and frees the original. Every process
  copies its own shards.
  """
  moved = _assembled(
    array.shape,
    sharding,
    ((shard.device, shard.data) for shard in array.addressable_shards),
  )
  array.delete()
  return moved


def _assembled(
  shape: tuple[int, ...], sharding: Sharding, shards: Iterable[tuple[jax.Device, Any]]
) -> jax.Array:
  kind = sharding.memory_kind
  placed = [
    jax.device_put(data, SingleDeviceSharding(device, memory_kind=kind)) for device, data in shards
  ]
  array = jax.make_array_from_single_device_arrays(shape, sharding, placed)
  return jax.block_until_ready(array)


def _written(array: Shaped[jax.Array, '...'], path: pathlib.Path) -> StoredArray:
  shards = []
  try:
    for i, shard in enumerate(array.addressable_shards):
      raw = np.ascontiguousarray(np.asarray(shard.data)).reshape(-1).view(np.uint8)
      file = path.with_name(f'{path.name}-{i}')
      raw.tofile(file)
      shards.append(
        StoredShard(shard.device, shard.data.shape, file, xxhash.xxh3_64_hexdigest(raw))
      )
  except OSError as error:
    raise RunError(
      f'{path.parent}: an offloaded array cannot be written ({error.strerror}); make room, or keep '
      "the role in host memory, with 'offload' in place of 'disk' in phases"
    ) from error
  stored = StoredArray(array.shape, array.dtype, tuple(shards))
  array.delete()
  return stored


def _read(stored: StoredArray, home: Sharding) -> jax.Array:
  def read(shard: StoredShard) -> np.ndarray:
    try:
      raw = np.fromfile(shard.file, np.uint8)
    except OSError as error:
      raise _damaged(shard.file, error.strerror) from error
    if xxhash.xxh3_64_hexdigest(raw) != shard.digest:
      raise _damaged(shard.file, 'its bytes are not those that were written')
    return raw.view(stored.dtype).reshape(shard.shape)

  pieces = ((shard.device, read(shard)) for shard in stored.shards)
  array = _assembled(stored.shape, home, pieces)
  for shard in stored.shards:
    shard.file.unlink(missing_ok=True)
  return array


def _damaged(file: pathlib.Path, reason: str) -> RunError:
  return RunError(
    f'{file}: an offloaded array cannot be read: {reason}; start the same command again to resume '
    'from the newest commit'
  )
