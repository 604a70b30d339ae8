"""Runs whose trajectories have several steps."""

import json
import os

import job
import numpy as np
import pytest
from paths import FIXTURES

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.full
STEPS = (
  '--config.rollout.workflow={"kind":"fresh_try:FreshTry"}',
  '--config.rollout.max_steps=2',
)


def rollouts(run, stage):
  files = sorted((run / 'rollouts' / stage).glob('*.jsonl'))
  return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_steps_are_trained_and_a_run_with_explorers_equals_one_without_them(tmp_path):
  path = os.pathsep.join(map(str, (job.ROOT, FIXTURES)))
  how = (*STEPS, '--config.stages.grpo.steps=3', '--config.stages.sft.steps=4')
  runs = [tmp_path / 'alone', tmp_path / 'explored']
  more = ((), ('--config.rollout.explorers={"processes":1,"groups":6}',))
  for run, flags in zip(runs, more, strict=True):
    job.train(run, *how, *flags, environ=job.environment(PYTHONPATH=path))
  job.assert_equal_runs(*runs)
  report = audit(runs[1] / 'replay')
  assert report.ok and report.live == ()
  rows = [row for row in job.rows(runs[0]) if 'num_steps/mean' in row]
  assert len(rows) == 3 and all(1 < row['num_steps/mean'] <= 2 for row in rows)
  trajectories = {}
  for row in rollouts(runs[0], 'grpo'):
    trajectories.setdefault(row['trajectory_id'], []).append(row)
  split = [steps for steps in trajectories.values() if len(steps) == 2]
  assert split and all(len(steps) <= 2 for steps in trajectories.values())
  for first, last in split:
    assert (first['uid'], last['uid']) == (first['trajectory_id'], f'{first["trajectory_id"]}/1')
    assert first['reward'] is None is not last['reward']
    # Both steps carry the trajectory's advantage.
    assert {*filter(None, first['advantages'])} == {*filter(None, last['advantages'])}
    sampled = np.array(last['trainer_logprobs'], float) - np.array(
      last['behaviour_logprobs'], float
    )
    assert np.nanmax(np.abs(sampled)) < 1e-4
  assert any(steps[-1]['finish_reason'] == 'steps' for steps in split)
