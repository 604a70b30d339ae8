"""Batch policies: rules that decide which of the started groups form the next batch.

`in_order` takes groups in the order in which they started and waits for them: the composition of a
batch does not depend on how long its answers take. `complete_first` takes groups that have
finished: the trainer waits less, but early batches hold more short answers
(docs/guides/staleness.md measures this). A clock then decides which groups form a batch.

Invariant: no policy makes a group older than the stage's staleness bound permits, provided that the
gate admitted the groups. A group that would become too old is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

BatchPolicyName = Literal['in_order', 'complete_first']


class Candidate(NamedTuple):
  """A started group that is not part of a batch yet and is not parked for a later one."""

  number: int
  is_finished: bool
  """Whether its samples are generated, scored and selected."""
  last_batch: int
  """Index in the stage of the last batch that may train on the group within the staleness bound."""


BatchPolicy = Callable[[Sequence[Candidate], int, int], list[int] | None]
"""Function of the candidates in their order of start, of the index of the next batch in the stage,
and of the number of groups in a batch. Returns the numbers of the groups that form the batch, in
order of start, or None if some of them are unfinished or have not started.
"""


def in_order(candidates: Sequence[Candidate], batch: int, count: int) -> list[int] | None:
  """Chooses the groups that started first."""
  del batch
  return _complete(candidates[:count], count)


def complete_first(candidates: Sequence[Candidate], batch: int, count: int) -> list[int] | None:
  """Chooses finished groups, those that started first ahead of the others. So groups that earlier
  batches passed over come before newer ones.

  Exceptions are groups that must join this batch, finished or not, because later batches would have
  no room for all groups whose time is up by then (earliest deadline first).
  """
  chosen: list[Candidate] = []
  for last in sorted({candidate.last_batch for candidate in candidates}):
    due = [candidate for candidate in candidates if candidate.last_batch <= last]
    must = len(due) - max(0, last - batch) * count - len(chosen)
    left = [candidate for candidate in due if candidate not in chosen]
    left.sort(key=lambda candidate: not candidate.is_finished)  # Stable, so in order of start.
    chosen += left[: max(0, must)]
  chosen += [c for c in candidates if c.is_finished and c not in chosen]
  numbers = {candidate.number for candidate in chosen[:count]}
  return _complete([c for c in candidates if c.number in numbers], count)


def passed_over(candidates: Sequence[Candidate], chosen: Sequence[int]) -> int:
  """Returns the number of groups that started before a group of the batch, but are not in it."""
  numbers = [candidate.number for candidate in candidates]
  before_last = numbers[: numbers.index(chosen[-1])] if chosen else []
  return len(set(before_last) - set(chosen))


POLICIES: Mapping[BatchPolicyName, BatchPolicy] = {
  'in_order': in_order,
  'complete_first': complete_first,
}


def _complete(chosen: Sequence[Candidate], count: int) -> list[int] | None:
  is_complete = len(chosen) == count and all(candidate.is_finished for candidate in chosen)
  return [candidate.number for candidate in chosen] if is_complete else None
