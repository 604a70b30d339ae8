"""Evaluation suites: greedy, mean@k and pass@k accuracy of one policy version on held-out tasks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.core.waits import gathered
from jaxrl_llm.master.exploring.judging import judged
from jaxrl_llm.rewards.api import RewardsConfig
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.workflow import Workflow, checked_run
from jaxrl_llm.runtime.events import SILENT, Edge, Events


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteConfig:
  """Configuration of one evaluation suite."""

  name: str
  taskset: str
  """Name of a configured taskset. No stage may train on its tasks; the run compares task digests to
  ensure this.
  """
  tasks: int | None = None
  """Number of tasks, taken from the start of the taskset. If None, all tasks are used."""
  samples: int = 0
  """Number of completions sampled per task for mean@k and pass@k, in addition to the greedy
  completion. If 0, only the greedy completion is generated.
  """
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = -1
  """Number of most probable tokens among which to sample; -1 for no such limit."""
  correct_at: float = 1.0
  """Minimum score of a completion that counts as correct. The score is the reward of the whole
  sample, including the rewards of its turns.
  """

  def __post_init__(self):
    if (self.tasks is not None and self.tasks < 1) or self.samples < 0:
      raise UserError(
        f'evaluation.{self.name}: tasks {self.tasks} and samples {self.samples}, wanted at least 1 '
        'task (or None for all) and at least 0 samples'
      )
    sampling = self.sampling
    if self.samples and sampling.temperature == 0:
      raise UserError(
        f'evaluation.{self.name}.temperature: 0 with samples={self.samples}; all of them would be '
        'greedy'
      )

  @property
  def sampling(self) -> Sampling:
    """Parameters with which the completions other than the greedy one are sampled."""
    return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


def pass_at_k(n: int, correct: int, k: int) -> float:
  """Unbiased estimate of pass@k, 1 - C(n - correct, k) / C(n, k) (arXiv:2107.03374, eq. 1)."""
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def standard_error(values: Sequence[float]) -> float:
  """Standard error of the mean over tasks; NaN for fewer than two tasks."""
  return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def mean(values: Sequence[float]) -> float:
  """Arithmetic mean. Without values it is NaN, because 0 would look like a measurement."""
  return float(np.mean(values)) if values else math.nan


Row = dict[str, Json]


def _solved(suite: SuiteConfig, rows: Sequence[Row]) -> list[float]:
  """Returns 1 (correct) or 0 (wrong) for each completion that has a score. Unscorable completions
  are left out.
  """
  return [float(row['score'] >= suite.correct_at) for row in rows if row['score'] is not None]


def greedy_metrics(suite: SuiteConfig, rows_by_task: Sequence[Sequence[Row]]) -> dict[str, float]:
  """Returns the fraction of tasks whose greedy completion is correct, and its standard error.

  Unscorable completions do not count.
  """
  solved = [solved for rows in rows_by_task for solved in _solved(suite, rows)]
  accuracy = f'val-core/{suite.taskset}/acc/greedy'
  return {accuracy: mean(solved), f'{accuracy}/stderr': standard_error(solved)}


def sampled_metrics(suite: SuiteConfig, rows_by_task: Sequence[Sequence[Row]]) -> dict[str, float]:
  """Returns mean@n with its standard error over tasks, and pass@k for k = 1, 2, 4, … up to n.

  n is `suite.samples`. pass@k is the mean over the tasks with at least k scorable samples.
  """
  by_task = [solved for rows in rows_by_task if (solved := _solved(suite, rows))]
  means = [mean(solved) for solved in by_task]
  accuracy = f'val-core/{suite.taskset}/acc/mean@{suite.samples}'
  metrics = {accuracy: mean(means), f'{accuracy}/stderr': standard_error(means)}
  for k in (1 << i for i in range(suite.samples.bit_length())):
    at_k = [pass_at_k(len(solved), int(sum(solved)), k) for solved in by_task if len(solved) >= k]
    metrics[f'val-core/{suite.taskset}/acc/pass@{k}'] = mean(at_k)
  return metrics


def response_metrics(suite: SuiteConfig, rows: Sequence[Row]) -> dict[str, float]:
  """Returns statistics of all completions, greedy and sampled.

  These are the number of tasks, the mean score and length, the fraction of truncated completions
  and the number of unscorable ones.
  """
  prefix = f'val-aux/{suite.taskset}'
  scores = [row['score'] for row in rows if row['score'] is not None]
  return {
    f'{prefix}/num_tasks': float(len({row['uid'] for row in rows})),
    f'{prefix}/score/mean': mean(scores),
    f'{prefix}/response_length/mean': mean([float(row['response_len']) for row in rows]),
    f'{prefix}/truncated': mean([float(row['finish_reason'] == Finish.LENGTH) for row in rows]),
    f'{prefix}/unscorable': float(len(rows) - len(scores)),
    'goodput/tokens/evaluated': float(sum(row['response_len'] for row in rows)),
  }


class Evaluator:
  """Runs evaluation suites on the policy version that the engine serves."""

  def __init__(
    self,
    *,
    workflow: Workflow,
    scorers: ScorerPool,
    rewards: RewardsConfig,
    deadline_s: float = 3600.0,
    events: Events = SILENT,
  ):
    """
    Args:
      deadline_s: maximum time in seconds during which no task of the suite finishes. The evaluation
        then fails.
    """
    self._workflow, self._scorers, self._rewards, self._events = workflow, scorers, rewards, events
    self._deadline_s = deadline_s

  async def run(
    self, suite: SuiteConfig, tasks: Sequence[Task]
  ) -> tuple[dict[str, float], list[Row]]:
    """Runs one suite. Returns its metrics, keyed by name, and one row per completion, for the files
    in the run's directory `evals/`.
    """
    asked = self._events.request(Edge.SUITE, suite=suite.name, count=len(tasks))
    greedy = await self._attempts(
      suite, tasks, samples=1, sampling=Sampling(temperature=0.0), mode='greedy'
    )
    metrics = greedy_metrics(suite, greedy)
    rows = [row for task_rows in greedy for row in task_rows]
    if suite.samples:
      sampled = await self._attempts(
        suite, tasks, samples=suite.samples, sampling=suite.sampling, mode='sample'
      )
      metrics |= sampled_metrics(suite, sampled)
      rows += [row for task_rows in sampled for row in task_rows]
    self._events.reply(asked, count=len(rows))
    return metrics | response_metrics(suite, rows), rows

  async def _attempts(
    self, suite, tasks, *, samples: int, sampling: Sampling, mode: str
  ) -> list[list[Row]]:
    return await gathered(
      (self._task(suite, task, samples, sampling, mode) for task in tasks),
      name='suite',
      owner=f'evaluation {suite.name}',
      waits_for=(
        'another of its tasks to end, by the engine and the scorers (rollout.collect_deadline_s)'
      ),
      deadline_s=self._deadline_s,
    )

  async def _task(
    self, suite: SuiteConfig, task: Task, samples: int, sampling: Sampling, mode: str
  ) -> list[Row]:
    stage = f'evaluation-{suite.name}'
    runs = checked_run(self._workflow, task, 0, stage=stage, samples=samples, sampling=sampling)
    return [
      {
        'suite': suite.name,
        'uid': task.uid,
        'prompt': task.prompt[-1]['content'],
        'completion': member.completion,
        'truth': task.truth,
        'mode': mode,
        'sample_index': member.sample.sample_index,
        'score': (score := member.reward.worth),
        'correct': score is not None and score >= suite.correct_at,
        'finish_reason': str(member.sample.finish_reason),
        'response_len': member.sample.response_len,
      }
      for member in await judged(runs, task, self._scorers, self._rewards)
    ]
