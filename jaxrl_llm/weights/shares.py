"""Shares of a model's tensors, which the processes of the trainer write side by side.

Invariant: the shares of all processes together are all tensors, and each tensor is in one share.
Every process derives them from the model's spec alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.weights.tables import TensorEntry, entries


def share_of(spec: ModelSpec, number: int, count: int) -> frozenset[str]:
  """Returns the Hugging Face names of the tensors that process `number` of `count` writes. The
  shares have similar sizes, and the layers of an array are divided evenly, so that all processes
  can gather layers of it at the same time.
  """
  shares: list[tuple[int, int, set[str]]] = [(0, i, set()) for i in range(count)]
  for entry in sorted(entries(spec), key=_by_size):
    size, index, names = heapq.heappop(shares)
    names.add(entry.hf)
    heapq.heappush(shares, (size + math.prod(entry.shape), index, names))
  return frozenset(next(names for _, index, names in shares if index == number))


def _by_size(entry: TensorEntry) -> tuple[int, str, int]:
  """Returns a sort key: larger tensors come first, and the layers of an array together."""
  return -math.prod(entry.shape), entry.path, entry.layer or 0


def parameters_of(spec: ModelSpec, number: int, count: int) -> Collection[str]:
  """Returns the names in the unrolled tree of the parameters that process `number` of `count`
  writes.
  """
  share = share_of(spec, number, count)
  return {entry.unrolled for entry in entries(spec) if entry.hf in share}
