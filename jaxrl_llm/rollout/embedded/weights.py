"""Weights of the embedded engine: copies of the published arrays on the engine's devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.api import unstack_layers


def copied(
  leaves: Iterable[tuple[str, np.ndarray | jax.Array]], shapes: Any, *, to_devices: bool
) -> Params:
  """Returns copies of weights, in the unrolled form. Each array is copied before the next array is
  requested.

  Args:
    leaves: (name in the parameter tree, array) of each parameter. Layers may be stacked or
      separate. Arrays on devices are moved from device to device, and must not be changed, donated
      or deleted later.
    shapes: tree of the shape, data type and sharding of each parameter.
    to_devices: whether to copy to the devices of these shardings, or to host memory.

  Raises:
    ValueError: the names or shapes differ from those of `shapes`.
  """
  wanted = flatten(shapes)
  copies, given_shapes = {}, {}
  for given, array in leaves:
    parts = {given: array}
    if given not in wanted and given.startswith('layers/') and np.ndim(array):
      parts = flatten(unstack_layers(unflatten(parts)))
    for name, leaf in parts.items():
      given_shapes[name] = np.shape(leaf)
      if name in wanted and given_shapes[name] == wanted[name].shape:
        copies[name] = _copy(leaf, wanted[name], to_devices=to_devices)
  wrong = [
    f'{name}: got {given_shapes.get(name)}, wanted {wanted[name].shape if name in wanted else None}'
    for name in sorted(given_shapes.keys() | wanted.keys())
    if name not in wanted or given_shapes.get(name) != wanted[name].shape
  ]
  if wrong:
    raise ValueError(
      f'weights do not match this model ({len(wrong)} arrays differ): {"; ".join(wrong[:4])}'
    )
  return jax.block_until_ready(unflatten(copies))


def _copy(
  leaf: Shaped[np.ndarray | jax.Array, '*shape'], like: jax.ShapeDtypeStruct, *, to_devices: bool
) -> Shaped[np.ndarray | jax.Array, '*shape']:
  if to_devices and isinstance(leaf, jax.Array):
    # Moving an array is a program with collectives, of which few may be in flight (`DeviceThread`).
    return jax.block_until_ready(jax.device_put(leaf.astype(like.dtype), like.sharding))
  # np.array always copies, even from a CPU device array, so device_put may alias the copy.
  copy = np.array(leaf, like.dtype)
  return jax.device_put(copy, like.sharding) if to_devices else copy
