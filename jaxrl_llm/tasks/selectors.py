"""Selectors draw the next task, either in passes over all tasks or with weights that depend on the
results of past attempts.

The drawn task depends only on the selector's seed, its past draws and the feedback that it got. The
state is JSON.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Float64

from jaxrl_llm.core.types import Json


@runtime_checkable
class Selector(Protocol):
  """Draws tasks, which are numbered from 0."""

  def next(self) -> tuple[int, int]:
    """Draws a task. Returns its number and the number of times that it had been drawn before."""
    ...

  def feedback(self, task: int, successes: int, attempts: int) -> None:
    """Records the results of a group of attempts at a task."""
    ...

  def state(self) -> dict[str, Json]: ...

  def restore(self, state: Mapping[str, Json]) -> None: ...


class Passes:
  """Draws each task once per pass, in a fixed order or reshuffled in each pass. Ignores
  feedback.
  """

  def __init__(self, order: Sequence[int], *, seed: int | None):
    """
    Args:
      order: numbers of the tasks, in the order of a pass.
      seed: seed for reshuffling the order in each pass. If None, every pass uses `order` itself.
    """
    self._order = order
    indices = grain.MapDataset.range(len(order))
    self._indices = (indices if seed is None else indices.shuffle(seed=seed)).repeat()
    self._position = 0

  def next(self) -> tuple[int, int]:
    task, visit = self._order[self._indices[self._position]], self._position // len(self._order)
    self._position += 1
    return task, visit

  def feedback(self, task: int, successes: int, attempts: int) -> None:
    pass

  def state(self) -> dict[str, Json]:
    return {'position': self._position}

  def restore(self, state: Mapping[str, Json]) -> None:
    self._position = int(state['position'])


@runtime_checkable
class Estimate(Protocol):
  """Estimates a task's success rate and derives its sampling weight."""

  def update(self, before: Sequence[float] | None, successes: int, attempts: int) -> list[float]:
    """Returns a task's new statistics after a group of attempts. `before` are its previous
    statistics, or None for its first group.
    """
    ...

  def weight(self, known: Sequence[float] | None) -> float: ...


class FailureRate:
  """Estimate with which a task's drawing probability is P ∝ max(1 − s, floor), where s is the
  moving average of the task's success rate (Kimi k1.5, arXiv:2501.12599, 2.3.4).
  """

  def __init__(self, *, prior: float, newest: float, floor: float):
    """
    Args:
      prior: success rate that a task is assumed to have until it is attempted.
      newest: weight of the newest group in the moving average. The first group alone sets the
        average.
      floor: minimum weight of a task, so that solved tasks can be drawn again.
    """
    self._prior, self._newest, self._floor = prior, newest, floor

  def update(self, before: Sequence[float] | None, successes: int, attempts: int) -> list[float]:
    rate = successes / attempts
    return [rate if before is None else (1 - self._newest) * before[0] + self._newest * rate]

  def weight(self, known: Sequence[float] | None) -> float:
    return max(self._floor, 1 - (self._prior if known is None else known[0]))


class TargetRate:
  """Estimate with which a task's drawing probability is P ∝ exp(−|p − target| / temperature). p is
  the mean of a Beta posterior of the task's success rate, which discounts past evidence.

  After each group: α ← (1 − λ) α + λ + successes, β ← (1 − λ) β + λ + failures, where λ is
  `discount` and α = β = 1 at first. This is the explicit evidence of BOTS (arXiv:2510.26374), as in
  Trinity-RFT's difficulty-based selector. A task that is not drawn keeps its posterior.
  """

  def __init__(self, *, target: float, temperature: float, discount: float):
    self._target, self._temperature, self._discount = target, temperature, discount

  def update(self, before: Sequence[float] | None, successes: int, attempts: int) -> list[float]:
    alpha, beta = before or (1.0, 1.0)
    kept = 1 - self._discount
    return [
      kept * alpha + self._discount + successes,
      kept * beta + self._discount + attempts - successes,
    ]

  def weight(self, known: Sequence[float] | None) -> float:
    alpha, beta = known or (1.0, 1.0)
    return float(np.exp(-abs(alpha / (alpha + beta) - self._target) / self._temperature))


class Weighted:
  """Draws tasks independently, with probabilities proportional to their weights. The n-th draw
  depends only on the seed, n and the current weights.
  """

  def __init__(self, tasks: int, estimate: Estimate, *, seed: int):
    self._count, self._estimate, self._seed = tasks, estimate, seed
    self._draws = 0
    self._visits: collections.Counter[int] = collections.Counter()
    self._known: dict[int, list[float]] = {}
    self._weights = self._fresh()

  def _fresh(self) -> Float64[np.ndarray, 'tasks']:
    return np.full(self._count, self._estimate.weight(None), np.float64)

  def next(self) -> tuple[int, int]:
    sums = np.cumsum(self._weights)
    at = np.random.Generator(np.random.Philox(key=[self._seed, self._draws])).random() * sums[-1]
    task = min(int(np.searchsorted(sums, at, side='right')), self._count - 1)
    visit = self._visits[task]
    self._draws += 1
    self._visits[task] += 1
    return task, visit

  def feedback(self, task: int, successes: int, attempts: int) -> None:
    self._known[task] = self._estimate.update(self._known.get(task), successes, attempts)
    self._weights[task] = self._estimate.weight(self._known[task])

  def state(self) -> dict[str, Json]:
    def named(by_task):
      return {str(task): value for task, value in sorted(by_task.items())}

    return {'draws': self._draws, 'visits': named(self._visits), 'known': named(self._known)}

  def restore(self, state: Mapping[str, Json]) -> None:
    self._draws = int(state['draws'])
    self._visits = collections.Counter(
      {int(task): count for task, count in state['visits'].items()}
    )
    self._known = {int(task): list(value) for task, value in state['known'].items()}
    self._weights = self._fresh()
    for task, known in self._known.items():
      self._weights[task] = self._estimate.weight(known)
