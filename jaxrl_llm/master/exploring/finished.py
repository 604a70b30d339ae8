"""Finished groups: decides which of their samples are trained on, and records why the other samples
are dropped.

Invariant: each sample of a finished group is either admitted to training or dropped with a reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.types import Json
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.processors import Processed, process
from jaxrl_llm.master.exploring.selection import Experience, choose, experience_rows
from jaxrl_llm.replay.tables import Issue
from jaxrl_llm.replay.writer import StepWriter
from jaxrl_llm.rewards.api import RewardsConfig, drops_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedGroup:
  """A generated and scored group, after the processors and the selection."""

  members: list[Experience]
  """All trajectories, ordered by sample index."""
  verified: list[Experience]
  """Scorable samples that no processor removed."""
  chosen: list[Experience]
  """Samples selected for training; empty if the group is dropped."""
  dropped: dict[str, list[str]]
  """uids of the trajectories that are not trained on, keyed by reason. Spaces in reasons are
  replaced by '_'.
  """
  lineage: list[tuple[str, str, Json]]
  """(uid, processor name, change) for each change to a sample, in the order of the changes."""
  counts: dict[str, int]
  """Number of samples before and after each processor: `<processor>/in` and `<processor>/out`."""
  scorer_failed: bool
  """Whether a scorer that is configured to drop the group on failure has failed."""

  @property
  def outcome(self) -> tuple[str, int, int] | None:
    """(task uid, number of correct samples, number of scorable samples); None if no sample is
    scorable.
    """
    scorable = [m for m in self.members if m.reward.value is not None]
    if not scorable:
      return None
    return scorable[0].task.uid, sum(bool(m.reward.correct) for m in scorable), len(scorable)

  @property
  def uids(self) -> list[str]:
    """uids of the samples to train on, which are all steps of the selected trajectories."""
    return [*dict.fromkeys(step.uid for m in self.chosen for step in m.steps)]

  def settle(self, writer: StepWriter) -> None:
    """Records the processors' changes to the stored samples, and admits or drops each sample, all
    in the caller's transaction.
    """
    steps = {m.sample.uid: m.steps for m in self.members}
    writer.derive([*self.lineage, *experience_rows(self.chosen)])
    writer.admit(self.uids)
    for reason, uids in self.dropped.items():
      if uids:
        writer.drop([step.uid for uid in uids for step in steps[uid]], reason.replace('_', ' '))


def _issue(sample: Sample) -> Issue:
  return Issue(uid=sample.uid, group_id=sample.group_id, task_id=sample.task_id, visit=sample.visit)


def store_samples(writer: StepWriter, members: Sequence[Experience]) -> None:
  """Stores the generated samples of a group with their scores, inside the caller's transaction.

  The first step of each trajectory was issued when the group started. Later steps are issued here,
  because their number was not known before.
  """
  writer.issue([_issue(step) for m in members for step in m.later])
  writer.append([step for m in members for step in m.steps])
  writer.score([s for m in members for s in m.scores])


def finish(
  config: ExplorerConfig,
  members: Sequence[Experience],
  rewards: RewardsConfig,
  *,
  step: int,
  processed: Processed | None = None,
) -> FinishedGroup:
  """Decides which samples of a group are trained on: drops those that are unscorable, removed by a
  processor or not selected.

  Args:
    members: all trajectories of the group with their final rewards, ordered by sample index.
    step: number of batches that the run has completed.
    processed: result of the processors for the scorable members. If None, they run now.
  """
  scorer_failed = drops_group((s for m in members for s in m.scores), rewards)
  if processed is None:
    processed = process(config.processors, scorable_of(members), step)
  chosen = choose(config.selection, processed.members) if processed.members else []
  admitted = {m.sample.uid for m in chosen}
  return FinishedGroup(
    members=list(members),
    verified=processed.members,
    chosen=chosen,
    dropped={
      'scorer_failed' if scorer_failed else 'unscorable': [
        m.sample.uid for m in members if m.reward.value is None
      ],
      **processed.dropped,
      'not_selected': [m.sample.uid for m in processed.members if m.sample.uid not in admitted],
    },
    lineage=processed.lineage,
    counts=processed.counts,
    scorer_failed=scorer_failed,
  )


def scorable_of(members: Sequence[Experience]) -> list[Experience]:
  return [member for member in members if member.reward.value is not None]


def why_dropped(group: FinishedGroup, config: ExplorerConfig) -> str:
  """Returns the reason why no sample of a group is trained on, with advice for the user."""
  failed = [s for m in group.members if m.reward.value is None for s in m.scores if s.value is None]
  if len({m.reward.value for m in group.members}) == 1 and failed:
    first = failed[0]
    return (
      f'scorer {first.scorer} {first.status}: {dict(first.evidence)}; check the tasks and the '
      'scorer'
    )
  if group.verified and all(m.masked for m in group.verified):
    earlier = sum(not m.sample.loss_mask.any() for m in group.verified)
    return (
      f'all of its {len(group.verified)} samples are masked: {earlier} have no token in the loss '
      '(with rollout.partial: they ended in an earlier batch than the group), '
      f'{len(group.verified) - earlier} are masked by a processor '
      f'({", ".join(name for name, _ in config.processors) or "none is configured"})'
    )
  rewards = [m.reward.total for m in group.members]
  return (
    f'selection {config.selection.kind!r} accepts no sample with rewards {rewards}; the tasks are '
    'too easy or too hard for this policy, or the group is too small'
  )
