"""Measures the seconds spent in each part of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
  """Adds up seconds by name, e.g. `annotate`, `train`, `gen` (until a batch's rows are final)."""

  def __init__(self):
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def timed(self, name: str) -> Iterator[None]:
    """Adds the block's seconds to `timing_s/<name>` of the step."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

  def take(self) -> dict[str, float]:
    """Returns the seconds since the last call, keyed by name."""
    seconds, self._seconds = self._seconds, {}
    return seconds
