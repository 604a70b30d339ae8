"""Kubernetes: a job as a JobSet, with a Secret for its files. GPUs, and TPU slices of GKE.

One replicated job holds each group, and one pod each process. The JobSet ends when the trainers
have ended. If a trainer fails, the JobSet starts all groups again, up to `Job.restarts` times;
after exit code 2 (unusable input) it fails at once. A lost process of a service is replaced alone.

The trainers get JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. On several TPU
slices they get none of these: GKE sets the variables that JAX detects.

Sources: JobSet's API (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/), Kubernetes' Job
(https://kubernetes.io/docs/concepts/workloads/controllers/job/), TPUs in GKE
(https://cloud.google.com/kubernetes-engine/docs/concepts/tpus).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import yaml

from jaxrl_llm.app.cluster.job import TRAINER, Job, Launcher, ProcessGroup
from jaxrl_llm.core.errors import UserError, one_line

_FILES = '/run/jaxrl/files'
"""Where the init container sees the Secret."""
_COPY = (
  'umask 077; while [ $# -gt 0 ]; do if [ ! -e "$2" ]; then mkdir -p -- "${2%/*}" && copy=$(mktemp '
  '-- "$2.XXXXXX") || exit 1; cat -- "$1" >"$copy" && mv -f -- "$copy" "$2" || exit 1; fi; shift '
  '2; done'
)
"""Copies each odd argument to the next one, unless that exists, with mode 0600 and in one step: all
pods do it. A key outlives the job that is started again.
"""
_UNUSABLE, _STUCK = 2, 1
"""Exit codes that no restart cures: of invalid input, and of a trainer that cannot continue."""
_POD_NAME = 63 - len('-12345')
"""Maximum length of a pod's name without the suffix of the Job controller."""
_CHIPS = (1, 4, 8)
"""Numbers of chips that a TPU node may have."""
_LABEL = re.compile(r'[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?')
_LABEL_KEY = re.compile(rf'([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{_LABEL.pattern}')
_RESOURCE = re.compile(r'[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?')
_PRINTABLE = re.compile(r'[!-~]+')
_TOPOLOGY = re.compile(r'[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}')
_NOISE = re.compile(r'[IWE]\d{4} |Warning: |$')
"""Lines of kubectl that are its log, and no message."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SECONDS = 60
"""Maximum duration of a call of kubectl; logs may take longer."""
_LOGS_S = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobsetOptions:
  """Settings of the Kubernetes launcher."""

  image: str | None = None
  """Container image with jaxrl_llm, for every group. Required."""
  claim: str | None = None
  """PersistentVolumeClaim (ReadWriteMany) that holds the run directory. Required."""
  mount: str = '/data'
  """Path under which every pod sees the claim; the run directory lies in it."""
  python: str = 'python3'
  """Interpreter in the image, instead of that of the machine from which the job is submitted."""
  namespace: str | None = None
  """Namespace; unset: that of kubectl's context."""
  service_account: str | None = None
  """Service account of the pods; unset: they get no token for the Kubernetes API."""
  pull_secret: str | None = None
  """Secret with the credentials of the image's registry."""
  priority_class: str | None = None
  """Priority class of the pods."""
  queue: str | None = None
  """Kueue's local queue."""
  gpu_type: str | None = None
  """GKE: type of the GPU nodes, such as nvidia-h100-80gb."""
  node_selector: tuple[str, ...] = ()
  """Labels that a node must have to run any pod of the job, each as KEY=VALUE."""
  slices: int = 1
  """Number of TPU slices over which the trainer's nodes are divided."""
  shm_gib: int | None = None
  """Maximum size of /dev/shm in GiB, part of the pod's memory; unset: half of the node's memory."""
  user: int | None = None
  """User and group ID of the processes; unset: those of the image."""
  port: int = 8476
  """Port of the coordinator in the first trainer's pod."""

  def __post_init__(self):
    for name in ('claim', 'namespace', 'service_account', 'pull_secret', 'priority_class'):
      if (value := getattr(self, name)) is not None and not _RESOURCE.fullmatch(value):
        raise UserError(
          f'--{name}={value}: wanted the name of a Kubernetes object: lower-case letters, digits, '
          'inner hyphens and dots'
        )
    for name in ('queue', 'gpu_type'):
      if (value := getattr(self, name)) is not None and not _LABEL.fullmatch(value):
        raise UserError(f'--{name}={value}: wanted the value of a label, at most 63 characters')
    for name in ('image', 'python'):
      value = getattr(self, name)
      if value is not None and not _PRINTABLE.fullmatch(value):
        raise UserError(f'--{name}={value}: wanted printable ASCII characters without spaces')
    for name, low, high in (
      ('slices', 1, 1024),
      ('port', 1024, 65535),
      ('shm_gib', 1, 1 << 20),
      ('user', 0, (1 << 31) - 1),
    ):
      if (value := getattr(self, name)) is not None and not low <= value <= high:
        raise UserError(f'--{name}={value}: wanted {low} to {high}')
    mount = pathlib.PurePosixPath(self.mount)
    if not mount.is_absolute() or '..' in mount.parts or ':' in self.mount or len(mount.parts) < 2:
      raise UserError(f'--mount={self.mount}: wanted an absolute path other than /, without ..')
    for label in self.node_selector:
      key, _, value = label.partition('=')
      if not _LABEL_KEY.fullmatch(key) or not _LABEL.fullmatch(value):
        raise UserError(f'--node_selector={label}: wanted a label of nodes as KEY=VALUE')


def text(job: Job, options: JobsetOptions) -> str:
  """Returns the manifest: a Secret with the job's files, if there are any, and the JobSet.

  Raises:
    UserError: Kubernetes cannot run the job with these options.
  """
  _check(job, options)
  documents = [_secret(job, options)] if job.files else []
  documents.append(_jobset(job, options))
  return yaml.dump_all(map(_quoted, documents), Dumper=_Dumper, sort_keys=False, width=math.inf)


class _Quoted(str):
  """A string that the manifest has in quotes: plain ones such as y and 1e3 mean other things to
  other parsers.
  """


class _Dumper(yaml.SafeDumper):
  """Writes `_Quoted` strings in quotes."""


def _represent(dumper: _Dumper, value: _Quoted) -> yaml.Node:
  return dumper.represent_scalar('tag:yaml.org,2002:str', str(value), style="'")


_Dumper.add_representer(_Quoted, _represent)


def _quoted(value: Any) -> Any:
  """Quotes the strings in a tree that are values, not keys."""
  if isinstance(value, dict):
    return {key: _quoted(inner) for key, inner in value.items()}
  if isinstance(value, list):
    return [_quoted(inner) for inner in value]
  return _Quoted(value) if isinstance(value, str) else value


def _check(job: Job, options: JobsetOptions) -> None:
  where = f'job {job.name}'
  if not job.name[0].isalpha():
    raise UserError(f'{where}: the name begins with {job.name[0]!r}; Kubernetes wants a letter')
  for name, meaning in (
    ('image', 'the container image with jaxrl_llm'),
    ('claim', 'the PersistentVolumeClaim that holds the run directory'),
  ):
    if not getattr(options, name):
      raise UserError(f'{where}: --{name} is missing; wanted {meaning}')
  if options.slices > 1 and not job.trainer.resources.tpu:
    raise UserError(f'{where}: --slices={options.slices}, but the trainer has no TPU; wanted 1')
  for name, path in (('run directory', job.workdir), *(('file', path) for path in job.files)):
    if not _is_mounted(path, options):
      raise UserError(
        f'{where}: the {name} {path} is not in --mount={options.mount}, where the pods see '
        f'--claim={options.claim}; wanted --workdir={options.mount}/…, or another --mount'
      )
  for group in job.groups:
    _check_group(job, group, options)


def _is_mounted(path: str, options: JobsetOptions) -> bool:
  """Whether a path lies on the claim."""
  pure = pathlib.PurePosixPath(path)
  return '..' not in pure.parts and pure.is_relative_to(options.mount)


def _check_group(job: Job, group: ProcessGroup, options: JobsetOptions) -> None:
  where = f'job {job.name}, group {group.name}'
  for word in (*group.command, *group.env.values(), *job.env.values(), *job.files.values()):
    if '\0' in word or any('\ud800' <= c <= '\udfff' for c in word):
      raise UserError(f'{where}: {word!r} contains a null character or is not Unicode')
  longest = f'{job.name}-{group.name}-{_slices(group, options) - 1}-{group.processes - 1}'
  if len(longest) > _POD_NAME:
    raise UserError(
      f'{where}: the name of its last pod, {longest}, is longer than {_POD_NAME} characters; '
      'choose a shorter name for the job'
    )
  resources = group.resources
  if resources.topology and not resources.tpu:
    raise UserError(f'{where}: topology {resources.topology} without a type of TPU')
  if resources.tpu:
    _check_tpu(where, group, options)


def _check_tpu(where: str, group: ProcessGroup, options: JobsetOptions) -> None:
  tpu, topology, slices = group.resources.tpu, group.resources.topology, _slices(group, options)
  if not _LABEL.fullmatch(tpu):
    raise UserError(f'{where}: tpu {tpu!r}: wanted a type of TPU nodes: tpu-v5-lite-podslice')
  if not _TOPOLOGY.fullmatch(topology or ''):
    raise UserError(f'{where}: topology {topology!r}: wanted that of one slice, such as 4x4')
  if group.processes_per_node > 1:
    raise UserError(
      f'{where}: {group.processes_per_node} processes on each TPU node; wanted 1, which has all '
      'of its chips'
    )
  chips = _size(topology) * slices
  if not _is_trainer(group) and _size(topology) not in _CHIPS:
    raise UserError(
      f'{where}: topology {topology} has several nodes; wanted that of one node, such as 2x4, '
      'because the processes of a service are independent'
    )
  if group.nodes % slices or chips % group.nodes or chips // group.nodes not in _CHIPS:
    fitting = [chips // n for n in _CHIPS if chips % n == 0 and chips // n % slices == 0]
    raise UserError(
      f'{where}: {group.nodes} nodes for {slices} x {topology} = {chips} chips; wanted '
      f'{" or ".join(map(str, fitting))} nodes'
    )
  if _is_trainer(group) and group.nodes == slices > 1:
    raise UserError(
      f'{where}: {slices} slices of one node each; GKE joins slices of several nodes alone'
    )


def _is_trainer(group: ProcessGroup) -> bool:
  return group.name == TRAINER


def _slices(group: ProcessGroup, options: JobsetOptions) -> int:
  """Number of TPU slices of a group. Each node of a service is one."""
  if not group.resources.tpu:
    return 1
  return options.slices if _is_trainer(group) else group.nodes


def _size(topology: str) -> int:
  """Number of chips."""
  return math.prod(map(int, topology.split('x')))


def _metadata(name: str, options: JobsetOptions) -> dict:
  return {'name': name, **({'namespace': options.namespace} if options.namespace else {})}


def _secret_name(job_name: str) -> str:
  return f'{job_name}-files'


def _secret(job: Job, options: JobsetOptions) -> dict:
  return {
    'apiVersion': 'v1',
    'kind': 'Secret',
    'metadata': _metadata(_secret_name(job.name), options),
    'type': 'Opaque',
    'stringData': {f'file-{i}': job.files[path] for i, path in enumerate(sorted(job.files))},
  }


def _jobset(job: Job, options: JobsetOptions) -> dict:
  metadata = _metadata(job.name, options)
  if options.queue:
    metadata['labels'] = {'kueue.x-k8s.io/queue-name': options.queue}
  hopeless = {
    'name': 'hopeless',
    'action': 'FailJobSet',
    'onJobFailureReasons': ['PodFailurePolicy', 'DeadlineExceeded'],
  }
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': metadata,
    'spec': {
      'network': {
        'enableDNSHostnames': True,
        'publishNotReadyAddresses': True,
        'subdomain': job.name,
      },
      'successPolicy': {'operator': 'All', 'targetReplicatedJobs': [job.trainer.name]},
      'failurePolicy': {'maxRestarts': job.restarts, 'rules': [hopeless]},
      'replicatedJobs': [_replicated(job, group, options) for group in job.groups],
    },
  }


def _replicated(job: Job, group: ProcessGroup, options: JobsetOptions) -> dict:
  """A group as a replicated job: one Job for each TPU slice that its processes share, or one."""
  is_trainer = _is_trainer(group)
  replicas = _slices(group, options) if is_trainer else 1
  codes = [_STUCK, _UNUSABLE] if is_trainer else [_UNUSABLE]
  hopeless = {'containerName': group.name, 'operator': 'In', 'values': codes}
  rules: list[dict] = [{'action': 'FailJob', 'onExitCodes': hopeless}]
  if not is_trainer:
    evicted = {'type': 'DisruptionTarget', 'status': 'True'}
    rules.append({'action': 'Ignore', 'onPodConditions': [evicted]})
  spec = {
    'completionMode': 'Indexed',
    'parallelism': group.processes // replicas,
    'completions': group.processes // replicas,
    'backoffLimit': 0 if is_trainer else job.restarts * group.processes,
    'podFailurePolicy': {'rules': rules},
    'template': {'spec': _pod(job, group, options)},
  }
  if is_trainer and job.time_limit_s is not None:
    spec['activeDeadlineSeconds'] = job.time_limit_s
  template: dict[str, Any] = {}
  if group.resources.tpu and is_trainer and group.nodes > replicas:
    # All nodes of a slice are one node pool, which no other Job shares.
    key = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
    template['metadata'] = {'annotations': {key: 'cloud.google.com/gke-nodepool'}}
  return {'name': group.name, 'replicas': replicas, 'template': {**template, 'spec': spec}}


def _pod(job: Job, group: ProcessGroup, options: JobsetOptions) -> dict:
  resources = group.resources
  selector = dict(label.split('=', 1) for label in options.node_selector)
  if resources.tpu:
    selector['cloud.google.com/gke-tpu-accelerator'] = resources.tpu
    selector['cloud.google.com/gke-tpu-topology'] = resources.topology
  if resources.gpus and options.gpu_type:
    selector['cloud.google.com/gke-accelerator'] = options.gpu_type
  shared = {'medium': 'Memory'}
  if options.shm_gib is not None:
    shared['sizeLimit'] = f'{options.shm_gib}Gi'
  volumes: list[dict] = [
    {'name': 'data', 'persistentVolumeClaim': {'claimName': options.claim}},
    {'name': 'shm', 'emptyDir': shared},
  ]
  if job.files:
    secret = {'secretName': _secret_name(job.name), 'defaultMode': 0o400}
    volumes.append({'name': 'files', 'secret': secret})
  spec: dict[str, Any] = {
    'restartPolicy': 'Never',
    'terminationGracePeriodSeconds': job.grace_s,
    # Otherwise the command would be process 1, which ignores SIGTERM until it has a handler.
    'shareProcessNamespace': True,
    'enableServiceLinks': False,
    'automountServiceAccountToken': bool(options.service_account),
    'volumes': volumes,
    'containers': [_container(job, group, options)],
  }
  if job.files:
    spec['initContainers'] = [_copying(job, options)]
  if options.service_account:
    spec['serviceAccountName'] = options.service_account
  if options.pull_secret:
    spec['imagePullSecrets'] = [{'name': options.pull_secret}]
  if options.priority_class:
    spec['priorityClassName'] = options.priority_class
  if options.user is not None:
    spec['securityContext'] = {
      'runAsUser': options.user,
      'runAsGroup': options.user,
      'fsGroup': options.user,
      'fsGroupChangePolicy': 'OnRootMismatch',
    }
  if selector:
    spec['nodeSelector'] = selector
  if devices := _devices(group, options):
    # Nodes with accelerators repel other pods, on GKE and elsewhere.
    spec['tolerations'] = [{'key': key, 'operator': 'Exists'} for key in devices]
  return spec


def _copying(job: Job, options: JobsetOptions) -> dict:
  """The container that writes the job's files before a pod's process starts."""
  pairs = []
  for i, path in enumerate(sorted(job.files)):
    pairs += [f'{_FILES}/file-{i}', path]
  return {
    'name': 'files',
    'image': options.image,
    'command': _literal(['sh', '-c', _COPY, 'files', *pairs]),
    'volumeMounts': [
      {'name': 'data', 'mountPath': options.mount},
      {'name': 'files', 'mountPath': _FILES, 'readOnly': True},
    ],
  }


def _container(job: Job, group: ProcessGroup, options: JobsetOptions) -> dict:
  resources = group.resources
  given = {'cpu': resources.cpus and str(resources.cpus)}
  given['memory'] = resources.memory_gib and f'{resources.memory_gib}Gi'
  amounts = {name: amount for name, amount in given.items() if amount} | _devices(group, options)
  container = {
    'name': group.name,
    'image': options.image,
    'command': _literal(_in_image(group.command, options)),
    'env': _environment(job, group, options),
    'volumeMounts': [
      {'name': 'data', 'mountPath': options.mount},
      {'name': 'shm', 'mountPath': '/dev/shm'},
    ],
  }
  if job.directory is not None and _is_mounted(job.directory, options):
    container['workingDir'] = job.directory
  if amounts:
    container['resources'] = {'requests': amounts, 'limits': dict(amounts)}
  return container


def _in_image(command: Sequence[str], options: JobsetOptions) -> list[str]:
  """Replaces the interpreter of a command `PYTHON [-OPTION …] -m MODULE …`."""
  flags = itertools.takewhile(_is_flag, command[1:])
  return [options.python, *command[1:]] if '-m' in flags else [*command]


def _is_flag(word: str) -> bool:
  return word.startswith('-')


def _devices(group: ProcessGroup, options: JobsetOptions) -> dict[str, str]:
  """Accelerators of one process, by the name of the resource."""
  if group.resources.tpu:
    chips = _size(group.resources.topology) * _slices(group, options) // group.nodes
    return {'google.com/tpu': str(chips)}
  return {'nvidia.com/gpu': str(group.resources.gpus)} if group.resources.gpus else {}


def _environment(job: Job, group: ProcessGroup, options: JobsetOptions) -> list[dict]:
  fixed = {'PYTHONUNBUFFERED': '1'}
  if group.resources.cpus:
    fixed['NPROC'] = str(group.resources.cpus)
  values = {**fixed, **job.env, **group.env}
  entries = [{'name': name, 'value': _expanded_to(values[name])} for name in sorted(values)]
  if not _is_trainer(group) or _slices(group, options) > 1:
    return entries
  ours = {
    'JAX_COORDINATOR_ADDRESS': {
      'value': f'{job.name}-{group.name}-0-0.{job.name}:{options.port}',
    },
    'JAX_NUM_PROCESSES': {'value': str(group.processes)},
    'JAX_PROCESS_ID': {'valueFrom': {'fieldRef': {'fieldPath': _INDEX}}},
  }
  entries = [entry for entry in entries if entry['name'] not in ours]
  return [*entries, *({'name': name, **source} for name, source in ours.items())]


def _literal(words: Sequence[str]) -> list[str]:
  return [_expanded_to(word) for word in words]


def _expanded_to(word: str) -> str:
  """Returns what Kubernetes, which replaces $(NAME), expands to `word`."""
  return word.replace('$', '$$')


def _kubectl(
  arguments: Sequence[str], options: JobsetOptions, *, stdin: str = '', shown: bool = False
) -> str:
  """Runs kubectl in the namespace and returns what it wrote.

  Args:
    shown: kubectl writes to this process's output instead, and may take longer.

  Raises:
    UserError: kubectl is missing, failed, or took too long.
  """
  if shutil.which('kubectl') is None:
    raise UserError(
      'kubectl: no such program in PATH; install it, or submit the printed text where it is'
    )
  namespace = [f'--namespace={options.namespace}'] if options.namespace else []
  limit_s = _LOGS_S if shown else _SECONDS
  try:
    done = subprocess.run(
      ['kubectl', *arguments, *namespace],
      input=stdin,
      stdout=None if shown else subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      errors='replace',
      timeout=limit_s,
    )
  except subprocess.TimeoutExpired:
    raise UserError(f'kubectl {arguments[0]}: no answer within {limit_s} s') from None
  except OSError as error:
    raise UserError(f'kubectl: cannot be run: {error.strerror}') from error
  if done.returncode != 0:
    said = [line for line in done.stderr.splitlines() if not _NOISE.match(line)]
    words = one_line(' '.join(said)) or f'exit code {done.returncode}'
    raise UserError(f'kubectl {arguments[0]}: {words}')
  return done.stdout or ''


def submit(manifest: str, job: Job, options: JobsetOptions) -> str:
  """Submits the manifest and returns the job's name; deletes what it made if that fails."""
  found = _kubectl(['get', 'jobset', job.name, '--ignore-not-found', '--output=name'], options)
  if found.strip():
    raise UserError(
      f'job {job.name}: the cluster has a JobSet of this name; cancel it first (--cancel='
      f'{job.name}), or choose another name'
    )
  try:
    _kubectl(['apply', '--filename=-'], options, stdin=manifest)
  except UserError:
    with contextlib.suppress(UserError):
      _delete(job.name, options)
    raise
  return job.name


def _delete(name: str, options: JobsetOptions) -> str:
  objects = [f'jobset/{name}', f'secret/{_secret_name(name)}']
  return _kubectl(['delete', *objects, '--ignore-not-found', '--wait=false'], options)


def _named(name: str) -> str:
  if not _RESOURCE.fullmatch(name):
    raise UserError(f'{name!r}: wanted the name of a job, as --submit printed it')
  return name


def status(name: str, options: JobsetOptions) -> str:
  """Returns a line such as "RUNNING; restarts 1; trainer: 2 ready; rollout: 1 ready, 1 failed"."""
  found = _kubectl(['get', 'jobset', _named(name), '--output=json'], options)
  try:
    return _status_line(json.loads(found))
  except (ValueError, TypeError, AttributeError, KeyError) as error:
    raise UserError(f'kubectl get jobset {name}: {one_line(error)}; wanted a JobSet') from error


def _status_line(jobset: dict) -> str:
  state = jobset.get('status', {})
  true = [c for c in state.get('conditions', []) if c['status'] == 'True']
  last = next(
    (c for kind in ('Failed', 'Completed', 'Suspended') for c in true if c['type'] == kind), None
  )
  if last is None:
    parts = ['RUNNING' if any(g.get('ready') for g in _groups(state)) else 'PENDING']
  else:
    parts = [
      one_line(f'{last["type"].upper()} since {last["lastTransitionTime"]}: {last["message"]}')
    ]
  parts.append(f'restarts {int(state.get("restarts", 0))}')
  for group in _groups(state):
    counts = [
      f'{int(group[kind])} {kind}'
      for kind in ('active', 'ready', 'succeeded', 'failed')
      if group.get(kind)
    ]
    parts.append(f'{group["name"]}: {", ".join(counts) or "nothing yet"}')
  line = one_line('; '.join(parts))
  return ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _groups(state: dict) -> list[dict]:
  return state.get('replicatedJobsStatus', [])


def logs(name: str, options: JobsetOptions) -> None:
  """Prints what the pods wrote, each line after the pod's name."""
  _kubectl(
    [
      'logs',
      f'--selector=jobset.sigs.k8s.io/jobset-name={_named(name)}',
      '--all-containers',
      '--ignore-errors',
      '--prefix',
      '--tail=-1',
    ],
    options,
    shown=True,
  )


def cancel(name: str, options: JobsetOptions) -> None:
  """Deletes the JobSet and its Secret; the pods get SIGTERM and the job's grace period."""
  if not _delete(_named(name), options).strip():
    raise UserError(f'{name}: the cluster has no such JobSet')


LAUNCHER = Launcher(
  name='jobset',
  Options=JobsetOptions,
  text=text,
  submit=submit,
  status=status,
  logs=logs,
  cancel=cancel,
)
