"""Two real jax.distributed processes on loopback: the same job, the same numbers, and deaths that
are noticed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time

import job
import numpy as np
import object_store
import programs
import psutil
import pytest
from paths import SUPPORT

from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.browse import open_copy
from jaxrl_llm.runtime.archive import Archive, ArchiveConfig

pytestmark = pytest.mark.full


@pytest.fixture(scope='module')
def recorded(tmp_path_factory):
  """A finished run of one process, and a file of ten of its plans."""
  file = tmp_path_factory.mktemp('recorded') / 'plans.json'
  with contextlib.closing(open_copy(job.quick_run() / 'replay', file.parent / 'copy')) as store:
    plans = store.plans()
  file.write_text(json.dumps([plans[step] for step in sorted(plans)[6:16]]))
  return job.quick_run(), file


def gradients_of(recorded, out, *, processes):
  command = [SUPPORT / 'gradients.py', *recorded, out, '{"fsdp": 2}']
  devices = f'{programs.CHEAP} --xla_force_host_platform_device_count={2 // processes}'
  if processes > 1:
    command = [
      'launch/cluster/local.py',
      f'--processes={processes}',
      '--',
      sys.executable,
      *command,
    ]
  job.call(*command, environ=job.environment(XLA_FLAGS=devices), timeout_s=900)
  return dict(np.load(out))


def test_two_processes_compute_the_gradients_of_one_for_ten_recorded_plans(recorded, tmp_path):
  one = gradients_of(recorded, tmp_path / 'one.npz', processes=1)
  two = gradients_of(recorded, tmp_path / 'two.npz', processes=2)
  assert len([k for k in one if k.endswith('/loss')]) == 10
  assert one.keys() == two.keys()
  for name, wanted in one.items():
    if name.endswith('/loss'):
      assert abs(two[name] - wanted) <= 1e-6 * max(1.0, abs(wanted))
    elif np.linalg.norm(wanted) > 1e-7:
      assert np.linalg.norm(two[name] - wanted) <= 1e-5 * np.linalg.norm(wanted), name


@pytest.fixture(scope='module')
def two_processes():
  """A run of PPO, in which two processes gather and shard more than in other algorithms."""
  return job.finished('two_processes', config=job.PPO_OF_TWO, processes=2)


def test_two_processes_leave_a_whole_run(two_processes):
  assert [(stage, step) for stage, step, _ in job.accuracies(two_processes)] == [
    ('sft', 0),
    ('sft', 12),
    ('ppo', 15),
    ('ppo', 18),
    ('ppo', 21),
  ]
  for part in ('hf', 'critic'):
    files = sorted(path.name for path in (two_processes / part).glob('*.safetensors'))
    assert files == [f'model-0000{number}-of-00002.safetensors' for number in (1, 2)]
  losses = [r['actor/sft_loss'] for r in job.rows(two_processes) if 'actor/sft_loss' in r]
  assert losses[-1] < losses[0] - 0.3
  assert audit(two_processes / 'replay').ok
  # What was planned is a part of the run.
  policy = json.loads((two_processes / 'config.json').read_text())['policy']
  assert (policy['dtype'], policy['scan_layers'], policy['remat']) == ('float32', False, 'none')


def test_two_processes_measure_what_one_does(two_processes):
  """Token columns are gathered in both: the critic's first batch, and the policy's, are those of
  one process.
  """
  for key, tolerance in (
    ('critic/vf_loss', 1e-4),
    ('critic/values/mean', 1e-4),
    ('actor/entropy', 1e-3),
  ):
    found, wanted = (
      next(row[key] for row in job.rows(run) if row['stage'] == 'ppo' and key in row)
      for run in (two_processes, job.ppo_run())
    )
    assert found == pytest.approx(wanted, rel=tolerance), key


def killed(run, count, *flags, rank, environ=None, ready=lambda: True):
  """Starts a job of two processes, kills one after `count` rows, once `ready` returns True, and
  checks that the job ends and names it. Returns what the job printed.
  """
  process = job.start(run, *flags, config=job.PPO_OF_TWO, processes=2, environ=environ)
  job.wait_for_rows(run, count, process)
  while not ready():
    assert process.poll() is None, 'ended before it was killed'
    time.sleep(0.02)
  # The supervisor starts them in the order of their numbers.
  trainers = sorted(child.pid for child in psutil.Process(process.pid).children())
  os.kill(trainers[rank], signal.SIGKILL)
  started = time.monotonic()
  out, err = process.communicate(timeout=60)
  assert time.monotonic() - started < 45, 'the stated time is 30 s, and some to start and read'
  assert process.returncode == 128 + signal.SIGKILL
  assert re.search(rf'process {rank}.*SIGKILL', out + err), out + err
  return out


@pytest.mark.acceptance
def test_either_killed_the_job_ends_names_it_and_resumes_bit_for_bit(two_processes, tmp_path):
  run = tmp_path / 'run'
  for rank, count in enumerate((15, 18)):
    out = killed(run, count, rank=rank)
    assert ('memory plan remat none' in out) == (rank == 0), 'planned only at the start'
  resumed = job.train(run, config=job.PPO_OF_TWO, processes=2)
  assert 'memory plan' not in resumed.stdout
  job.assert_equal_runs(run, two_processes)


def test_a_job_whose_process_0_is_killed_ends_and_resumes_on_fresh_hosts_from_an_object_store(
  two_processes, tmp_path, monkeypatch
):
  """The archive has what both processes wrote, but only process 0 uses it."""
  for name, value in object_store.serve().items():
    monkeypatch.setenv(name, value)
  environ = job.environment(**object_store.serve())
  config = ArchiveConfig(location='s3://bucket/runs/two')
  archive, flag = Archive(config), f'--config.archive.location={config.location}'
  first, second = tmp_path / 'first', tmp_path / 'second'
  out = killed(first, 16, flag, rank=0, environ=environ, ready=archive.steps)
  assert 'memory plan remat none' in out
  shutil.rmtree(first)
  archived = archive.steps()
  resumed = job.train(second, flag, config=job.PPO_OF_TWO, processes=2, environ=environ)
  assert f'fetched the commit at step {archived[-1]}' in ' '.join(resumed.stdout.split())
  assert 'memory plan' not in resumed.stdout
  job.assert_equal_runs(second, two_processes)
  assert audit(second / 'replay').ok
  assert archive.steps() == job.commits(second)
