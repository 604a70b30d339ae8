"""Runs the trials of a sweep as a job array on Slurm: each task runs `jaxrl sweep --trial=N`.

All tasks write to the same ledger. The sweep directory must therefore lie on a file system that all
nodes share and that supports locks.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.app.cluster.job import TRAINER, Job, ProcessGroup, ProcessResources
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json

_ARRAY_FLAGS = (
  *('launcher', 'launcher_options', 'cpus', 'memory_gib', 'time_limit_s', 'sweepdir'),
  *('parallel', 'gpus_per_trial', 'trial'),
)
"""Flags of `jaxrl sweep` that are not passed on to the tasks of the array."""
_TASK = 'exec "$@" --trial="$SLURM_ARRAY_TASK_ID"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobArray:
  """Everything that defines a job array except for the number of its tasks."""

  command: tuple[str, ...]
  """Command of every task. The flag --trial is appended to it."""
  sweepdir: pathlib.Path
  """Absolute path of the sweep directory."""
  resources: ProcessResources
  """Resources of one trial."""
  grace_s: float
  """Seconds that a trial has to commit when it is stopped."""
  time_limit_s: int | None
  at_once: int | None
  """Maximum number of trials that run at the same time. If None, there is no limit."""
  options: str
  """Options of the Slurm launcher as a JSON mapping."""


def task_arguments(arguments: Sequence[str]) -> list[str]:
  """Removes --submit and the flags in `_ARRAY_FLAGS` from the arguments of `jaxrl sweep`."""
  kept, value_follows = [], False
  for argument in arguments:
    name, equals, _ = argument.lstrip('-').partition('=')
    if value_follows:
      value_follows = False
    elif argument.startswith('-') and name.removeprefix('no') == 'submit':
      continue
    elif argument.startswith('-') and name in _ARRAY_FLAGS:
      value_follows = not equals
    else:
      kept.append(argument)
  return kept


def array_text(array: JobArray, count: int) -> str:
  """Returns the batch script of a job array that runs `count` trials.

  Raises:
    UserError: if the options are invalid.
  """
  # Imported here, because only job arrays need the Slurm launcher.
  from jaxrl_llm.app.cluster import slurm

  return slurm.array_text(_job(array), count, _options(array), at_once=array.at_once)


def check_installed() -> None:
  """Raises UserError unless job arrays can be submitted from this host."""
  from jaxrl_llm.app.cluster import slurm

  slurm.check_installed()


def submit_array(array: JobArray, count: int) -> str:
  """Submits the job array and returns its id.

  Raises:
    UserError: if sbatch is not installed, if the options are invalid, or if Slurm refuses the job.
  """
  from jaxrl_llm.app.cluster import slurm

  return slurm.submit(array_text(array, count), _job(array), _options(array))


def _options(array: JobArray) -> Any:
  from jaxrl_llm.app.cluster import slurm

  try:
    value = parse_json(array.options)
  except ValueError as error:
    raise UserError(
      f'--launcher_options={array.options}: not JSON ({error}); wanted such as '
      '{"partition": "gpu"}'
    ) from None
  # Unless the options say otherwise, several trials may run on the same node.
  shared = {'exclusive': False}
  value = {**shared, **value} if isinstance(value, dict) else value
  return from_json(value, slurm.SlurmOptions, '--launcher_options')


def _job(array: JobArray) -> Job:
  group = ProcessGroup(
    name=TRAINER,
    command=('bash', '-c', _TASK, 'trial', *array.command),
    resources=array.resources,
  )
  return Job(
    name='sweep',
    groups=(group,),
    workdir=str(array.sweepdir),
    directory=os.getcwd(),
    env={name: os.environ[name] for name in ('PYTHONPATH',) if name in os.environ},
    grace_s=max(1, round(array.grace_s)),
    time_limit_s=array.time_limit_s,
  )
