"""Workload of a server, and the prompts that it has received. Requests are dispatched by both,
because a server whose prefix cache contains the beginning of a prompt has less work with it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

_SHORTEST = 16
"""Length in tokens of the shortest prefix that is compared: the size of vLLM's cache blocks on
GPUs.
"""
_REMEMBERED = 16_384
"""Maximum number of prefixes that are remembered of a server."""

Prefix = tuple[int, int]
"""Length in tokens and hash of a prefix."""


def prefixes(prompt: tuple[int, ...]) -> Sequence[Prefix]:
  """Returns the compared prefixes of a prompt, shortest first: those of 16, 32, 64, … tokens, and
  the whole prompt. Other lengths are left out, because hashing takes time.
  """
  lengths = []
  length = _SHORTEST
  while length < len(prompt):
    lengths.append(length)
    length *= 2
  if len(prompt) >= _SHORTEST:
    lengths.append(len(prompt))
  return [(length, hash(prompt[:length])) for length in lengths]


class RecentPrompts:
  """Prefixes of the prompts that a server has received since its cache was cleared. The server may
  have dropped some of them from its cache.
  """

  def __init__(self):
    self._prefixes: collections.OrderedDict[Prefix, None] = collections.OrderedDict()
    """Remembered prefixes, least recently received first."""

  def add(self, received: Sequence[Prefix]) -> None:
    """Remembers the prefixes of a prompt."""
    for prefix in received:
      self._prefixes[prefix] = None
      self._prefixes.move_to_end(prefix)
    while len(self._prefixes) > _REMEMBERED:
      self._prefixes.popitem(last=False)

  def shared(self, requested: Sequence[Prefix]) -> int:
    """Returns the length in tokens of the longest prefix of a prompt that is remembered."""
    return next((each[0] for each in reversed(requested) if each in self._prefixes), 0)

  def clear(self) -> None:
    self._prefixes.clear()


@dataclasses.dataclass
class Workload:
  """Requests that a fleet has dispatched to a server, each for one sample."""

  assigned: int = 0
  """Number of requests since the last publication."""
  outstanding: int = 0
  """Number of tokens of the requests in flight: each counts with its maximum length, without the
  part of its prompt that was probably cached.
  """
  recent: RecentPrompts = dataclasses.field(default_factory=RecentPrompts)
  """Prompts of the requests since the server's cache was cleared."""
