"""The interface of log writers, which copy the rows of metrics.jsonl to other places.

The option `logging.writers` names custom writers. Each is a class or function that is called with
(run, **options) and returns a `LogWriter`. The writer gets each row at most once, in order. If the
writer raises an error or hangs, the run continues and counts the rows that the writer lost.
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
"""Name of the folder in the run directory that contains one directory per log writer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRow:
  """A row of metrics.jsonl."""

  index: int
  """Number of rows before this one in metrics.jsonl. A step with an evaluation has two rows."""
  stage: str
  step: int
  """Number of steps that the run has completed, over all stages."""
  metrics: Mapping[str, float | int]
  """Metrics of the row, keyed by name. Metrics that are not finite are left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRun:
  """The run whose rows a log writer receives."""

  name: str
  workdir: pathlib.Path
  """Run directory."""
  directory: pathlib.Path
  """Directory for the writer's own files. It exists, and is kept when the run is resumed."""
  config: Mapping[str, Any]
  """Resolved configuration, as in config.json."""


class LogWriter(Protocol):
  """Writes the rows of a run's metrics to one place."""

  def write(self, row: LogRow) -> None:
    """Writes a row. If this raises an error, the row counts as lost, and the next row is written as
    usual.
    """
    ...

  def close(self) -> None:
    """Finishes writing. Called once per start of the run, after the last row."""
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
