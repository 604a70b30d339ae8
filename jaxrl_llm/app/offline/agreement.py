"""Agreement among people who judge the same samples."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxrl_llm.replay.inbox import Given


class Agreement(NamedTuple):
  """Agreement of the people who judged samples for one scorer."""

  alpha: float | None
  """Krippendorff's alpha over the samples that at least two people judged. None (undefined) if no
  sample qualifies, or if all verdicts on these samples are equal.
  """
  samples: int
  """Number of samples that at least two people judged."""
  people: int
  """Number of people who judged at least one sample that another person judged, too."""

  @property
  def line(self) -> str:
    alpha = 'undefined' if self.alpha is None else f'{self.alpha:.3f}'
    return (
      f"Krippendorff's alpha {alpha}, over {self.samples} samples judged by two or more of "
      f'{self.people} people'
    )


def krippendorff_alpha(units: Iterable[Sequence[float]]) -> float | None:
  """Computes Krippendorff's alpha for interval data, 1 − D_o / D_e. It is 1 for perfect agreement
  and about 0 if people agree only as often as by chance.

  Only units with m_u ≥ 2 values count; together they have n values. D_o is (1/n) Σ_u Σ_{i≠j} (v_ui
  − v_uj)² / (m_u − 1), and D_e is Σ_{i≠j} (v_i − v_j)² / (n (n − 1)) over all pairs of these
  values. If all values are 0 or 1, alpha is the same as for nominal data.

  Source: K. Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), sections C and D.

  Args:
    units: for each sample, the values that different people gave to it. Units with fewer than two
      values are ignored.

  Returns:
    Alpha, or None if no unit has two values or all values that count are equal.
  """
  pairable = [unit for unit in units if len(unit) > 1]
  values = [value for unit in pairable for value in unit]
  if len(set(values)) < 2:
    return None
  observed = sum(_squares(unit) / (len(unit) - 1) for unit in pairable) / len(values)
  expected = _squares(values) / (len(values) * (len(values) - 1))
  return 1.0 - observed / expected


def _squares(values: Sequence[float]) -> float:
  """Returns the sum of squared differences over all ordered pairs of the m values, computed as
  2 m Σ (v − mean)².
  """
  mean = sum(values) / len(values)
  return 2 * len(values) * sum((value - mean) ** 2 for value in values)


def agreements(verdicts: Iterable[Given]) -> dict[str, Agreement]:
  """Returns the agreement for each scorer that has verdicts, keyed by scorer."""
  judged: dict[str, dict[tuple[str, int], dict[str, float]]] = collections.defaultdict(dict)
  for verdict in verdicts:
    sample = judged[verdict.scorer].setdefault((verdict.uid, verdict.attempt), {})
    sample[verdict.who] = verdict.value
  result = {}
  for scorer, samples in judged.items():
    shared = [of for of in samples.values() if len(of) > 1]
    alpha = krippendorff_alpha([[*of.values()] for of in shared])
    result[scorer] = Agreement(alpha, len(shared), len({who for of in shared for who in of}))
  return result
