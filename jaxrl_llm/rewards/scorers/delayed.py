"""Scorer `delayed`: its verdicts arrive later, from people or other programs (`replay.inbox`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.api import Delayed, read_options

_MAX_HOURS = 24 * 366


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedOptions:
  """Options of the scorer `delayed`."""

  max_age_versions: int = 8
  """Maximum staleness, in batches, of a sample that has waited for verdicts, at the update that
  trains on it. It replaces `source.bound` for these samples, and must be at least that bound.
  """
  max_age_hours: float = 24.0
  """Maximum wait for the verdicts of a group, in hours. The time limit for collecting a batch is
  extended by this time.
  """
  max_groups: int = 64
  """Maximum number of groups that are being generated or are waiting for verdicts. At this number,
  no further group starts.
  """
  verdicts: int = 1
  """Number of verdicts that each sample needs, from different people or programs. The sample's
  value is the mean of the verdicts that arrive first, up to this number.
  """

  def __post_init__(self):
    if self.max_age_versions < 1 or self.max_groups < 1 or self.verdicts < 1:
      raise UserError(
        f"scorer 'delayed': max_age_versions {self.max_age_versions}, max_groups "
        f'{self.max_groups} and verdicts {self.verdicts}, wanted at least 1 of each'
      )
    if not 0 < self.max_age_hours <= _MAX_HOURS:
      raise UserError(
        f"scorer 'delayed': max_age_hours is {self.max_age_hours}, wanted a positive number of at "
        f'most {_MAX_HOURS}'
      )


def delayed_scorer(**options: Any) -> Delayed:
  """Returns a scorer whose verdicts arrive later, from people or other programs, by the command
  `jaxrl feedback` or over HTTP. The options are `DelayedOptions`.
  """
  settings = read_options(DelayedOptions, options, 'delayed')
  return Delayed(**dataclasses.asdict(settings))
