"""Composes a `Job` from a configuration: the trainer and the services that it uses.

The services are vLLM servers, sandbox hosts, and explorers, which run the rollout workflow. They
register in a directory of the run, the registry, where the trainer finds them. This module checks
everything that can be known before a job is submitted: the configuration, its overrides, and
whether the mesh fits the nodes' devices.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import secrets
from collections.abc import Mapping, Sequence

from jaxrl_llm.app.cluster.job import TRAINER, Job, ProcessGroup, ProcessResources
from jaxrl_llm.app.schema import AUTO, Config
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.mesh import mesh_sizes
from jaxrl_llm.rollout.vllm.server import options

KEY = 'key'
"""Name of the file, in the registry, with the job's key, the secret that all services share."""
_CODE = 'code'
"""Kind of the scorers that can run programs on sandbox hosts."""
_REGISTRY = 'registry'
_ANYWHERE = '0.0.0.0'
_PUBLISHED = 'published'
"""Folder in the run directory where the trainer writes weights for servers on other nodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Number and kinds of a job's processes, and the resources and settings of each kind.

  Every field is also a flag of `jaxrl launch`.
  """

  nodes: int = 1
  """Number of nodes on which the trainer runs."""
  processes_per_node: int = 1
  """Number of trainer processes on each node."""
  cpus: int | None = None
  """Number of CPU cores of each process. If unset, the cluster system decides."""
  memory_gib: int | None = None
  """Memory of each process in GiB. If unset, the cluster system decides."""
  gpus: int = 0
  """Number of GPUs of each trainer process."""
  tpu: str | None = None
  """Type of the trainer's TPU nodes, such as tpu-v5-lite-podslice. Only for Kubernetes."""
  topology: str | None = None
  """Topology of each of the trainer's TPU slices, such as 8x8. Only for Kubernetes."""
  slices: int = 1
  """Number of TPU slices over which the trainer's nodes are divided. Only for Kubernetes."""
  rollout_nodes: int = 0
  """Number of nodes for vLLM servers, in addition to the trainer's nodes. If 0, the job has no
  separate vLLM servers, and the trainer starts the servers that it needs.
  """
  rollout_servers: int = 1
  """Number of vLLM servers on each of the `rollout_nodes` nodes."""
  rollout_gpus: int = 0
  """Number of GPUs of each vLLM server."""
  explorers: int = 0
  """Number of explorers, processes that run the rollout workflow. Each runs on a separate node."""
  sandboxes: int = 0
  """Number of sandbox hosts for scorers of kind `code`. Each runs on a separate node."""
  restarts: int = 3
  """Maximum number of times that the cluster system restarts the job after a failure or preemption.
  """
  grace_s: int = 30
  """Seconds between SIGTERM and SIGKILL when a process is stopped."""
  time_limit_s: int | None = None
  """Maximum duration of the job in seconds. If unset, the cluster system's limit applies."""
  name: str | None = None
  """Name of the job. If unset, the job is named after the configuration."""
  plaintext: bool = False
  """Whether services and trainer may communicate without TLS. Use it only on a trusted network."""
  tls_cert: str | None = None
  """PEM file with the certificate of the services, at a path that exists on all nodes."""
  tls_key: str | None = None
  """Path of a PEM file with the private key of the certificate in `tls_cert`."""
  ca_file: str | None = None
  """PEM file of CA certificates with which the trainer and the explorers verify the services. If
  unset, the CA certificates of the operating system are used.
  """

  def __post_init__(self):
    for name in ('rollout_nodes', 'explorers', 'sandboxes', 'rollout_gpus'):
      if getattr(self, name) < 0:
        raise UserError(f'--{name}={getattr(self, name)}: wanted at least 0')
    for name in ('nodes', 'processes_per_node', 'slices', 'rollout_servers'):
      if getattr(self, name) < 1:
        raise UserError(f'--{name}={getattr(self, name)}: wanted at least 1')
    if (self.tls_cert is None) != (self.tls_key is None):
      raise UserError('--tls_cert and --tls_key: wanted both, or neither')

  @property
  def has_services(self) -> bool:
    return bool(self.rollout_nodes or self.explorers or self.sandboxes)


def compose(
  config_spec: str,
  overrides: Mapping[str, str],
  layout: Layout,
  *,
  program: Sequence[str],
  workdir: str | os.PathLike[str] | None = None,
  one_machine: bool = False,
) -> Job:
  """Returns the job that trains a configuration.

  Args:
    config_spec: `FILE.py[:VARIANT]` or the name of a shipped configuration.
    overrides: values of overrides as text, keyed by dotted key, as on the command line.
    program: command that runs `jaxrl` on every node.
    workdir: run directory. If None, it is `runs/<name of the configuration>`.
    one_machine: whether all processes run on this machine. Services then use unix sockets.

  Raises:
    UserError: if the configuration is invalid or does not fit the layout.
  """
  config = apply_overrides(load_file(config_spec, Config), overrides)
  run = pathlib.Path(workdir or f'runs/{config.name}').absolute()
  registry = run / _REGISTRY
  _check_mesh(config, layout)
  _check_services(config, layout, one_machine)
  needed = _needed(config, layout, run, registry, one_machine)
  config = apply_overrides(config, needed)
  given = {**overrides, **needed}
  train = (
    *program,
    'train',
    f'--config={_absolute(config_spec)}',
    f'--workdir={run}',
    *(f'--config.{key}={text}' for key, text in given.items()),
  )
  trainer = ProcessGroup(
    name=TRAINER,
    command=train,
    nodes=layout.nodes,
    processes_per_node=layout.processes_per_node,
    slices=layout.slices,
    resources=ProcessResources(
      cpus=layout.cpus,
      memory_gib=layout.memory_gib,
      gpus=layout.gpus,
      tpu=layout.tpu,
      topology=layout.topology,
    ),
  )
  services = _services(config, layout, run, (*program, 'serve'), one_machine)
  return Job(
    name=layout.name or _job_name(config.name),
    groups=(trainer, *services),
    workdir=str(run),
    directory=os.getcwd(),
    env={} if one_machine else {'JAXRL_GRACE_S': str(layout.grace_s)},
    files={str(registry / KEY): secrets.token_urlsafe(32)} if services else {},
    restarts=layout.restarts,
    grace_s=layout.grace_s,
    time_limit_s=layout.time_limit_s,
  )


def _needed(
  config: Config, layout: Layout, run: pathlib.Path, registry: pathlib.Path, one_machine: bool
) -> dict[str, str]:
  """Returns the configuration overrides by which the trainer finds the services."""
  needed: dict[str, str] = {}
  if not layout.has_services:
    return needed
  needed['registry.directory'] = str(registry)
  if layout.plaintext and not one_machine:
    needed['registry.allow_plaintext'] = 'true'
  if layout.rollout_nodes:
    needed['rollout.vllm.discover'] = str(layout.rollout_nodes * layout.rollout_servers)
    if layout.ca_file:
      needed['rollout.vllm.ca_file'] = str(pathlib.Path(layout.ca_file).absolute())
    # vLLM servers on other nodes fetch new weights from the trainer, or read them from a directory
    # that the trainer writes.
    if config.rollout.vllm.transfer == 'pull' and one_machine:
      # 'pull' needs fronts, which servers on one machine do not have.
      needed['rollout.vllm.transfer'] = 'files'
    elif config.rollout.vllm.transfer == 'pull':
      needed['rollout.vllm.source'] = json.dumps(_listen(layout))
    elif config.rollout.vllm.publish_dir is None and not one_machine:
      needed['rollout.vllm.publish_dir'] = str(run / _PUBLISHED)
  for scorer in config.rewards.scorers:
    if layout.sandboxes and scorer.implementation == _CODE:
      settings = {'discover': '*'}
      if layout.ca_file:
        settings['ca_file'] = str(pathlib.Path(layout.ca_file).absolute())
      for name, value in settings.items():
        needed[f'rewards.scorers.{scorer.name}.options.{name}'] = json.dumps(value)
  if layout.explorers and one_machine:
    needed['rollout.explorers.processes'] = str(layout.explorers)
  elif layout.explorers:
    needed['rollout.explorers.listen'] = json.dumps(_listen(layout))
    needed['rollout.explorers.processes'] = '0'
  return needed


def _check_mesh(config: Config, layout: Layout) -> None:
  """Raises UserError if the mesh does not fit the devices of the trainer's nodes.

  Nothing is checked when the layout specifies neither GPUs nor a TPU topology, because the number
  of devices is then unknown.
  """
  if layout.gpus:
    mesh_sizes(config.learner.mesh, layout.nodes * layout.processes_per_node * layout.gpus)
  elif layout.topology is not None:
    if not re.fullmatch(r'[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){0,2}', layout.topology):
      raise UserError(f'--topology={layout.topology}: wanted the shape of a slice, such as 8x8')
    chips = math.prod(map(int, layout.topology.split('x')))
    mesh_sizes(config.learner.mesh, layout.slices * chips)


def _check_services(config: Config, layout: Layout, one_machine: bool) -> None:
  if layout.rollout_nodes and config.rollout.vllm_servers is None:
    raise UserError(
      f'--rollout_nodes={layout.rollout_nodes}: rollout.engine is {config.rollout.engine!r}, '
      "wanted 'vllm': add --config.rollout.engine=vllm, or leave --rollout_nodes out"
    )
  if layout.rollout_nodes and config.rollout.vllm.addresses:
    raise UserError(
      f'--rollout_nodes={layout.rollout_nodes}: rollout.vllm.addresses already names servers that '
      'others start; wanted only one of the two'
    )
  kinds = {scorer.implementation for scorer in config.rewards.scorers}
  if layout.sandboxes and _CODE not in kinds:
    raise UserError(
      f'--sandboxes={layout.sandboxes}: the configuration has no scorer of kind code, only '
      f'{", ".join(sorted(kinds)) or "none"}; leave --sandboxes out'
    )
  if layout.has_services and not one_machine and not (layout.plaintext or layout.tls_cert):
    raise UserError(
      'services on other nodes: neither --tls_cert and --tls_key nor --plaintext is given; wanted '
      'certificates, or --plaintext on a network where nobody else listens'
    )


def _services(
  config: Config, layout: Layout, run: pathlib.Path, serve: tuple[str, ...], one_machine: bool
) -> list[ProcessGroup]:
  """Returns the process groups of the services.

  Args:
    serve: command that runs `jaxrl serve`.
  """
  groups = []
  registry = f'--registry={run / _REGISTRY}'
  listen = [registry, *([] if one_machine else _front(layout))]
  cpus = ProcessResources(cpus=layout.cpus, memory_gib=layout.memory_gib)
  trust = [f'--ca_file={pathlib.Path(layout.ca_file).absolute()}'] if layout.ca_file else []
  if layout.rollout_nodes:
    group = ProcessGroup(
      name='rollout',
      command=(*serve, *_vllm(config, run, [*listen, *trust], one_machine)),
      nodes=layout.rollout_nodes,
      processes_per_node=layout.rollout_servers,
      resources=dataclasses.replace(cpus, gpus=layout.rollout_gpus),
    )
    groups.append(group)
  if layout.sandboxes:
    command = (*serve, '--role=sandbox', *listen)
    groups.append(
      ProcessGroup(name='scorer', command=command, nodes=layout.sandboxes, resources=cpus)
    )
  if layout.explorers and not one_machine:  # On one machine, the trainer starts the explorers.
    command = (*serve, '--role=explorer', registry, *trust)
    groups.append(
      ProcessGroup(name='explorer', command=command, nodes=layout.explorers, resources=cpus)
    )
  return groups


def _listen(layout: Layout) -> dict[str, str | bool]:
  """Returns the settings of a front, the HTTP server through which other nodes reach a service.

  The front listens on all interfaces and registers under the name of its host.
  """
  if not layout.tls_cert:
    return {'host': _ANYWHERE, 'allow_plaintext': True}
  certificate, key = (pathlib.Path(file).absolute() for file in (layout.tls_cert, layout.tls_key))
  return {'host': _ANYWHERE, 'tls_cert': str(certificate), 'tls_key': str(key)}


def _front(layout: Layout) -> list[str]:
  """Returns the flags with which `jaxrl serve` opens a front, the HTTP server for other nodes.

  The front gets the settings of `_listen`, and port 0, for which the system chooses a free port.
  """
  flags = {**_listen(layout), 'port': 0}
  return [f'--{name}' if value is True else f'--{name}={value}' for name, value in flags.items()]


def _vllm(config: Config, run: pathlib.Path, listen: list[str], one_machine: bool) -> list[str]:
  """Returns the arguments of `jaxrl serve` for one vLLM server.

  The directory of --model is empty at first. The server waits until the trainer has written the
  model's config.json into it.
  """
  vllm = config.rollout.vllm
  dtype = config.policy.dtype if vllm.dtype == 'policy' else vllm.dtype
  if dtype == AUTO and config.policy.init_from is not None:
    raise UserError(
      "policy.dtype: 'auto', but the servers start before the trainer chooses; set it, for example "
      'policy.dtype=bfloat16'
    )
  flags = [
    f'--model={run / "vllm"}',
    f'--model_deadline_s={vllm.start_deadline_s:g}',
    f'--environment={vllm.environment}',
    f'--dtype={"float32" if dtype == AUTO else dtype}',
    f'--max_model_len={config.rollout.max_length}',
    f'--transfer={"files" if vllm.reads_files else vllm.transfer}',
    f'--cpu_cache_gib={vllm.cpu_cache_gib}',
    f'--logs={run / "logs" / "{host}-{pid}"}',
    *listen,
  ]
  if not one_machine:
    flags.append(f'--publish_root={vllm.publish_dir or run / _PUBLISHED}')
  words = options(vllm.args)
  return ['--role=vllm', *flags, *(['--', *words] if words else [])]


def _absolute(config_spec: str) -> str:
  match = re.fullmatch(r'(?P<path>.*\.py)(?P<variant>(?::.*)?)', config_spec)
  if match is None:
    return config_spec  # The name of a shipped configuration is not a path.
  return f'{pathlib.Path(match["path"]).absolute()}{match["variant"]}'


def _job_name(name: str) -> str:
  """Converts the name of a configuration to a job name that every cluster system accepts.

  For example, 'My run_1' becomes 'my-run-1'.
  """
  return re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')[:40].strip('-') or 'train'
