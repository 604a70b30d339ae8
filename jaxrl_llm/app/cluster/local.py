"""Launcher `local`: runs a job on this machine, as a shell script that calls the supervisor."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping

import psutil

from jaxrl_llm.app.cluster.files import LAUNCHES, write_files
from jaxrl_llm.app.cluster.job import Job, Launcher, ProcessGroup
from jaxrl_llm.core.errors import UserError

_SUPERVISOR = 'jaxrl_llm.app.cluster.supervisor'
_SCRIPT, _OUTPUT, _ENDED, _STARTED = 'local.sh', 'local.out', 'local.ended', 'local.json'
"""Names of the files in the folder `LAUNCHES` of the run directory: the script, the output of the
job, its exit code, and the process id of the script.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalOptions:
  """Settings of the local launcher."""

  linger_s: float = 600.0
  """Seconds that the remaining trainer processes may take to end, once the first one has finished
  or the job has received SIGTERM. Processes that are left afterwards are killed.
  """


def text(job: Job, options: LocalOptions) -> str:
  """Returns a shell script that runs a job in the foreground and exits with the job's exit code."""
  trainer = job.trainer
  supervisor = [sys.executable, '-P', '-m', _SUPERVISOR, f'--processes={trainer.processes}']
  supervisor += [f'--restarts={job.restarts}', f'--grace_s={job.grace_s}']
  supervisor += [f'--linger_s={options.linger_s:g}']
  if trainer.resources.gpus:
    supervisor.append(f'--gpus={trainer.resources.gpus}')
  services, first = [], trainer.processes * trainer.resources.gpus
  for group in job.services:
    for _ in range(group.processes):
      gpus = range(first, first := first + group.resources.gpus)
      shown = {'CUDA_VISIBLE_DEVICES': ','.join(map(str, gpus))} if gpus else {}
      services.append([f'--service={shlex.join(_command(group, shown))}'])
  parts = [supervisor, *services, ['--', *_command(trainer, {})]]
  ended = shlex.quote(f'{job.workdir}/{LAUNCHES}/{_ENDED}')
  lines = [
    '#!/usr/bin/env bash',
    f'# Job {job.name} on this machine, written by `jaxrl launch local`.',
    'set -u',
    *([] if job.directory is None else [f'cd -- {shlex.quote(job.directory)} || exit 2']),
    *(f'export {name}={shlex.quote(value)}' for name, value in job.env.items()),
    'trap : INT TERM  # The supervisor gets them too, and ends the job.',
    ' \\\n  '.join(map(shlex.join, parts)),
    'code=$?',
    f'ended={ended}',
    'mkdir -p "${ended%/*}" && echo "$code" >"$ended"',
    'exit "$code"',
  ]
  return '\n'.join(lines) + '\n'


def _command(group: ProcessGroup, variables: Mapping[str, str]) -> list[str]:
  cpus = group.resources.cpus
  env = {**({} if cpus is None else {'NPROC': str(cpus)}), **variables, **group.env}
  return (
    ['env', *(f'{name}={value}' for name, value in env.items()), *group.command]
    if env
    else [*group.command]
  )


def submit(text: str, job: Job, options: LocalOptions) -> str:
  """Starts a job's script in the background and returns the job's id, which is its run directory.

  Raises:
    UserError: if a job is already running in this run directory.
  """
  folder = pathlib.Path(job.workdir, LAUNCHES)
  if (process := _process(folder)) is not None:
    raise UserError(
      f'{job.workdir}: its job is already running (process {process.pid}); end it with --cancel='
      f'{job.workdir}'
    )
  write_files(job, script=(_SCRIPT, text))
  (folder / _ENDED).unlink(missing_ok=True)
  with open(folder / _OUTPUT, 'ab') as output:
    started = subprocess.Popen(
      ['bash', str(folder / _SCRIPT)],
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=output,
      start_new_session=True,
    )
  facts = {'pid': started.pid, 'created': psutil.Process(started.pid).create_time()}
  (folder / _STARTED).write_text(json.dumps(facts))
  return job.workdir


def _process(folder: pathlib.Path) -> psutil.Process | None:
  """Returns the process of the script that was submitted last; None if there is none or it has
  ended.

  Args:
    folder: the run directory's folder `LAUNCHES`.
  """
  try:
    facts = json.loads((folder / _STARTED).read_text())
    process = psutil.Process(int(facts['pid']))
    same = process.create_time() == facts['created'] and process.status() != psutil.STATUS_ZOMBIE
    return process if same else None
  except (FileNotFoundError, psutil.NoSuchProcess):
    return None
  except (ValueError, KeyError, TypeError):
    raise UserError(f'{folder / _STARTED}: cannot be read; remove it') from None


def _folder(job_id: str) -> pathlib.Path:
  folder = pathlib.Path(job_id, LAUNCHES)
  if not (folder / _STARTED).exists():
    raise UserError(f'{job_id}: no job was submitted with this run directory')
  return folder


def status(job_id: str, options: LocalOptions) -> str:
  """Returns a line that says whether a job is running or has ended, with its exit code if known."""
  folder = _folder(job_id)
  if (process := _process(folder)) is not None:
    return f'RUNNING process {process.pid}'
  ended = folder / _ENDED
  if not ended.exists():
    return 'ENDED without an exit code: it was killed, or the machine was restarted'
  return f'ENDED exit code {ended.read_text().strip()}'


def logs(job_id: str, options: LocalOptions) -> None:
  """Prints the output of a job so far."""
  sys.stdout.write((_folder(job_id) / _OUTPUT).read_text(errors='replace'))


def cancel(job_id: str, options: LocalOptions) -> None:
  """Sends SIGTERM to a job's supervisor, which then stops the job's processes."""
  process = _process(_folder(job_id))
  if process is None:
    raise UserError(f'{job_id}: its job is not running')
  # The process group consists of the script and the supervisor. Each process of the job is in a
  # separate session, and the supervisor stops it.
  os.killpg(process.pid, signal.SIGTERM)


LAUNCHER = Launcher(
  name='local',
  Options=LocalOptions,
  text=text,
  submit=submit,
  status=status,
  logs=logs,
  cancel=cancel,
  one_machine=True,
)
