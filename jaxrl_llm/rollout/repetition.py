"""Repetition detection: engines end a completion early if it repeats a pattern of tokens.

Invariant: whether a completion ends depends only on its own tokens. Hence every engine ends it at
the same token, however many tokens the engine samples at a time.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from jaxrl_llm.core.errors import UserError

_MAX_PATTERN_SIZE, _MAX_COUNT = 1024, 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepetitionDetection:
  """Rule that ends a completion as soon as its last tokens are `min_count` copies of one pattern,
  like vLLM's sampling parameter `repetition_detection`. The copies are part of the completion.
  """

  max_pattern_size: int
  """Maximum length of a pattern in tokens."""
  min_pattern_size: int = 1
  """Minimum length of a pattern in tokens."""
  min_count: int
  """Number of consecutive copies of a pattern that end a completion. The first occurrence counts as
  a copy.
  """

  def __post_init__(self):
    where = 'repetition_detection'
    if not 1 <= self.min_pattern_size <= self.max_pattern_size <= _MAX_PATTERN_SIZE:
      raise UserError(
        f'{where}: min_pattern_size {self.min_pattern_size} and max_pattern_size '
        f'{self.max_pattern_size}, wanted 1 <= min_pattern_size <= max_pattern_size <= '
        f'{_MAX_PATTERN_SIZE}'
      )
    if not 2 <= self.min_count <= _MAX_COUNT:
      raise UserError(f'{where}: min_count {self.min_count}, wanted 2 to {_MAX_COUNT}')

  @property
  def reach(self) -> int:
    """Number of tokens at the end of a completion that decide whether it ends."""
    return self.max_pattern_size * self.min_count

  def end(self, tokens: Int[np.ndarray, 'time'], *, start: int = 0) -> int | None:
    """Returns the number of tokens after which a completion ends, or None if it continues.

    Args:
      tokens: the tokens so far, without the prompt.
      start: number of tokens that an earlier call has examined without finding an end.
    """
    positions = np.arange(start, len(tokens))
    sizes = np.arange(self.min_pattern_size, self.max_pattern_size + 1)
    # A cheap test excludes nearly all pattern sizes: in a repetition of period `size`, a new token
    # equals the token `size` positions before it.
    before = positions - sizes[:, None]
    equal = (tokens[np.maximum(before, 0)] == tokens[positions]) & (before >= 0)
    ends = [self._end(tokens, int(size), start) for size in sizes[equal.any(axis=1)]]
    return min((end for end in ends if end is not None), default=None)

  def _end(self, tokens: Int[np.ndarray, 'time'], size: int, start: int) -> int | None:
    """Implements `end` for patterns of `size` tokens."""
    first = max(0, start + 1 - size * self.min_count)
    part = tokens[first:]
    equal = part[size:] == part[:-size]
    at = np.arange(len(equal))
    runs = at - np.maximum.accumulate(np.where(equal, -1, at))
    ends = first + size + 1 + np.flatnonzero(runs >= size * (self.min_count - 1))
    ends = ends[ends > start]
    return int(ends[0]) if len(ends) else None
