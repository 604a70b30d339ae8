"""Checksums of tensors that depend on positions and add up over parts. With them, a server proves
that the weights on its device are right, even if the device holds only parts of the tensors.

A tensor is read as a matrix. Its last axis numbers the columns, and all other axes together number
the lines. A tensor with a single axis is one column, and a scalar is one element. The checksum of a
tensor, or of any part of a tensor, is

  Σ word(x[line, column]) · odd(line) · odd(2^62 + column)   modulo 2^64

over the elements of the part, with lines and columns counted in the whole tensor. The checksum of
the whole tensor is therefore the sum of the checksums of its parts.

  word(x)    the element's bits as an unsigned integer w; for elements of four bytes, w ^ (w >> 16).
             An element of eight bytes counts as two elements of four bytes, in memory order, in
             adjacent columns.
  odd(n)     the (n + 1)-th output of SplitMix64 with seed 0, with its lowest bit set (Steele, Lea
             and Flood 2014, "Fast splittable pseudorandom number generators").

A single changed element always changes the sum, because the factors are odd and a word is smaller
than 2^64. Swapped or moved elements leave it unchanged with a probability of about 2^-48: factors
differ by a random even number, and words usually differ in one of their 16 lowest bits. A float32
and its negative differ only in the highest bit. The shift by 16 makes their words differ in one of
the 16 lowest bits, too.

Invariant: `rollout.vllm.worker.checksum` computes the same function in torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt64


class Slice(NamedTuple):
  """A part of a tensor: a range along one axis, and everything along the other axes."""

  axis: int
  start: int
  length: int


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_COLUMNS = 1 << 62
"""Index of the factor of column 0 in the SplitMix64 sequence."""
_BLOCK = 1 << 15
"""Number of words that are in memory at a time as integers of 8 bytes."""


def odd_factors(start: int, count: int) -> UInt64[np.ndarray, '{count}']:
  """Returns the `count` factors odd(start), odd(start + 1), …, as the module's docstring defines
  them.
  """
  return _odd(np.arange(count, dtype=np.uint64) + np.uint64(start))


def _odd(indices: UInt64[np.ndarray, 'count']) -> UInt64[np.ndarray, 'count']:
  """Returns the factors odd(n) of the given indices n."""
  z = (indices + np.uint64(1)) * _GAMMA
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@functools.lru_cache(maxsize=16)
def column_factors(count: int) -> UInt64[np.ndarray, '{count}']:
  """Returns the factors odd(2^62 + column) of columns 0 to `count` - 1. Do not modify the returned
  array, because later calls return the same array.
  """
  return odd_factors(_COLUMNS, count)


def line_sums(block: Shaped[np.ndarray, '*lines columns'], start: int = 0) -> np.ndarray:
  """Returns the sum of word · odd(2^62 + column) over each line, as a flat array of type uint64.

  Args:
    block: elements of some lines.
    start: column of the block's first element in the whole tensor.
  """
  columns = block.shape[-1]
  itemsize = block.dtype.itemsize
  words = np.ascontiguousarray(block).reshape(-1, columns)
  words = words.view(np.dtype(f'u{min(itemsize, 4)}'))
  each = max(1, itemsize // 4)  # Words per element.
  factors = column_factors((start + columns) * each)[start * each :]
  sums = np.empty(len(words), np.uint64)
  step = max(1, min(len(words), _BLOCK // max(1, words.shape[1])))
  # Without these buffers, memory would be allocated for each block, which takes longer than the
  # sums.
  mixed = np.empty((step, words.shape[1]), words.dtype)
  wide = np.empty((step, words.shape[1]), np.uint64)
  for first in range(0, len(words), step):
    part = words[first : first + step]
    if itemsize >= 4:
      part = np.right_shift(part, np.uint32(16), out=mixed[: len(part)])
      part ^= words[first : first + step]
    wide[: len(part)] = part
    np.dot(wide[: len(part)], factors, out=sums[first : first + step])
  return sums


def _words(elements: Shaped[np.ndarray, 'count']) -> UInt64[np.ndarray, 'count']:
  """Returns the words of elements of at most four bytes each."""
  words = elements.view(np.dtype(f'u{elements.dtype.itemsize}'))
  if words.dtype.itemsize == 4:
    words = words ^ (words >> np.uint32(16))
  return words.astype(np.uint64)


def as_matrix(array: Shaped[np.ndarray, '...']) -> Shaped[np.ndarray, '*lines columns']:
  """Returns the array with the columns of the tensor as its last axis. An array with at most one
  axis becomes a single column.
  """
  return array if array.ndim > 1 else array.reshape(-1, 1)


class RunningChecksum:
  """Checksums of a tensor and of slices of the tensor, computed while its rows arrive in blocks."""

  def __init__(self, slices: Collection[Slice] = ()):
    self._sums: dict[Slice | None, int] = dict.fromkeys((None, *slices), 0)

  def add(self, rows: Shaped[np.ndarray, 'rows *rest'], first: int) -> None:
    """Adds consecutive rows. `first` is the index of the first row added, along the first axis."""
    if not rows.size:
      return
    matrix = as_matrix(rows)
    lines = matrix.shape[:-1]
    inner = math.prod(lines[1:])
    factors = odd_factors(first * inner, math.prod(lines)).reshape(lines)
    of_lines = line_sums(matrix).reshape(lines)
    for cut in self._sums:
      if cut is None:
        part, sums = factors, of_lines
      elif cut.axis == len(lines):
        part = factors
        columns = matrix[..., cut.start : cut.start + cut.length]
        sums = line_sums(columns, cut.start).reshape(lines)
      else:
        if cut.axis == 0 and (cut.start >= first + len(rows) or cut.start + cut.length <= first):
          continue
        start = cut.start - (first if cut.axis == 0 else 0)
        index = (slice(None),) * cut.axis + (slice(max(start, 0), max(start + cut.length, 0)),)
        part, sums = factors[index], of_lines[index]
      total = int(np.dot(part.reshape(-1), sums.reshape(-1)))
      self._sums[cut] = (self._sums[cut] + total) % (1 << 64)

  def replace(
    self,
    shape: tuple[int, ...],
    positions: Int[np.ndarray, 'count'],
    old: Shaped[np.ndarray, 'count'],
    new: Shaped[np.ndarray, 'count'],
  ) -> None:
    """Replaces elements of a tensor that has been added whole.

    Args:
      shape: shape of the tensor.
      positions: positions of the elements in C order.
      old: former elements, of at most four bytes each.
      new: the elements that replace them.
    """
    shape = shape or (1,)
    index = np.unravel_index(positions, shape)
    width = shape[-1] if len(shape) > 1 else 1
    lines, columns = np.divmod(np.asarray(positions, np.uint64), np.uint64(width))
    terms = _words(new) - _words(old)  # Unsigned integers wrap: all sums are modulo 2^64.
    terms *= _odd(lines) * _odd(columns + np.uint64(_COLUMNS))
    for cut in self._sums:
      part = terms
      if cut is not None:
        at = index[cut.axis]
        part = terms[(at >= cut.start) & (at < cut.start + cut.length)]
      total = int(part.sum(dtype=np.uint64))
      self._sums[cut] = (self._sums[cut] + total) % (1 << 64)

  def covers(self, slices: Collection[Slice]) -> bool:
    """Returns whether the checksums of the given slices are computed."""
    return all(cut in self._sums for cut in slices)

  def values(self) -> dict[Slice | None, str]:
    """Returns the checksums of the rows added so far, as 16 hexadecimal digits, keyed by slice. The
    key None stands for the whole tensor.
    """
    return {cut: f'{total:016x}' for cut, total in self._sums.items()}


def checksums(
  array: Shaped[np.ndarray, '...'], slices: Collection[Slice] = ()
) -> dict[Slice | None, str]:
  """Returns the checksums of a whole tensor and of slices of the tensor, in the form of
  `RunningChecksum.values`.
  """
  running = RunningChecksum(slices)
  running.add(array if array.ndim else array.reshape(1), 0)
  return running.values()
