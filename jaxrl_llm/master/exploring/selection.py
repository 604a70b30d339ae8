"""Selects the samples of a finished group to train on: all, preference pairs, or the best ones.

A group from which no sample is selected is dropped, and another group replaces it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Sample
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Reward
from jaxrl_llm.rollout.workflow import trained_turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experience:
  """A trajectory with its completion, scores and reward. Most trajectories are one sample. Once the
  trajectory is selected, the fields from `masked` on describe how it is trained on.
  """

  sample: Sample
  """The trajectory's first step. Its uid identifies the trajectory in scores and in the store."""
  later: tuple[Sample, ...] = ()
  """The trajectory's later steps, in order."""
  task: Task
  completion: str
  """Text of the policy's last turn."""
  scores: tuple[Score, ...]
  reward: Reward
  """Reward that was combined from the scores and may then have been changed by processors."""
  masked: bool = False
  """Whether the sample is left out of the loss. A masked sample still counts in its group's
  baseline.
  """
  pair: str | None = None
  """Id of the sample's preference pair; None if it is in no pair."""
  label: Literal[1, -1] | None = None
  """Role in the pair: 1 for chosen, -1 for rejected. None if the sample is in no pair."""
  imitated: bool = False
  """Whether the sample is trained on as a demonstration."""

  @property
  def steps(self) -> tuple[Sample, ...]:
    return (self.sample, *self.later)

  @property
  def finish_reason(self) -> Finish:
    """Reason why the trajectory ended."""
    return self.steps[-1].finish_reason

  @property
  def response_len(self) -> int:
    """Number of tokens after the prompts of all steps."""
    return sum(step.response_len for step in self.steps)

  def step(self, uid: str) -> Sample:
    """Returns the step with this uid."""
    (step,) = (step for step in self.steps if step.uid == uid)
    return step

  def step_rewards(self) -> list[tuple[float | None, tuple[float, ...]]]:
    """Returns (reward, rewards of turns) of each step. The trajectory's reward belongs to the last
    step; the reward of a turn belongs to the step that contains the turn.
    """
    rewards, turn_values = [], self.reward.turn_values
    for step in self.steps[:-1]:
      turns = trained_turns(step)
      rewards.append((None if self.reward.value is None else 0.0, turn_values[:turns]))
      turn_values = turn_values[turns:]
    return [*rewards, (self.reward.value, turn_values)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionConfig:
  """Configures which samples of a group are trained on."""

  kind: Literal['all', 'mixed', 'pairs', 'margin', 'shortest_correct', 'best', 'above'] = 'all'
  """Rule that selects the samples of a group.

  all: every scorable sample.

  mixed: every scorable sample, or none if all have the same reward, turn rewards included (DAPO's
  dynamic sampling).

  pairs: for preference losses, pairs of the shortest correct sample (chosen) and another sample
  (rejected). The other sample is wrong, or correct and at least `longer_by` times as long (Kimi
  k1.5, arXiv:2501.12599, section 2.4).

  margin: for preference losses, the pair of the sample with the highest reward (chosen) and the
  sample with the lowest reward (rejected), if the rewards differ by at least `margin`.

  shortest_correct: only the shortest correct sample, as a demonstration (Kimi k1.5's shortest
  rejection sampling, in the section cited for 'pairs').

  best: only the sample with the highest reward, as a demonstration (best of n).

  above: the samples with a reward of at least `min_reward`, as demonstrations (rejection sampling,
  as in DeepSeek-R1, arXiv:2501.12948, section 2.3.3).

  The reward of a sample includes the rewards of its turns. Of samples with equal rewards, 'margin'
  and 'best' take the shortest.
  """
  pairs_per_group: int = 1
  longer_by: float = 1.5
  margin: float = 1.0
  min_reward: float = 1.0

  def __post_init__(self):
    if self.pairs_per_group < 1 or self.longer_by < 1:
      raise UserError(
        f'selection: pairs_per_group {self.pairs_per_group} and longer_by {self.longer_by}, wanted '
        'at least 1 of each'
      )
    if not 0 < self.margin < math.inf:
      raise UserError(f'selection: margin {self.margin}, wanted a number above 0')
    if not math.isfinite(self.min_reward):
      raise UserError(f'selection: min_reward {self.min_reward}, wanted a finite number')

  @property
  def pairs(self) -> bool:
    """Whether samples are selected as preference pairs."""
    return self.kind in ('pairs', 'margin')

  @property
  def imitates(self) -> bool:
    """Whether samples are selected as demonstrations."""
    return self.kind in ('shortest_correct', 'best', 'above')

  @property
  def unit(self) -> int:
    """Number of sequences that must stay together in a micro-batch: 2 for pairs, otherwise 1."""
    return 2 if self.pairs else 1

  @property
  def least(self) -> int | None:
    """Minimum number of units (pairs, or single sequences; see `unit`) that are selected from a
    group that is not dropped. None if the number is the group's size, or depends on how many
    samples can be scored.
    """
    return 1 if self.pairs or self.imitates else None

  def most(self, group_size: int) -> int:
    """Returns the maximum number of sequences that are selected from one group."""
    if self.kind == 'pairs':
      return 2 * min(self.pairs_per_group, group_size - 1)
    if self.kind == 'margin':
      return 2
    return 1 if self.kind in ('shortest_correct', 'best') else group_size


def choose(config: SelectionConfig, members: Sequence[Experience]) -> list[Experience]:
  """Selects samples of a group to train on, from its scorable members in order of sample index. If
  none is selected, the caller drops the group.

  Masked members count in the baseline of the other members, but are never part of a pair and never
  serve as a demonstration.
  """
  unmasked = [m for m in members if not m.masked]
  if not unmasked:
    return []
  if config.kind == 'all':
    return [*members]
  if config.kind == 'mixed':
    return [*members] if len({m.reward.total for m in members}) > 1 else []
  if config.kind in ('margin', 'best', 'above'):
    return _by_reward(config, unmasked)
  correct = [m for m in unmasked if m.reward.correct]
  if not correct:
    return []
  best = min(correct, key=lambda m: m.response_len)  # Ties go to the first sample.
  if config.kind == 'shortest_correct':
    return [_demonstration(best)]
  limit = config.longer_by * best.response_len
  worse = [m for m in unmasked if not m.reward.correct]
  worse += [m for m in correct if m is not best and m.response_len >= limit]
  chosen = []
  for other in worse[: config.pairs_per_group]:
    chosen += _pair(best, other)
  return chosen


def _by_reward(config: SelectionConfig, members: Sequence[Experience]) -> list[Experience]:
  """Implements `choose` for the kinds 'margin', 'best' and 'above', which ignore correctness."""
  if config.kind == 'above':
    return [_demonstration(m) for m in members if m.reward.total >= config.min_reward]
  best = min(members, key=lambda m: (-m.reward.total, m.response_len))
  if config.kind == 'best':
    return [_demonstration(best)]
  worst = min(members, key=lambda m: (m.reward.total, m.response_len))
  return _pair(best, worst) if best.reward.total - worst.reward.total >= config.margin else []


def _demonstration(member: Experience) -> Experience:
  return dataclasses.replace(member, imitated=True)


def _pair(chosen: Experience, rejected: Experience) -> list[Experience]:
  pair = f'{rejected.sample.uid}/pair'
  return [
    dataclasses.replace(chosen, pair=pair, label=1),
    dataclasses.replace(rejected, pair=pair, label=-1),
  ]


def sampled_tokens(members: Sequence[Experience]) -> int:
  """Returns the number of tokens that the policy sampled in these members. A sample that is in
  several pairs counts once.
  """
  samples = {step.uid: step for member in members for step in member.steps}
  return sum(int(np.count_nonzero(sample.sampled)) for sample in samples.values())


EXPERIENCE = 'experience'
"""Name of the store records that describe how a selected sample is trained on. Records of a
processor's changes to a sample have the processor's name instead.
"""


def experience_rows(chosen: Sequence[Experience]) -> list[tuple[str, str, Json]]:
  """Returns one store record (uid, EXPERIENCE, value) for each selected trajectory of a group.
  `read_experiences` rebuilds the selection from these records.
  """
  uses: dict[str, list[tuple[int, Experience]]] = {}
  for place, choice in enumerate(chosen):
    uses.setdefault(choice.sample.uid, []).append((place, choice))
  rows = []
  for uid, choices in uses.items():
    _, first = choices[0]
    uses_of = [
      [place, choice.pair or '', choice.label or 0, choice.imitated] for place, choice in choices
    ]
    rows.append(
      (uid, EXPERIENCE, {'reward': first.reward.value, 'masked': first.masked, 'uses': uses_of})
    )
  return rows


def read_experiences(
  rows: Mapping[str, Json], members: Mapping[str, Experience]
) -> list[Experience]:
  """Rebuilds the samples selected from one or more groups, in their original order.

  Args:
    rows: values of the records that `experience_rows` returned, keyed by uid.
    members: scored samples, keyed by uid.
  """
  groups: dict[str, dict[int, Experience]] = {}
  for uid, row in rows.items():
    reward = dataclasses.replace(members[uid].reward, value=row['reward'])
    member = dataclasses.replace(members[uid], reward=reward, masked=row['masked'])
    for place, pair, label, imitated in row['uses']:
      chosen = groups.setdefault(member.sample.group_id, {})
      chosen[place] = dataclasses.replace(
        member, pair=pair or None, label=label or None, imitated=imitated
      )
  return [chosen[place] for chosen in groups.values() for place in sorted(chosen)]
