"""Sequence packing: assigns rows to optimizer steps, ranks, micro-batches and chunks by length.

Invariants: every row is placed exactly once and whole; rows of one unit share optimizer step, rank
and micro-batch; every rank has the same number of chunks in every micro-batch. Pure and
deterministic: every process that packs the same lengths gets the same placements.

A unit is a set of rows that stay together: a single sequence, a preference pair, or a group that a
loss couples. Source: DeepSeek-R1 (arXiv:2501.12948v2), B.1: sort the sequences by length,
distribute them over data-parallel ranks, and best-fit each rank's into chunks of fixed length,
equally many on every rank.
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
  """Chunks per rank and micro-batch: rank r owns chunks [r * chunks, (r + 1) * chunks)."""
  chunk_len: int
  micro_batches: int
  """At least one."""
  length: Int32[np.ndarray, 'rows']
  micro_batch: Int32[np.ndarray, 'rows']
  chunk: Int32[np.ndarray, 'rows']
  """Chunk index in the micro-batch, across all ranks."""
  offset: Int32[np.ndarray, 'rows']
  """Position in the chunk of the row's first token."""
  segment: Int32[np.ndarray, 'rows']
  """1-based index of the row in its chunk, by offset; 0 is padding."""

  @property
  def tokens(self) -> int:
    return int(self.length.sum())

  @property
  def utilisation(self) -> float:
    """Fraction of token slots, over all ranks and micro-batches, that hold a token."""
    return self.tokens / (self.micro_batches * self.ranks * self.chunks * self.chunk_len)


def deal(units: Sequence[Sequence[int]], steps: int, *, seed: int) -> list[list[int]]:
  """Distributes units over optimizer steps by a seeded permutation; counts differ by at most one.

  Runs before any sorting by length: splitting a length-sorted batch would give minibatches of very
  different mean lengths, which is a different algorithm.

  Args:
    units: row numbers of each unit.
    steps: number of optimizer steps, at most the number of units.
    seed: determines the permutation, together with the number of units.

  Returns:
    For each optimizer step, its *unit* numbers (indices into `units`), in permuted order.
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
) -> Packing:
  """Packs the rows of one optimizer step.

  Args:
    lengths: number of tokens of each row.
    units: row numbers of each unit, every row in exactly one; None: every row is its own unit.
    ranks: data-parallel ranks.
    chunks: chunks per rank and micro-batch.
    chunk_len: tokens per chunk.
  """
  units = [[row] for row in range(len(lengths))] if units is None else units
  _check(lengths, units, ranks, chunks, chunk_len)
  totals = [sum(lengths[row] for row in unit) for unit in units]
  order = sorted(range(len(units)), key=lambda u: (-totals[u], u))
  bins = [_RankBins(chunks, chunk_len) for _ in range(ranks)]
  for rank, owned in enumerate(_deal_ranks(order, totals, ranks)):
    for unit in owned:
      bins[rank].place(sorted(units[unit], key=lambda row: (-lengths[row], row)), lengths)
  micro_batches = max(1, *(-(-len(b.used) // chunks) for b in bins))
  places = np.zeros((4, len(lengths)), np.int32)
  for rank, packed in enumerate(bins):
    for row, (chunk, offset, segment) in packed.places.items():
      places[:, row] = (chunk // chunks, rank * chunks + chunk % chunks, offset, segment)
  return Packing(
    ranks=ranks,
    chunks=chunks,
    chunk_len=chunk_len,
    micro_batches=micro_batches,
    length=np.asarray(lengths, np.int32).reshape(-1),
    micro_batch=places[0],
    chunk=places[1],
    offset=places[2],
    segment=places[3],
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
  """Assigns units to ranks, longest first, in rounds of one per rank; the least loaded picks first.

  The first two rounds give snake order (ranks forwards, then backwards); later rounds keep
  levelling the loads, which would drift apart in snake order.
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
  """One rank's chunks, filled best-fit; chunk c belongs to micro-batch c // chunks."""

  def __init__(self, chunks: int, chunk_len: int):
    self.chunks, self.chunk_len = chunks, chunk_len
    self.used: list[int] = []
    self.places: dict[int, tuple[int, int, int]] = {}
    self._rows: list[int] = []
    self._by_free: list[tuple[int, int]] = []
    """(free tokens, chunk) of all chunks so far, sorted: the first with enough room fits best."""

  def place(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
    """Places one unit, its rows sorted longest first."""
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
    """Returns each row's chunk: in the fullest micro-batch with room for all, else in a new one."""
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
        f'not fit one micro-batch of {self.chunks} chunks of {self.chunk_len}; raise chunks per '
        'micro-batch or chunk_len'
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
  """Best-fits sizes (descending) into `free`; returns indices of `free`; None if one cannot fit."""
  free, fitted = list(free), []
  for size in wanted:
    fits = [(space, place) for place, space in enumerate(free) if space >= size]
    if not fits:
      return None
    place = min(fits)[1]
    free[place] -= size
    fitted.append(place)
  return fitted
