"""A job whose explorers fetch completions from servers behind fronts that sign."""

import json
import os
import signal

import job
import pytest
from attached import POLICY, fake_servers
from direct import fronted

from jaxrl_llm.replay.audit import audit


@pytest.mark.full
def test_explorers_fetch_the_completions_of_a_job_and_one_of_them_is_killed(tmp_path):
  run, stage = tmp_path / 'run', '--config.stages.grpo'
  explore = {'processes': 2, 'groups': 3, 'direct': True}
  with (
    fake_servers(tmp_path, 2) as servers,
    fronted(tmp_path, [address for _, address in servers]) as addresses,
  ):
    process = job.start(
      run,
      '--config.rollout.engine=vllm',
      f'--config.rollout.vllm.addresses={json.dumps(addresses)}',
      f'--config.rollout.vllm.key_file={tmp_path / "servers"}',
      f'--config.rollout.explorers={json.dumps(explore)}',
      '--config.rollout.vllm.stream=2',
      '--config.stages.sft.steps=2',
      f'{stage}.steps=4',
      f'{stage}.evaluate_every=null',
      '--config.evaluation=[]',
      *POLICY,
    )
    job.wait_for_rows(run, 2 + 1, process)
    os.kill(job.explorers(run)['explorer-0'], signal.SIGKILL)
    _, said = process.communicate(timeout=300)
  assert process.returncode == 0, said
  steps = [row for row in job.rows(run) if row['stage'] == 'grpo' and 'actor/pg_loss' in row]
  assert len(steps) == 4
  assert max(row['sampling/sampling_logp_difference/max'] for row in steps) < 1e-4
  delivered = sum(row['perf/direct_delivered'] for row in steps)
  undelivered = sum(row['perf/direct_undelivered'] for row in steps)
  # The killed explorer may have had six groups of four in hand, of which the engine fetched some.
  assert delivered >= 4 * 6 * 4 - undelivered and undelivered <= 3 * 4
  assert sum(row['perf/direct_refused'] for row in steps) == 0
  assert all({'perf/direct_expired', 'perf/direct_late'} <= row.keys() for row in steps)
  assert sum(row['run/engine_void'] + row['run/engine_restarts'] for row in steps) == 0
  report = audit(run / 'replay')
  assert report.ok and report.states['trained'] == 4 * 6 * 4, report.lines
