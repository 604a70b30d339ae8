"""Whole arrays of sharded parameters in the memory of one device, for a transfer that reads device
memory.

Invariant: an array consists of the same parts as the one that `Gatherer.leaves` copies to the host,
computed by the same compiled programs from the same parameters. Moving and joining the parts does
not change their bits, because they are moved as integers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Shaped, UInt

from jaxrl_llm.core.types import Params
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.api import DeviceArrays
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.parts import Cut, Part, ahead


class WholeArrays:
  """Assembles parameters on one device of a job with one process."""

  def __init__(self, gatherer: Gatherer):
    """
    Args:
      gatherer: gatherer that converts the parameters for publication.
    """
    self._gatherer = gatherer
    self._everywhere = jax.jit(_bits, out_shardings=replicated(gatherer.mesh))
    self._joined = jax.jit(_joined, static_argnames='axis')

  def of(self, params: Params) -> DeviceArrays:
    """Returns the function that assembles parameters. It may be called, and the iterators may be
    advanced, for as long as the parameters exist.
    """
    return functools.partial(self._iterate, params)

  def _iterate(
    self, params: Params, names: Sequence[str], device: jax.Device
  ) -> Iterator[tuple[str, UInt[jax.Array, 'elements']]]:
    pieces: list[jax.Array] = []
    for part, cut, piece in ahead(self._pieces(params, names, device)):
      # The parts of a staged array have rows of every group, along the second axis.
      axis, rows = (1, cut.length) if cut.staged else (0, cut.groups * cut.length)
      pieces.append(jax.lax.slice_in_dim(piece, part.skipped, None, axis=axis))
      if sum(piece.shape[axis] for piece in pieces) == rows:
        whole = self._joined(pieces, axis=axis)
        pieces = []  # Frees the memory of the pieces once they are joined.
        yield part.name, whole
        del whole  # Otherwise it would exist while the next array is assembled.

  def _pieces(
    self, params: Params, names: Sequence[str], device: jax.Device
  ) -> Iterator[tuple[Part, Cut, UInt[jax.Array, '...']]]:
    """Yields each part of the given parameters with its bits on the given device."""
    for part, cut, array in self._gatherer.parts(params, names):
      yield part, cut, self._moved(array, device)

  def _moved(
    self, array: Shaped[jax.Array, '*shape'], device: jax.Device
  ) -> UInt[jax.Array, '*shape']:
    """Returns the bits of a part on the given device."""
    if len(array.sharding.device_set) == 1:
      return jax.device_put(_bits(array), device)
    # `device_put` from several devices would take the way over the host.
    return jax.device_put(self._everywhere(array).addressable_data(0), device)


def _bits(x: Shaped[jax.Array, '*shape']) -> UInt[jax.Array, '*shape']:
  """Returns the bits of an array's elements."""
  return jax.lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * x.dtype.itemsize}'))


def _joined(pieces: Sequence[UInt[jax.Array, '...']], axis: int) -> UInt[jax.Array, 'elements']:
  """Returns the pieces of an array as one flat array. A flat array has its elements in C order in
  memory, which the compiler does not promise for others.
  """
  return jnp.concatenate(pieces, axis=axis).reshape(-1)
