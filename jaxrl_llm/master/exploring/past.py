"""Draws groups of earlier batches that are added to a batch of new groups."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.replay.draw import DrawConfig, Group, draw
from jaxrl_llm.replay.index import ReplayStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
  """Rule that adds groups of a stage's earlier batches to a batch of new groups."""

  stage: str
  groups: int
  """Maximum number of earlier groups per batch."""
  max_uses: int
  config: DrawConfig
  seed: int

  def draw(self, store: ReplayStore, step: int) -> list[Group]:
    """Draws groups of the stage that have been trained on at least once and fewer than `max_uses`
    times. `config` determines the order and further conditions.
    """

    def reusable(group):
      return group.group_id.startswith(f'{self.stage}/') and 0 < group.uses < self.max_uses

    oldest = None if self.config.max_age is None else step - self.config.max_age
    groups = {
      group.group_id: group
      for group in store.candidates(step, oldest_version=oldest)
      if reusable(group)
    }
    drawn = draw([*groups.values()], self.config, count=self.groups, step=step, seed=self.seed)
    return [groups[group_id] for group_id in drawn]
