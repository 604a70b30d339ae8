"""Jobs whose embedded engine samples on all devices of process 0."""

import json

import job
import programs
import pytest

from jaxrl_llm.replay.audit import audit

MODEL = dict(
  hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
  num_key_value_heads=2, head_dim=32,
)  # fmt: skip
CONFIG = (
  *job.QUICK,
  f'--config.policy.model={json.dumps(MODEL)}',
  '--config.rollout.embedded.mesh.tensor=2',
  '--config.stages.sft.steps=3',
  '--config.stages.grpo.steps=4',
  '--config.checkpoint.every_steps=2',
)


def environment(devices):
  count = f' --xla_force_host_platform_device_count={devices}'
  return job.environment(XLA_FLAGS=programs.CHEAP + count)


def assert_sampled_by_the_policy(run):
  """The engine's logprobs are the trainer's, so it has the weights of each step."""
  differences = [
    row['rollout_corr/log_ppl_abs_diff']
    for row in job.rows(run)
    if 'rollout_corr/log_ppl_abs_diff' in row
  ]
  assert len(differences) == 4 and max(differences) < 1e-5, differences


@pytest.mark.full
def test_a_job_on_four_devices_resumes_bit_for_bit(tmp_path):
  """Slots on two pairs of devices, and weights on the devices of each pair."""
  environ = environment(4)
  whole = job.finished('sampling_mesh', config=CONFIG, environ=environ)
  assert_sampled_by_the_policy(whole)
  assert audit(whole / 'replay').ok
  run = job.killed_and_resumed(tmp_path / 'run', 6, config=CONFIG, environ=environ)
  job.assert_equal_runs(run, whole)


@pytest.mark.acceptance
def test_a_resumed_run_keeps_its_mesh(tmp_path):
  environ = environment(4)
  whole = job.finished('sampling_mesh', config=CONFIG, environ=environ)
  refused = job.train(
    job.copy(whole, tmp_path / 'run'), '--config.rollout.embedded.mesh.tensor=1',
    config=CONFIG, environ=environ, expect=2,
  )  # fmt: skip
  assert 'rollout.embedded.mesh.tensor' in refused.stderr


@pytest.mark.acceptance
def test_a_mesh_that_the_model_does_not_permit_is_refused_in_one_line(tmp_path):
  flags = ('--config.rollout.embedded.mesh.tensor=4',)
  done = job.train(tmp_path / 'run', *flags, config=CONFIG, environ=environment(4), expect=2)
  (line,) = [line for line in done.stderr.splitlines() if 'rollout.embedded.mesh' in line]
  assert 'tensor=4 does not divide the 2 key-value heads' in line
  assert not job.commits(tmp_path / 'run')


@pytest.mark.acceptance
def test_of_two_processes_the_first_samples_on_its_devices(tmp_path):
  environ = environment(2)
  whole = job.finished('sampling_mesh_of_two', config=CONFIG, processes=2, environ=environ)
  assert_sampled_by_the_policy(whole)
  run = job.killed_and_resumed(tmp_path / 'run', 6, config=CONFIG, processes=2, environ=environ)
  job.assert_equal_runs(run, whole)
