"""Adds groups of earlier batches to a batch of new ones."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.replay.draw import DrawConfig, Group, draw
from jaxrl_llm.replay.index import ReplayStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
  """Rule by which earlier groups of a stage join a batch of new ones."""

  stage: str
  groups: int
  """Maximum number of earlier groups per batch."""
  max_uses: int
  config: DrawConfig
  seed: int

  def draw(self, store: ReplayStore, step: int) -> list[Group]:
    """Draws groups by `config` from those trained on at least once but under `max_uses` times."""

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
