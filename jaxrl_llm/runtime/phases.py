"""Phases of a step and their timings. Role residency (which role occupies which device when) plugs in here."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import AsyncIterator, Iterator


class Phase(enum.StrEnum):
  ROLLOUT = 'gen'
  """Weight publishing, generation and scoring, until the batch is closed."""
  INFERENCE = 'annotate'
  """Forward passes over the closed batch."""
  TRAIN = 'train'


class PhaseManager:
  """Times phases. Roles are always resident: entering a phase moves nothing, leaving it records its seconds."""

  def __init__(self):
    self._seconds: dict[str, float] = {}

  @contextlib.asynccontextmanager
  async def enter(self, phase: Phase) -> AsyncIterator[None]:
    with self.timed(phase.value):
      yield

  @contextlib.contextmanager
  def timed(self, name: str) -> Iterator[None]:
    """Adds the block's seconds to `timing_s/<name>` of the step."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

  def take(self) -> dict[str, float]:
    """Returns the seconds by name since the last call."""
    seconds, self._seconds = self._seconds, {}
    return seconds
