"""Checks that scorers give full marks to the reference answer of a task, but not to the reference
answer of another task.

The reference answer of a task is called its truth. Because a policy seldom writes the bare truth,
the check tries several forms in which completions usually state answers. Demonstrations are scored
as they are.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from jaxrl_llm.app.doctor.data import Data, spread
from jaxrl_llm.app.doctor.findings import Finding, failure, ok, warning
from jaxrl_llm.app.schema import scored_tasksets
from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rewards.api import Attempt, Reward, RewardsConfig, combine, in_force
from jaxrl_llm.rewards.pool.pool import ScorerPool

_TASKS = 16
"""Maximum number of tasks of each taskset whose truths are scored."""
_DEMONSTRATIONS = 32
"""Maximum number of demonstrations of each stage that are scored."""
_BY_TRUTH = frozenset({'answer', 'box_iou', 'k12', 'point', 'verifier'})
"""Shipped scorers that give full marks only to completions that agree with the truth."""
_FULL = 0.95
"""Minimum share of truths that must get full marks. It is below 1, because real data contain some
truths that a scorer cannot parse.
"""
_CHANCE = 0.1
"""Maximum share of other tasks' truths that may get full marks by chance."""


def _as_it_is(truth: str) -> str:
  return truth


def _boxed(truth: str) -> str:
  return rf'\boxed{{{truth}}}'


def _after_hashes(truth: str) -> str:
  return f'#### {truth}'


def _tagged(truth: str) -> str:
  return f'<answer>{truth}</answer>'


def _stated(truth: str) -> str:
  return f'The answer is {truth}'


_FORMS: tuple[Callable[[str], str], ...] = (_as_it_is, _boxed, _after_hashes, _tagged, _stated)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Judge:
  """Scores (task, text) pairs as if the text were the policy's answer to the task."""

  scorers: ScorerPool
  rewards: RewardsConfig

  async def __call__(
    self, answers: Sequence[tuple[Task, str]]
  ) -> list[tuple[tuple[Score, ...], Reward]]:
    async def judge(number: int, task: Task, text: str):
      attempt = Attempt(
        uid=f'doctor/{task.uid}/0/{number}',
        task=task,
        completion=text,
        finish_reason='stop',
        response_len=len(text.split()),
      )
      scores = await self.scorers.score(attempt)
      return scores, combine(scores, self.rewards)

    return await asyncio.gather(*(judge(i, *answer) for i, answer in enumerate(answers)))


async def truths(
  data: Data, tasksets: Mapping[str, Sequence[Task]], scorers: ScorerPool
) -> AsyncIterator[Finding]:
  """Checks the scorers on the truths of each taskset's tasks, on truths of other tasks, and on
  demonstrations.

  Args:
    tasksets: tasks of the run, keyed by the name of their taskset.
    scorers: scorer pool of the run, which must have been started.
  """
  rewards = data.config.rewards
  judge = _Judge(scorers=scorers, rewards=rewards)
  for name in sorted(scored_tasksets(data.config)):
    tasks = [task for task in tasksets[name] if task.truth]
    if not tasks:
      yield ok(f'scorers {name}', 'its tasks have no truth to try the scorers on', tasks=0)
      continue
    yield await _of_taskset(name, spread(tasks, _TASKS), judge)
  scored = {task.digest for name in scored_tasksets(data.config) for task in tasksets[name]}
  for stage, pairs in data.shown.items():
    for finding in await _of_demonstrations(stage, pairs, scored, judge):
      yield finding


async def _of_taskset(name: str, tasks: Sequence[Task], judge: _Judge) -> Finding:
  check = f'scorers {name}'
  decisive = _decisive(tasks[0], judge.rewards)
  by_truth = decisive in _BY_TRUTH
  shares, unscorable, evidence = {}, 0.0, ''
  for form in _FORMS:
    judged = await judge([(task, form(task.truth)) for task in tasks])
    shares[form] = _share(bool(reward.correct) for _, reward in judged)
    failed = [score for scores, _ in judged for score in scores if score.value is None]
    if form is _as_it_is and failed:
      unscorable = _share(reward.value is None for _, reward in judged)
      evidence = f'{failed[0].scorer} {failed[0].status}: {one_line(dict(failed[0].evidence), 200)}'
    if shares[form] >= _FULL:
      break
  best = max(shares, key=shares.get)
  others = _exchanged(tasks)
  wrong = await judge([(task, best(truth)) for task, truth in others])
  accepted = _share(bool(reward.correct) for _, reward in wrong)
  detail = dict(
    taskset=name,
    tasks=len(tasks),
    truth_correct=shares[best],
    exchanged_correct=accepted,
    unscorable=unscorable,
  )
  result = (
    f'{shares[best]:.0%} of the truths get full marks, as {best("…")!r}, and {accepted:.0%} of '
    'those of other tasks'
  )
  look = 'look at tasksets.truth, and at the mode and the extraction of the scorer (jaxrl score)'
  if unscorable > 1 - _FULL and shares[best] < _FULL:
    return failure(check, f'{unscorable:.0%} cannot be scored ({evidence})', look, **detail)
  if by_truth and shares[best] < _FULL:
    return (failure if shares[best] < 0.5 else warning)(check, result, look, **detail)
  if by_truth and accepted > _CHANCE:
    return (failure if accepted > 0.5 else warning)(check, result, look, **detail)
  if not by_truth and (shares[best] < 0.5 or accepted > 0.5):
    text = (
      f'scorer {decisive} decides what is correct without comparing it with the truth ({result})'
    )
    return ok(check, text, **detail)
  return ok(check, result, **detail)


async def _of_demonstrations(
  stage: str, pairs: Sequence[tuple[Task, str]], scored: set[str], judge: _Judge
) -> list[Finding]:
  """Scores demonstrations whose text ends with the task's reference answer.

  These demonstrations should get full marks.

  Args:
    pairs: tasks and the texts of their demonstrations.
    scored: digests of the tasks that the run scores. Demonstrations of other tasks are skipped.
  """
  right = [
    (task, text)
    for task, text in pairs
    if task.digest in scored and task.truth and _ends_with_truth(text, task.truth)
  ]
  if not right or _decisive(right[0][0], judge.rewards) not in _BY_TRUTH:
    return []
  tried = spread(right, _DEMONSTRATIONS)
  judged = await judge(tried)
  share = _share(bool(reward.correct) for _, reward in judged)
  check, detail = f'scorers {stage}', dict(stage=stage, demonstrations=len(tried), correct=share)
  result = f'{share:.0%} of the demonstrations that end with the truth get full marks'
  if share >= 0.9:
    return [ok(check, result, **detail)]
  example = next(text for (_, text), (_, reward) in zip(tried, judged) if not reward.correct)
  return [
    (failure if share < 0.5 else warning)(
      check,
      f'{result}, and {example[-80:]!r} does not: the scorer looks for the answer elsewhere',
      "set the scorer's extraction to the form of the demonstrations, or change their templates",
      **detail,
    )
  ]


def _decisive(task: Task, rewards: RewardsConfig) -> str:
  """Returns the kind (`ScorerConfig.kind`) of the scorer that decides whether a completion is
  correct.
  """
  scorers = in_force(rewards.scorers, task.domain, task.taskset)
  chosen = next((s for s in scorers if s.name == rewards.correct_by), scorers[0])
  return chosen.implementation


def _ends_with_truth(text: str, truth: str) -> bool:
  answer = truth.rpartition('####')[2]
  return _bare(text).endswith(_bare(answer))


def _bare(text: str) -> str:
  return ''.join(text.split()).rstrip('.}>$').removesuffix('</answer').casefold()


def _exchanged(tasks: Sequence[Task]) -> list[tuple[Task, str]]:
  """Returns (task, truth of another task) pairs in which the two tasks have different truths.

  Tasks without such a counterpart are left out.
  """
  pairs = []
  for i, task in enumerate(tasks):
    others = [*tasks[i + 1 :], *tasks[:i]]
    other = next((o for o in others if _bare(o.truth) != _bare(task.truth)), None)
    if other is not None:
      pairs.append((task, other.truth))
  return pairs


def _share(flags) -> float:
  values = list(flags)
  return sum(values) / len(values) if values else 0.0
