"""A table of environments: the place in a job that each describes, or the one line that it gets."""

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.process.job import describe, outside, unjoined

JAX = {
  'JAX_COORDINATOR_ADDRESS': 'node1:8476',
  'JAX_NUM_PROCESSES': '4',
  'JAX_PROCESS_ID': '3',
}
SALLOC = {'SLURM_JOB_ID': '77', 'SLURM_JOB_NODELIST': 'node[1-2]', 'SLURM_NTASKS': '4'}
SCRIPT = {**SALLOC, 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0', 'SLURM_NODEID': '0'}
SRUN = {
  **SCRIPT,
  'SLURM_STEP_ID': '0',
  'SLURM_STEP_NODELIST': 'node[1-2]',
  'SLURM_STEP_NUM_TASKS': '4',
  'SLURM_STEP_TASKS_PER_NODE': '2(x2)',
  'SLURM_PROCID': '3',
  'SLURM_LOCALID': '1',
  'SLURM_NODEID': '1',
}
SHELL = {**SRUN, 'SLURM_STEP_ID': '4294967290', 'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0'}
OPEN_MPI = {
  'OMPI_COMM_WORLD_SIZE': '4',
  'OMPI_COMM_WORLD_RANK': '2',
  'OMPI_COMM_WORLD_LOCAL_RANK': '0',
  'OMPI_COMM_WORLD_LOCAL_SIZE': '1',
}
OPEN_MPI_4 = {**OPEN_MPI, 'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1:34911'}
MPICH = {'PMI_SIZE': '4', 'PMI_RANK': '1', 'MPI_LOCALRANKID': '1', 'MPI_LOCALNRANKS': '4'}
POD = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '2'}
JOBSET = {
  **POD,
  'JAX_COORDINATOR_ADDRESS': 'run-trainer-0-0.run:8476',
  'JAX_NUM_PROCESSES': '4',
}
GKE = {'TPU_WORKER_HOSTNAMES': 'a,b', 'TPU_WORKER_ID': '1'}
SLICES = {
  **GKE,
  'MEGASCALE_NUM_SLICES': '2',
  'MEGASCALE_SLICE_ID': '1',
  'MEGASCALE_COORDINATOR_ADDRESS': 'run-slice-0-0.run:8080',
}


def place(environment, **facts):
  """(Address, processes, this one, JAX's method, the only GPU)."""
  found = describe(environment, **facts)
  if found is None:
    return None
  return found.coordinator, found.processes, found.process, found.method, found.local_device


@pytest.mark.parametrize(
  ('environment', 'facts', 'wanted'),
  [
    ({}, {}, None),
    (JAX, {}, ('node1:8476', 4, 3, None, None)),
    (JAX, {'process': 0}, ('node1:8476', 4, 0, None, None)),
    (
      {},
      {'coordinator': '[::1]:1', 'processes': 2, 'process': 1},
      ('[::1]:1', 2, 1, None, None),
    ),
    (
      {**JAX, 'JAX_COORDINATOR_ADDRESS': 'a', 'JAX_COORDINATOR_PORT': '7'},
      {},
      ('a:7', 4, 3, None, None),
    ),
    ({'JAX_NUM_PROCESSES': '1'}, {}, None),
    ({**JAX, 'JAX_NUM_PROCESSES': '1', 'JAX_PROCESS_ID': '0'}, {}, None),
    ({'JAX_COORDINATOR_ADDRESS': ''}, {}, None),
    # Slurm
    (SALLOC, {}, None),
    (SCRIPT, {}, None),
    (SHELL, {}, None),
    (SRUN, {}, (None, 4, 3, 'slurm', 1)),
    ({**SRUN, 'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0'}, {}, None),
    ({**SRUN, 'SLURM_STEP_TASKS_PER_NODE': '3,1'}, {}, (None, 4, 3, 'slurm', None)),
    ({**SRUN, 'CUDA_VISIBLE_DEVICES': '0'}, {}, (None, 4, 3, 'slurm', None)),
    ({**SRUN, 'CUDA_VISIBLE_DEVICES': '0,1'}, {}, (None, 4, 3, 'slurm', 1)),
    (SRUN | {'JAX_COORDINATOR_ADDRESS': 'ib1:1'}, {}, ('ib1:1', 4, 3, 'slurm', 1)),
    (SRUN | JAX | {'JAX_PROCESS_ID': '1'}, {}, ('node1:8476', 4, 1, None, 1)),
    (SRUN, {'processes': 1}, None),
    ({**SRUN, 'SLURM_PROCID': 'x', **JAX}, {}, ('node1:8476', 4, 3, None, None)),
    # MPI
    (OPEN_MPI_4, {}, (None, 4, 2, 'ompi', None)),
    (OPEN_MPI, {'has_mpi4py': True}, (None, 4, 2, 'mpi4py', None)),
    (OPEN_MPI, {'coordinator': 'a:1'}, ('a:1', 4, 2, None, None)),
    ({**OPEN_MPI, 'OMPI_COMM_WORLD_SIZE': '1', 'OMPI_COMM_WORLD_RANK': '0'}, {}, None),
    (SRUN | OPEN_MPI_4, {}, (None, 4, 2, 'ompi', None)),
    (MPICH, {'has_mpi4py': True}, (None, 4, 1, 'mpi4py', 1)),
    (SRUN | {'PMI_SIZE': '4', 'PMI_RANK': '3'}, {}, (None, 4, 3, 'slurm', 1)),
    # Kubernetes
    (POD, {}, None),
    (JOBSET, {}, ('run-trainer-0-0.run:8476', 4, 2, None, None)),
    (JOBSET | {'JAX_PROCESS_ID': '0'}, {}, ('run-trainer-0-0.run:8476', 4, 0, None, None)),
    # Cloud TPU
    (GKE, {}, None),
    (GKE, {'has_tpu': True}, (None, 2, 1, 'gketpu', None)),
    ({'TPU_WORKER_HOSTNAMES': 'localhost'}, {'has_tpu': True}, None),
    (SLICES, {'has_tpu': True}, (None, 4, 3, 'gketpu', None)),
    (SLICES | JOBSET, {'has_tpu': True}, ('run-trainer-0-0.run:8476', 4, 3, 'gketpu', None)),
    ({}, {'has_tpu': True}, (None, None, None, 'gcetpu', None)),
    ({'TPU_SKIP_MDS_QUERY': '1'}, {'has_tpu': True}, None),
    (JAX, {'has_tpu': True}, ('node1:8476', 4, 3, None, None)),
    ({}, {'has_tpu': True, 'coordinator': 'a:1'}, ('a:1', None, None, 'gcetpu', None)),
  ],
)
def test_the_place_of_a_process(environment, facts, wanted):
  assert place(environment, **facts) == wanted


@pytest.mark.parametrize(
  ('environment', 'facts', 'words'),
  [
    (
      {'JAX_COORDINATOR_ADDRESS': 'a:1'},
      {},
      'JAX_COORDINATOR_ADDRESS: set, but not JAX_NUM_PROCESSES (--num_processes) and '
      'JAX_PROCESS_ID (--process_id),',
    ),
    ({'JAX_NUM_PROCESSES': '2'}, {}, 'set, but not JAX_COORDINATOR_ADDRESS (--coordinator) and'),
    ({}, {'process': 0}, '--process_id: set, but not JAX_COORDINATOR_ADDRESS'),
    ({**JAX, 'JAX_PROCESS_ID': '4'}, {}, 'process 4 of 4 processes; wanted a number from 0 to 3'),
    ({**JAX, 'JAX_NUM_PROCESSES': 'four'}, {}, "JAX_NUM_PROCESSES='four': wanted an integer"),
    ({**JAX, 'JAX_NUM_PROCESSES': '0'}, {}, 'JAX_NUM_PROCESSES: 0, wanted at least 1'),
    ({**JAX, 'JAX_PROCESS_ID': '-1'}, {}, "JAX_PROCESS_ID='-1': wanted an integer"),
    ({**JAX, 'JAX_PROCESS_ID': '٣'}, {}, 'wanted an integer'),
    ({**JAX, 'JAX_NUM_PROCESSES': '9' * 5000}, {}, 'wanted an integer'),
    (JAX, {'coordinator': 'node1'}, "--coordinator='node1': wanted HOST:PORT"),
    (JAX, {'coordinator': 'node1:99999'}, 'wanted HOST:PORT'),
    ({**JAX, 'JAX_COORDINATOR_ADDRESS': 'a b:1\n'}, {}, 'wanted HOST:PORT'),
    ({**SRUN, 'SLURM_PROCID': '4'}, {'coordinator': 'a:1'}, 'process 4 of 4'),
    ({**SRUN, 'SLURM_PROCID': '4'}, {}, 'process 4 of 4'),
    ({**SRUN, 'SLURM_PROCID': ''}, {}, 'Slurm: SLURM_PROCID missing, although its other variables'),
    ({**SRUN, 'SLURM_STEP_NUM_TASKS': 'many'}, {}, "SLURM_STEP_NUM_TASKS='many'"),
    (OPEN_MPI, {}, 'Open MPI: process 2 of 4, but no variable has the address of process 0'),
    ({'OMPI_COMM_WORLD_SIZE': '4'}, {}, 'Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL'),
    (MPICH, {}, 'install mpi4py, or set JAX_COORDINATOR_ADDRESS=HOST:PORT'),
    ({**JOBSET, 'JOB_COMPLETION_INDEX': '4'}, {}, 'process 4 of 4'),
    ({**POD, 'JAX_NUM_PROCESSES': '4'}, {}, 'set, but not JAX_COORDINATOR_ADDRESS'),
    ({'TPU_WORKER_HOSTNAMES': 'a,b'}, {'has_tpu': True}, 'TPU: TPU_WORKER_ID missing'),
    (
      {k: v for k, v in SLICES.items() if k != 'MEGASCALE_COORDINATOR_ADDRESS'},
      {'has_tpu': True},
      'TPU slices: MEGASCALE_COORDINATOR_ADDRESS missing',
    ),
    ({**SLICES, 'MEGASCALE_SLICE_ID': '2'}, {'has_tpu': True}, 'process 5 of 4'),
  ],
)
def test_half_a_place_and_nonsense_are_one_line(environment, facts, words):
  with pytest.raises(UserError) as raised:
    describe(environment, **facts)
  assert words in str(raised.value) and '\n' not in str(raised.value)


@pytest.mark.parametrize(
  ('environment', 'words'),
  [
    ({}, None),
    (SHELL, None),
    ({'SLURM_NTASKS': '1'}, None),
    (SCRIPT, 'SLURM_NTASKS=4, but srun did not start this process, so it trains alone'),
    (POD, 'JOB_COMPLETION_INDEX=2, but neither JAX_COORDINATOR_ADDRESS nor JAX_NUM_PROCESSES'),
  ],
)
def test_a_process_alone_says_what_it_was_perhaps_meant_for(environment, words):
  found = unjoined(environment)
  assert found == words or words in found


@pytest.mark.parametrize('environment', [JAX, SRUN, OPEN_MPI_4, MPICH, JOBSET, SLICES])
def test_children_are_outside_of_the_job(environment):
  kept = outside({**environment, 'PATH': '/bin', 'SLURM_TMPDIR': '/tmp/77'})
  assert kept['PATH'] == '/bin' and kept['SLURM_TMPDIR'] == '/tmp/77'
  assert describe(kept, has_mpi4py=True) is None
  assert describe({**kept, 'TPU_SKIP_MDS_QUERY': '1'}, has_tpu=True) is None
