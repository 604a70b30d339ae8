"""Collects the outcomes of finished groups, and reports them to the task sampler."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from jaxrl_llm.tasks.sampler import TaskSampler

Outcome = tuple[str, int, int]
"""(task uid, number of correct samples, number of scorable samples) of a group."""


class Outcomes:
  """Outcomes that have not been reported to the task sampler.

  They are reported when a batch closes, in order of the groups' numbers. If the gate's bound is 0,
  the sampler has then drawn all tasks of this batch and none of the next, so its choices do not
  depend on timing. If the bound is larger, its choices may depend on timing: if a group of a later
  batch is dropped, the sampler may draw the task of its replacement before or after the report.
  """

  def __init__(self, sampler: TaskSampler, *, in_order: bool):
    """
    Args:
      in_order: whether batches take groups in the order in which they started. False with partial
        rollouts, delayed rewards or a batch policy other than 'in_order'.
    """
    self._sampler, self._in_order = sampler, in_order
    self._outcomes: dict[int, Outcome] = {}
    """Outcomes, keyed by group number."""

  def record(self, number: int, outcome: Outcome) -> None:
    self._outcomes[number] = outcome

  def forget(self, number: int) -> None:
    """Forgets the outcome, if any, of a group that no batch will take."""
    self._outcomes.pop(number, None)

  def report(self, last: int, started: Container[int]) -> None:
    """Reports the outcomes of the groups with numbers up to `last` if batches take groups in order.
    Otherwise, reports the outcomes of all groups that are in a batch or dropped.

    Args:
      last: number of the last group in the batch.
      started: numbers of the groups that are neither in a batch nor dropped.
    """
    for number in sorted(self._outcomes):
      if number <= last if self._in_order else number not in started:
        self._sampler.feedback(*self._outcomes.pop(number))

  def state(self) -> list[list[Any]]:
    """Returns the outcomes as JSON."""
    return [[number, *outcome] for number, outcome in self._outcomes.items()]

  def restore(self, state: list[list[Any]]) -> None:
    self._outcomes = {number: tuple(outcome) for number, *outcome in state}
