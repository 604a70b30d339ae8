"""A job as a value: groups of processes with their commands, resources, environment and files.

A launcher connects jobs to one system, such as Slurm, Kubernetes or a shell. Its pure function
`text` converts a `Job` to the text that the system reads: a batch script, a manifest or a shell
script. Its other functions submit, query and cancel the job. The system itself queues, places and
restarts the job.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.core.errors import UserError

TRAINER = 'trainer'
"""Name of the group that trains. Its processes form one `jax.distributed` cluster, and the job ends
when they have ended.
"""
_NAME = re.compile(r'[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?')
_VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessResources:
  """Resources of one process. For a field that is None or 0, the cluster system's default
  applies.
  """

  cpus: int | None = None
  memory_gib: int | None = None
  gpus: int = 0
  tpu: str | None = None
  """Type of the TPU nodes, such as 'tpu-v5-lite-podslice'. Only for Kubernetes."""
  topology: str | None = None
  """Topology of a TPU slice, such as '8x8'. Only for Kubernetes."""

  def __post_init__(self):
    for name in ('cpus', 'memory_gib'):
      if (value := getattr(self, name)) is not None and value < 1:
        raise UserError(f'{name}: {value}, wanted at least 1')
    if self.gpus < 0:
      raise UserError(f'gpus: {self.gpus}, wanted at least 0')
    if self.gpus and self.tpu:
      raise UserError(
        f'gpus: {self.gpus}, although tpu is {self.tpu}; wanted only one kind of accelerator'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessGroup:
  """Processes of a job that run the same command."""

  name: str
  """Role of the processes: 'trainer', 'rollout', 'scorer' or 'explorer'."""
  command: tuple[str, ...]
  """Program and its arguments, the same for every process. No shell interprets them."""
  nodes: int = 1
  processes_per_node: int = 1
  slices: int = 1
  """Number of TPU slices over which a trainer's nodes are divided. Only for Kubernetes."""
  resources: ProcessResources = ProcessResources()
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment variables of the group's processes, in addition to `Job.env`."""

  def __post_init__(self):
    _check_name(f'group {self.name}', self.name)
    for name in ('nodes', 'processes_per_node', 'slices'):
      if getattr(self, name) < 1:
        raise UserError(f'group {self.name}: {name} is {getattr(self, name)}, wanted at least 1')
    if not self.command:
      raise UserError(f'group {self.name}: has no command')
    _check_variables(f'group {self.name}', self.env)

  @property
  def processes(self) -> int:
    """Number of processes on all nodes."""
    return self.nodes * self.processes_per_node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A training run with its services, on one machine or many."""

  name: str
  groups: tuple[ProcessGroup, ...]
  """Process groups of the job. The first is the trainer."""
  workdir: str
  """Absolute path of the run directory, which all nodes must be able to access under this path."""
  directory: str | None = None
  """Absolute path of the working directory of every process. If None, the system chooses it."""
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment variables of every process."""
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Contents of files, keyed by absolute path, such as the file with the secret key that the job's
  services share. The launcher writes the files with mode 0600 before the processes start.
  """
  restarts: int = 3
  """Maximum number of times that the system restarts the job after a failure or preemption."""
  grace_s: int = 30
  """Seconds between SIGTERM and SIGKILL when a process is stopped."""
  time_limit_s: int | None = None
  """Maximum duration in seconds. If None, the system's limit applies."""

  def __post_init__(self):
    _check_name('job', self.name)
    names = [group.name for group in self.groups]
    if names[:1] != [TRAINER] or len(set(names)) < len(names):
      raise UserError(f'job {self.name}: groups are {names}, wanted {TRAINER!r} first, each once')
    _check_variables(f'job {self.name}', self.env)
    paths = {'workdir': self.workdir, 'directory': self.directory or '/'}
    paths |= {f'files[{i}]': file for i, file in enumerate(self.files)}
    for where, path in paths.items():
      if not path.startswith('/') or '\0' in path or '\n' in path:
        raise UserError(
          f'job {self.name}: {where} is {path!r}, wanted an absolute path of one line'
        )
    for group in self.groups:
      if any('\0' in argument for argument in group.command):
        raise UserError(f'group {group.name}: an argument contains a NUL character')
    if self.restarts < 0 or self.grace_s < 1:
      raise UserError(
        f'job {self.name}: restarts={self.restarts} and grace_s={self.grace_s}, wanted at least 0 '
        'and at least 1'
      )

  @property
  def trainer(self) -> ProcessGroup:
    return self.groups[0]

  @property
  def services(self) -> tuple[ProcessGroup, ...]:
    """All groups except the trainer. Their processes are stopped after the trainer has ended."""
    return self.groups[1:]


@dataclasses.dataclass(frozen=True)
class Launcher:
  """Functions that run jobs on one system, such as Slurm.

  The last argument of each function is an instance of `Options`. A user's own launcher is given on
  the command line as 'module:attribute'.
  """

  name: str
  Options: type
  """Frozen dataclass of the system's settings, such as partition, account, namespace or image. Each
  field is also a command-line flag of the launcher.
  """
  text: Callable[[Job, Any], str]
  """Function that returns the text that describes a job to the system. The function is pure, so
  that users can read, keep and compare the texts.
  """
  submit: Callable[[str, Job, Any], str]
  """Function that submits the text of a job and returns the job's id. Raises UserError if the
  system refuses the job.
  """
  status: Callable[[str, Any], str]
  """Function that returns one line about the job with the given id, such as "RUNNING since …".
  Raises UserError if the system does not know the id.
  """
  logs: Callable[[str, Any], None]
  """Function that prints the output of the job with the given id so far."""
  cancel: Callable[[str, Any], None]
  """Function that ends the job with the given id. The job's processes get SIGTERM. The trainer then
  writes a commit (checkpoint) before it ends.
  """
  one_machine: bool = False
  """Whether all processes run on this machine, so that services can listen on unix sockets."""


def _check_name(where: str, name: str) -> None:
  """Raises UserError for a name that Slurm, Kubernetes or a shell would reject or interpret."""
  if not _NAME.fullmatch(name):
    raise UserError(
      f'{where}: the name {name!r} may have at most 40 characters, only lower-case letters, digits '
      'and inner hyphens'
    )


def _check_variables(where: str, env: Mapping[str, str]) -> None:
  for name, value in env.items():
    if not _VARIABLE.fullmatch(name) or '\0' in value or '\n' in value:
      raise UserError(f'{where}: env {name!r}={value!r} is not an environment variable of one line')
