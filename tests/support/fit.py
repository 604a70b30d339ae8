"""χ² test of samples against exact probabilities."""

from __future__ import annotations

import numpy as np


def chi_square(tokens, probabilities):
  """Returns (statistic, degrees of freedom). Outcomes that are expected fewer than 5 times are
  joined.
  """
  expected = probabilities * len(tokens)
  counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
  rare = expected < 5
  expected = np.r_[expected[~rare], expected[rare].sum()]
  counts = np.r_[counts[~rare], counts[rare].sum()]
  expected, counts = expected[expected > 0], counts[expected > 0]
  return ((counts - expected) ** 2 / expected).sum(), len(expected) - 1


def assert_fits(tokens, probabilities):
  statistic, freedom = chi_square(tokens, probabilities)
  # A χ² statistic with f degrees of freedom has mean f and variance 2f. The limit is 4 standard
  # deviations. The keys are fixed, so the test always passes or always fails.
  assert statistic < freedom + 4 * np.sqrt(2 * freedom), (statistic, freedom)
