"""Jobs on a real Slurm: they come back after every kind of end, and arrays run each element once.

Debian's packages are needed (`bash tests/support/slurm.sh install`).
"""

import os
import signal
import subprocess
import sys

import job
import psutil
import pytest
import slurm_cluster
from paths import ROOT
from slurm_cluster import UNFINISHED

from jaxrl_llm.app.cluster import slurm
from jaxrl_llm.app.cluster.job import Job, ProcessGroup, ProcessResources
from jaxrl_llm.replay.audit import audit

pytestmark = [
  pytest.mark.acceptance,
  pytest.mark.skipif(
    not slurm_cluster.is_installed(), reason='no Slurm: bash tests/support/slurm.sh install'
  ),
]
TWO = ('--nodes=2', '--cpus=1', '--config.learner.mesh.fsdp=2')
VLLM = (
  '--rollout_nodes=1',
  '--plaintext',
  '--config.rollout.engine=vllm',
  f'--config.rollout.vllm.environment={ROOT / ".venv-vllm"}',
)


@pytest.fixture(scope='module')
def cluster():
  with slurm_cluster.running() as started:
    yield started


def kill(workdir, word: str) -> None:
  """SIGKILL to one process of a job's step."""
  victims = [
    process
    for process in psutil.process_iter(['cmdline'])
    if f'--workdir={workdir}' in (line := process.info['cmdline'] or [])
    or f'--registry={workdir}/registry' in line
    if word in line and line[0] == sys.executable
  ]
  assert victims
  os.kill(victims[-1].pid, signal.SIGKILL)


def test_a_job_comes_back_bit_for_bit(cluster, tmp_path):
  """Requeued, killed, and preempted by a job of a higher partition."""
  calm, run = tmp_path / 'calm', tmp_path / 'run'
  undisturbed = cluster.submit(calm, *TWO)
  assert cluster.wait_for_end(undisturbed).startswith('COMPLETED'), slurm_cluster.output(
    calm, undisturbed
  )
  job_id = cluster.submit(run, *TWO)
  cluster.wait_for_rows(job_id, run, 12 + 4)
  cluster.call('scontrol', 'requeue', job_id)
  cluster.wait_for_requeue(job_id)
  cluster.wait_for_rows(job_id, run, 12 + 7)
  kill(run, 'train')
  cluster.wait_for_requeue(job_id)
  cluster.wait_for_rows(job_id, run, 12 + 9)
  urgent = ['sbatch', '--partition=urgent', '--nodes=3', '--exclusive', '--output=/dev/null']
  subprocess.run(
    [*urgent, '--wait', '--wrap=sleep 1'], env=cluster.environ, check=True, timeout=300
  )
  cluster.wait_for_requeue(job_id)
  assert cluster.wait_for_end(job_id).startswith('COMPLETED'), slurm_cluster.output(run, job_id)
  job.assert_equal_runs(run, calm)
  said = slurm_cluster.output(run, job_id)
  assert [f'(restart {i} of at most 3)' in said for i in range(4)] == [True] * 4
  assert 'of the trainer, exit code 137' in said


def test_a_job_with_a_rollout_server_comes_back_and_its_accounts_add_up(cluster, tmp_path):
  run = tmp_path / 'run'
  job_id = cluster.submit(run, *TWO, *VLLM, '--config.stages.grpo.steps=100')
  cluster.wait_for_rows(job_id, run, 12 + 10)
  cluster.call('scontrol', 'requeue', job_id)
  cluster.wait_for_requeue(job_id)
  cluster.wait_for_rows(job_id, run, 12 + 30)
  kill(run, 'train')
  cluster.wait_for_requeue(job_id)
  cluster.wait_for_rows(job_id, run, 12 + 50)
  kill(run, 'serve')
  cluster.wait_for_requeue(job_id)
  assert cluster.wait_for_end(job_id).startswith('COMPLETED'), slurm_cluster.output(run, job_id)
  steps = [row['training/global_step'] for row in job.rows(run) if 'actor/pg_loss' in row]
  assert steps == list(range(13, 113))
  report = audit(run / 'replay')
  assert report.ok, report.lines
  assert report.states['trained'] == 100 * 6 * 4
  assert oct((run / 'registry' / 'key').stat().st_mode & 0o777) == '0o600'


def test_a_configuration_error_is_the_jobs_exit_code_and_starts_nothing_again(cluster, tmp_path):
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  (tmp_path / 'run' / 'config.json').write_text('not JSON')
  job_id = cluster.submit(tmp_path / 'run', '--cpus=1')
  assert cluster.wait_for_end(job_id).startswith('FAILED')
  assert cluster.exit_code(job_id) == 2, slurm_cluster.output(tmp_path / 'run', job_id)


@pytest.mark.parametrize('flag', ['--nodes=9', '--cpus=99'])
def test_a_job_that_no_node_could_run_is_refused_and_does_not_wait(cluster, tmp_path, flag):
  with pytest.raises(AssertionError, match='error: sbatch: Slurm would never start the job'):
    cluster.submit(tmp_path / 'run', flag)
  assert not cluster.call('squeue', '--noheader').strip()


def test_a_cancelled_job_commits_and_does_not_come_back(cluster, tmp_path):
  run = tmp_path / 'run'
  job_id = cluster.submit(run, *TWO, '--config.stages.grpo.steps=200')
  cluster.wait_for_rows(job_id, run, 12 + 2)
  cluster.call(sys.executable, 'launch/cluster/slurm.py', f'--cancel={job_id}')
  assert cluster.wait_for_end(job_id).startswith('FAILED')
  assert cluster.exit_code(job_id) == 143
  assert job.commits(run)[-1] >= 12
  assert 'committed in' in slurm_cluster.output(run, job_id)


def test_the_time_limit_ends_a_job_with_a_commit_and_it_comes_back(cluster, tmp_path):
  run = tmp_path / 'run'
  job_id = cluster.submit(run, *TWO, '--time_limit_s=60', '--grace_s=45', '--restarts=1')
  cluster.wait_for_requeue(job_id)
  cluster.wait(job_id, lambda state: state.startswith('RUNNING'))
  cluster.call('scontrol', 'update', f'jobid={job_id}', 'TimeLimit=60')
  assert cluster.wait_for_end(job_id).startswith('COMPLETED'), slurm_cluster.output(run, job_id)
  assert 'the time limit is near' in slurm_cluster.output(run, job_id)


ELEMENT = """
import os, pathlib, signal
mine = pathlib.Path(os.environ['SLURM_ARRAY_TASK_ID'])
starts = int(mine.read_text()) + 1 if mine.exists() else 1
mine.write_text(str(starts))
if mine.name == '2' and starts == 1:
  os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_array_runs_each_element_once_and_a_killed_one_again(cluster, tmp_path, monkeypatch):
  trainer = ProcessGroup(
    name='trainer', command=(sys.executable, '-c', ELEMENT), resources=ProcessResources(cpus=1)
  )
  array = Job(name='array', workdir=str(tmp_path), directory=str(tmp_path), groups=(trainer,))
  options = slurm.SlurmOptions(exclusive=False)
  for name in ('SLURM_CONF', 'PATH'):
    monkeypatch.setenv(name, cluster.environ[name])
  job_id = slurm.submit(slurm.array_text(array, 4, options, at_once=3), array, options)
  cluster.wait_for_requeue(f'{job_id}_2')
  states = cluster.wait(job_id, lambda states: not any(word in states for word in UNFINISHED))
  assert states.split() == ['COMPLETED', 'None'] * 4
  assert [(tmp_path / str(i)).read_text() for i in range(4)] == ['1', '1', '2', '1']
