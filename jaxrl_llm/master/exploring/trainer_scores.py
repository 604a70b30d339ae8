"""Scores of the trainer's reward model: decides which groups wait for this model, and finishes
them with its verdicts.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence

from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.endings import Endings, NothingToLearn
from jaxrl_llm.master.exploring.finished import scorable_of, store_samples
from jaxrl_llm.master.exploring.judging import judge_by_trainer
from jaxrl_llm.master.exploring.processors import Processors
from jaxrl_llm.master.exploring.scheduling import ScoringRounds
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.rewards.api import Verdict, drops_group
from jaxrl_llm.rewards.pool.pool import ScorerPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerScores:
  """Scoring of a stage's samples by the trainer's reward model, in rounds."""

  config: ExplorerConfig
  scorers: ScorerPool
  """Pool of the run's scorers, of which at least one is the trainer's reward model."""
  rounds: ScoringRounds
  """The stage's scheduler, by which no group starts during a round."""
  processors: Processors
  endings: Endings

  def needs(self, members: Sequence[Experience]) -> bool:
    """Returns whether a group must wait for the reward model. A group that will be dropped in any
    case does not wait.
    """
    if not self.scorers.is_scored_by_trainer(members[0].task):
      return False
    return not drops_group((score for m in members for score in m.scores), self.scorers.config)

  def begin(self) -> list[Experience]:
    """Begins a round. Returns the samples that the reward model must score, in order of uid."""
    self.rounds.begin_round()
    members = [member for group in self.endings.groups.unscored for member in group.unscored]
    return sorted(members, key=lambda member: member.sample.uid)

  async def finish(self, verdicts: Mapping[str, Verdict]) -> None:
    """Finishes the groups of a round.

    Args:
      verdicts: verdicts of the reward model, keyed by uid.

    Raises:
      NothingToLearn: too many groups were dropped.
    """
    samples = self.endings.samples
    for group in self.endings.groups.unscored:
      members = judge_by_trainer(group.unscored, verdicts, self.scorers, self.scorers.config)
      processed = await self.processors.run(scorable_of(members), samples.step)
      group.unscored, group.scored = None, time.monotonic()
      store = functools.partial(store_samples, samples.writer, members)
      self.endings.finish(group, members, store, processed)

  def check_rounds(self) -> None:
    """Raises NothingToLearn if a batch that is not complete has had its last round."""
    stage, most, count = self.config.stage, self.config.max_rounds, self.rounds.rounds
    if count > most:
      raise NothingToLearn(
        f'stage {stage}: {self.endings.tally.counts["dropped/groups"]} groups were dropped in '
        f'{count} rounds of rollouts for one batch, reward_model.max_rounds permits {most} after '
        'the first; relax the processors or the selection, or raise max_rounds'
      )
