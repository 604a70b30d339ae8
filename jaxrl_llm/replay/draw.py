"""Which of the groups that can be drawn make a batch: a pure function, so that a resumed run draws what it drew.

Invariant: the draw depends on the groups (not on the order in which they are listed), the configuration, the step and
the seed alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxrl_llm.core.errors import UserError


class Group(NamedTuple):
  """A group that can be drawn: samples that share a baseline."""

  group_id: str
  uids: tuple[str, ...]
  """In the order of their issue."""
  version: int
  """Step of the oldest weights that generated any of it."""
  uses: int
  """Batches that trained on it: the most of any of its samples."""
  last_used: int | None
  """Step of the last of these batches (batches completed before it); None: never trained on."""
  admitted: int
  """Completed batches when the last of it was admitted."""
  issued: int
  """Its place in the order of issue; larger is later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
  """How a batch is drawn."""

  order: Literal['newest', 'shuffled', 'priority'] = 'newest'
  """newest: the newest version first. shuffled: uniform, without replacement. priority: by version - decay · uses."""
  decay: float = 2.0
  """priority: versions that one use costs."""
  cooldown: int = 1
  """Batches that a group rests after one that trained on it."""
  max_age: int | None = None
  """Groups whose version is more than so many batches old are left out; None: no limit."""

  def __post_init__(self):
    if not 0 <= self.decay < math.inf:
      raise UserError(f'draw.decay: {self.decay}, wanted a finite number of at least 0')
    if self.cooldown < 0:
      raise UserError(f'draw.cooldown: {self.cooldown}, wanted at least 0 batches')
    if self.max_age is not None and self.max_age < 0:
      raise UserError(f'draw.max_age: {self.max_age}, wanted at least 0 versions, or None for no limit')


def draw(groups: Sequence[Group], config: DrawConfig, *, count: int, step: int, seed: int) -> list[str]:
  """Ids of the groups of batch `step`, in the order in which they are drawn.

  newest:    the largest (version, admitted, issued) first
  priority:  the largest version - decay · uses first; of equals the one less used, then the newest
  shuffled:  the smallest h first, h one 64-bit draw per group of Philox with key (seed, step)

  The priority is that of Trinity-RFT's queue (`linear_decay`, arXiv:2505.17826).

  Args:
    groups: that can be drawn, in any order.
    config: the order, and what is left out.
    count: groups wanted; fewer are returned where fewer are left.
    step: batches completed before this one.
    seed: of the shuffle, at least 0.
  """
  ready = sorted((group for group in groups if _ready(group, config, step)), key=lambda group: group.group_id)
  newness = lambda group: (-group.admitted, -group.issued)
  match config.order:
    case 'newest':
      ready.sort(key=lambda group: (-group.version, *newness(group)))
    case 'priority':
      ready.sort(key=lambda group: (config.decay * group.uses - group.version, group.uses, *newness(group)))
    case 'shuffled':
      bits = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(len(ready))
      ready = [ready[i] for i in np.argsort(bits, kind='stable')]
  return [group.group_id for group in ready[:count]]


def _ready(group: Group, config: DrawConfig, step: int) -> bool:
  rested = group.last_used is None or step - group.last_used > config.cooldown
  return rested and (config.max_age is None or step - group.version <= config.max_age)
