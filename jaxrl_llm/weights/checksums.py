"""Checksums of tensors that depend on positions and add up over parts, so that a server can prove
the weights that it holds on its device, whatever parts of a tensor it holds.

A tensor is read as a matrix: its last axis are the columns and all other axes the lines; a tensor
with a single axis is one column, and a scalar one element. The checksum of a tensor or of any part
of it is

  Σ word(x[line, column]) · odd(line) · odd(2^62 + column)   modulo 2^64

over the elements of the part, with lines and columns counted in the whole tensor. So the checksum
of the whole is the sum of the checksums of its parts.

  word(x)    the element's bits as an unsigned integer w, for four bytes w ^ (w >> 16). An element
             of eight bytes counts as two elements of four, in memory order, in adjacent columns.
  odd(n)     the (n + 1)-th output of SplitMix64 with seed 0, with its lowest bit set (Steele, Lea
             and Flood 2014, "Fast splittable pseudorandom number generators").

A single changed element always changes the sum, because the factors are odd and a word is smaller
than 2^64. Swapped or moved elements leave it unchanged with a probability of about 2^-48: factors
differ by a random even number, and words usually differ in one of their 16 lowest bits. The shift
is there for a float32 and its negative, whose bits differ in the highest bit alone.

Invariant: `rollout.vllm.worker.checksum` computes the same function in torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt64


class Slice(NamedTuple):
  """A part of a tensor: a range along one axis, and everything along the other axes."""

  axis: int
  start: int
  length: int


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_COLUMNS = 1 << 62
"""Number of the first column's factor in the SplitMix64 sequence."""
_BLOCK = 1 << 15
"""Number of elements whose words are in memory at a time, as integers of 8 bytes."""


def odd_factors(start: int, count: int) -> UInt64[np.ndarray, '{count}']:
  """Returns odd(start), odd(start + 1), …; see the module."""
  z = (np.arange(count, dtype=np.uint64) + np.uint64(start + 1)) * _GAMMA
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@functools.lru_cache(maxsize=16)
def column_factors(count: int) -> UInt64[np.ndarray, '{count}']:
  """Returns the factors of the first columns. Do not modify the returned array."""
  return odd_factors(_COLUMNS, count)


def line_sums(block: Shaped[np.ndarray, '*lines columns'], start: int = 0) -> np.ndarray:
  """Returns the sum over each line of word · odd(2^62 + column), flat, as uint64.

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
  # Without these buffers, each block would be allocated anew, which takes longer than the sums.
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


def as_matrix(array: Shaped[np.ndarray, '...']) -> Shaped[np.ndarray, '*lines columns']:
  """Returns the array with columns as its last axis; see the module."""
  return array if array.ndim > 1 else array.reshape(-1, 1)


class RunningChecksum:
  """Checksums of a tensor and of slices of it, whose rows arrive in blocks."""

  def __init__(self, slices: Collection[Slice] = ()):
    self._sums: dict[Slice | None, int] = dict.fromkeys((None, *slices), 0)

  def add(self, rows: Shaped[np.ndarray, 'rows *rest'], first: int) -> None:
    """Adds rows, of which the first has the index `first` along the tensor's first axis."""
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

  def values(self) -> dict[Slice | None, str]:
    """Returns the checksums of the rows so far, as 16 hexadecimal digits, keyed by slice; None is
    the key of the whole tensor.
    """
    return {cut: f'{total:016x}' for cut, total in self._sums.items()}


def checksums(
  array: Shaped[np.ndarray, '...'], slices: Collection[Slice] = ()
) -> dict[Slice | None, str]:
  """Returns the checksums of a whole tensor and of slices of it; see `RunningChecksum.values`."""
  running = RunningChecksum(slices)
  running.add(array if array.ndim else array.reshape(1), 0)
  return running.values()
