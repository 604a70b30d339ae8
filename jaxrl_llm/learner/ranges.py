"""Which numbers an option may have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxrl_llm.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
  """From `least` to `most`; NaN is in none."""

  least: float = -math.inf
  most: float = math.inf
  exclusive: bool = False
  """`least` is not among them."""
  infinite: bool = False
  """Infinity is among them: it switches a limit off."""

  def __contains__(self, value: float) -> bool:
    above = value > self.least if self.exclusive else value >= self.least
    return above and value <= self.most and (self.infinite or math.isfinite(value))

  def __str__(self) -> str:
    low = '' if self.least == -math.inf else f'above {self.least:g}' if self.exclusive else f'at least {self.least:g}'
    high = '' if self.most == math.inf else f'at most {self.most:g}'
    return ' and '.join(filter(None, (low, high))) or 'a finite number'


def check_ranges(options: object, where: str, ranges: Mapping[str, Range]) -> None:
  """Raises UserError for an option of a dataclass that is outside its range; None is outside none.

  Args:
    where: what the options are called in a configuration.
  """
  for name, wanted in ranges.items():
    value = getattr(options, name)
    if value is not None and value not in wanted:
      raise UserError(f'{where}.{name}: {value}, wanted {wanted}')
