"""Score records: each is one scorer's assessment of one sample. Records are never changed."""

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
  """The scorer itself raised an exception."""
  CRASHED = 'crashed'
  """The scorer's process died."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """A scorer's result for one sample. The sample is unscorable if `value` is None.

  If the completion itself is at fault (no answer, wrong format), it gets a value, normally 0. After
  any other failure, `value` is None: the sample is excluded from the baseline and the loss, and the
  run's metrics count it as unscorable.
  """

  uid: str
  """Identifier of the sample that was scored."""
  scorer: str
  value: float | None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Named components of `value`, before weighting."""
  turn_values: tuple[float, ...] = ()
  status: Status = Status.OK
  evidence: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  """Basis of the value, such as the extracted answer or the text of an error."""
  time: float = 0.0
  """Time that the scorer took, in seconds."""


def total_value(value: float | None, turn_values: Sequence[float]) -> float | None:
  """Returns an attempt's value plus the values of its turns; None if `value` is None."""
  return None if value is None else value + math.fsum(turn_values)
