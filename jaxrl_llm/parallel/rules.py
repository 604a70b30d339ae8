"""Sharding rules. A table maps each logical axis (the meaning of a dimension) to the mesh axes over
which such a dimension is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from jaxrl_llm.parallel.mesh import BATCH_AXES, FSDP, SEQUENCE, TENSOR

RULES: Mapping[str, tuple[str, ...]] = {
  'batch': BATCH_AXES,
  'draws': (*BATCH_AXES, TENSOR),
  'time': (SEQUENCE,),
  'layers': (),
  'vocab': (TENSOR,),
  'embed': (FSDP, SEQUENCE),
  'heads': (TENSOR,),
  'kv_heads': (TENSOR,),
  'mlp': (TENSOR,),
  'norm': (),
  'lora': (),
}


def sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
  """Returns the sharding of an array. Each dimension is sharded over the mesh axes that the table
  gives for its logical axis. If the number of shards does not divide the dimension's size, mesh
  axes are left out, beginning with the last, until the number of shards divides the size.

  Args:
    mesh: device mesh.
    axes: logical name of each dimension; None for a dimension that is never sharded.
    shape: shape of the array.
  """
  mesh_axes = [
    () if name is None else _dividing(mesh, name, size)
    for name, size in zip(axes, shape, strict=True)
  ]
  return NamedSharding(
    mesh, PartitionSpec(*(over if _parts(mesh, over) > 1 else None for over in mesh_axes))
  )


def parts(mesh: Mesh, axis: str, size: int) -> int:
  """Returns the number of shards of a dimension of `size` whose logical name is `axis`."""
  return _parts(mesh, _dividing(mesh, axis, size))


def _dividing(mesh: Mesh, name: str, size: int) -> tuple[str, ...]:
  over = RULES[name]
  while size % _parts(mesh, over):
    over = over[:-1]
  return over


def _parts(mesh: Mesh, over: tuple[str, ...]) -> int:
  return math.prod(mesh.shape[axis] for axis in over)


def constrain(
  x: Shaped[Array, '*shape'], mesh: Mesh | None, *axes: str | None
) -> Shaped[Array, '*shape']:
  """Constrains the sharding of `x` by the table, inside a jitted function. Without a mesh, `x` is
  returned unchanged.
  """
  return x if mesh is None else jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape))


def tree_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
  """Returns the shardings of a parameter tree. `axes` is the tree of the arrays' axis names, and
  `shapes` is the tree of their shapes, such as the result of `jax.eval_shape`.
  """
  return jax.tree.map(
    lambda names, array: sharding(mesh, names, array.shape),
    axes,
    shapes,
    is_leaf=lambda leaf: isinstance(leaf, tuple),
  )


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def sharding_of_batch(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays `[micro_batches, chunks, ...]`. Chunks are sharded over the
  data-parallel ranks.
  """
  return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
