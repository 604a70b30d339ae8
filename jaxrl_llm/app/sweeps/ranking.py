"""Ranks the points of a sweep by the mean of the objective over the trials of each point.

A point is a combination of overrides. Its trials differ only in their seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxrl_llm.app.sweeps.ledger import LedgerEntry
from jaxrl_llm.app.sweeps.trials import describe
from jaxrl_llm.core.types import Json
from jaxrl_llm.runtime.comparison import mean_and_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedGroup:
  """The trials of one point, which differ only in their seeds."""

  label: str
  point: Mapping[str, Json]
  entries: Sequence[LedgerEntry]
  values: Sequence[float]
  """Values of the objective, one for each trial that has measured it."""

  @property
  def mean(self) -> float | None:
    return mean_and_error(self.values)[0]

  @property
  def stderr(self) -> float | None:
    return mean_and_error(self.values)[1]


def ranked(
  entries: Sequence[LedgerEntry], values: Mapping[int, float], direction: str
) -> list[SeedGroup]:
  """Returns one group for each point, ordered by mean, the best first.

  Groups in which no trial has measured the objective come last.

  Args:
    values: value of the objective, keyed by the number of the trial.
    direction: 'maximize' or 'minimize'.
  """
  members: dict[str, list[LedgerEntry]] = {}
  for entry in entries:
    if not entry.trial.is_start:
      members.setdefault(repr(sorted(entry.trial.point.items(), key=str)), []).append(entry)
  groups = [
    SeedGroup(
      label=describe(trials[0].trial.point) or 'base',
      point=trials[0].trial.point,
      entries=trials,
      values=[values[entry.number] for entry in trials if entry.number in values],
    )
    for trials in members.values()
  ]
  sign = -1 if direction == 'maximize' else 1

  def place(group: SeedGroup) -> tuple[bool, float]:
    return group.mean is None, 0.0 if group.mean is None else sign * group.mean

  return sorted(groups, key=place)


def measured(mean: float | None, stderr: float | None) -> str:
  """Formats a mean with its standard error if there is one, such as '0.412 ± 0.013'."""
  if mean is None:
    return '–'
  return f'{mean:.4g}' if stderr is None else f'{mean:.4g} ± {stderr:.2g}'
