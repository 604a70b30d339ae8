"""Reads rollouts that were selected for training back from the store, with scores and rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.exploring.selection import EXPERIENCE, Experience, read_experiences
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.rewards.api import RewardsConfig, combine


def recall(
  store: ReplayStore,
  uids: Sequence[str],
  *,
  tasks: Callable[[str], Task | None],
  text: Callable[[Sample], str],
  rewards: RewardsConfig,
) -> list[Experience]:
  """Returns those samples that were selected for training, in the order of their selection.

  Args:
    store: store of the samples.
    uids: uids of samples of one or more groups. Samples that were not selected are skipped.
    tasks: returns the task with the given uid, or None if it no longer exists.
    text: returns a sample's completion.
    rewards: configuration that combines scores into a reward.

  Raises:
    UserError: a task no longer exists.
  """
  experiences = store.derived(uids, EXPERIENCE)
  scores, members = store.scores([*experiences]), {}
  for sample in store.read([*experiences]):
    task = tasks(sample.task_id)
    if task is None:
      raise UserError(
        f'sample {sample.uid}: its task {sample.task_id} is no longer in a taskset of the run; '
        f'restore the source of taskset {sample.taskset}'
      )
    given = tuple(scores[sample.uid])
    members[sample.uid] = Experience(
      sample=sample,
      task=task,
      completion=text(sample),
      scores=given,
      reward=combine(given, rewards),
    )
  return read_experiences(experiences, members)
