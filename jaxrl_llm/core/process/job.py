"""Finds the place of this process in a job of several processes, from flags and the environment.

Three facts describe the place: the address of process 0, the number of processes, and the number of
this process. Each comes from a flag, else from JAX's variables, else from the system that started
the process: Slurm's `srun`, MPI, Kubernetes or Cloud TPU. In a `JobDescription`, a fact is None if
`jax.distributed.initialize` has to find it; the description then names the method by which JAX does
so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.process.xla_flags import without_added

ADDRESS, PORT = 'JAX_COORDINATOR_ADDRESS', 'JAX_COORDINATOR_PORT'
COUNT, INDEX = 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
LOCAL_DEVICES = 'JAX_LOCAL_DEVICE_IDS'
_FLAGS = {ADDRESS: '--coordinator', COUNT: '--num_processes', INDEX: '--process_id'}
_K8S_INDEX = 'JOB_COMPLETION_INDEX'
_VISIBLE = ('CUDA_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES')
_PLACES = (
  *(ADDRESS, PORT, COUNT, INDEX, LOCAL_DEVICES, 'JAX_PARTITION_INDEX', 'JAX_SLICE_INDEX'),
  *('SLURM_PROCID', 'SLURM_LOCALID', 'SLURM_NODEID', 'SLURM_NPROCS', 'SLURM_TASKS_PER_NODE'),
  *('CLOUD_TPU_TASK_ID', _K8S_INDEX),
)
_PREFIXES = (
  *('SLURM_STEP', 'SLURM_NTASKS', 'OMPI_', 'PMIX_', 'PMI_', 'PRTE_', 'MPI_LOCAL', 'HYDI_'),
  *('MEGASCALE_', 'TPU_WORKER_', 'TPU_PROCESS_'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobDescription:
  """Place of this process in a job of several processes."""

  source: str
  """Origin of the description, for messages, such as 'Slurm'."""
  coordinator: str | None
  """HOST:PORT of process 0; if None, JAX finds it by `method`."""
  processes: int | None
  """Number of processes, at least 2; if None, JAX finds it by `method`."""
  process: int | None
  """Number of this process, from 0; if None, JAX finds it by `method`."""
  method: str | None = None
  """Value of `cluster_detection_method` for `jax.distributed.initialize`, which then finds the
  facts that are None. None if all facts are known.
  """
  local_device: int | None = None
  """Number, on this host, of the only GPU that this process may use; if None, the process may use
  all GPUs that it sees.
  """

  def __str__(self) -> str:
    count = 'the' if self.processes is None else f'the {self.processes}'
    where = f' at {self.coordinator}' if self.coordinator else ''
    return f'{count} processes of the job{where} ({self.source})'


class _Given(NamedTuple):
  """Value of a fact about the job, and the name of the flag or variable that gives it."""

  source: str
  value: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
  """Place in a job that a system such as Slurm gave to this process."""

  source: str
  processes: int | None
  process: int | None
  method: str | None
  """JAX's method to find the address; None if JAX has no method for this system."""
  remedy: str = ''
  """First part of the remedy in the error message for an unknown address."""
  local: int | None = None
  """Number of this process on its host."""
  beside: int | None = None
  """Number of the job's processes on the host of this process, including this process."""


def describe(
  environment: Mapping[str, str],
  *,
  coordinator: str | None = None,
  processes: int | None = None,
  process: int | None = None,
  has_tpu: bool = False,
  has_mpi4py: bool = False,
) -> JobDescription | None:
  """Returns the place of this process in its job, or None if the process trains alone.

  Args:
    environment: variables of the process.
    coordinator, processes, process: values of the flags, which override the environment; None for
      flags that are not set.
    has_tpu: whether the machine has TPU chips, so that JAX may ask Google's metadata server.
    has_mpi4py: whether mpi4py is installed, which lets JAX find the address under any MPI.

  Raises:
    UserError: a fact is missing or invalid.
  """
  given = {
    ADDRESS: _address(environment, coordinator),
    COUNT: _given(environment, COUNT, processes),
    INDEX: _given(environment, INDEX, process),
  }
  count, index = given[COUNT], given[INDEX]
  if count is not None and count.value == 1 and (index is None or index.value == 0):
    return None
  try:
    place = _place(environment, has_tpu=has_tpu, has_mpi4py=has_mpi4py)
  except UserError:
    if None in given.values():
      raise
    place = None  # The flags and JAX's variables already give all facts.
  if not any(given.values()):
    return _detected(place, environment)
  if place is None and index is None and _K8S_INDEX in environment:
    given[INDEX] = _Given(_K8S_INDEX, _number(environment, _K8S_INDEX))
  return _merged(given, place, environment)


def unjoined(environment: Mapping[str, str]) -> str | None:
  """Returns a message if this process trains alone but was perhaps meant to join a job, otherwise
  None.

  Args:
    environment: variables of the process, for which `describe` returns None.
  """
  if _K8S_INDEX in environment:
    return (
      f'{_K8S_INDEX}={environment[_K8S_INDEX]}, but neither {ADDRESS} nor {COUNT} is set, so this '
      'pod trains alone; set both in the manifest if its pods form one job'
    )
  tasks = environment.get('SLURM_NTASKS', '1')
  if 'SLURM_STEP_NODELIST' not in environment and tasks != '1':
    return (
      f'SLURM_NTASKS={tasks}, but srun did not start this process, so it trains alone; start it '
      'with srun if the tasks form one job'
    )
  return None


def outside(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns the variables without those that give a process its place in a job, and without the
  compiler flags that the program has added.

  Child processes (servers, explorers, scorers) get the result as their environment. Otherwise, they
  would take the place of this process in the job, or abort because their compiler does not know a
  flag.
  """
  kept = without_added(environment)
  return {name: value for name, value in kept.items() if not is_place(name)}


def is_place(name: str) -> bool:
  """Returns whether the variable gives a process its place in a job."""
  return name in _PLACES or name.startswith(_PREFIXES)


def _detected(place: _Place | None, environment: Mapping[str, str]) -> JobDescription | None:
  """Returns the place of this process if neither flags nor JAX's variables describe the job, so
  that only the system's variables count. Returns None if the process trains alone.
  """
  if place is None or place.processes == 1:
    return None
  if place.method is None:
    raise UserError(
      f'{place.source}: process {place.process} of {place.processes}, but no variable has the '
      f'address of process 0; {place.remedy}set {ADDRESS}=HOST:PORT'
    )
  _check_index(place.source, place.process, place.processes)
  return JobDescription(
    source=place.source,
    coordinator=None,
    processes=place.processes,
    process=place.process,
    method=place.method,
    local_device=_local_device(place, environment),
  )


def _merged(
  given: Mapping[str, _Given | None], place: _Place | None, environment: Mapping[str, str]
) -> JobDescription | None:
  """Returns the place that flags and JAX's variables describe, completed with the system's facts.

  Returns None if the job has only one process. Raises UserError if a fact is missing.
  """
  names = ', '.join(fact.source for fact in given.values() if fact is not None)
  missing = [name for name, fact in given.items() if fact is None]
  if place is not None and place.method is not None:
    missing = []  # JAX itself determines the missing facts.
  elif place is not None:
    missing = [name for name in missing if name == ADDRESS]
  if missing:
    wanted = ' and '.join(f'{name} ({_FLAGS[name]})' for name in missing)
    raise UserError(
      f'{names}: set, but not {wanted}, which neither a Slurm step nor MPI, Kubernetes or a TPU '
      'supplies; set all three, or none to train alone'
    )
  address, count, index = (
    None if fact is None else fact.value for fact in (given[ADDRESS], given[COUNT], given[INDEX])
  )
  completed = place is not None and None in (address, count, index)
  if completed:
    count = place.processes if count is None else count
    index = place.process if index is None else index
  _check_index(names, index, count)
  if count == 1:
    return None
  return JobDescription(
    source=f'{names}, {place.source}' if completed else names,
    coordinator=address,
    processes=count,
    process=index,
    method=place.method if completed else None,
    local_device=_local_device(place, environment) if place is not None else None,
  )


def _check_index(source: str, index: int | None, count: int | None) -> None:
  if count is not None and index is not None and index >= count:
    raise UserError(
      f'{source}: process {index} of {count} processes; wanted a number from 0 to {count - 1}'
    )


def _place(environment: Mapping[str, str], *, has_tpu: bool, has_mpi4py: bool) -> _Place | None:
  """Returns the place that the innermost system gave to this process; None if no system that this
  module knows started the process.

  MPI comes before Slurm: an MPI launcher may run its own processes as a step of Slurm. Slurm's
  variables then describe the launcher's processes, not the job's.
  """
  return (
    _open_mpi(environment, has_mpi4py)
    or _mpich(environment, has_mpi4py)
    or _slurm(environment)
    or _tpu(environment, has_tpu)
  )


def _open_mpi(environment: Mapping[str, str], has_mpi4py: bool) -> _Place | None:
  if not any(name.startswith('OMPI_COMM_WORLD_') for name in environment):
    return None
  size, rank = 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK'
  local, beside = 'OMPI_COMM_WORLD_LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_SIZE'
  count, index, local_index, local_count = _group(
    environment, 'Open MPI', (size, rank, local, beside)
  )
  # Open MPI before version 5 gives the address of mpirun's host in this variable.
  launcher = 'ompi' if 'OMPI_MCA_orte_hnp_uri' in environment else None
  return _Place(
    source='Open MPI',
    processes=count,
    process=index,
    method=launcher or ('mpi4py' if has_mpi4py else None),
    remedy='install mpi4py, or ',
    local=local_index,
    beside=local_count,
  )


def _mpich(environment: Mapping[str, str], has_mpi4py: bool) -> _Place | None:
  # PMI_RANK alone does not identify MPICH, because `srun --mpi=pmi2` sets it as well.
  if 'MPI_LOCALNRANKS' not in environment or 'PMI_RANK' not in environment:
    return None
  count, index, local_index, local_count = _group(
    environment, 'MPICH', ('PMI_SIZE', 'PMI_RANK', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS')
  )
  return _Place(
    source='MPICH',
    processes=count,
    process=index,
    method='mpi4py' if has_mpi4py else None,
    remedy='install mpi4py, or ',
    local=local_index,
    beside=local_count,
  )


def _slurm(environment: Mapping[str, str]) -> _Place | None:
  # Slurm starts the processes of a job as the tasks of a step. Batch scripts and salloc shells run
  # outside any step, or in a step with a single task.
  if 'SLURM_STEP_NODELIST' not in environment:
    return None
  # In a salloc shell, SLURM_NTASKS is the number of tasks of the job, not of the step.
  tasks = 'SLURM_STEP_NUM_TASKS' if 'SLURM_STEP_NUM_TASKS' in environment else 'SLURM_NTASKS'
  if environment.get(tasks) == '1':
    return _Place(source='Slurm', processes=1, process=0, method='slurm')
  _, count, index, local = _group(
    environment, 'Slurm', ('SLURM_JOB_ID', tasks, 'SLURM_PROCID', 'SLURM_LOCALID')
  )
  return _Place(
    source='Slurm',
    processes=count,
    process=index,
    method='slurm',
    local=local,
    beside=_tasks_here(environment),
  )


def _tasks_here(environment: Mapping[str, str]) -> int | None:
  """Returns the number of the step's tasks on this node; None if it is not known.

  SLURM_STEP_TASKS_PER_NODE is '2(x3),1' for four nodes with 2, 2, 2 and 1 tasks.
  """
  nodes: list[int] = []
  for part in environment.get('SLURM_STEP_TASKS_PER_NODE', '').split(','):
    match = re.fullmatch(r'(\d{1,6})(?:\(x(\d{1,6})\))?', part)
    if not match:
      return None
    nodes += [int(match[1])] * int(match[2] or 1)
  node = environment.get('SLURM_NODEID', '')
  if len(set(nodes)) == 1:
    return nodes[0]
  return nodes[int(node)] if node.isdecimal() and int(node) < len(nodes) else None


def _tpu(environment: Mapping[str, str], has_tpu: bool) -> _Place | None:
  if not has_tpu:
    return None
  hosts_name = next(
    (name for name in ('TPU_PROCESS_ADDRESSES', 'TPU_WORKER_HOSTNAMES') if name in environment),
    None,
  )
  if hosts_name is None:
    if 'TPU_SKIP_MDS_QUERY' in environment:
      return None
    # JAX asks the metadata server, which also answers on a TPU with a single host.
    return _Place(source='TPU metadata', processes=None, process=None, method='gcetpu')
  hosts = len(environment[hosts_name].split(','))
  slices, this = 1, 0
  if 'MEGASCALE_NUM_SLICES' in environment or 'MEGASCALE_SLICE_ID' in environment:
    slices, this = _group(environment, 'TPU slices', ('MEGASCALE_NUM_SLICES', 'MEGASCALE_SLICE_ID'))
    if slices > 1:
      _group(environment, 'TPU slices', (), others=('MEGASCALE_COORDINATOR_ADDRESS',))
  if hosts * slices == 1:
    return _Place(source='TPU', processes=1, process=0, method='gketpu')
  (worker,) = _group(environment, 'TPU', ('TPU_WORKER_ID',))
  return _Place(
    source='TPU', processes=hosts * slices, process=worker + hosts * this, method='gketpu'
  )


def _group(
  environment: Mapping[str, str], source: str, names: tuple[str, ...], others: tuple[str, ...] = ()
) -> list[int]:
  """Returns the numbers in the variables `names`, which a system sets together.

  Raises:
    UserError: one of `names` or `others` is missing, or one of `names` is not a number.
  """
  missing = [name for name in (*names, *others) if not environment.get(name)]
  if missing:
    raise UserError(
      f'{source}: {", ".join(missing)} missing, although its other variables are set; use a '
      f'launcher that sets all of them, or set {ADDRESS}, {COUNT} and {INDEX}'
    )
  return [_number(environment, name) for name in names]


def _number(environment: Mapping[str, str], name: str) -> int:
  value = environment[name].strip()
  if not re.fullmatch(r'\d{1,18}', value, re.ASCII):
    raise UserError(f'{name}={environment[name]!r:.60}: wanted an integer of at least 0')
  return int(value)


def _given(environment: Mapping[str, str], name: str, flag: int | None) -> _Given | None:
  """Returns the number that a flag or JAX's variable gives; None if neither does."""
  source = name if flag is None else _FLAGS[name]
  if flag is None:
    if not environment.get(name):
      return None
    flag = _number(environment, name)
  least = 1 if name == COUNT else 0
  if flag < least:
    raise UserError(f'{source}: {flag}, wanted at least {least}')
  return _Given(source, flag)


def _address(environment: Mapping[str, str], flag: str | None) -> _Given | None:
  """Returns the address that a flag or JAX's variable gives; None if neither does."""
  source, value = (_FLAGS[ADDRESS], flag) if flag else (ADDRESS, environment.get(ADDRESS))
  if not value:
    return None
  if ':' not in value and environment.get(PORT):
    value = f'{value}:{environment[PORT]}'
  match = re.fullmatch(r'(?:[\w.\-]+|\[[0-9a-fA-F:.%\w]+\]):(\d{1,5})', value, re.ASCII)
  if not match or not 0 < int(match[1]) < 1 << 16:
    raise UserError(
      f'{source}={value!r:.200}: wanted HOST:PORT of process 0, such as node1:8476 or [::1]:8476'
    )
  return _Given(source, value)


def _local_device(place: _Place, environment: Mapping[str, str]) -> int | None:
  """Returns the number of the GPU for a process that shares its host with others.

  The result is None if the process may use all GPUs that it sees.
  """
  bound = any(environment.get(name) and ',' not in environment[name] for name in _VISIBLE)
  if place.local is None or place.beside == 1 or bound:
    return None
  return place.local
