"""Eight processes on two hosts (network namespaces), which detect their job from the variables of a
system, in a mesh of two slices: the gradients of one process.
"""

import contextlib
import json
import subprocess
import sys

import job
import namespaces
import numpy as np
import pytest
from paths import SUPPORT

from jaxrl_llm.replay.browse import open_copy

pytestmark = pytest.mark.acceptance
cabled = pytest.fixture(namespaces.cabled)

HOSTS, EACH = (namespaces.SERVING, namespaces.CALLING), 4


def slurm(process):
  """What `srun --ntasks=8 --ntasks-per-node=4` sets."""
  return {
    'SLURM_JOB_ID': '4711',
    'SLURM_NTASKS': '8',
    'SLURM_STEP_ID': '0',
    'SLURM_STEP_NODELIST': ','.join(HOSTS),
    'SLURM_STEP_NUM_TASKS': '8',
    'SLURM_STEP_TASKS_PER_NODE': f'{EACH}(x2)',
    'SLURM_PROCID': str(process),
    'SLURM_LOCALID': str(process % EACH),
    'SLURM_NODEID': str(process // EACH),
  }


def jobset(process):
  """What a JobSet's pods get: the manifest's variables and the index of the Indexed Job."""
  return {
    'KUBERNETES_SERVICE_HOST': '10.0.0.1',
    'JAX_COORDINATOR_ADDRESS': f'{HOSTS[0]}:8476',
    'JAX_NUM_PROCESSES': '8',
    'JOB_COMPLETION_INDEX': str(process),
  }


@pytest.fixture(scope='module')
def recorded(tmp_path_factory):
  """A finished run of one process, and a file of two plans of each of its stages."""
  file = tmp_path_factory.mktemp('recorded') / 'plans.json'
  with contextlib.closing(open_copy(job.quick_run() / 'replay', file.parent / 'copy')) as store:
    plans = store.plans()
  steps = sorted(plans)
  file.write_text(json.dumps([plans[step] for step in (*steps[:2], *steps[-2:])]))
  return job.quick_run(), file


def command(recorded, out, mesh):
  script = str(SUPPORT / 'gradients.py')
  return [sys.executable, script, *map(str, recorded), str(out), json.dumps(mesh)]


@pytest.fixture(scope='module')
def alone(recorded, tmp_path_factory):
  out = tmp_path_factory.mktemp('alone') / 'out.npz'
  subprocess.run(
    command(recorded, out, {}), cwd=job.ROOT, env=job.environment(), check=True, timeout=600
  )
  return dict(np.load(out))


@pytest.mark.parametrize('system', [slurm, jobset])
def test_eight_processes_on_two_hosts_compute_the_gradients_of_one(
  system, recorded, alone, cabled, tmp_path
):
  mesh = {'data': 2, 'fsdp': 2, 'tensor': 2, 'slices': 2}
  processes = []
  for process in range(len(HOSTS) * EACH):
    words = cabled.command(process // EACH, *command(recorded, tmp_path / 'out.npz', mesh))
    env = job.environment(NPROC='1', **system(process))
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    processes.append(subprocess.Popen(words, cwd=job.ROOT, env=env, **pipes))
  try:
    said = [process.communicate(timeout=900)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert [process.returncode for process in processes] == [0] * 8, said
  assert "'data': 2, 'fsdp': 2, 'sequence': 1, 'tensor': 2" in said[0]
  assert ('Slurm' if system is slurm else 'JOB_COMPLETION_INDEX') in said[0]
  assert not list(tmp_path.glob('left-*'))
  found = dict(np.load(tmp_path / 'out.npz'))
  assert found.keys() == alone.keys() and len([key for key in found if '/loss' in key]) == 4
  for name, wanted in alone.items():
    if name.endswith('/loss'):
      assert abs(found[name] - wanted) <= 1e-6 * max(1.0, abs(wanted)), name
    elif np.linalg.norm(wanted) > 1e-7:
      assert np.linalg.norm(found[name] - wanted) <= 1e-5 * np.linalg.norm(wanted), name
