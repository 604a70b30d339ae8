"""Measures how many seconds each part of a step takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
  """Adds up the seconds of each named part of a step, such as `adv` or `update_actor`."""

  def __init__(self):
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def timed(self, name: str) -> Iterator[None]:
    """Adds the duration of the block to the seconds of part `name`."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

  def take(self) -> dict[str, float]:
    """Returns the seconds since the last call, keyed by name."""
    seconds, self._seconds = self._seconds, {}
    return seconds
