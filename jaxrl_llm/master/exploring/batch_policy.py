"""Batch policies: rules that decide which of the started groups form the next batch.

`in_order` takes groups in the order in which they started, and waits for them. The composition of a
batch then does not depend on how long its answers take to generate. `complete_first` takes groups
that have finished. The trainer waits less, but early batches contain more short answers
(docs/guides/staleness.md measures this), and timing decides which groups form a batch.

Invariant: under each policy, the groups that the gate admits stay within the stage's staleness
bound. A batch waits for a group that would otherwise become too old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

BatchPolicyName = Literal['in_order', 'complete_first']


class Candidate(NamedTuple):
  """A started group that is not part of a batch yet and is not parked. A parked group waits for
  delayed rewards, or until a later batch continues it.
  """

  number: int
  is_finished: bool
  """Whether the group's samples are generated, scored and selected."""
  last_batch: int
  """Last batch that may train on the group without exceeding the staleness bound, as an index
  within the stage.
  """


BatchPolicy = Callable[[Sequence[Candidate], int, int], list[int] | None]
"""Function of (candidates in order of start, index of the next batch in the stage, number of groups
per batch). It returns the numbers of the groups that form the batch, in order of start, or None if
some of them are unfinished or have not started.
"""


def in_order(candidates: Sequence[Candidate], batch: int, count: int) -> list[int] | None:
  """Chooses the groups that started first. Returns None until all of them have finished."""
  del batch
  return _complete(candidates[:count], count)


def complete_first(candidates: Sequence[Candidate], batch: int, count: int) -> list[int] | None:
  """Chooses finished groups in order of start, so groups that earlier batches passed over come
  before newer ones.

  Some groups must join this batch, finished or not, because later batches do not have room for all
  groups whose staleness bound is about to be reached. These groups are found as in
  earliest-deadline-first scheduling, where the deadline of a group is its `last_batch`.
  """
  chosen: list[Candidate] = []
  for last in sorted({candidate.last_batch for candidate in candidates}):
    due = [candidate for candidate in candidates if candidate.last_batch <= last]
    must = len(due) - max(0, last - batch) * count - len(chosen)
    left = [candidate for candidate in due if candidate not in chosen]
    # The sort is stable, so finished and unfinished groups each stay in order of start.
    left.sort(key=lambda candidate: not candidate.is_finished)
    chosen += left[: max(0, must)]
  chosen += [c for c in candidates if c.is_finished and c not in chosen]
  numbers = {candidate.number for candidate in chosen[:count]}
  return _complete([c for c in candidates if c.number in numbers], count)


def batches_ahead(policy: BatchPolicyName, bound: int) -> int:
  """Returns the number of batches after the current one for which groups may already start.

  With 'in_order', this number is `bound`, the stage's staleness bound. With 'complete_first', it is
  half of the bound, rounded up, so that the remaining batches within the bound may pass over a
  group. If groups started as far ahead as the bound permits, each batch would have to take the
  groups that started first.
  """
  return bound if policy == 'in_order' else (bound + 1) // 2


def passed_over(candidates: Sequence[Candidate], chosen: Sequence[int]) -> int:
  """Returns the number of groups that are not in the batch although they started before its newest
  group.
  """
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
