"""Exploration settings of a stage."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.past import Past
from jaxrl_llm.master.exploring.processors import Processor
from jaxrl_llm.master.exploring.selection import SelectionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorerConfig:
  """Exploration settings of a stage."""

  stage: str
  earlier: tuple[str, ...] = ()
  """Previous stages of the run; visit numbers of a task continue from theirs."""
  groups_per_batch: int
  """Number of new groups per batch, one per task."""
  group_size: int = 8
  """Number of samples per task."""
  bound: int = 0
  """Maximum lag of a group's weights, in batches; see `Gate`."""
  batches: int | None = None
  """Number of batches in the stage; None: unlimited."""
  temperature: float = 1.0
  processors: tuple[tuple[str, Processor], ...] = ()
  """(name, processor) pairs that run, in order, on a finished group."""
  selection: SelectionConfig = SelectionConfig()
  """Selects the samples of a group to train on."""
  past: Past | None = None
  """Earlier groups that join each batch."""
  max_dropped_groups: int = 100
  """Maximum number of groups dropped while collecting one batch (nothing scorable or nothing
  selected); one more ends the run.
  """
  limits: TaskLimits = TaskLimits()
  collect_deadline_s: float = 3600.0
  """Maximum wait for a batch, in seconds."""
