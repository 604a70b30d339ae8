"""Sequence packing: assigns rows to optimizer steps, ranks, micro-batches and chunks by length.

A unit is a set of rows that must stay together: a single sequence, a preference pair, or a group
that a loss couples.

Invariants: every row is placed exactly once, and as a whole. The rows of a unit are in the same
optimizer step, rank and micro-batch. Every rank has the same number of chunks in every micro-batch.
Packing is a pure function, so every process that packs the same lengths gets the same result.

The method follows DeepSeek-R1 (arXiv:2501.12948v2, B.1). The sequences are sorted by length and
distributed over the data-parallel ranks. On each rank, a best-fit strategy packs them into chunks
of fixed length, and all ranks have equally many chunks.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from jaxrl_llm.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
  """Placement of a step's rows in `micro_batches` arrays of shape [ranks * chunks, chunk_len]."""

  ranks: int
  chunks: int
  """Number of chunks per rank and micro-batch. Rank r has the chunks from r * chunks to
  (r + 1) * chunks - 1.
  """
  chunk_len: int
  """Number of tokens per chunk."""
  micro_batches: int
  """Number of micro-batches, at least 1."""
  length: Int32[np.ndarray, 'rows']
  """Number of the row's tokens that are stored in its chunk."""
  micro_batch: Int32[np.ndarray, 'rows']
  chunk: Int32[np.ndarray, 'rows']
  """Index of the row's chunk in the micro-batch, counted over all ranks."""
  offset: Int32[np.ndarray, 'rows']
  """Position in the chunk of the row's first stored token."""
  segment: Int32[np.ndarray, 'rows']
  """Number of the row in its chunk, counted from 1 in order of offset. In segment ids, 0 marks
  padding.
  """
  first: Int32[np.ndarray, 'rows']
  """Number of tokens at the beginning of the row that are not stored with it, because earlier rows
  of its chunk share them; see `batching.trees`.
  """
  filled: int
  """Number of chunks with rows on the rank that has the most, at least 1."""
  splits_remainder: bool = False
  """Whether the last chunks of a step, if they do not fill a micro-batch, are computed one chunk
  per rank at a time, so that empty chunks are not computed.
  """

  @property
  def used(self) -> int:
    """Amount of work in the unit in which the learner's programs count it: `filled` if the
    remainder is split, otherwise `micro_batches`.
    """
    return self.filled if self.splits_remainder else self.micro_batches

  @property
  def tokens(self) -> int:
    """Number of tokens in the chunks, where shared tokens count once."""
    return int(self.length.sum())

  @property
  def shared_tokens(self) -> int:
    """Number of tokens that are not computed, because they are stored with another row."""
    return int(self.first.sum())

  @property
  def utilisation(self) -> float:
    """Fraction of the computed token slots, over all ranks, that contain a token."""
    computed = self.filled if self.splits_remainder else self.micro_batches * self.chunks
    return self.tokens / (computed * self.ranks * self.chunk_len)


def deal(units: Sequence[Sequence[int]], steps: int, *, seed: int) -> list[list[int]]:
  """Distributes units over optimizer steps at random. The numbers of units per step differ by at
  most 1.

  Units must be distributed before any sorting by length: if a sorted batch were split, the
  minibatches would have very different mean lengths, which would change the algorithm.

  Args:
    units: row numbers of each unit.
    steps: number of optimizer steps, at most the number of units.
    seed: seed of the permutation.

  Returns:
    For each optimizer step, the indices of its units in `units`, in permuted order.
  """
  if not 0 < steps <= len(units):
    raise UserError(
      f'packing: {len(units)} units cannot fill {steps} optimizer steps, wanted at least one unit '
      'per step; lower the number of minibatches or raise the batch size'
    )
  order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(units)).tolist()
  size, more = divmod(len(units), steps)
  cuts = [0]
  for step in range(steps):
    cuts.append(cuts[-1] + size + (step < more))
  return [order[a:b] for a, b in itertools.pairwise(cuts)]


def pack(
  lengths: Sequence[int],
  *,
  units: Sequence[Sequence[int]] | None = None,
  ranks: int,
  chunks: int,
  chunk_len: int,
  splits_remainder: bool = False,
) -> Packing:
  """Packs the rows of one optimizer step.

  Args:
    lengths: number of tokens of each row.
    units: row numbers of each unit. Every row is in exactly one unit. If None, every row is a
      separate unit.
    ranks: number of data-parallel ranks.
    chunks: number of chunks per rank and micro-batch.
    chunk_len: number of tokens per chunk.
    splits_remainder: see `Packing`. Every unit must then be a single row.
  """
  units = [[row] for row in range(len(lengths))] if units is None else units
  _check(lengths, units, ranks, chunks, chunk_len)
  totals = [sum(lengths[row] for row in unit) for unit in units]
  order = sorted(range(len(units)), key=lambda u: (-totals[u], u))
  bins = [_RankBins(chunks, chunk_len) for _ in range(ranks)]
  for rank, owned in enumerate(_deal_ranks(order, totals, ranks)):
    for unit in owned:
      bins[rank].place(sorted(units[unit], key=lambda row: (-lengths[row], row)), lengths)
  filled = 1 + max((chunk for b in bins for chunk, *_ in b.places.values()), default=0)
  if splits_remainder and any(len(unit) > 1 for unit in units):
    raise ValueError('packing: the rows of a unit could be separated by split_remainder')
  places = np.zeros((4, len(lengths)), np.int32)
  for rank, packed in enumerate(bins):
    for row, (chunk, offset, segment) in packed.places.items():
      places[:, row] = (chunk // chunks, rank * chunks + chunk % chunks, offset, segment)
  return Packing(
    ranks=ranks,
    chunks=chunks,
    chunk_len=chunk_len,
    micro_batches=-(-filled // chunks),
    length=np.asarray(lengths, np.int32).reshape(-1),
    micro_batch=places[0],
    chunk=places[1],
    offset=places[2],
    segment=places[3],
    first=np.zeros(len(lengths), np.int32),
    filled=filled,
    splits_remainder=splits_remainder,
  )


def _check(
  lengths: Sequence[int], units: Sequence[Sequence[int]], ranks: int, chunks: int, chunk_len: int
) -> None:
  if min(ranks, chunks, chunk_len) < 1:
    raise UserError(
      f'packing: ranks {ranks}, chunks {chunks}, chunk_len {chunk_len}: each must be at least 1'
    )
  for row, length in enumerate(lengths):
    if not 0 < length <= chunk_len:
      raise UserError(
        f'packing: row {row} has {length} tokens, wanted 1 … {chunk_len} (chunk_len); raise '
        'chunk_len or refuse such rows at admission'
      )
  if sorted(row for unit in units for row in unit) != list(range(len(lengths))):
    raise ValueError(f'packing: units must name each of the {len(lengths)} rows exactly once')


def _deal_ranks(order: Sequence[int], totals: Sequence[int], ranks: int) -> list[list[int]]:
  """Assigns units to ranks, starting with the longest. In each round every rank gets one unit, and
  the rank with the fewest tokens gets the longest unit of the round.

  In the first two rounds, the result is the snake order (ranks forwards, then backwards). In later
  rounds, this rule keeps the ranks' numbers of tokens close. In snake order, the numbers would
  drift apart.
  """
  owned: list[list[int]] = [[] for _ in range(ranks)]
  loads = [0] * ranks
  for start in range(0, len(order), ranks):
    lightest = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
    for rank, unit in zip(lightest, order[start : start + ranks]):
      owned[rank].append(unit)
      loads[rank] += totals[unit]
  return owned


class _RankBins:
  """Chunks of one rank. Each row is put into the fullest chunk that has room for it (best fit).

  Chunk c belongs to the micro-batch c // chunks.
  """

  def __init__(self, chunks: int, chunk_len: int):
    self.chunks, self.chunk_len = chunks, chunk_len
    self.used: list[int] = []
    self.places: dict[int, tuple[int, int, int]] = {}
    self._rows: list[int] = []
    self._by_free: list[tuple[int, int]] = []
    """(free tokens, chunk) of all chunks so far, in ascending order. The first entry with enough
    free tokens is the fullest chunk with room.
    """

  def place(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
    """Places one unit. Its rows must be sorted by length, longest first."""
    if len(rows) == 1:
      at = bisect.bisect_left(self._by_free, (lengths[rows[0]], -1))
      if at == len(self._by_free):
        self._open(1)
        at = bisect.bisect_left(self._by_free, (lengths[rows[0]], -1))
      self._put(rows[0], lengths[rows[0]], self._by_free[at][1])
    elif rows:
      for row, chunk in zip(rows, self._fit_unit([lengths[row] for row in rows], rows)):
        self._put(row, lengths[row], chunk)

  def _fit_unit(self, wanted: list[int], rows: Sequence[int]) -> list[int]:
    """Returns the chunk of each row of a unit. All chunks are in the fullest micro-batch that has
    room for the unit, or in a new micro-batch if no micro-batch has room.
    """
    first = range(0, len(self.used), self.chunks)
    free = {c: [self.chunk_len - n for n in self.used[c : c + self.chunks]] for c in first}
    for frees in free.values():
      frees += [self.chunk_len] * (self.chunks - len(frees))
    enough = [
      (sum(frees), c)
      for c, frees in free.items()
      if sum(frees) >= sum(wanted) and max(frees) >= wanted[0]
    ]
    for _, chunk in sorted(enough):
      fitted = _best_fit(wanted, free[chunk])
      if fitted is not None:
        self._open(chunk + self.chunks - len(self.used))
        return [chunk + c for c in fitted]
    fitted = _best_fit(wanted, [self.chunk_len] * self.chunks)
    if fitted is None:
      raise UserError(
        f'packing: the unit of rows {list(rows)} ({sum(wanted)} tokens in {len(rows)} rows) does '
        f'not fit into one micro-batch of {self.chunks} chunks of {self.chunk_len} tokens; raise '
        'chunks per micro-batch or chunk_len'
      )
    self._open(-len(self.used) % self.chunks)
    chunk = len(self.used)
    self._open(self.chunks)
    return [chunk + c for c in fitted]

  def _open(self, count: int) -> None:
    for _ in range(count):
      bisect.insort(self._by_free, (self.chunk_len, len(self.used)))
      self.used.append(0)
      self._rows.append(0)

  def _put(self, row: int, length: int, chunk: int) -> None:
    free = self.chunk_len - self.used[chunk]
    del self._by_free[bisect.bisect_left(self._by_free, (free, chunk))]
    bisect.insort(self._by_free, (free - length, chunk))
    self._rows[chunk] += 1
    self.places[row] = (chunk, self.used[chunk], self._rows[chunk])
    self.used[chunk] += length


def _best_fit(wanted: Sequence[int], free: Sequence[int]) -> list[int] | None:
  """Puts each size into the smallest of the free spaces that is large enough.

  Args:
    wanted: sizes, in descending order.
    free: free spaces, which shrink as sizes are put into them.

  Returns:
    The index in `free` for each size, or None if a size does not fit.
  """
  free, fitted = list(free), []
  for size in wanted:
    fits = [(space, place) for place, space in enumerate(free) if space >= size]
    if not fits:
      return None
    place = min(fits)[1]
    free[place] -= size
    fitted.append(place)
  return fitted
