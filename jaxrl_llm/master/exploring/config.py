"""Exploration settings of a stage."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.master.exploring.past import Past
from jaxrl_llm.master.exploring.processors import Processor
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.rollout.api import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorerConfig:
  """Exploration settings of a stage."""

  stage: str
  earlier: tuple[str, ...] = ()
  """Previous stages of the run. A task's visits are counted onwards from those in these stages."""
  restarted: int = 0
  """Number of batches that the run had completed when this stage, in a branch, began its tasks
  afresh; its visits before that count too. 0: it never did.
  """
  groups_per_batch: int
  """Number of new groups per batch, one per task."""
  group_size: int = 8
  """Number of samples per task."""
  bound: int = 0
  """Maximum number of batches by which the weights that generate a group may lag behind those that
  the group's batch updates; see `Gate`.
  """
  batches: int | None = None
  """Number of batches in the stage. If None, the number is unlimited."""
  sampling: Sampling = Sampling()
  processors: tuple[tuple[str, Processor], ...] = ()
  """(name, processor) pairs. The processors run on each finished group, in this order."""
  selection: SelectionConfig = SelectionConfig()
  """Rule that selects which samples of a group are trained on."""
  partial: PartialConfig | None = None
  """Budget by which a group is generated over several batches; None: a group is generated for one
  batch. Requires `bound` 0 and the workflow `SingleTurn`.
  """
  past: Past | None = None
  """Rule by which groups of earlier batches join each batch; None if none do."""
  max_dropped_groups: int = 100
  """Maximum number of groups that may be dropped while one batch is collected, whatever the reason.
  The run fails when one more is dropped.
  """
  limits: TaskLimits = TaskLimits()
  collect_deadline_s: float = 3600.0
  """Maximum wait for a batch, in seconds."""
