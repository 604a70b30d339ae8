"""Attempts at a task with what they are worth."""

from __future__ import annotations

from collections.abc import AsyncIterator

from jaxrl_llm.experience.sample import Sample
from jaxrl_llm.experience.task import Task
from jaxrl_llm.master.selection import Scored
from jaxrl_llm.rewards.api import Attempt, RewardsConfig, combine
from jaxrl_llm.rewards.pool import ScorerPool


async def judge(sample: Sample, completion: str, task: Task, scorers: ScorerPool, rewards: RewardsConfig) -> Scored:
  """One attempt, scored by all scorers in force."""
  attempt = Attempt(
    uid=sample.uid,
    task=task,
    completion=completion,
    finish_reason=str(sample.finish_reason),
    response_len=sample.response_len,
  )
  scores = await scorers.score(attempt)
  return Scored(sample=sample, task=task, completion=completion, scores=scores, reward=combine(scores, rewards))


async def judged(
  runs: AsyncIterator[tuple[Sample, str]], task: Task, scorers: ScorerPool, rewards: RewardsConfig
) -> list[Scored]:
  """What a workflow gives for one task, each scored as it ends, in the order of issue."""
  found = [await judge(sample, completion, task, scorers, rewards) async for sample, completion in runs]
  return sorted(found, key=lambda one: one.sample.sample_index)
