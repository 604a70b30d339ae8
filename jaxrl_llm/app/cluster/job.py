"""A job as a value: groups of processes with their commands, resources, environment and files.

A launcher turns a `Job` into the text of its system (a Slurm script, a Kubernetes manifest, a shell
script) by a pure function, and submits, queries and cancels it. Restart, placement and queueing
belong to that system.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.core.errors import UserError

TRAINER = 'trainer'
"""Name of the group whose processes join one `jax.distributed` job; the job ends with them."""
_NAME = re.compile(r'[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?')
_VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessResources:
  """Resources of one process; None and 0: whatever the system gives by default."""

  cpus: int | None = None
  memory_gib: int | None = None
  gpus: int = 0
  tpu: str | None = None
  """Kubernetes: type of the TPU nodes, such as 'tpu-v5-lite-podslice'."""
  topology: str | None = None
  """Kubernetes: topology of a TPU slice, such as '8x8'."""

  def __post_init__(self):
    for name in ('cpus', 'memory_gib'):
      if (value := getattr(self, name)) is not None and value < 1:
        raise UserError(f'{name}: {value}, wanted at least 1')
    if self.gpus < 0:
      raise UserError(f'gpus: {self.gpus}, wanted at least 0')
    if self.gpus and self.tpu:
      raise UserError(f'gpus: {self.gpus} beside tpu {self.tpu}; wanted one kind of accelerator')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessGroup:
  """Processes of a job that run the same command."""

  name: str
  """Role: 'trainer', 'rollout', 'scorer' or 'explorer'."""
  command: tuple[str, ...]
  """Program and arguments, the same in every process; not a shell command."""
  nodes: int = 1
  processes_per_node: int = 1
  resources: ProcessResources = ProcessResources()
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment variables besides the job's."""

  def __post_init__(self):
    _check_name(f'group {self.name}', self.name)
    for name in ('nodes', 'processes_per_node'):
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
  """The first group is the trainer."""
  workdir: str
  """Run directory, on a file system that all nodes see under this path."""
  directory: str | None = None
  """Absolute path of the current directory of every process; None: the system's."""
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment variables of every process."""
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Content of files that the launcher writes with mode 0600 before submitting, keyed by absolute
  path, such as the job's key.
  """
  restarts: int = 3
  """Number of times that the system starts the job again after a failure or preemption."""
  grace_s: int = 30
  """Seconds between SIGTERM and SIGKILL."""
  time_limit_s: int | None = None
  """Maximum duration; None: the system's."""

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
        f'job {self.name}: restarts={self.restarts} grace_s={self.grace_s}, wanted at least 0 and 1'
      )

  @property
  def trainer(self) -> ProcessGroup:
    return self.groups[0]

  @property
  def services(self) -> tuple[ProcessGroup, ...]:
    """Groups beside the trainer; they end with it."""
    return self.groups[1:]


@dataclasses.dataclass(frozen=True)
class Launcher:
  """A system that runs jobs. Users name their own as 'module:attribute'.

  `options` is an instance of `Options`, whose fields are command-line flags of the launcher.
  """

  name: str
  Options: type
  """Frozen dataclass of the system's own settings (partition, account, namespace, image, …)."""
  text: Callable[[Job, Any], str]
  """Returns the text that describes the job; a pure function, so that texts can be read, kept and
  compared.
  """
  submit: Callable[[str, Job, Any], str]
  """Submits a text and returns the job's id; raises UserError if the system refuses."""
  status: Callable[[str, Any], str]
  """Returns one line for a job's id, such as "RUNNING since …"; raises UserError if unknown."""
  logs: Callable[[str, Any], None]
  """Prints what the job's processes wrote so far."""
  cancel: Callable[[str, Any], None]
  """Ends a job: its processes get SIGTERM, and commit."""
  one_machine: bool = False
  """Whether all processes run on this machine, so that services can listen on unix sockets."""


def _check_name(where: str, name: str) -> None:
  """Raises UserError for names that Slurm, Kubernetes or a shell would not take literally."""
  if not _NAME.fullmatch(name):
    raise UserError(
      f'{where}: the name {name!r} may have at most 40 characters, only lower-case letters, digits '
      'and inner hyphens'
    )


def _check_variables(where: str, env: Mapping[str, str]) -> None:
  for name, value in env.items():
    if not _VARIABLE.fullmatch(name) or '\0' in value or '\n' in value:
      raise UserError(f'{where}: env {name!r}={value!r} is not an environment variable of one line')
