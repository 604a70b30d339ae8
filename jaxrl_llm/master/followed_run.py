"""A run that another run follows: its shared batches, and the position of the reader in them."""

from __future__ import annotations

import dataclasses
import math

from jaxrl_llm.core.types import Json
from jaxrl_llm.replay.shared import Opening, SharedBatches


@dataclasses.dataclass(frozen=True)
class Place:
  """Place of a group in the shared batches."""

  attempt: int
  """Attempt (start of the other run) that shared the group."""
  step: int
  """Step of the shared batch that contained the group."""
  run: int = 0
  """Number of the other run. Commits written when only one run could be followed lack it."""


class FollowedRun:
  """A run that this run follows, and the position in its shared batches."""

  def __init__(self, number: int, shared: SharedBatches, where: str):
    """
    Args:
      where: configuration key of the run, and its directory if there are several, for messages.
    """
    self.number, self.shared, self.where = number, shared, where
    self.store = ''
    """Name of the run's store; empty before the run's first start."""
    self.attempt: int | None = None
    self.step = 0
    """Attempt and step of the next shared batch to read."""
    self.latest = 0
    """Number of the run's batch that was read last, where the batches of all runs are numbered from
    1 in the order in which they were read; 0 if none was read.
    """
    self.opening: Opening | None = None
    """Newest opening of the run; None before the run's first start."""

  def to_json(self) -> Json:
    return [self.store, self.attempt, self.step, self.latest]

  def restore(self, store: str, attempt: int | None, step: int, latest: int = 0) -> None:
    self.store, self.attempt, self.step, self.latest = store, attempt, step, latest

  def has_next(self) -> bool:
    """Returns whether the run has shared the next batch to read."""
    return self.attempt is not None and self.step in self.shared.steps().get(self.attempt, ())

  def unread(self) -> int:
    """Returns the number of shared batches that have not been read."""
    return sum(
      self.attempt is None
      or started > self.attempt
      or (started == self.attempt and step >= self.step)
      for started, steps in self.shared.steps().items()
      for step in steps
    )

  def draws_as(self, other: FollowedRun) -> bool:
    """Returns whether both runs draw some of the same tasks with the same random numbers."""
    if self.opening is None or other.opening is None or self.opening.seed is None:
      return False
    (index, count), (of_other, count_of_other) = self.opening.share, other.opening.share
    overlap = (index - of_other) % math.gcd(count, count_of_other) == 0
    sequences = [(opening.seed, opening.tasks) for opening in (self.opening, other.opening)]
    return sequences[0] == sequences[1] and overlap
