"""Lossless deltas: the elements whose bits differ between two versions of the same weights.

A delta of a tensor has two arrays. `gaps` encodes the positions of the changed elements in C order.
Each gap is the number of unchanged elements since the previous changed element, in one or more
bytes: each byte of 255 adds 255 to the gap, and a byte below 255 ends the gap. `bits` holds the new
bits of the changed elements, as integers.

Invariant: a delta that `apply` accepts has increasing positions within the tensor. Everything is
checked before the first element is written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Integer, Shaped, UInt8

from jaxrl_llm.weights.tensor_files import FileLayout

GAPS, BITS = '/gaps', '/bits'
"""Suffixes of a tensor's two arrays in the file of a delta."""
_LONG = 255
"""Value of a byte that adds to a gap without ending it."""


class Changes(NamedTuple):
  """Elements of a tensor whose bits differ from the version before."""

  positions: Int[np.ndarray, 'count']
  """Increasing positions of the elements in C order."""
  bits: Integer[np.ndarray, 'count']
  """New bits of the elements."""


def encode_gaps(positions: Int[np.ndarray, 'count'], before: int = -1) -> UInt8[np.ndarray, 'n']:
  """Encodes increasing positions. `before` is the position of the last changed element before them,
  or -1 if there is none.
  """
  gaps = np.diff(positions, prepend=before) - 1
  long = gaps // _LONG
  ends = np.cumsum(long + 1) - 1
  encoded = np.full(int(ends[-1]) + 1 if len(ends) else 0, _LONG, np.uint8)
  encoded[ends] = gaps - long * _LONG
  return encoded


def decode_gaps(gaps: UInt8[np.ndarray, 'n']) -> Int[np.ndarray, 'count']:
  """Returns the positions that `encode_gaps` encoded.

  Raises:
    ValueError: there are no gaps, or the last gap is incomplete.
  """
  ends = gaps < _LONG
  if not len(gaps) or not ends[-1]:
    raise ValueError('its last gap has no end')
  positions = np.cumsum(gaps, dtype=np.int64)[ends]
  return positions + np.arange(len(positions))


def apply(
  tensors: Mapping[str, Shaped[np.ndarray, '...']], delta: Mapping[str, Shaped[np.ndarray, '...']]
) -> None:
  """Writes the changed elements of a delta into contiguous tensors.

  Args:
    tensors: tensors of the previous version, keyed by name.
    delta: arrays of the delta, keyed by their names in its file.

  Raises:
    ValueError: the delta does not fit the tensors. In this case, nothing is written.
  """
  changes = []
  names = sorted({key.removesuffix(GAPS).removesuffix(BITS) for key in delta})
  for name in names:
    gaps, bits = delta.get(name + GAPS), delta.get(name + BITS)
    if name not in tensors or gaps is None or bits is None or len(delta) != 2 * len(names):
      raise ValueError(f'delta refused: {name} is not a tensor of the model with gaps and bits')
    flat = tensors[name].reshape(-1).view(f'i{tensors[name].dtype.itemsize}')
    if gaps.dtype != np.uint8 or gaps.ndim != 1 or bits.dtype != flat.dtype or bits.ndim != 1:
      raise ValueError(
        f'delta refused: {name} has gaps {gaps.dtype}{list(gaps.shape)} and bits '
        f'{bits.dtype}{list(bits.shape)}, wanted one row of uint8 and one of {flat.dtype}'
      )
    try:
      positions = decode_gaps(gaps)
    except ValueError as error:
      raise ValueError(f'delta refused: {name}: {error}') from None
    if len(positions) != len(bits) or positions[-1] >= flat.size:
      raise ValueError(
        f'delta refused: {name} has {len(positions)} positions up to {positions[-1]} and '
        f'{len(bits)} values, the tensor {flat.size} elements'
      )
    changes.append((flat, positions, bits))
  for flat, positions, bits in changes:
    flat[positions] = bits


class Image:
  """Copy of the newest version's file in the memory of this process. As a sink of `TensorWriter`,
  it takes the bytes of the next version and collects the elements that changed.
  """

  def __init__(self, layout: FileLayout, itemsize: int, *, limit: int | None = None):
    """
    Args:
      itemsize: size of an element in bytes.
      limit: limit of the size of a delta in bytes. A delta is collected only if it is smaller. If
        None, the limit is the size of the tensors.
    """
    self._limit = layout.nbytes if limit is None else limit
    self.bytes = np.zeros(layout.size, np.uint8)
    self.bytes[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
    self._layout, self._dtype = layout, np.dtype(f'i{itemsize}')
    self._lock = threading.Lock()
    self.begin(compare=False, collect=False)

  def begin(self, *, compare: bool, collect: bool) -> None:
    """Prepares for the next version.

    Args:
      compare: whether to count the elements that change. If not, the version replaces the previous
        one without a comparison.
      collect: whether to collect the changed elements for a delta.
    """
    self._compares, self._collects = compare, collect
    self.changed = 0
    """Number of elements of the next version that differ from the previous version; 0 if they are
    not compared.
    """
    self.nbytes = 0
    """Size of the collected delta in bytes."""
    self._parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {
      name: [] for name in self._layout.offsets
    }
    self._last = dict.fromkeys(self._layout.offsets, -1)
    self._patched: set[str] = set()
    """Names of the tensors whose next version is already in the image."""

  def bits(self, name: str) -> Integer[np.ndarray, 'elements']:
    """Returns a view of the bits of a tensor's elements in the image."""
    start = self._layout.offsets[name]
    return self.bytes[start : start + self._layout.sizes[name]].view(self._dtype)

  def patch(self, name: str, changes: Changes) -> None:
    """Applies all changes of a tensor from the previous version, which the image must contain, to
    the next one. `put` ignores the tensor from then on.
    """
    self.bits(name)[changes.positions] = changes.bits.view(self._dtype)
    self._patched.add(name)
    self._collect(name, changes.positions, changes.bits.view(self._dtype))

  def put(self, name: str, block: UInt8[np.ndarray, 'bytes'], offset: int) -> None:
    if name in self._patched:
      return
    target = self.bytes[offset : offset + len(block)]
    if not self._compares:
      np.copyto(target, block)
      return
    # The header's length is a multiple of 8, so the elements are aligned.
    old, new = target.view(self._dtype), block.view(self._dtype)
    changed = np.flatnonzero(old != new)
    bits = new[changed]
    old[changed] = bits
    first = (offset - self._layout.offsets[name]) // self._dtype.itemsize
    self._collect(name, changed + first, bits)

  def _collect(
    self, name: str, positions: Int[np.ndarray, 'count'], bits: Integer[np.ndarray, 'count']
  ) -> None:
    """Counts and collects the next changes of a tensor."""
    if not len(positions):
      return
    with self._lock:
      self.changed += len(positions)
    if not self._collects or not self.is_smaller:
      return
    gaps = encode_gaps(positions, self._last[name])
    self._last[name] = int(positions[-1])
    with self._lock:
      self.nbytes += gaps.nbytes + bits.nbytes
    self._parts[name].append((gaps, bits))

  @property
  def is_smaller(self) -> bool:
    """Whether the collected delta is below the limit. Once it is not, `put` collects no further
    changes, so the delta may then be incomplete.
    """
    return self.nbytes < self._limit

  def arrays(self) -> Iterator[tuple[str, Integer[np.ndarray, 'n']]]:
    """Yields (name in the file of the delta, array) for each array of the delta. Unchanged tensors
    have no arrays.
    """
    for name, changes in self._parts.items():
      if changes:
        gaps, bits = zip(*changes, strict=True)
        yield name + GAPS, np.concatenate(gaps)
        yield name + BITS, np.concatenate(bits)

  def release(self) -> None:
    """Releases the memory of the collected delta."""
    self._parts = {}
