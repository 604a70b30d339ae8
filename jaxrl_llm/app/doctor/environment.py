"""Checks of the machine: accelerators, vLLM's environment, shared memory, open files, cores and
disk space.
"""

from __future__ import annotations

import os
import pathlib
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import jax

from jaxrl_llm.app.composition.sharing import shares
from jaxrl_llm.app.composition.stages import policy_options
from jaxrl_llm.app.doctor.findings import Finding, failure, ok, warning
from jaxrl_llm.app.dry_run.programs import Held
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.server import check_transfer
from jaxrl_llm.rollout.vllm.spec import SHARED_MEMORY
from jaxrl_llm.weights.layout import dtype_of
from jaxrl_llm.weights.tables import entries

_GPUS = pathlib.Path('/proc/driver/nvidia/gpus')
_SLOW_ON_CPUS = 300_000_000
"""Number of parameters above which a step on CPUs takes minutes."""
_IMPORT_S = 300.0
"""Maximum time in seconds that importing vLLM may take."""
_VERSIONS = 2
"""Number of published versions whose files exist at the same time: the newest and the previous
one.
"""
_DESCRIPTORS = 256
"""Number of file descriptors that a run needs in addition to the descriptors for workers, servers
and requests.
"""
_EACH = 8
"""Number of file descriptors for each scorer worker and each server."""
_SPARE = 1.1
"""Multiple of the needed memory or disk space. The doctor warns if less is free."""


def accelerators(config: Config, parameters: int) -> Iterator[Finding]:
  """Checks that JAX uses the machine's GPUs, and that no large model is trained on CPUs.

  Args:
    parameters: number of the model's parameters.
  """
  devices = jax.devices()
  kind, platform = devices[0].device_kind, devices[0].platform
  result = f'{len(devices)} × {kind}'
  gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
  detail = dict(devices=len(devices), device_kind=kind, platform=platform)
  if platform == 'cpu' and gpus:
    yield warning(
      'accelerators',
      f'{result}, and the machine has {gpus} GPUs, which JAX does not use',
      "install JAX's plugin (pip install 'jax[cuda12]'), and do not set JAX_PLATFORMS=cpu",
      **detail,
    )
  elif platform == 'cpu' and parameters > _SLOW_ON_CPUS:
    yield warning(
      'accelerators',
      f'{result} for {parameters:,} parameters',
      'start it on a machine with GPUs or TPUs; a CPU takes minutes for each step',
      **detail,
    )
  else:
    yield ok('accelerators', result, **detail)


def servers(config: Config) -> Iterator[Finding]:
  """Checks that vLLM can be imported in its environment if the run starts servers."""
  vllm = config.rollout.vllm_servers
  if vllm is None:
    return
  if vllm.addresses:
    yield ok('vllm', f'attached servers at {", ".join(vllm.addresses)}; their owner starts them')
    return
  try:
    python = check_transfer(vllm)
  except UserError as error:
    result, _, remedy = str(error).rpartition('; ')
    yield failure('vllm', result, remedy)
    return
  try:
    imported = subprocess.run(
      [str(python), '-c', 'import vllm; print(vllm.__version__)'],
      capture_output=True,
      text=True,
      timeout=_IMPORT_S,
      stdin=subprocess.DEVNULL,
    )
  except subprocess.TimeoutExpired:
    remedy = 'check whether its disk is slow, or create it again with jaxrl install'
    yield failure('vllm', f'{python} does not import vLLM within {_IMPORT_S:g} s', remedy)
    return
  except OSError as error:
    yield failure('vllm', f'{python}: {error.strerror}', 'create the environment again')
    return
  if imported.returncode:
    lines = imported.stderr.strip().splitlines() or [f'exit code {imported.returncode}']
    yield failure(
      'vllm',
      f'{python} cannot import vLLM: {one_line(lines[-1])}',
      'create the environment again with `jaxrl install --environment=vllm`',
    )
  else:
    version = imported.stdout.strip().splitlines()[-1]
    yield ok('vllm', f'{version} in {vllm.environment}', version=version)


def publication_bytes(config: Config, spec: ModelSpec) -> int:
  """Returns the size in bytes of one published version of the whole policy."""
  dtype = config.rollout.vllm.dtype
  size = dtype_of(policy_options(config).dtype if dtype == 'policy' else dtype).itemsize
  return sum(size * _product(entry.shape) for entry in entries(spec))


def shared_memory(config: Config, spec: ModelSpec, free: int | None = None) -> Iterator[Finding]:
  """Checks that the directory through which weights are published has enough free space.

  Args:
    free: free space in bytes. If None, it is measured.
  """
  vllm = config.rollout.vllm_servers
  if vllm is None:
    return
  root = pathlib.Path(vllm.publish_dir or SHARED_MEMORY)
  needed = _VERSIONS * publication_bytes(config, spec)
  if not root.is_dir():
    yield failure(
      'shared_memory', f'{root} is missing', 'name a directory in rollout.vllm.publish_dir'
    )
    return
  free = shutil.disk_usage(root).free if free is None else free
  result = f'{free / 1e9:,.2f} GB free in {root}, two publications take {needed / 1e9:,.2f} GB'
  detail = dict(free_bytes=free, needed_bytes=needed)
  if free < needed:
    yield failure(
      'shared_memory',
      result,
      'enlarge it (mount -o remount,size=…; docker run --shm-size=…), or name a directory in '
      'rollout.vllm.publish_dir',
      **detail,
    )
  elif free < needed * _SPARE:
    yield warning('shared_memory', result, 'free some of it before the run', **detail)
  else:
    yield ok('shared_memory', result, **detail)


def sharing(config: Config, devices: Sequence[jax.Device]) -> Iterator[Finding]:
  """Checks that the trainer and its servers together do not reserve more memory than a GPU has.

  Only servers that the run starts itself and that share GPUs with the trainer count.

  Args:
    devices: devices of the trainer.
  """
  found = shares(config)
  if found is None or devices[0].platform != 'gpu':
    return
  detail = dict(trainer_share=found.trainer, servers=found.servers, server_share=found.each)
  if found.servers and found.total > 1:
    yield failure(
      'sharing',
      str(found),
      'give the servers GPUs of their own (rollout.vllm.devices, CUDA_VISIBLE_DEVICES), or lower '
      'rollout.vllm.args.gpu_memory_utilization and XLA_PYTHON_CLIENT_MEM_FRACTION',
      **detail,
    )
  else:
    yield ok('sharing', str(found), **detail)


def descriptors(config: Config, limit: int | None = None) -> Iterator[Finding]:
  """Checks that the limit on open files suffices for the run's workers, servers and requests.

  Args:
    limit: maximum number of open files. If None, it is the soft limit of this process.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  limit = limit if limit is not None else soft if soft != resource.RLIM_INFINITY else 1 << 30
  needed = _DESCRIPTORS + _EACH * config.rewards.workers
  if vllm := config.rollout.vllm_servers:
    needed += (len(vllm.addresses) or vllm.servers) * (vllm.max_in_flight + _EACH)
  result = f'at most {limit:,} open files, the run may open {needed:,}'
  detail = dict(limit=limit, needed=needed)
  if limit < needed:
    yield failure(
      'descriptors', result, f'ulimit -n {max(needed, 4096)} (hard limit {hard:,})', **detail
    )
  else:
    yield ok('descriptors', result, **detail)


def cores(config: Config) -> Iterator[Finding]:
  """Checks that there are at least as many cores as scorer workers and explorers of the run."""
  count = len(os.sched_getaffinity(0))
  explorers = config.rollout.explorers.processes if config.rollout.explorers is not None else 0
  workers = config.rewards.workers if config.rewards.scorers else 0
  result = f'{count} for {workers} scorer workers' + (
    f', {explorers} explorers' if explorers else ''
  )
  detail = dict(cores=count, scorer_workers=workers, explorers=explorers)
  if workers + explorers > count:
    yield warning(
      'cores',
      f'{result}: more processes than cores',
      'lower rewards.workers or rollout.explorers.processes, or give the job more cores',
      **detail,
    )
  else:
    yield ok('cores', result, **detail)


def disk(
  config: Config, workdir: pathlib.Path, roles: Sequence[Held], free: int | None = None
) -> Iterator[Finding]:
  """Checks that the run directory can be written and has space for the commits and the export.

  Args:
    roles: memory of each role's arrays (such as 'policy'), from which the size of a commit follows.
      Gradients, base weights and the copy that a commit in flight keeps in memory do not count.
    free: free space in bytes. If None, it is measured.
  """
  place = workdir.absolute()
  while not place.exists():
    place = place.parent
  uncommitted = ('gradients', 'base', 'commit in flight')
  committed = sum(role.whole for role in roles if role.role not in uncommitted)
  exported = sum(role.whole for role in roles if role.role in ('policy', 'base', 'critic'))
  # Count the newest `keep` commits, the best, and the one that is being written. Commits that are
  # kept for the `init_from` of later stages do not count.
  needed = committed * (config.checkpoint.keep + 2) + exported
  free = shutil.disk_usage(place).free if free is None else free
  result = (
    f'{free / 1e9:,.1f} GB free at {place}; {config.checkpoint.keep + 2} commits and the export '
    f'take {needed / 1e9:,.1f} GB'
  )
  detail = dict(free_bytes=free, needed_bytes=needed, commit_bytes=committed)
  remedy = 'free space, lower checkpoint.keep, or choose another --workdir'
  if not os.access(place, os.W_OK):
    yield failure('disk', f'{place} cannot be written', 'choose another --workdir', **detail)
  elif free < needed:
    yield failure('disk', result, remedy, **detail)
  elif free < needed * _SPARE:
    yield warning('disk', result, remedy, **detail)
  else:
    yield ok('disk', result, **detail)


def _product(shape: Sequence[int]) -> int:
  size = 1
  for axis in shape:
    size *= axis
  return size
