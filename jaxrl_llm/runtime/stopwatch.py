"""Measures how many seconds each part of a step takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple


class OwnSeconds(NamedTuple):
  """Seconds of a part of a step, excluding the parts nested inside it."""

  alone: float
  """Seconds of the part in which the engine of this process did not sample."""
  beside: float
  """Seconds of the part in which the engine of this process sampled at the same time."""


class Stopwatch:
  """Adds up the seconds of each named part of a step, such as `adv` or `update_actor`.

  Parts may be nested. All parts are timed in one asyncio task, so a nested part ends before the
  part that contains it.

  Attributes:
    sampled_s: function that returns the total seconds during which the engine of this process has
      sampled so far.
  """

  def __init__(self, now: Callable[[], float] = time.perf_counter):
    self.sampled_s: Callable[[], float] = lambda: 0.0
    self._now = now
    self._seconds: dict[str, float] = {}
    self._own: dict[str, OwnSeconds] = {}
    self._inside: list[OwnSeconds] = []
    """For each open part, the seconds of the closed parts nested inside it."""

  @contextlib.contextmanager
  def timed(self, name: str) -> Iterator[None]:
    """Adds the duration of the block to the seconds of part `name`."""
    start, sampled = self._now(), self.sampled_s()
    self._inside.append(OwnSeconds(0.0, 0.0))
    try:
      yield
    finally:
      seconds, inside = self._now() - start, self._inside.pop()
      beside = min(seconds, self.sampled_s() - sampled)
      self._seconds[name] = self._seconds.get(name, 0.0) + seconds
      own = self._own.get(name, OwnSeconds(0.0, 0.0))
      self._own[name] = _sum(own, seconds - beside - inside.alone, beside - inside.beside)
      if self._inside:
        self._inside[-1] = _sum(self._inside[-1], seconds - beside, beside)

  def take(self) -> dict[str, float]:
    """Returns the seconds that each part has taken since the last call, keyed by name."""
    seconds, self._seconds = self._seconds, {}
    return seconds

  def take_own(self) -> dict[str, OwnSeconds]:
    """Returns the seconds of each part since the last call, excluding the parts nested inside it.
    The seconds are keyed by the name of the part.
    """
    own, self._own = self._own, {}
    return own


def _sum(seconds: OwnSeconds, alone: float, beside: float) -> OwnSeconds:
  return OwnSeconds(seconds.alone + alone, seconds.beside + beside)
