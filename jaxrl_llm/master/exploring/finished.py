"""Finished groups: which of their samples are trained on, and why the others are not.

Invariant: each sample of a finished group is either admitted to training or dropped with a reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl_llm.core.types import Json
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.processors import process
from jaxrl_llm.master.exploring.selection import Experience, choose, experience_rows
from jaxrl_llm.replay.writer import StepWriter
from jaxrl_llm.rewards.api import RewardsConfig, drops_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedGroup:
  """A generated and scored group, after the processors and the selection."""

  members: list[Experience]
  """All samples, ordered by sample index."""
  verified: list[Experience]
  """Scorable samples that no processor removed."""
  chosen: list[Experience]
  """Samples selected for training; empty if the group is dropped."""
  dropped: dict[str, list[str]]
  """uids of the samples that are not trained on, keyed by reason, with '_' for each space."""
  lineage: list[tuple[str, str, Json]]
  """(uid, processor name, change) for each change to a sample, in the order of the changes."""
  counts: dict[str, int]
  """Numbers of samples before and after each processor, as in `processors.Processed`."""
  scorer_failed: bool
  """Whether a scorer failed that is configured to drop the group then."""

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
    """uids of the samples to train on."""
    return [*dict.fromkeys(m.sample.uid for m in self.chosen)]

  def store(self, writer: StepWriter) -> None:
    """Stores the samples with their scores and records, and admits or drops each of them. The
    caller's transaction covers all of this.
    """
    writer.append([m.sample for m in self.members])
    writer.score([s for m in self.members for s in m.scores])
    writer.derive([*self.lineage, *experience_rows(self.chosen)])
    writer.admit(self.uids)
    for reason, uids in self.dropped.items():
      if uids:
        writer.drop(uids, reason.replace('_', ' '))


def finish(
  config: ExplorerConfig, members: Sequence[Experience], rewards: RewardsConfig, *, step: int
) -> FinishedGroup:
  """Decides which samples of a group are trained on: drops those that are unscorable, removed by a
  processor or not selected.

  Args:
    members: all samples of the group with their final rewards, ordered by sample index.
    step: number of batches that the run has completed.
  """
  scorer_failed = drops_group((s for m in members for s in m.scores), rewards)
  scorable = [m for m in members if m.reward.value is not None]
  processed = process(config.processors, scorable, step)
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


def why_dropped(group: FinishedGroup, config: ExplorerConfig) -> str:
  """Returns why no sample of a group is trained on, and what the user can look at."""
  failed = [s for m in group.members if m.reward.value is None for s in m.scores if s.value is None]
  if len({m.reward.value for m in group.members}) == 1 and failed:
    first = failed[0]
    return (
      f'scorer {first.scorer} {first.status}: {dict(first.evidence)}; look at the tasks and at '
      'the scorer'
    )
  if group.verified and all(m.masked for m in group.verified):
    earlier = sum(not m.sample.loss_mask.any() for m in group.verified)
    return (
      f'all of its {len(group.verified)} samples are masked: {earlier} have no token in the loss '
      '(with rollout.partial: they ended in an earlier batch than the group), '
      f'{len(group.verified) - earlier} are masked by a processor '
      f'({", ".join(name for name, _ in config.processors) or "none is configured"})'
    )
  rewards = [m.reward.worth for m in group.members]
  return (
    f'rewards {rewards}, of which selection {config.selection.kind!r} accepts none; the tasks are '
    'too easy or too hard for this policy, or the group is too small'
  )
