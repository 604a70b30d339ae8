"""Draws a batch from the available groups with a pure function, so a resumed run repeats its draws.

Invariant: the draw depends only on the set of groups, the configuration, the count, the step and
the seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxrl_llm.core.errors import UserError


class Group(NamedTuple):
  """A group available to draw: samples that share a baseline."""

  group_id: str
  uids: tuple[str, ...]
  """uids of its samples, in order of issue."""
  version: int
  """Step of the oldest weights that generated any of its samples."""
  uses: int
  """Number of batches that trained on it: the maximum over its samples."""
  last_used: int | None
  """Step of the last batch that trained on it; None: never trained on."""
  admitted: int
  """Number of completed batches when its last sample was admitted."""
  issued: int
  """Position in the order of issue; larger is later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
  """Rules for drawing a batch."""

  order: Literal['newest', 'shuffled', 'priority'] = 'newest'
  """newest: the newest version first. shuffled: uniform, without replacement. priority: the largest
  version - decay · uses first.
  """
  decay: float = 2.0
  """For priority: cost of one use, in versions."""
  cooldown: int = 1
  """Number of batches that a group rests after each batch that trained on it."""
  max_age: int | None = None
  """Maximum age of a group's version, in batches; None: no limit."""

  def __post_init__(self):
    if not 0 <= self.decay < math.inf:
      raise UserError(f'draw.decay: {self.decay}, wanted a finite number of at least 0')
    if self.cooldown < 0:
      raise UserError(f'draw.cooldown: {self.cooldown}, wanted at least 0 batches')
    if self.max_age is not None and self.max_age < 0:
      raise UserError(
        f'draw.max_age: {self.max_age}, wanted at least 0 versions, or None for no limit'
      )


def draw(
  groups: Sequence[Group], config: DrawConfig, *, count: int, step: int, seed: int
) -> list[str]:
  """Returns the ids of the groups of batch `step`, in drawing order.

  newest:    the largest (version, admitted, issued) first
  priority:  the largest version - decay · uses first; ties: the least used, then the newest
  shuffled:  the smallest h first, where h is one 64-bit draw per group from Philox with key
             (seed, step)

  The priority is that of Trinity-RFT's queue (`linear_decay`, arXiv:2505.17826).

  Args:
    groups: available groups, in any order.
    config: order and exclusions.
    count: number of groups wanted; fewer are returned if fewer are ready.
    step: number of batches completed before this one.
    seed: shuffle seed, at least 0.
  """
  ready = sorted(
    (group for group in groups if _ready(group, config, step)), key=lambda group: group.group_id
  )

  def newness(group):
    return (-group.admitted, -group.issued)

  match config.order:
    case 'newest':
      ready.sort(key=lambda group: (-group.version, *newness(group)))
    case 'priority':
      ready.sort(
        key=lambda group: (config.decay * group.uses - group.version, group.uses, *newness(group))
      )
    case 'shuffled':
      bits = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(len(ready))
      ready = [ready[i] for i in np.argsort(bits, kind='stable')]
  return [group.group_id for group in ready[:count]]


def _ready(group: Group, config: DrawConfig, step: int) -> bool:
  rested = group.last_used is None or step - group.last_used > config.cooldown
  return rested and (config.max_age is None or step - group.version <= config.max_age)
