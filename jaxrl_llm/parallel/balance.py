"""Balanced shards of the time axis.

Under a causal mask, later queries see more keys than earlier ones. If device i of n holds the i-th
n-th of a row, the last device therefore has about twice the average work. Balanced shards give
every device an early and a late piece: a row is cut into 2n pieces, and device i holds the pieces i
and 2n - 1 - i (as in Megatron's context parallelism, and Llama 3, arXiv:2407.21783, section 3.3.2).

A row whose pieces are in the order in which devices hold them, (0, 2n - 1, 1, 2n - 2, ...), is said
to be in balanced order here. The order of a row without this permutation is its natural order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from jaxrl_llm.parallel.mesh import SEQUENCE
from jaxrl_llm.parallel.rules import sharding


def pieces(shards: int) -> list[int]:
  """Returns the numbers of the pieces of a row in balanced order."""
  return [piece for i in range(shards) for piece in (i, 2 * shards - 1 - i)]


def in_balanced_order(
  x: Shaped[Array, 'batch time *rest'], shards: int
) -> Shaped[Array, 'batch time *rest']:
  """Permutes rows from natural to balanced order. Every device must have whole rows, since pieces
  are not exchanged between devices.
  """
  halves = _cut(x, 2 * shards)
  early, late = halves[:, :shards], halves[:, shards:][:, ::-1]
  return jnp.stack([early, late], axis=2).reshape(x.shape)


def in_natural_order(
  x: Shaped[Array, 'batch time *rest'], shards: int
) -> Shaped[Array, 'batch time *rest']:
  """Permutes rows from balanced to natural order; the inverse of `in_balanced_order`."""
  pairs = _cut(x, shards, 2)
  return jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)


def _cut(x: Shaped[Array, 'batch time *rest'], *parts: int) -> Array:
  """Splits the time axis into axes of the sizes `parts`, and one for the tokens of a part."""
  return x.reshape(x.shape[0], *parts, -1, *x.shape[2:])


def exchanged(x: Float[Array, 'batch time embed'], mesh: Mesh) -> Float[Array, 'batch time embed']:
  """Permutes rows that are sharded over time from balanced to natural order.

  Each device sends its two pieces to the devices that hold them in natural order, in two
  permutations. In natural order, device i holds the pieces 2i and 2i + 1.
  """
  shards = mesh.shape[SEQUENCE]
  held = pieces(shards)
  # The device that has each piece in balanced order. All even pieces are on different devices, and
  # so are all odd pieces.
  holder = {piece: place // 2 for place, piece in enumerate(held)}
  even, odd = ([(holder[2 * i + k], i) for i in range(shards)] for k in range(2))
  spec = sharding(mesh, ('batch', 'time', None), x.shape).spec

  def local(x):
    first, second = jnp.split(x, 2, axis=1)
    # The first piece of device i has number i, and the sum of the numbers of both pieces is odd.
    first_is_even = jax.lax.axis_index(SEQUENCE) % 2 == 0
    evens, odds = (jnp.where(first_is_even, *pair) for pair in ((first, second), (second, first)))
    return jnp.concatenate(
      [jax.lax.ppermute(evens, SEQUENCE, even), jax.lax.ppermute(odds, SEQUENCE, odd)], axis=1
    )

  return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
