"""Which members of a finished group are learned from, and how: all of them, pairs of them, the best of them.

A group of which nothing is chosen is given up, and another is started in its place.
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
class Scored:
  """A sample with what it said and what that is worth."""

  sample: Sample
  task: Task
  completion: str
  scores: tuple[Score, ...]
  reward: Reward
  """What the scores came to, and what processors made of it."""
  masked: bool = False
  """In its group's baseline, and not trained on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
  """A member that is learned from."""

  scored: Scored
  pair: str = ''
  """Preference pair that it belongs to; empty: none."""
  label: int = 0
  """In its pair: 1 chosen, -1 rejected."""
  imitated: bool = False
  """Learned from as a demonstration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionConfig:
  """Which samples of a group are trained on."""

  kind: Literal['all', 'mixed', 'pairs', 'shortest_correct'] = 'all'
  """all: every scorable sample. mixed: the same, of groups with two different rewards, those of their turns included
  (DAPO's dynamic sampling).

  pairs: the shortest correct sample against wrong ones, and against correct ones that are `longer_by` times as long
  (Kimi k1.5, arXiv:2501.12599, section 2.4); for preference losses. shortest_correct: that sample alone, to be imitated
  (shortest rejection sampling, there too).
  """
  pairs_per_group: int = 1
  longer_by: float = 1.5

  def __post_init__(self):
    if self.pairs_per_group < 1 or self.longer_by < 1:
      raise UserError(
        f'selection: pairs_per_group {self.pairs_per_group} and longer_by {self.longer_by}, wanted at least 1 of each'
      )

  @property
  def unit(self) -> int:
    """Sequences that may not be separated."""
    return 2 if self.kind == 'pairs' else 1

  def most(self, group_size: int) -> int:
    """Sequences that one group gives at most."""
    if self.kind == 'pairs':
      return 2 * min(self.pairs_per_group, group_size - 1)
    return 1 if self.kind == 'shortest_correct' else group_size


def choose(config: SelectionConfig, members: Sequence[Scored]) -> list[Chosen]:
  """What is learned of a group's scorable members, which are in the order of issue; empty: nothing.

  Masked members are in the baseline of the others, never in a pair or imitated.
  """
  unmasked = [m for m in members if not m.masked]
  if not unmasked:
    return []
  if config.kind == 'all':
    return [Chosen(scored=m) for m in members]
  if config.kind == 'mixed':
    return [Chosen(scored=m) for m in members] if len({m.reward.worth for m in members}) > 1 else []
  correct = [m for m in unmasked if m.reward.correct]
  if not correct:
    return []
  best = min(correct, key=lambda m: m.sample.response_len)  # The first of equals.
  if config.kind == 'shortest_correct':
    return [Chosen(scored=best, imitated=True)]
  limit = config.longer_by * best.sample.response_len
  worse = [m for m in unmasked if not m.reward.correct]
  worse += [m for m in correct if m is not best and m.sample.response_len >= limit]
  chosen = []
  for other in worse[: config.pairs_per_group]:
    pair = f'{other.sample.uid}/pair'
    chosen += [Chosen(scored=best, pair=pair, label=1), Chosen(scored=other, pair=pair, label=-1)]
  return chosen


EXPERIENCE = 'experience'
"""Under this name the store keeps what a sample is learned from as, beside the changes that made it so."""


def experience_rows(chosen: Sequence[Chosen]) -> list[tuple[str, str, Json]]:
  """(uid, EXPERIENCE, what `read_experiences` reads) of each sample of a group's choice."""
  uses: dict[str, list[tuple[int, Chosen]]] = {}
  for place, choice in enumerate(chosen):
    uses.setdefault(choice.scored.sample.uid, []).append((place, choice))
  rows = []
  for uid, choices in uses.items():
    scored = choices[0][1].scored
    uses_of = [[place, choice.pair, choice.label, choice.imitated] for place, choice in choices]
    rows.append((uid, EXPERIENCE, {'reward': scored.reward.value, 'masked': scored.masked, 'uses': uses_of}))
  return rows


def read_experiences(rows: Mapping[str, Json], members: Mapping[str, Scored]) -> list[Chosen]:
  """The choice of a group again, in its order, or of several, one after the other.

  Args:
    rows: by uid, what `experience_rows` gave.
    members: by uid, the samples with their scores in force.
  """
  groups: dict[str, dict[int, Chosen]] = {}
  for uid, row in rows.items():
    reward = dataclasses.replace(members[uid].reward, value=row['reward'])
    scored = dataclasses.replace(members[uid], reward=reward, masked=row['masked'])
    for place, pair, label, imitated in row['uses']:
      chosen = groups.setdefault(scored.sample.group_id, {})
      chosen[place] = Chosen(scored=scored, pair=pair, label=label, imitated=imitated)
  return [chosen[place] for chosen in groups.values() for place in sorted(chosen)]
