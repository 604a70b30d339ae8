"""Selects the samples of a finished group to train on: all, preference pairs, or the best one.

A group from which no sample is selected is dropped, and another group replaces it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experience:
  """A sample with its completion, scores and reward. Once the sample is selected, the fields from
  `masked` on describe how it is trained on.
  """

  sample: Sample
  task: Task
  completion: str
  scores: tuple[Score, ...]
  reward: Reward
  """Reward that was combined from the scores and may then have been changed by processors."""
  masked: bool = False
  """Whether the sample is not trained on, although it counts in its group's baseline."""
  pair: str | None = None
  """Id of the sample's preference pair; None if it is in no pair."""
  label: Literal[1, -1] | None = None
  """Role in the pair: 1 for chosen, -1 for rejected. None if the sample is in no pair."""
  imitated: bool = False
  """Whether the sample is trained on as a demonstration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionConfig:
  """Configures which samples of a group are trained on."""

  kind: Literal['all', 'mixed', 'pairs', 'shortest_correct'] = 'all'
  """all: every scorable sample.

  mixed: every scorable sample, or none if all have the same reward, turn rewards included (DAPO's
  dynamic sampling).

  pairs: for preference losses, pairs of the shortest correct sample (chosen) and another sample
  (rejected). The other sample is wrong, or correct and at least `longer_by` times as long (Kimi
  k1.5, arXiv:2501.12599, section 2.4).

  shortest_correct: only the shortest correct sample, as a demonstration (shortest rejection
  sampling in the same section).
  """
  pairs_per_group: int = 1
  longer_by: float = 1.5

  def __post_init__(self):
    if self.pairs_per_group < 1 or self.longer_by < 1:
      raise UserError(
        f'selection: pairs_per_group {self.pairs_per_group} and longer_by {self.longer_by}, wanted '
        'at least 1 of each'
      )

  @property
  def unit(self) -> int:
    """Number of sequences that must stay together in a micro-batch: 2 for pairs, otherwise 1."""
    return 2 if self.kind == 'pairs' else 1

  def most(self, group_size: int) -> int:
    """Returns the maximum number of sequences that are selected from one group."""
    if self.kind == 'pairs':
      return 2 * min(self.pairs_per_group, group_size - 1)
    return 1 if self.kind == 'shortest_correct' else group_size


def choose(config: SelectionConfig, members: Sequence[Experience]) -> list[Experience]:
  """Selects samples of a group to train on, from its scorable members in order of sample index. If
  none is selected, the caller drops the group.

  Masked members count in the baseline of the others, but are never part of a pair and never serve
  as a demonstration.
  """
  unmasked = [m for m in members if not m.masked]
  if not unmasked:
    return []
  if config.kind == 'all':
    return [*members]
  if config.kind == 'mixed':
    return [*members] if len({m.reward.worth for m in members}) > 1 else []
  correct = [m for m in unmasked if m.reward.correct]
  if not correct:
    return []
  best = min(correct, key=lambda m: m.sample.response_len)  # In a tie, the first is taken.
  if config.kind == 'shortest_correct':
    return [dataclasses.replace(best, imitated=True)]
  limit = config.longer_by * best.sample.response_len
  worse = [m for m in unmasked if not m.reward.correct]
  worse += [m for m in correct if m is not best and m.sample.response_len >= limit]
  chosen = []
  for other in worse[: config.pairs_per_group]:
    pair = f'{other.sample.uid}/pair'
    chosen.append(dataclasses.replace(best, pair=pair, label=1))
    chosen.append(dataclasses.replace(other, pair=pair, label=-1))
  return chosen


def sampled_tokens(members: Sequence[Experience]) -> int:
  """Returns the number of tokens that the policy sampled in these members. A sample that is in
  several pairs counts once.
  """
  samples = {member.sample.uid: member.sample for member in members}
  return sum(int(sample.sampled.sum()) for sample in samples.values())


EXPERIENCE = 'experience'
"""Name of the store's records that say how a selected sample is trained on. Records with other
names say how the processor of that name changed a sample.
"""


def experience_rows(chosen: Sequence[Experience]) -> list[tuple[str, str, Json]]:
  """Returns one store record (uid, EXPERIENCE, value) for each selected sample of a group.
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
