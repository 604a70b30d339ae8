"""Draws groups for a batch from the groups that the store offers.

Invariant: a draw is a pure function of the set of groups, the configuration, the number of groups
wanted, the step and the seed. A resumed run therefore repeats its draws.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxrl_llm.core.errors import UserError


class Group(NamedTuple):
  """A group that can be drawn: the samples of one visit of a task, which share a baseline."""

  group_id: str
  uids: tuple[str, ...]
  """uids of the group's samples, in the order in which they were issued."""
  version: int
  """Step of the oldest weights with which any of the group's samples was generated."""
  uses: int
  """Number of batches that trained on the group: the maximum over its samples."""
  last_used: int | None
  """Step of the last batch that trained on the group; None if no batch did."""
  admitted: int
  """Number of batches that were completed when the group's last sample was admitted."""
  issued: int
  """Sequence number of the group; groups that were issued later have larger numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
  """Rules by which groups are drawn for a batch."""

  order: Literal['newest', 'shuffled', 'priority'] = 'newest'
  """Order in which groups are drawn. newest: groups of the newest version first. shuffled: a
  uniformly random order. priority: groups with the largest value of (version - decay · uses) first.
  """
  decay: float = 2.0
  """Number of versions by which each use lowers a group's priority (order 'priority')."""
  cooldown: int = 1
  """Minimum number of batches between two batches that train on the same group."""
  max_age: int | None = None
  """Maximum age of a group, in batches completed since the oldest policy version that sampled it.
  None for no limit.
  """

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
  """Returns the ids of the groups that are drawn for batch `step`, in drawing order.

  The orders are:

  newest:    the largest (version, admitted, issued) first
  priority:  the largest version - decay · uses first; among equals the least used, then the newest
  shuffled:  the smallest h first, where h is a 64-bit random number per group, drawn from Philox
             with key (seed, step)

  The priority is that of Trinity-RFT's queue (`linear_decay`, arXiv:2505.17826).

  Args:
    groups: available groups, in any order.
    config: the order, and conditions that exclude groups.
    count: number of groups to draw. Fewer are returned if too few can be drawn.
    step: number of batches completed before this one.
    seed: seed of the order 'shuffled', at least 0.
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
