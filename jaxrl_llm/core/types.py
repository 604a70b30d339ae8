"""Types shared by all layers.

In the whole project, logprobs are aligned with tokens: `logprobs[t] = log p(tokens[t] |
tokens[:t])` under the temperature-scaled distribution. Position 0 of a sequence has no logprob, so
its entry is 0 and masked. Only `ops.logprobs` shifts tokens against a model's outputs, by one
position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Params = Mapping[str, Any]
"""Model parameters as a nested dict of arrays."""

Json = None | bool | int | float | str | list[Any] | dict[str, Any]
"""Values that `json` reads and writes. Nested values are `Any`, since the type checks do not
support recursive aliases.
"""


@dataclasses.dataclass(frozen=True, order=True)
class Version:
  """Identifier of one set of policy weights. It is never reused for other weights, even after a
  crash.

  `step` is the number of completed batches. `attempt` increases with each start of the run in its
  run directory. It also increases with each stage that does not continue from the previous stage's
  last weights, and whenever the run takes the weights of another run.
  """

  attempt: int
  step: int

  def __str__(self) -> str:
    return f'{self.attempt}.{self.step}'
