"""Names that every layer shares.

Alignment, said once for the whole project: `logprobs[t] = log p(tokens[t] | tokens[:t])` of the temperature-scaled
distribution. Position 0 of a sequence has no logprob (it is 0 and masked). Only `ops.logprobs` shifts tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Params = Mapping[str, Any]
"""Nested dict of arrays: a model's parameters, as plain data."""

Json = None | bool | int | float | str | list[Any] | dict[str, Any]
"""What `json` reads and writes (nested values are not checked: a recursive alias cannot be)."""


@dataclasses.dataclass(frozen=True, order=True)
class Version:
  """Names one set of policy weights; the same number is never reused for other weights after a crash.

  `step` counts completed batches, `attempt` counts starts of the run's process on this run directory.
  """

  attempt: int
  step: int

  def __str__(self) -> str:
    return f'{self.attempt}.{self.step}'
