"""Launcher for Kubernetes: runs a job as a JobSet, and passes the job's files in a Secret.

The processes can use GPUs on any cluster, and TPU slices on Google Kubernetes Engine (GKE). Each
group of processes becomes a replicated job, and each process a pod. The JobSet ends when all
trainer processes have ended. If one of them fails, the JobSet restarts all groups, at most
`Job.restarts` times. A restart would not help after exit code 1 of a trainer (it cannot
continue), or after exit code 2 of any process (its input is invalid). The JobSet then fails at
once. If any other failure ends a process of a service, only that process is started again.

The trainer processes get JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. If they run
on several TPU slices, they get none of these, because GKE then sets variables that JAX detects.

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
"""Path at which the Secret is mounted in the init container."""
_COPY = (
  'umask 077; while [ $# -gt 0 ]; do if [ ! -e "$2" ]; then mkdir -p -- "${2%/*}" && copy=$(mktemp '
  '-- "$2.XXXXXX") || exit 1; cat -- "$1" >"$copy" && mv -f -- "$copy" "$2" || exit 1; fi; shift '
  '2; done'
)
"""Shell program that copies files with mode 0600. Its arguments alternate between the path of a
file and the path to which that file is copied.

An existing file is kept, so that a restarted job has the same secret key. A file appears under its
path only when it is complete, because all pods run this program at the same time.
"""
_UNUSABLE, _STUCK = 2, 1
"""Exit codes after which a restart would not help: `_UNUSABLE` (the input is invalid) and `_STUCK`
(the trainer cannot continue).
"""
_POD_NAME = 63 - len('-12345')
"""Maximum length of a pod's name without the suffix that the Job controller appends."""
_CHIPS = (1, 4, 8)
"""Possible numbers of chips of a TPU node."""
_LABEL = re.compile(r'[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?')
_LABEL_KEY = re.compile(rf'([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{_LABEL.pattern}')
_RESOURCE = re.compile(r'[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?')
_PRINTABLE = re.compile(r'[!-~]+')
_TOPOLOGY = re.compile(r'[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}')
_NOISE = re.compile(r'[IWE]\d{4} |Warning: |$')
"""Matches lines on kubectl's standard error that are log lines, warnings or empty."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SECONDS = 60
"""Maximum duration of a call of kubectl in seconds, except for printing logs."""
_LOGS_S = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobsetOptions:
  """Settings of the Kubernetes launcher."""

  image: str | None = None
  """Container image in which jaxrl_llm is installed. All groups use it. Required."""
  claim: str | None = None
  """PersistentVolumeClaim (ReadWriteMany) that contains the run directory. Required."""
  mount: str = '/data'
  """Path at which the claim is mounted in every pod. The run directory must lie below it."""
  python: str = 'python3'
  """Python interpreter in the image. In the commands of the job, it replaces the interpreter of the
  submitting machine.
  """
  namespace: str | None = None
  """Kubernetes namespace of the job. If unset, the namespace of kubectl's current context is used.
  """
  service_account: str | None = None
  """Service account of the pods. If unset, the pods get no token for the Kubernetes API."""
  pull_secret: str | None = None
  """Name of the Secret with the credentials for pulling the image from its registry."""
  priority_class: str | None = None
  """Priority class of the pods."""
  queue: str | None = None
  """Local queue of Kueue, the job queueing system, in which the job waits. If unset, the job does
  not use Kueue.
  """
  gpu_type: str | None = None
  """Type of the GPU nodes, such as nvidia-h100-80gb. Only for GKE."""
  node_selector: tuple[str, ...] = ()
  """Labels that a node must have to run any pod of the job, each as KEY=VALUE."""
  shm_gib: int | None = None
  """Maximum size of /dev/shm in GiB. It counts towards the pod's memory. If unset, the maximum is
  half of the node's memory.
  """
  user: int | None = None
  """User ID of the processes, also used as their group ID. If unset, the image determines both."""
  port: int = 8476
  """Port on which the JAX coordinator listens, in the pod of trainer process 0."""

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
  """Returns the manifest: the JobSet, preceded by a Secret if the job has files.

  Raises:
    UserError: if Kubernetes cannot run the job with these options.
  """
  _check(job, options)
  documents = [_secret(job, options)] if job.files else []
  documents.append(_jobset(job, options))
  return yaml.dump_all(map(_quoted, documents), Dumper=_Dumper, sort_keys=False, width=math.inf)


class _Quoted(str):
  """A string that is written in quotes.

  Without quotes, YAML parsers disagree on strings such as y (a boolean) and 1e3 (a number).
  """


class _Dumper(yaml.SafeDumper):
  """Writes `_Quoted` strings in quotes."""


def _represent(dumper: _Dumper, value: _Quoted) -> yaml.Node:
  return dumper.represent_scalar('tag:yaml.org,2002:str', str(value), style="'")


_Dumper.add_representer(_Quoted, _represent)


def _quoted(value: Any) -> Any:
  """Returns a copy of a tree in which all strings are marked for quoting, except the keys of
  mappings.
  """
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
  if job.trainer.slices > 1 and not job.trainer.resources.tpu:
    raise UserError(f'{where}: --slices={job.trainer.slices}, but the trainer has no TPU; wanted 1')
  for name, path in (('run directory', job.workdir), *(('file', path) for path in job.files)):
    if not _is_mounted(path, options):
      raise UserError(
        f'{where}: the {name} {path} is not in --mount={options.mount}, where the pods see '
        f'--claim={options.claim}; wanted --workdir={options.mount}/…, or another --mount'
      )
  for group in job.groups:
    _check_group(job, group, options)


def _is_mounted(path: str, options: JobsetOptions) -> bool:
  """Returns whether a path lies below the directory at which the claim is mounted."""
  pure = pathlib.PurePosixPath(path)
  return '..' not in pure.parts and pure.is_relative_to(options.mount)


def _check_group(job: Job, group: ProcessGroup, options: JobsetOptions) -> None:
  where = f'job {job.name}, group {group.name}'
  for word in (*group.command, *group.env.values(), *job.env.values(), *job.files.values()):
    if '\0' in word or any('\ud800' <= c <= '\udfff' for c in word):
      raise UserError(f'{where}: {word!r} contains a null character or is not Unicode')
  longest = f'{job.name}-{group.name}-{_slices(group) - 1}-{group.processes - 1}'
  if len(longest) > _POD_NAME:
    raise UserError(
      f'{where}: the name of its last pod, {longest}, is longer than {_POD_NAME} characters; '
      'choose a shorter name for the job'
    )
  resources = group.resources
  if resources.topology and not resources.tpu:
    raise UserError(f'{where}: topology is {resources.topology}, but the type of TPU is missing')
  if resources.tpu:
    _check_tpu(where, group)


def _check_tpu(where: str, group: ProcessGroup) -> None:
  tpu, topology, slices = group.resources.tpu, group.resources.topology, _slices(group)
  if not _LABEL.fullmatch(tpu):
    raise UserError(f'{where}: tpu {tpu!r}: wanted a TPU node type such as tpu-v5-lite-podslice')
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
      f'{where}: {slices} slices of one node each; GKE connects only slices of several nodes'
    )


def _is_trainer(group: ProcessGroup) -> bool:
  return group.name == TRAINER


def _slices(group: ProcessGroup) -> int:
  """Returns the number of TPU slices of a group. Each node of a service is a separate slice."""
  if not group.resources.tpu:
    return 1
  return group.slices if _is_trainer(group) else group.nodes


def _size(topology: str) -> int:
  """Returns the number of chips of a topology such as '8x8'."""
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
  """Returns a group as a replicated job.

  The trainer has one Kubernetes Job for each of its TPU slices. Any other group has one Job.
  """
  is_trainer = _is_trainer(group)
  replicas = _slices(group) if is_trainer else 1
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
    # The nodes of a slice form one node pool. This annotation reserves the pool for one Job.
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
    # Without a shared namespace, the command would have process id 1, and such a process ignores
    # SIGTERM until it has installed a handler.
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
    # Nodes with accelerators usually carry a taint that keeps pods without this toleration away.
    spec['tolerations'] = [{'key': key, 'operator': 'Exists'} for key in devices]
  return spec


def _copying(job: Job, options: JobsetOptions) -> dict:
  """Returns the init container, which writes the job's files before a pod's process starts."""
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
  """Replaces the interpreter of a command `PYTHON [-OPTION …] -m MODULE …` with the image's Python.

  Any other command is returned unchanged.
  """
  flags = itertools.takewhile(_is_flag, command[1:])
  return [options.python, *command[1:]] if '-m' in flags else [*command]


def _is_flag(word: str) -> bool:
  return word.startswith('-')


def _devices(group: ProcessGroup, options: JobsetOptions) -> dict[str, str]:
  """Returns the number of accelerators of one process, keyed by the Kubernetes resource name."""
  if group.resources.tpu:
    chips = _size(group.resources.topology) * _slices(group) // group.nodes
    return {'google.com/tpu': str(chips)}
  return {'nvidia.com/gpu': str(group.resources.gpus)} if group.resources.gpus else {}


def _environment(job: Job, group: ProcessGroup, options: JobsetOptions) -> list[dict]:
  fixed = {'PYTHONUNBUFFERED': '1'}
  if group.resources.cpus:
    fixed['NPROC'] = str(group.resources.cpus)
  values = {**fixed, **job.env, **group.env}
  entries = [{'name': name, 'value': _expanded_to(values[name])} for name in sorted(values)]
  if not _is_trainer(group) or _slices(group) > 1:
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
  """Returns `word`, escaped so that Kubernetes does not expand a $(NAME) in it."""
  return word.replace('$', '$$')


def _kubectl(
  arguments: Sequence[str], options: JobsetOptions, *, stdin: str = '', shown: bool = False
) -> str:
  """Runs kubectl in the namespace of the options and returns its standard output.

  Args:
    shown: whether kubectl writes directly to this process's standard output. The return value is
      then empty, and the time limit is `_LOGS_S` instead of `_SECONDS`.

  Raises:
    UserError: if kubectl is missing, fails or takes too long.
  """
  if shutil.which('kubectl') is None:
    raise UserError(
      'kubectl: no such program in PATH; install it, or submit the printed text on a machine that '
      'has it'
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
  """Submits the manifest and returns the job's name, which is its id.

  If the submission fails, the objects that it has created are deleted.
  """
  existing = _kubectl(['get', 'jobset', job.name, '--ignore-not-found', '--output=name'], options)
  if existing.strip():
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
  described = _kubectl(['get', 'jobset', _named(name), '--output=json'], options)
  try:
    return _status_line(json.loads(described))
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
  """Prints the output of the pods. Each line begins with the name of its pod."""
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
  """Deletes the JobSet and its Secret. The pods get SIGTERM, and SIGKILL after the grace period."""
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
