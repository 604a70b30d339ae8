"""Record of the delayed rewards for which a group of samples waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.core.types import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Awaited:
  """Delayed rewards for which each sample of a group waits, and the end of the wait. The store
  keeps one such record per sample, so that other processes know which rewards a sample may still
  get.
  """

  scorers: Mapping[str, int]
  """Number of verdicts that each sample needs, keyed by scorer. The verdicts of a scorer must come
  from different people or programs.
  """
  since: float
  """Unix time at which the wait began."""
  until: float
  """Unix time from which a verdict is too late."""
  newest_version: int
  """Step of the newest weights that generated any token of the group."""

  def to_json(self, text: str) -> Json:
    """Returns the record as JSON, with the sample's text added under `text` for the people and
    programs that judge it.
    """
    return {**dataclasses.asdict(self), 'scorers': dict(self.scorers), 'text': text}

  @classmethod
  def from_json(cls, record: Any) -> Awaited:
    """Parses a record that `to_json` returned. The text is ignored."""
    return cls(**{field.name: record[field.name] for field in dataclasses.fields(cls)})

  def is_late(self, time: float) -> bool:
    """Returns whether a verdict that arrives at this Unix time is too late."""
    return time >= self.until
