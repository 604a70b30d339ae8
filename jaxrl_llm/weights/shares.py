"""Shares of a model's tensors, which the processes of the trainer write side by side.

Invariant: the shares of all processes together are all tensors, and each tensor is in one share.
Every process derives them from the model's spec alone.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping

from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.weights.tables import TensorEntry, entries


def share_of(spec: ModelSpec, number: int, count: int) -> frozenset[str]:
  """Returns the Hugging Face names of the tensors that process `number` of `count` writes. The
  shares have similar sizes, and the layers of an array are divided evenly, so that all processes
  can gather layers of it at the same time.
  """
  return _shares(spec, count)[number]


@functools.cache
def _shares(spec: ModelSpec, count: int) -> list[frozenset[str]]:
  """Returns the share of each of `count` processes; see `share_of`."""
  tensors = sorted(entries(spec), key=_by_size)
  return divided({entry.hf: math.prod(entry.shape) for entry in tensors}, count)


def divided(sizes: Mapping[str, int], count: int) -> list[frozenset[str]]:
  """Divides names among `count` processes. Each name, in the order of the mapping, goes to the
  process that has the smallest total size so far.
  """
  shares: list[tuple[int, int, set[str]]] = [(0, i, set()) for i in range(count)]
  for name, added in sizes.items():
    size, index, names = heapq.heappop(shares)
    names.add(name)
    heapq.heappush(shares, (size + added, index, names))
  return [frozenset(names) for _, _, names in sorted(shares, key=lambda share: share[1])]


def _by_size(entry: TensorEntry) -> tuple[int, str, int]:
  """Returns a sort key: larger tensors come first, and the layers of an array together."""
  return -math.prod(entry.shape), entry.path, entry.layer or 0


@functools.cache
def parameters_of(spec: ModelSpec, number: int, count: int) -> frozenset[str]:
  """Returns the names in the unrolled tree of the parameters that process `number` of `count`
  writes.
  """
  share = share_of(spec, number, count)
  return frozenset(entry.unrolled for entry in entries(spec) if entry.hf in share)
