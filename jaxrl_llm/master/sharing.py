"""Shares the batches of a run that only explores with the run that trains on them.

The two runs exchange only files. This run reads the versions of the weights that the other run
exports (`weights.versions`), and the other run reads the batches that this run shares
(`replay.shared`).
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Mapping

from jaxrl_llm.batching.plan import Row, StepPlan
from jaxrl_llm.master.batches import RolloutBatches
from jaxrl_llm.master.exploring.explorer import Explorer
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.shared import (
  SharedBatch,
  SharedGroup,
  SharedRow,
  SharedScore,
  SharedTrajectory,
  SharedVersion,
  UnsharedBatch,
  digest,
)


class SharingBatches(RolloutBatches):
  """Batches of rollouts that are stored, and shared with the run that trains on them."""

  def __init__(
    self,
    explorer: Explorer,
    *,
    store: ReplayStore,
    version_of: Callable[[int], SharedVersion | None],
    taken_versions: Callable[[], int],
    committed: Callable[[], int],
  ):
    """
    Args:
      version_of: returns the exported version from which the weights of an attempt were taken; None
        if it is not known, as for rollouts of the run from which this run branched.
      taken_versions: returns the number of exported versions that this process has taken.
      committed: returns the step of the newest commit.
    """
    super().__init__(explorer, trains=False)
    self._store, self._version_of, self._committed = store, version_of, committed
    self._taken_versions = taken_versions
    self._step = 0
    self._unshared: UnsharedBatch | None = None

  @property
  def clock_decisions(self) -> int:
    """Number of decisions that depended on timing, which is the number of exported versions taken:
    each time, this process takes the version that is the newest at that moment.
    """
    return self._taken_versions()

  def advance(self, step: int, served: int) -> None:
    super().advance(step, served)
    self._step = step

  async def next(self) -> tuple[list[Row], dict[str, int]]:
    rows, counts = await super().next()
    batch = await asyncio.to_thread(self._batch, rows)
    self._unshared = await asyncio.to_thread(UnsharedBatch, self._store.directory, batch)
    if versions := [version.step for version in batch.versions.values()]:
      counts['explore/version'] = max(versions)
    return rows, counts

  def trained(self, plan: StepPlan) -> None:
    super().trained(plan)
    # A later commit contains this batch. If the process is killed before that commit, the opening
    # (`replay.shared.Opening`) of the next start makes the batch void.
    self._unshared.share()

  def _batch(self, rows: list[Row]) -> SharedBatch:
    places = {row.uid: (pathlib.PurePath(row.source).name, row.index) for row in rows}
    payloads = self._store.reader.read_bytes([*places.values()])
    sealed = {
      uid: SharedRow(segment=segment, row=index, digest=digest(payload))
      for (uid, (segment, index)), payload in zip(places.items(), payloads, strict=True)
    }
    groups: dict[str, list[Experience]] = {}
    for member in {m.sample.uid: m for m in self._taken.values()}.values():
      groups.setdefault(member.sample.group_id, []).append(member)
    attempts = {
      segment.version.attempt
      for member in self._taken.values()
      for step in member.steps
      for segment in step.segments
    }
    versions = {str(attempt): self._version_of(attempt) for attempt in sorted(attempts)}
    return SharedBatch(
      store=self._store.name,
      attempt=self._store.attempt,
      step=self._step,
      committed=self._committed(),
      versions={key: version for key, version in versions.items() if version is not None},
      groups=tuple(
        SharedGroup(
          group=group,
          task=members[0].sample.task_id,
          trajectories=tuple(_trajectory(member, sealed) for member in members),
        )
        for group, members in groups.items()
      ),
    )


def _trajectory(member: Experience, sealed: Mapping[str, SharedRow]) -> SharedTrajectory:
  reward = member.reward
  return SharedTrajectory(
    rows=tuple(sealed[step.uid] for step in member.steps),
    value=reward.value,
    parts=dict(reward.parts),
    correct=reward.correct,
    turn_values=tuple(reward.turn_values),
    masked=member.masked,
    scores=tuple(map(SharedScore.of, member.scores)),
  )
