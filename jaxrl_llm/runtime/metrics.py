"""Metrics as values that can be merged.

A mean, for example, is kept as a sum and a count until it is written. The parts from all processes,
micro-batches and optimizer steps are first merged, and only then is the sum divided by the count.
The written number therefore does not depend on how a step was split.
`runtime.metric_descriptions` documents each key, and `runtime.metric_names` gives it a readable
name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Scalar = Any
"""A number or a single-element array (NumPy, JAX)."""


class Mean(NamedTuple):
  """Mean that can be merged: the sum and the number of the values.

  For a weighted mean, `total` is the weighted sum and `count` the sum of the weights.
  """

  total: Scalar
  count: Scalar

  def merge(self, other: Mean) -> Mean:
    return Mean(self.total + other.total, self.count + other.count)

  def value(self) -> float | None:
    """Returns total / count, or None if count is 0."""
    return float(self.total) / float(self.count) if self.count else None


class Sum(NamedTuple):
  """Sum that can be merged, such as a number of tokens or of skipped samples."""

  total: Scalar

  def merge(self, other: Sum) -> Sum:
    return Sum(self.total + other.total)

  def value(self) -> float | None:
    return float(self.total)


class Max(NamedTuple):
  """Maximum that can be merged. It is NaN if any value was NaN, so that bad values stay visible."""

  largest: Scalar

  def merge(self, other: Max) -> Max:
    return Max(
      math.nan if math.isnan(self.largest + other.largest) else max(self.largest, other.largest)
    )

  def value(self) -> float | None:
    return float(self.largest)


class Min(NamedTuple):
  """Minimum that can be merged. It is NaN if any value was NaN, so that bad values stay visible."""

  smallest: Scalar

  def merge(self, other: Min) -> Min:
    return Min(
      math.nan if math.isnan(self.smallest + other.smallest) else min(self.smallest, other.smallest)
    )

  def value(self) -> float | None:
    return float(self.smallest)


Metric = Mean | Sum | Max | Min


def mean_of(values: Iterable[Scalar]) -> Mean:
  values = [float(v) for v in values]
  return Mean(math.fsum(values), len(values))


def spread(prefix: str, values: Iterable[Scalar]) -> dict[str, Metric]:
  """Returns the mean, maximum and minimum of the values, with keys such as `<prefix>/mean`.

  Returns no metrics if there are no values.
  """
  values = [float(v) for v in values]
  if not values:
    return {}
  bad = any(math.isnan(v) for v in values)
  return {
    f'{prefix}/mean': mean_of(values),
    f'{prefix}/max': Max(math.nan if bad else max(values)),
    f'{prefix}/min': Min(math.nan if bad else min(values)),
  }


def merge(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> dict[str, Metric]:
  """Merges two sets of metrics.

  Raises:
    TypeError: if a key has metrics of different types in the two sets.
  """
  merged = dict(left)
  for key, metric in right.items():
    if key in merged and type(merged[key]) is not type(metric):
      raise TypeError(
        f'metric {key!r}: cannot merge {type(merged[key]).__name__} with {type(metric).__name__}'
      )
    merged[key] = merged[key].merge(metric) if key in merged else metric
  return merged


def resolve(metrics: Mapping[str, Metric | Scalar]) -> dict[str, float]:
  """Converts metrics to the numbers that are written.

  A mean of no values is omitted, because it is undefined.
  """
  row = {}
  for key, metric in metrics.items():
    value = metric.value() if isinstance(metric, Mean | Sum | Max | Min) else float(metric)
    if value is not None:
      row[key] = value
  return row
