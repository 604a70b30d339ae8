"""Repeats updates of a run, and compares the results with the recorded ones.

A plan lists the samples of one batch. On the machine of the run, the commit, the recorded plans and
their samples determine everything about an update except its times. A difference therefore means
that a file or the program has changed, or that the result depends on something else after all.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.app.composition.batch_sources import recorded_groups
from jaxrl_llm.app.composition.loop_parts import stage_entrance
from jaxrl_llm.app.offline.reopen import Reopened, reopen
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.sources import Recorded
from jaxrl_llm.batching.plan import StepPlan
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json
from jaxrl_llm.learner.state import Learned
from jaxrl_llm.master.exploring.recall import recall
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.loop import pass_over, take_step
from jaxrl_llm.master.recorded import RecordedGroups
from jaxrl_llm.master.records import step_metrics
from jaxrl_llm.replay.browse import open_copy
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import SEALED
from jaxrl_llm.replay.tables import ADDED, INDEX
from jaxrl_llm.rollout.vllm.publication import digest
from jaxrl_llm.rollout.workflow import completion_text
from jaxrl_llm.runtime.checkpoint import Checkpoints
from jaxrl_llm.runtime.machine import changes
from jaxrl_llm.runtime.writers import METRICS_FILE, STAGE, STEP, finite_row, read_jsonl

_OF_A_STEP = 'perf/time_per_step'
"""Metric that distinguishes rows of training steps, which always contain it, from rows of
evaluations, which never contain it.
"""
_NOT_OF_THE_PLAN = (
  'timing_s/',
  'timing_per_token_ms/',
  'perf/',
  'goodput/',
  'run/clock_decisions',
  'run/engine',
)
"""Prefixes of the metrics that are not compared, because they depend on time or on counters of the
run's host.
"""


class Difference(NamedTuple):
  """A value that differs between the replay and the run's records. A missing value is None."""

  key: str
  got: Json
  recorded: Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
  """A replayed update, compared with the run's records."""

  step: int
  """Step of the update, equal to the number of completed batches after it."""
  stage: str
  metrics: Mapping[str, Json]
  """Metrics of the replayed update."""
  arrays: int
  """Number of arrays that were compared with the commit at this step; 0 if there is no such
  commit.
  """
  differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
  """Range of steps of a replay: from a commit to the step of interest."""

  commit: int
  """Step of the commit to start from; 0 for the initial state."""
  step: int
  """Step to replay, counted from 1."""
  rows: Mapping[int, Mapping[str, Json]]
  """Recorded metrics, keyed by step."""


def course(config: Config, run: pathlib.Path, step: int | None) -> Course:
  """Chooses the steps to replay: from the newest commit before `step` up to `step`.

  Args:
    step: step to replay; None for the last recorded step.

  Raises:
    UserError: the run has not recorded `step`, or the step cannot be repeated bit for bit, because
      the run was made on a different kind of machine or its commits have rounded moments.
  """
  file = run / METRICS_FILE
  rows = {
    row[STEP]: row for row in (read_jsonl(file)[0] if file.exists() else []) if _OF_A_STEP in row
  }
  if not rows:
    raise UserError(f'--workdir={run}: no step is recorded yet, so there is none to replay')
  if step is None:
    step = max(rows)
  if step not in rows:
    raise UserError(
      f'--step={step}: not recorded in {file}, which has the steps {min(rows)} to {max(rows)}'
    )
  checkpoints = Checkpoints(run / 'checkpoints', config.checkpoint, leads=True)
  kept = checkpoints.steps()
  commit = max((committed for committed in kept if committed < step), default=0)
  # Check the machine of the commits before and after the step, because the steps in between may
  # have been made on either machine.
  after = min((committed for committed in kept if committed >= step), default=0)
  if (commit or after) and config.checkpoint.moments_dtype != 'float32':
    raise UserError(
      f'--step={step}: cannot be replayed bit for bit, because the commits have moments in '
      f'{config.checkpoint.moments_dtype} (checkpoint.moments_dtype); only runs whose commits have '
      'float32 moments can'
    )
  for near in {commit, after} - {0}:
    if changed := changes(checkpoints.host(near)['machine']):
      raise UserError(
        f'--step={step}: cannot be replayed bit for bit here, because the machine differs from '
        f'that of the commit at step {near}: {changed}; replay it on a machine where all of '
        'these agree'
      )
  return Course(commit=commit, step=step, rows=rows)


async def replay(
  configs: Sequence[tuple[int, Config]], run: pathlib.Path, way: Course
) -> AsyncIterator[Compared]:
  """Yields each replayed step as soon as it is compared. Only reads the run.

  Args:
    configs: configurations of the run, each with the first step for which it was in force.

  Raises:
    UserError: a plan, or a sample that it names, no longer exists.
  """

  def place(step: int) -> int:
    return max(i for i, (first, _) in enumerate(configs) if first <= step)

  async with reopen(configs[place(way.commit + 1)][1], run) as past:
    store = open_copy(run / 'replay', past.workdir / 'replay')
    try:
      plans = _plans(store, run, way)
      offline = [stage for stage in past.config.stages if isinstance(stage.source, Recorded)]
      recorded = {stage.name: recorded_groups(run, stage, past.prepared) for stage in offline}
      state, entered = await past.state(way.commit), None
      while state.step < way.step:
        plan, current = plans[state.step], place(state.step + 1)
        if entered != (current, plan.stage):
          entered, under = (current, plan.stage), past.under(configs[current][1])
          stage = next(stage for stage in under.stages if stage.name == plan.stage)
          enter_stage = stage_entrance(dataclasses.replace(under, workdir=run))
          trainer, state = await enter_stage(stage, state)
        if stage.trains:
          state, batch, updated = await take_step(past.process, trainer, state, plan)
        else:
          state, batch, updated = pass_over(state, plan)
        rollouts = taken(store, past, plan, recorded.get(stage.name))
        row = finite_row(step_metrics(batch, updated, rollouts, under.config.rollout.mismatch)[0])
        differences = _metric_differences(row, way.rows.get(state.step, {}))
        arrays = 0
        if state.step == way.step and way.step in past.checkpoints.steps():
          arrays, more = await past.process.device.run(
            _commit_differences, state.learned, past.checkpoints, way.step
          )
          differences += more
        yield Compared(
          step=plan.step + 1,
          stage=stage.name,
          metrics=row,
          arrays=arrays,
          differences=tuple(differences),
        )
    finally:
      store.close()


def _plans(store: ReplayStore, run: pathlib.Path, way: Course) -> dict[int, StepPlan]:
  """Loads the plans of the steps to replay. The key of a plan is the number of batches that are
  completed before its step. Raises UserError if a plan is missing.
  """
  recorded = store.plans(way.commit)
  for step in range(way.commit, way.step):
    if step not in recorded:
      origin = f'the commit at step {way.commit}' if way.commit else 'the beginning'
      raise UserError(
        f'--step={way.step}: the plan of step {step + 1}, which the replay from {origin} needs, is '
        f'not recorded in {run / "replay" / INDEX}; choose a step after a later commit'
      )
  return {step: StepPlan.from_json(recorded[step]) for step in range(way.commit, way.step)}


def taken(
  store: ReplayStore, past: Reopened, plan: StepPlan, recorded: RecordedGroups | None = None
) -> dict[str, Experience]:
  """Returns the scored rollouts that a plan lists, keyed by uid, in the order of the plan.

  Samples and rewards are the same as when the run itself trained on them.
  """
  if recorded is not None:
    return recorded.recall(plan.rows)
  uids = [
    *dict.fromkeys(
      row.uid
      for row in plan.rows
      if row.source.startswith(SEALED) and not row.uid.startswith(ADDED)
    )
  ]
  tasks = {task.uid: task for taskset in past.prepared.tasksets.values() for task in taskset.tasks}

  def text(sample):
    return completion_text(
      past.prepared.tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason
    )

  rewards = past.config.rewards_of(plan.stage)
  chosen = recall(store, uids, tasks=tasks.get, text=text, rewards=rewards)
  members = {step.uid: choice for choice in chosen for step in choice.steps}
  return {uid: members[uid] for uid in uids}


def _metric_differences(row: Mapping[str, Json], recorded: Mapping[str, Json]) -> list[Difference]:
  """Returns the differences between the metrics that a plan determines. Numbers are equal only if
  all their bits are equal.
  """

  def of_plan(key):
    return not key.startswith(_NOT_OF_THE_PLAN) and key not in (STAGE, STEP)

  return [
    Difference(key, row.get(key), recorded.get(key))
    for key in sorted(filter(of_plan, row.keys() | recorded.keys()))
    if key not in row or key not in recorded or json.dumps(row[key]) != json.dumps(recorded[key])
  ]


def _commit_differences(
  learned: Learned, checkpoints: Checkpoints, step: int
) -> tuple[int, list[Difference]]:
  """Returns the number of arrays in the commit, and the differences between `learned` and the
  commit.

  Deletes the arrays of `learned`, since the devices may have room for only one of the two states.
  """
  arrays, host = learned.committed(), checkpoints.host(step)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
  got = _digests(arrays)
  for leaf in jax.tree.leaves(arrays):
    leaf.delete()
  recorded = _digests(checkpoints.restore(step, like))
  pairs = {name: (got[name], recorded[name]) for name in got}
  for name in ('reference_step', 'algorithm_state'):
    pairs[name] = (getattr(learned, name), host[name])
  return len(got), [
    Difference(name, *pair)
    for name, pair in pairs.items()
    if json.dumps(pair[0]) != json.dumps(pair[1])
  ]


def _digests(arrays: Any) -> dict[str, str]:
  """Returns a digest of all bits of each array, keyed by the array's tree path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): digest(np.asarray(leaf))
    for path, leaf in leaves
  }
