"""Joins and leaves the `jax.distributed` job that the environment or the command line describes."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import secrets
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.process.job import LOCAL_DEVICES, JobDescription, describe
from jaxrl_llm.core.process.xla_flags import has_tpu
from jaxrl_llm.core.waits import watched
from jaxrl_llm.parallel.coordination import CoordinationConfig
from jaxrl_llm.parallel.mesh import available_devices
from jaxrl_llm.parallel.watch import PeerWatch


def this_job(
  *, coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> JobDescription | None:
  """Returns the description of this process's job, or None if the process trains alone.

  Args:
    coordinator, processes, process: values of the command-line flags; None for flags that are not
      given.

  Raises:
    UserError: the description of the job is incomplete or contradictory.
  """
  return describe(
    os.environ,
    coordinator=coordinator,
    processes=processes,
    process=process,
    has_tpu=has_tpu(os.environ),
    has_mpi4py=importlib.util.find_spec('mpi4py') is not None,
  )


class Membership:
  """Membership of this process in a job that it has joined."""

  def __init__(self, config: CoordinationConfig):
    self._config = config
    self._watch = PeerWatch(config.heartbeat_s)

  def leave(self, workdir: pathlib.Path) -> None:
    """Leaves the job. Process 0 leaves last, because the other processes abort when the coordinator
    in process 0 goes away.

    Args:
      workdir: directory that all processes share. Each process other than 0 creates a file there
        when it has left.
    """
    count, index = jax.process_count(), jax.process_index()
    waits_for = 'the other processes of the job to finish'
    self._watch.stop()
    with watched(
      name='leave', owner=f'process {index}', waits_for=waits_for, deadline_s=self._config.silence_s
    ):
      # All processes get the random number that process 0 draws. With it, the names of the files
      # below differ from those of other starts of the run.
      start = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))

    def marker(i):
      return workdir / f'left-{start}-{i}'

    if index > 0:
      # Wait 'leave': bounded by a timeout of 300 s inside `shutdown`.
      jax.distributed.shutdown()
      marker(index).touch()
      return
    deadline = time.monotonic() + self._config.leave_s
    while not all(marker(i).exists() for i in range(1, count)) and time.monotonic() < deadline:
      time.sleep(0.02)
    for i in range(1, count):
      marker(i).unlink(missing_ok=True)
    # Wait 'leave': bounded by a timeout of 300 s inside `shutdown`.
    jax.distributed.shutdown()


def join(job: JobDescription, config: CoordinationConfig) -> Membership:
  """Joins the job. This function must be called before any other use of JAX's devices.

  Raises:
    UserError: JAX cannot join the job. If the other processes do not connect within
      `config.join_s`, this process exits instead of raising.
  """
  # With recoverability enabled, the death of another process raises an error in the next
  # collective. Otherwise the death would silently end this process.
  jax.config.update('jax_enable_recoverability', True)
  # Disable JAX's preemption service. Its signal handler would swallow a SIGTERM that arrives before
  # the run installs its own handler.
  jax.config.update('jax_enable_preemption_service', False)
  devices = {}
  if LOCAL_DEVICES not in os.environ:
    # An empty list selects all visible devices. JAX's default would be one device per process.
    devices['local_device_ids'] = [] if job.local_device is None else [job.local_device]
  owner = 'this process' if job.process is None else f'process {job.process}'
  # This deadline expires before JAX's own timeout, which would abort with a stack trace of JAX's
  # internals.
  with watched(name='join', owner=owner, waits_for=f'{job} to connect', deadline_s=config.join_s):
    try:
      jax.distributed.initialize(
        job.coordinator,
        num_processes=job.processes,
        process_id=job.process,
        cluster_detection_method=job.method or 'deactivate',
        initialization_timeout=int(2 * config.join_s) + 1,
        heartbeat_timeout_seconds=config.heartbeat_s,
        **devices,
      )
    except (ValueError, RuntimeError, OSError, ImportError) as error:
      raise UserError(f'{job}: cannot be joined: {one_line(error)}') from error
  available_devices()
  return Membership(config)
