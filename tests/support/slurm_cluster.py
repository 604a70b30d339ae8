"""A real Slurm on this machine (see slurm.sh), and jobs on it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import job
from paths import ROOT, SUPPORT

SCRIPT = SUPPORT / 'slurm.sh'
KILL_WAIT_S = 15
"""Seconds between SIGTERM and SIGKILL when Slurm ends a job."""


def is_installed() -> bool:
  path = f'{os.environ["PATH"]}:/usr/sbin:/sbin'
  return all(shutil.which(name, path=path) for name in ('sbatch', 'slurmctld', 'slurmd', 'munged'))


class Cluster:
  """A running cluster. Its commands need the environment variables `environ`."""

  def __init__(self, directory: pathlib.Path):
    self.environ = job.environment(
      SLURM_CONF=str(directory / 'slurm.conf'), PATH=f'{os.environ["PATH"]}:/usr/sbin:/sbin'
    )
    self.environ.pop('NPROC')  # The launcher sets it.

  def call(self, *command: object) -> str:
    """Runs a command to its end, and returns its stdout. Raises AssertionError with its output if
    it fails.
    """
    done = subprocess.run(
      [*map(str, command)], cwd=ROOT, env=self.environ, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
      raise AssertionError(f'{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}')
    return done.stdout

  def submit(self, workdir: pathlib.Path, *flags: str, config: tuple[str, ...] = job.QUICK) -> str:
    """Submits a training run with `jaxrl launch slurm`, and returns its job id."""
    programs = f'--config.compilation_cache={job.session() / "programs"}'
    command = [sys.executable, 'launch/cluster/slurm.py', *config, programs, *flags]
    return self.call(*command, f'--workdir={workdir}', '--noexclusive', '--submit').strip()

  def state(self, job_id: str) -> str:
    """Returns Slurm's state of a job, with the reason."""
    return self.call(
      'squeue', '--noheader', '--states=all', f'--jobs={job_id}', '--array', '--format=%T %r'
    ).strip()

  def exit_code(self, job_id: str) -> int:
    described = self.call('scontrol', '--oneliner', 'show', 'job', job_id)
    return int(described.partition(' ExitCode=')[2].partition(':')[0])

  def wait_for_requeue(self, job_id: str) -> None:
    """Waits until a job is in the queue again. Slurm starts it after about two minutes.

    An earlier start is not safe, because until then Slurm may end processes with the job's number
    once more.
    """
    self.wait(job_id, lambda state: state.startswith('PENDING'))

  def wait(self, job_id: str, is_reached: Callable[[str], bool], timeout_s: float = 1800) -> str:
    """Waits until `is_reached(state)` holds, and returns that state."""
    deadline = time.monotonic() + timeout_s
    while not is_reached(state := self.state(job_id)):
      assert time.monotonic() < deadline, state
      time.sleep(0.2)
    return state

  def wait_for_end(self, job_id: str) -> str:
    return self.wait(job_id, lambda state: not any(word in state for word in UNFINISHED))

  def wait_for_rows(self, job_id: str, workdir: pathlib.Path, count: int) -> None:
    """Waits until metrics.jsonl has `count` rows. Raises AssertionError if the job ends earlier."""
    deadline = time.monotonic() + 1800
    while len(job.rows(workdir)) < count:
      state = self.state(job_id)
      assert any(word in state for word in UNFINISHED), f'{state}\n{output(workdir, job_id)}'
      assert time.monotonic() < deadline, output(workdir, job_id)
      time.sleep(0.05)


UNFINISHED = ('PENDING', 'CONFIGURING', 'RUNNING', 'COMPLETING', 'REQUEUED')


def output(workdir: pathlib.Path, job_id: str) -> str:
  file = workdir / 'launch' / f'slurm-{job_id}.out'
  return file.read_text() if file.exists() else f'{file} does not exist'


@contextlib.contextmanager
def running(nodes: int = 3) -> Iterator[Cluster]:
  # pytest's folders are unsuitable: the path of a socket must be short, and munge requires folders
  # that belong to one owner.
  directory = pathlib.Path(tempfile.mkdtemp(prefix='slurm-'))
  cluster = directory / 'cluster'
  try:
    subprocess.run(
      ['bash', SCRIPT, 'start', cluster, str(nodes)],
      env={**os.environ, 'KILL_WAIT': str(KILL_WAIT_S)},
      check=True,
      timeout=120,
    )
    yield Cluster(cluster)
  finally:
    subprocess.run(['bash', SCRIPT, 'stop', cluster], check=True, timeout=120)
    shutil.rmtree(directory, ignore_errors=True)
