"""The interface of log writers, which copy the rows of metrics.jsonl to other places.

A custom writer is a class, or another function of (run, **options), that returns a `LogWriter`; a
run names it in `logging.writers`. It gets each row once, in order. It may raise or hang: the run
goes on without it, and counts the rows that it did not take.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl_llm.core.types import Json
from jaxrl_llm.runtime.writers import STAGE, STEP

DIRECTORY = 'logging'
"""Name of the folder in the run directory that holds a directory for each log writer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRow:
  """A row of metrics.jsonl."""

  index: int
  """Number of rows before it in metrics.jsonl. A step has two rows if it is evaluated."""
  stage: str
  step: int
  """Number of completed steps of the whole run."""
  metrics: Mapping[str, float | int]
  """Finite metrics of the row, keyed by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRun:
  """The run whose rows a writer gets."""

  name: str
  workdir: pathlib.Path
  """Run directory."""
  directory: pathlib.Path
  """The writer's own directory, which exists and is kept when the run is resumed."""
  config: Mapping[str, Any]
  """Resolved configuration, as in config.json."""


class LogWriter(Protocol):
  """Writes the rows of a run's metrics to one place."""

  def write(self, row: LogRow) -> None:
    """Writes a row. An error counts the row as lost; the next row is tried again."""
    ...

  def close(self) -> None:
    """Finishes what was written. It is called once, after the last row of this start."""
    ...


def log_row(index: int, row: Mapping[str, Json]) -> LogRow:
  """Returns the `LogRow` of a parsed line of metrics.jsonl."""
  step = row.get(STEP)
  return LogRow(
    index=index,
    stage=str(row.get(STAGE)),
    step=step if isinstance(step, int) else 0,
    metrics={
      key: value
      for key, value in row.items()
      if key != STEP and isinstance(value, int | float) and math.isfinite(value)
    },
  )
