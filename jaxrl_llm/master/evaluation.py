"""Evaluation suites: accuracy of one policy version on held-out tasks, for greedy answers and as
mean@k, pass@k and maj@k.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.process_clock import TOKENS
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.core.waits import gathered
from jaxrl_llm.master.exploring.judging import judged
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.rewards.api import RewardsConfig
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.workflow import Workflow
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
  """Number of completions sampled per task for mean@k, pass@k and maj@k, in addition to the greedy
  completion. If 0, only the greedy completion is generated.
  """
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = -1
  """Number of most probable tokens from which to sample; -1 for all tokens."""
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
        f'evaluation.{self.name}.temperature: 0 with samples={self.samples}, which would all be '
        'greedy; wanted a temperature above 0, or samples=0'
      )

  @property
  def sampling(self) -> Sampling:
    """Sampling parameters of all completions except the greedy one."""
    return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


def _answer(member: Experience) -> str | None:
  """Returns the answer that a scorer extracted from the completion. Returns None if no scorer
  reports an answer.
  """
  answers = (score.evidence.get('answer') for score in member.scores)
  return next((answer for answer in answers if isinstance(answer, str)), None)


def pass_at_k(n: int, correct: int, k: int) -> float:
  """Returns the unbiased estimate of pass@k, 1 - C(n - correct, k) / C(n, k) (arXiv:2107.03374, eq.
  1).
  """
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def standard_error(values: Sequence[float]) -> float:
  """Returns the standard error of the mean over tasks, or NaN for fewer than two tasks."""
  return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def mean(values: Sequence[float]) -> float:
  """Returns the arithmetic mean. Returns NaN if there are no values, because 0 would look like a
  measurement.
  """
  return float(np.mean(values)) if values else math.nan


Row = dict[str, Json]


def _solved(suite: SuiteConfig, rows: Sequence[Row]) -> list[float]:
  """Returns 1 (correct) or 0 (wrong) for each completion that has a score. Unscorable completions
  are left out.
  """
  return [float(row['score'] >= suite.correct_at) for row in rows if row['score'] is not None]


def greedy_metrics(suite: SuiteConfig, rows_by_task: Sequence[Sequence[Row]]) -> dict[str, float]:
  """Returns the fraction of tasks whose greedy completion is correct, and its standard error.

  Tasks whose completion is unscorable are left out.
  """
  solved = [solved for rows in rows_by_task for solved in _solved(suite, rows)]
  accuracy = f'val-core/{suite.taskset}/acc/greedy'
  return {accuracy: mean(solved), f'{accuracy}/stderr': standard_error(solved)}


def sampled_metrics(suite: SuiteConfig, rows_by_task: Sequence[Sequence[Row]]) -> dict[str, float]:
  """Returns mean@n with its standard error over tasks, maj@n, and pass@k for k = 1, 2, 4, … up to
  n.

  n is `suite.samples`. pass@k is the mean over the tasks with at least k scorable samples. maj@n is
  the mean of `majority` over the tasks.
  """
  by_task = [solved for rows in rows_by_task if (solved := _solved(suite, rows))]
  means = [mean(solved) for solved in by_task]
  accuracy = f'val-core/{suite.taskset}/acc/mean@{suite.samples}'
  metrics = {accuracy: mean(means), f'{accuracy}/stderr': standard_error(means)}
  majorities = [value for rows in rows_by_task if (value := majority(suite, rows)) is not None]
  metrics[f'val-core/{suite.taskset}/acc/maj@{suite.samples}'] = mean(majorities)
  for k in (1 << i for i in range(suite.samples.bit_length())):
    at_k = [pass_at_k(len(solved), int(sum(solved)), k) for solved in by_task if len(solved) >= k]
    metrics[f'val-core/{suite.taskset}/acc/pass@{k}'] = mean(at_k)
  return metrics


def majority(suite: SuiteConfig, rows: Sequence[Row]) -> float | None:
  """Returns the share of correct completions among those with the most frequent answer (majority
  voting; self-consistency, arXiv:2203.11171). If several answers are equally frequent, returns the
  mean of their shares. Returns None if no completion has a score.

  If no scorer reports an answer for a completion, its whole text counts as the answer.
  """
  votes: dict[str, list[float]] = {}
  for row in rows:
    if row['score'] is not None:
      answer = row['completion'].strip() if row['answer'] is None else row['answer']
      votes.setdefault(answer, []).append(float(row['score'] >= suite.correct_at))
  if not votes:
    return None
  most = max(map(len, votes.values()))
  return mean([mean(solved) for solved in votes.values() if len(solved) == most])


def response_metrics(suite: SuiteConfig, rows: Sequence[Row]) -> dict[str, float]:
  """Returns statistics of all completions, greedy and sampled.

  These are the number of tasks, the mean score and length, the fraction of truncated completions,
  the number of unscorable completions, and the total number of response tokens.
  """
  prefix = f'val-aux/{suite.taskset}'
  scores = [row['score'] for row in rows if row['score'] is not None]
  return {
    f'{prefix}/num_tasks': float(len({row['uid'] for row in rows})),
    f'{prefix}/score/mean': mean(scores),
    f'{prefix}/response_length/mean': mean([float(row['response_len']) for row in rows]),
    f'{prefix}/truncated': mean([float(Finish(row['finish_reason']).is_truncated) for row in rows]),
    f'{prefix}/unscorable': float(len(rows) - len(scores)),
    f'{TOKENS}evaluated': float(sum(row['response_len'] for row in rows)),
  }


class Evaluator:
  """Runs evaluation suites on the policy version that the engine serves."""

  def __init__(
    self,
    *,
    workflow: Workflow,
    scorers: ScorerPool,
    rewards: RewardsConfig,
    max_steps: int = 1,
    deadline_s: float = 3600.0,
    events: Events = SILENT,
    take_tokens: Callable[[str], int] | None = None,
  ):
    """
    Args:
      max_steps: maximum number of steps of a trajectory.
      deadline_s: maximum seconds until the next task of a running suite is finished. After that,
        `run` raises WaitExpired.
      take_tokens: takes the name of a group, and returns the number of tokens that were generated
        for the group since the last call with the same name. If None, the tokens of the responses
        are counted instead.
    """
    self._take_tokens = take_tokens
    self._workflow, self._scorers, self._rewards, self._events = workflow, scorers, rewards, events
    self._deadline_s, self._max_steps = deadline_s, max_steps

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
    metrics |= response_metrics(suite, rows)
    if self._take_tokens is not None:
      tokens = sum(self._take_tokens(f'{_stage(suite)}/{task.uid}/0') for task in tasks)
      metrics[f'{TOKENS}evaluated'] = float(tokens)
    return metrics, rows

  async def _attempts(
    self, suite, tasks, *, samples: int, sampling: Sampling, mode: str
  ) -> list[list[Row]]:
    return await gathered(
      (self._task(suite, task, samples, sampling, mode) for task in tasks),
      name='suite',
      owner=f'evaluation {suite.name}',
      waits_for=(
        'the engine and the scorers to finish another of its tasks (rollout.collect_deadline_s)'
      ),
      deadline_s=self._deadline_s,
    )

  async def _task(
    self, suite: SuiteConfig, task: Task, samples: int, sampling: Sampling, mode: str
  ) -> list[Row]:
    how = {'stage': _stage(suite), 'sampling': sampling, 'max_steps': self._max_steps}
    runs = checked_run(self._workflow, task, 0, samples=samples, **how)
    return [
      {
        'suite': suite.name,
        'uid': task.uid,
        'prompt': task.prompt[-1]['content'],
        'completion': member.completion,
        'answer': _answer(member),
        'truth': task.truth,
        'mode': mode,
        'sample_index': member.sample.sample_index,
        'score': (score := member.reward.total),
        'correct': score is not None and score >= suite.correct_at,
        'finish_reason': str(member.finish_reason),
        'response_len': member.response_len,
      }
      for member in await judged(runs, task, self._scorers, self._rewards)
    ]


def _stage(suite: SuiteConfig) -> str:
  """Returns the name that takes the place of a stage's name in the ids of the suite's groups."""
  return f'evaluation-{suite.name}'
