"""Shared code of benchmarks on preference pairs: folds, and accuracies over dependent pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.tasks.preferences import Pair, PreferencesConfig, load_preferences


def accuracy(margins: Float[np.ndarray, 'pairs'], groups: Sequence[str]) -> tuple[float, float]:
  """Returns the accuracy, ties counted half, and its standard error, clustered: pairs of one group
  may be dependent.

  SE² = G/(G-1) Σ_g (Σ_{i in g} (hitᵢ - accuracy))² / N², for N pairs in G groups.
  """
  hits = np.where(margins == 0, 0.5, margins > 0)
  _, cluster = np.unique(groups, return_inverse=True)
  sums = np.bincount(cluster, hits - hits.mean())
  return float(hits.mean()), float(
    np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / len(hits)
  )


def load_folds(source: str, folds: int) -> tuple[list[Pair], Int[np.ndarray, 'pairs']]:
  """Returns all pairs, sorted by fold, and the fold of each pair."""
  parts = [
    load_preferences(
      PreferencesConfig(name='pairs', source=source, split='eval', fold=fold, folds=folds)
    ).pairs
    for fold in range(folds)
  ]
  return [pair for part in parts for pair in part], np.repeat(
    np.arange(folds), [len(part) for part in parts]
  )
