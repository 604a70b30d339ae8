"""χ² test of samples against exact probabilities."""

from __future__ import annotations

import numpy as np


def chi_square(tokens, probabilities):
  """(statistic, degrees of freedom) with outcomes expected fewer than 5 times joined."""
  expected = probabilities * len(tokens)
  counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
  rare = expected < 5
  expected = np.r_[expected[~rare], expected[rare].sum()]
  counts = np.r_[counts[~rare], counts[rare].sum()]
  expected, counts = expected[expected > 0], counts[expected > 0]
  return ((counts - expected) ** 2 / expected).sum(), len(expected) - 1


def assert_fits(tokens, probabilities):
  statistic, freedom = chi_square(tokens, probabilities)
  # mean f, variance 2f; 4 deviations: the keys are fixed, so this passes always or never.
  assert statistic < freedom + 4 * np.sqrt(2 * freedom), (statistic, freedom)
