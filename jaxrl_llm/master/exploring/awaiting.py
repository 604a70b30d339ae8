"""Groups that wait for delayed rewards: keeps track of their verdicts, and decides when they join a
batch.

A group is parked if its samples are generated but still lack verdicts of a delayed scorer. While
parked, it has no place in a batch and does not use the gate's capacity. When its last verdict has
arrived, it takes the place of the next group that would have started. A group whose verdicts do not
arrive in time is dropped.

Invariant: when a group joins a batch after its wait, none of its tokens is older than
`max_age_versions` batches. Arrival times depend on clocks, so each group that joins a batch, or is
dropped because it is too late, counts as a clock decision.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from jaxrl_llm.core.records.score import Score
from jaxrl_llm.master.exploring.scheduling import Immediate, Turn
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.exploring.started import StartedGroup, StartedGroups, Waiting
from jaxrl_llm.replay import inbox
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.tables import State
from jaxrl_llm.replay.writer import StepWriter
from jaxrl_llm.rewards.api import combine, drops_group, in_force
from jaxrl_llm.rewards.pool.pool import ScorerPool

POLL_S = 1.0
"""Seconds between reads of the inbox."""
TOO_LATE = 'reward too late'
"""Drop reason of a group whose verdicts have not arrived in time."""


class Awaiting(Immediate):
  """Groups of a stage that wait for delayed rewards. This class is also the stage's scheduler.

  Attributes:
    decisions: number of groups that have joined a batch, or were dropped as too late.
  """

  def __init__(
    self,
    groups: StartedGroups,
    scorers: ScorerPool,
    store: ReplayStore,
    *,
    newest: Callable[[], int],
    clock: Callable[[], float] = time.time,
  ):
    """
    Args:
      groups: the started groups of the stage.
      scorers: pool with at least one delayed scorer.
      newest: returns the step of the last batch that may contain a group that starts now.
      clock: returns the Unix time.
    """
    self._groups, self._delayed, self._rewards = groups, scorers.delayed, scorers.config
    self._store, self._newest, self._clock = store, newest, clock
    self._ready: dict[int, dict[str, list[inbox.Given]]] = {}
    """Verdicts of the groups whose rewards are complete, keyed by group number and then by uid. The
    groups are in the order in which their rewards became complete.
    """
    self.decisions = 0

  @property
  def max_age_s(self) -> float:
    """Maximum number of seconds that a group waits for its verdicts."""
    return 3600 * min(scorer.max_age_hours for scorer in self._delayed.values())

  @property
  def max_age_versions(self) -> int:
    """Maximum staleness, in batches, of a sample after its wait."""
    return min(scorer.max_age_versions for scorer in self._delayed.values())

  @property
  def limits(self) -> str:
    """Limits of the wait as text, for error messages."""
    return f'{self.max_age_s / 3600:g} hours and {self.max_age_versions} batches'

  def next(self, admitted: int) -> Turn:
    """Chooses the groups to run next. Groups with complete rewards come first, in the order in
    which their rewards became complete. New groups follow, unless too many groups are waiting.
    """
    present = [number for number in self._ready if number in self._groups]
    ready = [n for n in present if not self._is_too_old(self._groups[n])][:admitted]
    most = min(scorer.max_groups for scorer in self._delayed.values())
    waiting = len(self._groups.awaiting) - len(ready) + len(self._groups.running)
    return Turn(ready, max(0, min(admitted - len(ready), most - waiting)))

  def wait_of(self, members: Sequence[Experience]) -> Waiting | None:
    """Returns the waiting state of a generated group, or None if none of its samples needs a
    delayed reward. A group that will be dropped in any case does not wait.
    """
    task = members[0].task
    awaited = Awaited(
      scorers={
        config.name: self._delayed[config.name].verdicts
        for config in in_force(self._rewards.scorers, task.domain, task.taskset)
        if config.name in self._delayed
      },
      since=self._clock(),
      until=self._clock() + self.max_age_s,
      newest_version=max(s.version.step for m in members for s in m.sample.segments),
    )
    waiting = Waiting([*members], awaited, self._store.attempt)
    dropped = drops_group((score for m in members for score in m.scores), self._rewards)
    return waiting if awaited.scorers and waiting.scorable and not dropped else None

  def kept(self, stage: str) -> set[str]:
    """Returns the names of the stage's groups that are waiting according to the store."""
    return {
      entry.group_id
      for entry in self._store.live()
      if entry.state == State.AWAITING and entry.group_id.startswith(f'{stage}/')
    }

  async def verdicts(self) -> list[inbox.Given]:
    """Reads the inbox in a thread. Returns the verdicts on all samples that are waiting now."""
    uids = [uid for group in self._groups.awaiting for uid in group.uids]
    return await asyncio.to_thread(inbox.given, self._store.directory, uids) if uids else []

  def update(self, verdicts: Sequence[inbox.Given]) -> list[StartedGroup]:
    """Processes the verdicts that have arrived. Returns the groups that have waited too long.

    Args:
      verdicts: all verdicts on the waiting samples, in the order of their arrival.
    """
    of_uid = collections.defaultdict(list)
    for verdict in verdicts:
      of_uid[verdict.uid].append(verdict)
    complete, late = [], []
    for group in self._groups.awaiting:
      used = {uid: _used(group.waiting, of_uid[uid]) for uid in group.waiting.scorable}
      if self._is_too_old(group):
        late.append(group)
      elif group.number in self._ready:
        continue
      elif None not in used.values():
        complete.append((max(given.seq for of in used.values() for given in of), group, used))
      elif group.waiting.awaited.is_late(self._clock()):
        late.append(group)
    complete.sort(key=lambda item: item[0])
    self._ready |= {group.number: used for _, group, used in complete}
    self._ready = {n: used for n, used in self._ready.items() if n not in [g.number for g in late]}
    self.decisions += len(late)
    return late

  def _is_too_old(self, group: StartedGroup) -> bool:
    return group.waiting.oldest_version < self._newest() - self.max_age_versions

  def take(self, group: StartedGroup) -> list[Experience]:
    """Returns the samples of a group with complete rewards, with all of their scores."""
    self.decisions += 1
    used = self._ready.pop(group.number)
    return [self._scored(m, used.get(m.sample.uid, [])) for m in group.waiting.members]

  def _scored(self, member: Experience, used: Sequence[inbox.Given]) -> Experience:
    scores = list(member.scores)
    for name in dict.fromkeys(given.scorer for given in used):
      of_scorer = [given for given in used if given.scorer == name]
      scores.append(
        Score(
          uid=member.sample.uid,
          scorer=name,
          value=math.fsum(given.value for given in of_scorer) / len(of_scorer),
          evidence={'verdicts': [[given.who, given.value] for given in of_scorer]},
        )
      )
    order = [config.name for config in self._rewards.scorers]
    scores.sort(key=lambda score: order.index(score.scorer))
    return dataclasses.replace(member, scores=tuple(scores), reward=combine(scores, self._rewards))


def store_verdicts(writer: StepWriter, group: StartedGroup, members: Sequence[Experience]) -> None:
  """Stores the scores that a group's samples did not have when they began to wait."""
  names = group.waiting.awaited.scorers
  writer.score([s for member in members for s in member.scores if s.scorer in names])


def _used(waiting: Waiting, verdicts: Sequence[inbox.Given]) -> list[inbox.Given] | None:
  """Returns the verdicts that make up the delayed rewards of a sample, or None if a verdict is
  still missing.

  Args:
    verdicts: verdicts on the sample, in the order of their arrival.
  """
  used = []
  for scorer, count in waiting.awaited.scorers.items():
    of_scorer = [
      given
      for given in verdicts
      if (given.scorer, given.attempt) == (scorer, waiting.attempt)
      and not waiting.awaited.is_late(given.at)
    ]
    if len(of_scorer) < count:
      return None
    used += of_scorer[:count]
  return used
