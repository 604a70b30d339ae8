"""A judgement of one sample by one scorer. Append-only; several per sample."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

from jaxrl_llm.core.types import Json


class Status(enum.StrEnum):
  OK = 'ok'
  TIMEOUT = 'timeout'
  """The scorer itself ran past its deadline."""
  ERROR = 'error'
  """The scorer itself raised."""
  CRASHED = 'crashed'
  """The scorer's process died."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """What a scorer said. `value` None means unscorable: it leaves the baseline and the loss, and is counted.

  What the completion causes (no answer, a wrong format) is a value, normally 0. None is for what it did not cause.
  """

  uid: str
  """The sample's uid."""
  scorer: str
  value: float | None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Named components of `value`, before weights."""
  turn_values: tuple[float, ...] = ()
  status: Status = Status.OK
  evidence: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  """What the value rests on: the extracted answer, an error's text."""
  time: float = 0.0
  """Seconds the scorer took."""


def worth(value: float | None, turn_values: Sequence[float]) -> float | None:
  """The value of a whole attempt: its own and those of its turns. None, unscorable, stays None."""
  return None if value is None else value + math.fsum(turn_values)
