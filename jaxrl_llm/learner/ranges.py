"""Ranges of numeric options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxrl_llm.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
  """Range of numbers from `least` to `most`. NaN is never in range, and infinity only if `infinite`
  is set.
  """

  least: float = -math.inf
  most: float = math.inf
  exclusive: bool = False
  """Whether `least` itself is excluded."""
  infinite: bool = False
  """Whether infinity is included. For an option that is a limit, infinity means no limit."""

  def __contains__(self, value: float) -> bool:
    above = value > self.least if self.exclusive else value >= self.least
    return above and value <= self.most and (self.infinite or math.isfinite(value))

  def __str__(self) -> str:
    low = (
      ''
      if self.least == -math.inf
      else f'above {self.least:g}'
      if self.exclusive
      else f'at least {self.least:g}'
    )
    high = '' if self.most == math.inf else f'at most {self.most:g}'
    return ' and '.join(filter(None, (low, high))) or 'a finite number'


def check_ranges(options: object, where: str, ranges: Mapping[str, Range]) -> None:
  """Raises UserError if an option is outside its range. Options that are None are not checked.

  Args:
    options: a dataclass with a field for each name in `ranges`.
    where: dotted path of the options in a configuration, for the message.
  """
  for name, wanted in ranges.items():
    value = getattr(options, name)
    if value is not None and value not in wanted:
      raise UserError(f'{where}.{name}: {value}, wanted {wanted}')
