"""Trees of rows that begin with the same tokens, so that a shared prefix is computed once.

The rows of a family, such as the samples of a task, are sorted by their tokens. Each row branches
off the previous row after the tokens that both have in common, and consecutive rows that share
tokens form a tree. In a chunk, the rows of a tree follow one another in this order (depth-first),
and each row stores only the tokens after its shared prefix. Tree training is described in
arXiv:2511.00413.

Invariants: the first row of a tree stores all its tokens. Every row stores its trained tokens and
the token before them, whose hidden state predicts the first trained token. Each trained token
therefore counts in exactly one row, and sharing affects only the computation of attention.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxrl_llm.batching.packing import Packing, pack
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Sample

_PARTS = (1, 2, 3, 4, 6, 8)
"""Numbers by which the chunk length is divided to get the maximum tree sizes to try: one chunk,
half a chunk, and so on. Smaller trees repeat more prefixes, but fill chunks and ranks more evenly.
"""


class Branch(NamedTuple):
  """A row as part of a tree."""

  row: int
  first: int
  """Number of leading tokens that the row shares with earlier rows of the tree and that are not
  stored with it.
  """


def sorted_prefixes(tokens: Sequence[Int32[np.ndarray, '_']]) -> list[tuple[int, int]]:
  """Sorts token sequences so that sequences with a common prefix follow one another.

  Returns:
    For each sequence in sorted order, its index in `tokens`, and the number of leading tokens that
    it has in common with the previous sequence (0 for the first).
  """
  # Big-endian bytes compare like the tokens themselves.
  keys = [array.astype('>u4').tobytes() for array in tokens]
  order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
  common = [_common(tokens[a], tokens[b]) for a, b in itertools.pairwise(order)]
  return list(zip(order, [0, *common]))


def _common(a: Int32[np.ndarray, '_'], b: Int32[np.ndarray, '_']) -> int:
  """Returns the length of the longest common prefix."""
  shorter = min(len(a), len(b))
  different = np.flatnonzero(a[:shorter] != b[:shorter])
  return int(different[0]) if len(different) else shorter


def pack_trees(
  lengths: Sequence[int],
  families: Sequence[Sequence[Branch]],
  *,
  units: Sequence[Sequence[int]],
  ranks: int,
  chunks: int,
  chunk_len: int,
  splits_remainder: bool = False,
) -> Packing:
  """Packs the rows of one optimizer step as trees, which `pack` places like rows.

  A family is cut into several trees if it does not fit a chunk, or if smaller trees need fewer
  micro-batches (or chunks per rank, if `splits_remainder`). The function tries smaller and smaller
  trees, and finally no sharing, until a packing has as few micro-batches as its tokens permit. Of
  the packings tried, the result has the fewest micro-batches and, among those, the fewest tokens.

  Args:
    lengths: number of tokens of each row.
    families: rows that may share prefixes, in the order of `sorted_prefixes`. Each row is in
      exactly one family. `first` is the number of tokens that the row can share with the previous
      row of the family.
    units: row numbers of each unit, as in `pack`. If a unit has several rows, these are exactly the
      rows of one family.
  """
  best, tried = None, set()
  for most in (*(chunk_len // parts for parts in _PARTS), 0):
    trees = tuple(tree for family in families for tree in _cut(family, lengths, most))
    if trees in tried:
      continue
    tried.add(trees)
    sizes = [sum(lengths[row] - first for row, first in tree) for tree in trees]
    packing = pack(
      sizes,
      units=_tree_units(trees, units),
      ranks=ranks,
      chunks=chunks,
      chunk_len=chunk_len,
      splits_remainder=splits_remainder,
    )
    if best is None or _cost(packing) < _cost(best[0]):
      best = packing, trees
    at_once = ranks * chunk_len * (1 if splits_remainder else chunks)
    if packing.used == -(-sum(sizes) // at_once):
      break
  return _by_row(*best, lengths)


def _cost(packing: Packing) -> tuple[int, int]:
  return packing.used, packing.tokens


def _cut(family: Sequence[Branch], lengths: Sequence[int], most: int) -> list[tuple[Branch, ...]]:
  """Cuts a family into trees of at most `most` tokens. A row with more tokens forms a separate
  tree.
  """
  trees: list[list[Branch]] = []
  size = 0
  for row, first in family:
    if first and trees and size + lengths[row] - first <= most:
      trees[-1].append(Branch(row, first))
      size += lengths[row] - first
    else:
      trees.append([Branch(row, 0)])
      size = lengths[row]
  return [tuple(tree) for tree in trees]


def _tree_units(
  trees: Sequence[Sequence[Branch]], units: Sequence[Sequence[int]]
) -> list[list[int]]:
  """Returns the units of trees: the numbers of the trees that contain rows of the same unit. A tree
  that need not stay together with another one is a unit of its own.
  """
  tree_of = {row: number for number, tree in enumerate(trees) for row, _ in tree}
  together = {number: [number] for number in range(len(trees))}
  for unit in units:
    first, *rest = sorted({tree_of[row] for row in unit})
    for number in rest:
      together[first] += together.pop(number)
  return list(together.values())


def _by_row(packing: Packing, trees: Sequence[Sequence[Branch]], lengths: Sequence[int]) -> Packing:
  """Converts the placement of trees to the placement of their rows."""
  places = np.zeros((5, len(lengths)), np.int32)
  for number, tree in enumerate(trees):
    offset = int(packing.offset[number])
    for row, first in tree:
      held = lengths[row] - first
      places[:, row] = (
        *(packing.micro_batch[number], packing.chunk[number], offset), held, first
      )  # fmt: skip
      offset += held
  micro_batch, chunk, offset, length, first = places
  segment, before = np.zeros(len(lengths), np.int32), None
  for row in np.lexsort((offset, chunk, micro_batch)):
    same = before is not None and (micro_batch[before], chunk[before]) == (
      micro_batch[row], chunk[row]
    )  # fmt: skip
    segment[row] = segment[before] + 1 if same else 1
    before = row
  return dataclasses.replace(
    packing,
    length=length,
    micro_batch=micro_batch,
    chunk=chunk,
    offset=offset,
    segment=segment,
    first=first,
  )


def seen_until(packing: Packing) -> list[Int32[np.ndarray, '_']]:
  """Returns, for each stored token of each row, the number of the last segment whose tokens attend
  to it; see `ops.places.Places`. The result has one array `[length]` per row.
  """
  order = np.lexsort((packing.offset, packing.chunk, packing.micro_batch)).tolist()
  first, results = packing.first.tolist(), {}
  for place, row in enumerate(order):
    last = np.full(packing.length[row], packing.segment[row], np.int32)
    shared = first[row] + len(last)
    for later in order[place + 1 :]:
      shared = min(shared, first[later])
      if shared <= first[row]:
        break
      last[: shared - first[row]] = packing.segment[later]
    results[row] = last
  return [results[row] for row in range(len(order))]


def check_prefixes(samples: Mapping[int, Sample], packing: Packing) -> None:
  """Raises RunError if a row does not begin with the tokens that it shares according to the
  packing, or if one of these tokens or the row's first stored token is trained on.

  Args:
    samples: all samples of one or more chunks, keyed by row of the packing.
  """
  before = None
  for i in np.lexsort((packing.offset, packing.chunk, packing.micro_batch)).tolist():
    if i not in samples:
      continue
    sample, first = samples[i], int(packing.first[i])
    # The previous row belongs to the same tree, so its tokens are the path from which this row
    # branches off.
    if first and not np.array_equal(sample.tokens[:first], before.tokens[:first]):
      raise RunError(
        f'{sample.uid}: does not begin with the {first} tokens that it shares with {before.uid} '
        'according to the plan; the run directory is damaged, audit it or resume from an earlier '
        'commit'
      )
    if first and sample.loss_mask[: first + 1].any():
      raise RunError(
        f'{sample.uid}: one of its first {first + 1} tokens is trained on, but the plan says that '
        'the row shares them; the run directory is damaged, audit it or resume from an earlier '
        'commit'
      )
    before = sample
