"""Contract of workflows: the requirements on the trajectories that a workflow yields.

The master checks these requirements for workflows in its own process and for workflows in
explorers. A violation raises an error that names the sample.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping

import numpy as np
from absl import logging

from jaxrl_llm.core.errors import RunError, one_line
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.records.sample import Sample, step_uid
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rewards.api import MAX_EVIDENCE, MAX_PART_NAME, MAX_PARTS, MAX_REWARD, Verdict
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.workflow import Rollout, Workflow, trained_turns


class Roster:
  """Records which trajectories of a group have arrived. One trajectory, with all its steps, is
  expected for each index below `samples`.
  """

  def __init__(self, group: str, samples: int, *, max_steps: int = 1):
    """
    Args:
      group: id `<stage>/<task uid>/<visit>` of the group. It is the prefix of the uids of its
        samples.
      samples: number of expected trajectories.
      max_steps: maximum number of steps of a trajectory.
    """
    self._seen: set[int] = set()
    self._group, self._samples, self._max_steps = group, samples, max_steps

  def take(self, rollout: Rollout) -> bool:
    """Records a trajectory and returns whether it is the first with its index. Raises ValueError if
    the trajectory has too many steps, or if a step does not belong to the group or trajectory, has
    an unexpected uid or index, or fails `check_segments`.
    """
    index = rollout.sample.sample_index
    if not 0 <= index < self._samples:
      raise ValueError(
        f'sample {rollout.sample.uid} has index {index}, wanted 0 to {self._samples - 1}'
      )
    if len(rollout.steps) > self._max_steps:
      raise ValueError(
        f'sample {rollout.sample.uid} has {len(rollout.steps)} steps, wanted at most '
        f'{self._max_steps} (rollout.max_steps)'
      )
    for step, sample in enumerate(rollout.steps):
      self._check_step(sample, index, step)
    if index in self._seen:
      return False
    self._seen.add(index)
    return True

  def _check_step(self, sample: Sample, index: int, step: int) -> None:
    trajectory = f'{self._group}/{index}'
    wanted = step_uid(trajectory, step)
    if (sample.uid, sample.group_id) != (wanted, self._group):
      raise ValueError(
        f'sample {sample.uid} of group {sample.group_id}, wanted sample {wanted} of group '
        f'{self._group}'
      )
    place = (sample.trajectory_id, sample.sample_index, sample.step_index)
    if place != (trajectory, index, step):
      raise ValueError(
        f'sample {sample.uid} has (trajectory, index, step) {place}, wanted '
        f'{(trajectory, index, step)}'
      )
    if not self._group.endswith(f'/{sample.task_id}/{sample.visit}'):
      raise ValueError(
        f'sample {sample.uid} has task {sample.task_id}, visit {sample.visit}, wanted those of its '
        f'group {self._group}'
      )
    check_segments(sample)

  def incomplete(self) -> str:
    """Returns an error message that names a missing sample, or an empty string if all samples have
    arrived.
    """
    missing = sorted({*range(self._samples)} - self._seen)
    return f'its workflow ended without sample {missing[0]} of {self._samples}' if missing else ''


def check_segments(sample: Sample) -> None:
  """Raises ValueError unless the sample's segments lie within its tokens, are in order, do not
  overlap, and cover every token that is marked as sampled.
  """
  covered, last = np.zeros(len(sample.tokens), bool), 0
  for segment in sample.segments:
    if not last <= segment.start <= segment.end <= len(sample.tokens):
      raise ValueError(
        f'sample {sample.uid}: segment [{segment.start}, {segment.end}), wanted it inside [{last}, '
        f'{len(sample.tokens)}), because segments must be in order and must not overlap'
      )
    covered[segment.start : segment.end] = True
    last = segment.end
  if (sample.sampled & ~covered).any():
    raise ValueError(
      f'sample {sample.uid}: token {np.argmax(sample.sampled & ~covered)} was sampled, but no '
      'segment covers it'
    )


def check_limits(verdict: Verdict, name: str) -> None:
  """Raises ValueError unless an environment's reward meets the master's requirements: numbers
  within ±`MAX_REWARD`, at most `MAX_PARTS` parts, printable part names of at most `MAX_PART_NAME`
  characters, and evidence that is JSON of at most `MAX_EVIDENCE` characters.

  Args:
    name: subject of the error messages, such as 'sample <uid>'.
  """
  rewards = verdict.turn_values if verdict.value is None else (verdict.value, *verdict.turn_values)
  _check_numbers(rewards, name)
  check_counts(verdict.parts, name)
  try:
    evidence = json.dumps(dict(verdict.evidence), allow_nan=False)
    if len(evidence) <= MAX_EVIDENCE:
      parse_json(evidence)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(one_line(f'{name}: the evidence of a reward is not JSON: {error}')) from None
  if len(evidence) > MAX_EVIDENCE:
    raise ValueError(
      f'{name}: the evidence of a reward has {len(evidence)} characters as JSON, wanted at most '
      f'{MAX_EVIDENCE}'
    )


def check_counts(counts: Mapping[str, float], name: str) -> None:
  """Raises ValueError unless the counts (parts) of an environment's reward meet the requirements of
  `check_limits`.
  """
  _check_numbers(counts.values(), name)
  if len(counts) > MAX_PARTS:
    raise ValueError(f'{name}: has a reward of {len(counts)} counts, wanted at most {MAX_PARTS}')
  for count in counts:
    if not (isinstance(count, str) and len(count) <= MAX_PART_NAME and count.isprintable()):
      raise ValueError(
        f'{name}: has a count {one_line(repr(count), 100)}, wanted a name of at most '
        f'{MAX_PART_NAME} characters, all printable'
      )


def _check_numbers(numbers: Iterable[float], name: str) -> None:
  for number in numbers:
    if not abs(number) <= MAX_REWARD:
      raise ValueError(f'{name}: has reward {number}, wanted a number within ±{MAX_REWARD:g}')


def check_verdict(rollout: Rollout) -> None:
  """Raises ValueError if the environment's reward of a rollout fails `check_limits`, or has more
  turn values than the rollout has turns that are trained on.
  """
  verdict, name = rollout.verdict, f'sample {rollout.sample.uid}'
  if verdict is None:
    return
  check_limits(verdict, name)
  turns = sum(map(trained_turns, rollout.steps))
  if len(verdict.turn_values) > turns:
    raise ValueError(
      f'{name} has rewards for {len(verdict.turn_values)} turns, wanted at most {turns}'
    )


async def checked_run(
  workflow: Workflow,
  task: Task,
  visit: int,
  *,
  stage: str,
  samples: int,
  sampling: Sampling,
  max_steps: int = 1,
) -> AsyncIterator[Rollout]:
  """Runs a workflow and yields its trajectories. If several trajectories have the same index, only
  the first of them is yielded.

  Args:
    max_steps: maximum number of steps of a trajectory.

  Raises:
    RunError: the workflow yields a trajectory or reward that violates the contract, or omits a
      trajectory.
  """
  group = f'{stage}/{task.uid}/{visit}'
  roster = Roster(group, samples, max_steps=max_steps)
  runs = workflow.run(task, visit, stage=stage, samples=samples, sampling=sampling)
  async with contextlib.aclosing(runs):
    async for yielded in runs:
      rollout = Rollout(*yielded)
      try:
        is_first = roster.take(rollout)
        check_verdict(rollout)
      except ValueError as error:
        raise RunError(f'rollout.workflow: {error}; correct the workflow') from None
      if is_first:
        yield rollout
      else:
        logging.log_first_n(
          logging.WARNING,
          'rollout.workflow: sample %s was yielded twice; the first one counts',
          5,
          rollout.sample.uid,
        )
  if problem := roster.incomplete():
    raise RunError(
      f'rollout.workflow: group {group}: {problem}; it must yield each index below {samples} once'
    )
