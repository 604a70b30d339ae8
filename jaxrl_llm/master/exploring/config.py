"""Configuration of the explorer."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.master.exploring.batch_policy import BatchPolicyName
from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.master.exploring.past import Past
from jaxrl_llm.master.exploring.processors import Processor
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.master.exploring.verifying import ModelProcessor
from jaxrl_llm.rollout.api import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorerConfig:
  """Settings with which the explorer collects the rollouts of a stage."""

  stage: str
  earlier: tuple[str, ...] = ()
  """Names of the run's earlier stages. Their visits of a task (the number of times that they have
  drawn it) are included in this stage's count of the task's visits.
  """
  restarted: int = 0
  """Number of batches that the run had completed at its last branch with `--reset_data`; 0 if there
  was none. After such a branch, the stage draws its tasks from the beginning again, but its visits
  of a task before the branch still count.
  """
  first_step: int = 0
  """Number of batches that the run completes before the stage."""
  groups_per_batch: int
  """Number of new groups per batch, one per task."""
  group_size: int = 8
  """Number of trajectories per task."""
  max_steps: int = 1
  """Maximum number of steps of a trajectory. Each step is a sample."""
  bound: int = 0
  """Maximum staleness in batches: the number of batches between the weights that generate a group
  and the weights that the group updates. See `Gate`.
  """
  batch_policy: BatchPolicyName = 'in_order'
  """Rule that decides which groups form a batch. 'complete_first' requires `bound` 2 or more."""
  batches: int | None = None
  """Number of batches in the stage. If None, the number is unlimited."""
  sampling: Sampling = Sampling()
  response_lengths: tuple[tuple[int, int], ...] = ()
  """(batch, tokens) pairs in ascending order of `batch`. If a group starts or continues with
  weights that have been trained on at least `batch` batches of the stage, its samples have at most
  `tokens` tokens after the prompt. If several pairs apply, the last one counts. If empty, only the
  run's limit applies.
  """
  processors: tuple[tuple[str, Processor | ModelProcessor], ...] = ()
  """(name, processor) pairs. The processors run on each finished group, in this order."""
  selection: SelectionConfig = SelectionConfig()
  """Rule that selects the samples of a group to train on."""
  partial: PartialConfig | None = None
  """Settings of partial rollouts, which generate a group over several batches. If None, each group
  is generated for one batch.
  """
  past: Past | None = None
  """Rule that adds groups of earlier batches to each batch. If None, no such groups are added."""
  max_dropped_groups: int = 100
  """Maximum number of groups that may be dropped while one batch is collected, for any reason. If
  one more is dropped, the run fails.
  """
  max_rounds: int = 8
  """Maximum number of further rounds of rollouts for a batch, which replace groups that were
  dropped after the trainer's reward model had scored them. If a batch needs more rounds, the run
  fails.
  """
  limits: TaskLimits = TaskLimits()
  collect_deadline_s: float = 3600.0
  """Maximum wait for a batch, in seconds."""

  def sampling_after(self, batches: int) -> Sampling:
    """Returns the sampling parameters of a group that begins with weights that have been trained on
    `batches` batches of the stage.
    """
    limits = [tokens for first, tokens in self.response_lengths if first <= batches]
    if not limits:
      return self.sampling
    return dataclasses.replace(self.sampling, max_response_length=limits[-1])
