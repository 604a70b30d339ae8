"""Scores the attempts (completions) at a task: each as soon as it ends, then all as a group."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.score import Score, total_value
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.rewards.api import (
  ENVIRONMENT,
  Attempt,
  RewardsConfig,
  Verdict,
  combine,
  drops_group,
  in_force,
)
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.workflow import Rollout


async def judge(
  rollout: Rollout, task: Task, scorers: ScorerPool, rewards: RewardsConfig
) -> Experience:
  """Scores one attempt with all configured scorers that judge attempts one by one.

  Raises:
    RunError: a scorer reads the environment's reward, but the workflow reports none, although no
      limit ended the trajectory; or the workflow reports a failed episode or an environment's
      reward other than 0, but no scorer reads it.
  """
  _check_verdict(rollout, rewards)
  scores = await scorers.score(rollout.attempt(task))
  return Experience(
    sample=rollout.sample,
    later=rollout.later,
    task=task,
    completion=rollout.text,
    scores=scores,
    reward=combine(scores, rewards),
  )


def _check_verdict(rollout: Rollout, rewards: RewardsConfig) -> None:
  sample, verdict = rollout.sample, rollout.verdict
  if verdict is None and all(s.implementation != ENVIRONMENT for s in rewards.scorers):
    return
  configured = in_force(rewards.scorers, sample.domain, sample.taskset)
  is_read = any(scorer.implementation == ENVIRONMENT for scorer in configured)
  if is_read and verdict is None and not rollout.steps[-1].finish_reason.is_truncated:
    raise RunError(
      f'rollout.workflow: sample {sample.uid} has no reward, and rewards.scorers has '
      f'{ENVIRONMENT!r}; call episode.reward in the workflow, or remove the scorer'
    )
  if verdict is None or is_read:
    return
  if verdict.value is None:
    raise RunError(
      f'rollout.workflow: sample {sample.uid} cannot be scored, because its episode failed: '
      f'{verdict.evidence.get("error", "no reason given")}; only the scorer {ENVIRONMENT!r} '
      f'records this; add ScorerConfig(name={ENVIRONMENT!r}, weight=0) to rewards.scorers'
    )
  if total_value(verdict.value, verdict.turn_values) != 0:
    raise RunError(
      f'rollout.workflow: sample {sample.uid} has a reward of the environment, which no scorer of '
      f'its taskset reads; add ScorerConfig(name={ENVIRONMENT!r}) to rewards.scorers'
    )


async def judge_group(
  members: Sequence[Experience], scorers: ScorerPool, rewards: RewardsConfig
) -> list[Experience]:
  """Scores the attempts at a task with the scorers that judge whole groups. Returns the attempts,
  ordered by sample index, with all their scores and their final rewards.
  """
  members = sorted(members, key=lambda member: member.sample.sample_index)
  attempts = [attempt_of(member) for member in members]
  scores = await scorers.score_group(attempts, [member.scores for member in members])
  return rewarded(members, scores, rewards)


def judge_by_trainer(
  members: Sequence[Experience],
  verdicts: Mapping[str, Verdict],
  scorers: ScorerPool,
  rewards: RewardsConfig,
) -> list[Experience]:
  """Adds the scores of the trainer's reward model to the members of a group. Returns the members,
  in the given order, with all their scores and their final rewards.

  Args:
    members: members of the group, with their other scores.
    verdicts: verdicts of the reward model, keyed by the members' uids.
  """
  order = {config.name: place for place, config in enumerate(rewards.scorers)}
  scores = [
    (*m.scores, *scorers.trainer_scores(attempt_of(m), verdicts[m.sample.uid])) for m in members
  ]
  scores = [tuple(sorted(of, key=lambda score: order[score.scorer])) for of in scores]
  return rewarded(members, scores, rewards)


def rewarded(
  members: Sequence[Experience], scores: Sequence[tuple[Score, ...]], rewards: RewardsConfig
) -> list[Experience]:
  """Returns the members of a group with the given scores and the rewards that follow from them. If
  a scorer failed and is configured to drop the group, the reward of every member is None.
  """
  with_scores = [
    dataclasses.replace(m, scores=s, reward=combine(s, rewards))
    for m, s in zip(members, scores, strict=True)
  ]
  if drops_group((score for of in scores for score in of), rewards):
    return [
      dataclasses.replace(m, reward=dataclasses.replace(m.reward, value=None, correct=None))
      for m in with_scores
    ]
  return with_scores


async def judged(
  runs: AsyncIterator[Rollout], task: Task, scorers: ScorerPool, rewards: RewardsConfig
) -> list[Experience]:
  """Scores a workflow's attempts at one task, each as it ends and then all of them as a group."""
  async with asyncio.TaskGroup() as scoring:
    pending = [scoring.create_task(judge(run, task, scorers, rewards)) async for run in runs]
  return await judge_group([judging.result() for judging in pending], scorers, rewards)


def attempt_of(member: Experience) -> Attempt:
  """Returns a trajectory as an `Attempt`, the input of scorers, without its transcript and the
  environment's reward.
  """
  return Attempt(
    uid=member.sample.uid,
    task=member.task,
    completion=member.completion,
    finish_reason=str(member.finish_reason),
    response_len=member.response_len,
  )
