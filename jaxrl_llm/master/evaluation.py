"""Evaluation suites: a pinned version on held-out tasks, with the estimators the field reports."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.core.types import Json
from jaxrl_llm.experience.task import Task
from jaxrl_llm.rewards.api import Attempt, RewardsConfig, combine
from jaxrl_llm.rewards.pool import ScorerPool
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.workflow import SingleTurn


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteConfig:
  """What is measured, and how."""

  name: str
  taskset: str
  """Name of a configured taskset; its tasks must not be trained on (checked by digest)."""
  tasks: int | None = None
  """Tasks taken from its front; None = all."""
  samples: int = 0
  """Sampled completions per task for mean@k and pass@k, beside the greedy one; 0 = greedy only."""
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = -1
  """-1 = off."""
  correct_at: float = 1.0
  """A completion counts as correct from this score on (for pass@k)."""


def pass_at_k(n: int, correct: int, k: int) -> float:
  """1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), eq. 1."""
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def standard_error(values: Sequence[float]) -> float:
  """Of the mean over tasks; 0 for fewer than two."""
  return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


class Evaluator:
  """Runs suites on whatever version the engine serves."""

  def __init__(self, *, workflow: SingleTurn, scorers: ScorerPool, rewards: RewardsConfig):
    self._workflow, self._scorers, self._rewards = workflow, scorers, rewards

  async def run(self, suite: SuiteConfig, tasks: Sequence[Task]) -> tuple[dict[str, float], list[dict[str, Json]]]:
    """(metrics, rows): metrics by their field names, rows as they are written to `evals/`."""
    greedy = await self._attempts(suite, tasks, samples=1, sampling=Sampling(temperature=0.0), mode='greedy')
    metrics = self._greedy_metrics(suite, greedy)
    rows = [row for task_rows in greedy for row in task_rows]
    if suite.samples:
      sampling = Sampling(temperature=suite.temperature, top_p=suite.top_p, top_k=suite.top_k)
      sampled = await self._attempts(suite, tasks, samples=suite.samples, sampling=sampling, mode='sample')
      metrics |= self._sampled_metrics(suite, sampled)
      rows += [row for task_rows in sampled for row in task_rows]
    return metrics, rows

  async def _attempts(self, suite, tasks, *, samples: int, sampling: Sampling, mode: str) -> list[list[dict]]:
    async with asyncio.TaskGroup() as group:
      pending = [group.create_task(self._task(suite, task, samples, sampling, mode)) for task in tasks]
    return [p.result() for p in pending]

  async def _task(self, suite: SuiteConfig, task: Task, samples: int, sampling: Sampling, mode: str) -> list[dict]:
    rows = []
    name = f'evaluation-{suite.name}'
    async for sample, completion in self._workflow.run(task, 0, stage=name, samples=samples, sampling=sampling):
      attempt = Attempt(
        uid=sample.uid,
        task=task,
        completion=completion,
        finish_reason=str(sample.finish_reason),
        response_len=sample.response_len,
      )
      reward = combine(await self._scorers.score(attempt), self._rewards.scorers)
      rows.append(
        {
          'suite': suite.name,
          'uid': task.uid,
          'prompt': task.prompt[-1]['content'],
          'completion': completion,
          'truth': task.truth,
          'mode': mode,
          'sample_index': sample.sample_index,
          'score': reward.value,
          'finish_reason': str(sample.finish_reason),
          'response_len': sample.response_len,
        }
      )
    return sorted(rows, key=lambda row: row['sample_index'])

  def _greedy_metrics(self, suite: SuiteConfig, rows_by_task: list[list[dict]]) -> dict[str, float]:
    rows = [rows[0] for rows in rows_by_task]
    values = [row['score'] for row in rows if row['score'] is not None]
    return {
      f'val-core/{suite.taskset}/acc/greedy': float(np.mean(values)) if values else 0.0,
      f'val-aux/{suite.taskset}/acc/greedy_stderr': standard_error(values),
      f'val-aux/{suite.taskset}/response_length/mean': float(np.mean([row['response_len'] for row in rows])),
      f'val-aux/{suite.taskset}/truncated': float(np.mean([row['finish_reason'] == 'length' for row in rows])),
      f'val-aux/{suite.taskset}/num_unscorable': float(len(rows) - len(values)),
    }

  def _sampled_metrics(self, suite: SuiteConfig, rows_by_task: list[list[dict]]) -> dict[str, float]:
    scores = [[row['score'] for row in rows if row['score'] is not None] for rows in rows_by_task]
    scores = [values for values in scores if values]
    means = [float(np.mean(values)) for values in scores]
    metrics = {
      f'val-core/{suite.taskset}/acc/mean@{suite.samples}': float(np.mean(means)) if means else 0.0,
      f'val-aux/{suite.taskset}/acc/mean@{suite.samples}_stderr': standard_error(means),
    }
    k = 1
    while k <= suite.samples:
      at_k = [
        pass_at_k(len(values), sum(v >= suite.correct_at for v in values), k) for values in scores if len(values) >= k
      ]
      metrics[f'val-core/{suite.taskset}/acc/pass@{k}'] = float(np.mean(at_k)) if at_k else 0.0
      k *= 2
    return metrics
