"""Which members of a finished group are learned from, and how: all of them, pairs of them, the best of them.

A group of which nothing is chosen is given up, and another is started in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.experience.sample import Sample
from jaxrl_llm.experience.score import Score
from jaxrl_llm.experience.task import Task
from jaxrl_llm.rewards.api import Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
  """A sample with what it said and what that is worth."""

  sample: Sample
  task: Task
  completion: str
  scores: tuple[Score, ...]
  reward: Reward


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
  kind: Literal['all', 'mixed', 'pairs', 'shortest_correct'] = 'all'
  """all: every scorable sample. mixed: the same, of groups with two different rewards (DAPO's dynamic sampling).

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
  """What is learned of a group's scorable members, which are in the order of issue; empty: nothing."""
  if config.kind == 'all':
    return [Chosen(scored=m) for m in members]
  if config.kind == 'mixed':
    return [Chosen(scored=m) for m in members] if len({m.reward.value for m in members}) > 1 else []
  correct = [m for m in members if m.reward.correct]
  if not correct:
    return []
  best = min(correct, key=lambda m: m.sample.response_len)  # The first of equals.
  if config.kind == 'shortest_correct':
    return [Chosen(scored=best, imitated=True)]
  limit = config.longer_by * best.sample.response_len
  worse = [m for m in members if not m.reward.correct]
  worse += [m for m in correct if m is not best and m.sample.response_len >= limit]
  chosen = []
  for other in worse[: config.pairs_per_group]:
    pair = f'{other.sample.uid}/pair'
    chosen += [Chosen(scored=best, pair=pair, label=1), Chosen(scored=other, pair=pair, label=-1)]
  return chosen
