"""Measures how the processes of a run spend their time (docs/guides/report.md, goodput)."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping

SECONDS = 'goodput/seconds/'
"""Prefix of the metrics `goodput/seconds/<kind of process>/<activity>`."""
WALL = 'goodput/wall_s/'
"""Prefix of the metrics `goodput/wall_s/<kind of process>`."""


TOKENS = 'goodput/tokens/'
"""Prefix of the metrics that count sampled tokens by outcome, such as trained or dropped."""


class ProcessClock:
  """Adds up the seconds that processes of one kind spend in each activity.

  A process is in at most one activity at a time, and the owner of the clock reports each change.
  Independently of the activities, the clock measures how long the processes exist. Time during
  which a process was counted in no activity shows as a difference between the two totals.
  """

  def __init__(self, now: Callable[[], float] = time.monotonic):
    self._now = now
    self._since = self._existed_since = now()
    self._counts: dict[str, int] = {}
    self._exist = 0
    self._seconds: collections.Counter[str] = collections.Counter()
    self._wall = 0.0

  def exist(self, count: int) -> None:
    """Records the number of processes that exist from now on."""
    now = self._now()
    self._wall += self._exist * (now - self._existed_since)
    self._existed_since, self._exist = now, count

  def set(self, counts: Mapping[str, int]) -> None:
    """Records the number of processes in each activity from now on."""
    now = self._now()
    for activity, count in self._counts.items():
      self._seconds[activity] += count * (now - self._since)
    self._since, self._counts = now, dict(counts)

  def take(self) -> tuple[dict[str, float], float]:
    """Returns (seconds in each activity, seconds of existence), summed over all processes since the
    last call.
    """
    self.set(self._counts)
    self.exist(self._exist)
    seconds, self._seconds = self._seconds, collections.Counter()
    wall, self._wall = self._wall, 0.0
    return dict(seconds), wall


def seconds_metrics(kind: str, clocks: Iterable[ProcessClock]) -> dict[str, float]:
  """Returns the metrics of all processes of a kind since the last call, summed over their
  clocks.
  """
  seconds: collections.Counter[str] = collections.Counter()
  wall = 0.0
  for clock in clocks:
    in_activities, existed = clock.take()
    seconds.update(in_activities)
    wall += existed
  return {
    **{f'{SECONDS}{kind}/{name}': value for name, value in sorted(seconds.items())},
    f'{WALL}{kind}': wall,
  }
