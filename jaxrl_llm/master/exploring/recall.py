"""Reads stored rollouts that were selected for training, with their scores and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

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
  """Returns the trajectories that were selected for training, in the order of their selection.

  Args:
    store: store of the samples.
    uids: uids of all samples of one or more groups. Samples that were not selected are skipped.
    tasks: returns the task with the given uid, or None if it no longer exists.
    text: returns a sample's completion.
    rewards: configuration that combines scores into a reward.

  Raises:
    UserError: a task no longer exists.
  """
  experiences = store.derived(uids, EXPERIENCE)
  later: dict[str, list[str]] = {}
  for uid in uids:
    if (trajectory := uid.rpartition('/')[0]) in experiences:
      later.setdefault(trajectory, []).append(uid)
  members = read_members(store, [*experiences], later, tasks=tasks, text=text, rewards=rewards)
  return read_experiences(experiences, {member.sample.uid: member for member in members})


def read_members(
  store: ReplayStore,
  uids: Sequence[str],
  later: Mapping[str, Sequence[str]],
  *,
  tasks: Callable[[str], Task | None],
  text: Callable[[Sample], str],
  rewards: RewardsConfig,
) -> list[Experience]:
  """Returns stored trajectories with their scores and rewards, whether they were selected or not.
  For the other arguments and the exceptions, see `recall`.

  Args:
    uids: uids of the first steps.
    later: uids of the later steps, keyed by the uid of the trajectory's first step.
  """
  steps = {step.uid: step for step in store.read([uid for of in later.values() for uid in of])}
  scores, members = store.scores(uids), []
  for sample in store.read(uids):
    task = tasks(sample.task_id)
    if task is None:
      raise UserError(
        f'sample {sample.uid}: its task {sample.task_id} is no longer in a taskset of the run; '
        f'restore the source of taskset {sample.taskset}'
      )
    given = tuple(scores[sample.uid])
    members.append(
      Experience(
        sample=sample,
        later=(following := _ordered(steps[uid] for uid in later.get(sample.uid, ()))),
        task=task,
        completion=text((sample, *following)[-1]),
        scores=given,
        reward=combine(given, rewards),
      )
    )
  return members


def _ordered(steps: Iterable[Sample]) -> tuple[Sample, ...]:
  return tuple(sorted(steps, key=lambda step: step.step_index))
