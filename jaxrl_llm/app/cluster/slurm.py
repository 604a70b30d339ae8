"""Launcher for Slurm: runs a job as one batch script, in which each process group is a job step.

All groups share one allocation, which starts, ends and is requeued as a whole. Unlike a
heterogeneous job of Slurm, the job can be an element of a job array. The price is that all nodes
have the same resources: as much as the most demanding group needs. Each group runs on separate
nodes of the allocation (`srun --relative`).

Slurm itself restarts the job. It requeues a job when a node fails or the job is preempted. In
addition, the batch script calls `scontrol requeue` when the trainer has ended for a reason that may
be transient: a signal, exit code 75, or a service that failed. `Job.restarts` limits the total.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
import shutil
import string
import subprocess
from collections.abc import Sequence

from absl import logging

from jaxrl_llm.app.cluster.files import LAUNCHES, write_files
from jaxrl_llm.app.cluster.job import Job, Launcher, ProcessGroup
from jaxrl_llm.core.errors import UserError, one_line

_DEADLINE_S = 60.0
"""Maximum duration of a call of a Slurm command in seconds."""
_ID = re.compile(r'[0-9]+(_[0-9]+)?')
_OPTION = re.compile(r'--[a-z][-a-z0-9]*(=[^\s\'"\\#]+)?')
_UNQUOTABLE = re.compile(r'["\\]')
_NEVER = ('BadConstraints', 'PartitionConfig', 'PartitionNodeLimit', 'PartitionTimeLimit')
"""Reasons, by their Slurm names, for which a job cannot start until an administrator changes the
cluster.
"""
_ENDED = (
  *('BOOT_FAIL', 'CANCELLED', 'COMPLETED', 'DEADLINE', 'FAILED'),
  *('NODE_FAIL', 'OUT_OF_MEMORY', 'PREEMPTED', 'TIMEOUT'),
)
"""States of jobs that have ended."""
_UNKNOWN_JOB = 'Invalid job id'
"""Text in Slurm's error message about an unknown job. Slurm forgets a job some minutes after it has
ended.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmOptions:
  """Settings of the Slurm launcher."""

  partition: str | None = None
  """Partition in which the job runs. If unset, the cluster's default partition is used."""
  account: str | None = None
  """Account to which the job's resources are charged."""
  qos: str | None = None
  """Name of the quality of service (QOS) that the job requests."""
  reservation: str | None = None
  """Name of the reservation whose nodes the job uses."""
  constraint: str | None = None
  """Features that the nodes must have, as in sbatch --constraint."""
  exclusive: bool = True
  """Whether no other job may run on the nodes. If so, the job can use all cores and memory of the
  nodes. Otherwise, the job gets the cores and memory that --cpus and --memory_gib specify.
  """
  sbatch: tuple[str, ...] = ()
  """Additional options for sbatch, such as --mail-type=END."""
  srun: tuple[str, ...] = ()
  """Additional options for srun, such as --container-image=IMAGE."""

  def __post_init__(self):
    for name in ('partition', 'account', 'qos', 'reservation', 'constraint'):
      if (value := getattr(self, name)) is not None and not _OPTION.fullmatch(f'--x={value}'):
        raise UserError(f'--{name}={value}: wanted a value without spaces, quotes, # or \\')
    for name in ('sbatch', 'srun'):
      for option in getattr(self, name):
        if not _OPTION.fullmatch(option):
          raise UserError(
            f'--{name}={option}: wanted --option or --option=value, without spaces, quotes, # or \\'
          )


_SCRIPT = string.Template("""\
#!/usr/bin/env bash
$directives
# Job $name, written by `jaxrl launch slurm`. Each group of processes is a job step on nodes of its
# own. The job ends when the trainer ends. Its exit code is that of the first process that failed
# by itself.
set -uo pipefail

id=$${SLURM_ARRAY_TASK_ID:+$${SLURM_ARRAY_JOB_ID}_$$SLURM_ARRAY_TASK_ID}
id=$${id:-$$SLURM_JOB_ID}
restart=$${SLURM_RESTART_COUNT:-0}
restarts=$restarts
say() { echo "slurm: $$*" >&2; }
say "job $$id starts on $$SLURM_JOB_NODELIST (restart $$restart of at most $$restarts)"
if ((restart > restarts)); then
  say 'started again too often; giving up'
  exit 1
fi
$directory
# A process must find its job through srun's variables, not through those of the submitting shell.
unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID
$environment
# File in which each process records its exit code. When srun ends processes, it loses their codes.
ends=$launches/slurm-$$SLURM_JOB_ID.ends
mkdir -p "$${ends%/*}"
: >"$$ends"

# Script of each process: task GROUP PROCESSES_PER_NODE ENDS COMMAND [ARGUMENT ...]. It exits with 0
# if the process ended because it was asked to: otherwise, srun would end the other processes, which
# may still be committing.
task='
group=$$1 threads=$$((SLURM_CPUS_ON_NODE / $$2)) ends=$$3
shift 3
export NPROC=$${NPROC:-$$((threads > 0 ? threads : 1))} PYTHONUNBUFFERED=1
trap : TERM INT HUP
"$$@"
code=$$?
echo "$$group $$SLURM_PROCID $$code" >>"$$ends"
case $$code in 130 | 143) exit 0 ;; esac
exit "$$code"'

$steps

runs() { kill -0 "$$1" 2>/dev/null; }

# stop GROUP: sends SIGTERM once to the processes of a group. The trainer then commits. If srun got
# the signal instead, it would soon kill them.
stop() {
  local step
  step=$$(squeue --noheader --steps --jobs="$$id" --format='%j %i' | grep "^$$1 " | head -n 1)
  [ -z "$$step" ] || scancel --quiet --signal=TERM "$${step#* }" 2>/dev/null
}

asked=
lost=
# Near the time limit, Slurm signals only this script. In all other cases, it signals every process.
trap 'asked=limit; say "the time limit is near: stopping the trainer"; stop trainer' USR1
trap 'asked=cancel; say "cancelled: stopping the trainer"; stop trainer' USR2
trap 'asked=$${asked:-end}' TERM

# Removes ended services from the list, and stops the trainer if a service has failed. Exit code 0
# of a service means that a signal asked it to end. The trainer is then left alone: it may have
# received the same signal, and a second one would interrupt its commit.
look_at_services() {
  local service left=()
  for service in $${services[@]+"$${services[@]}"}; do
    if runs "$$service"; then
      left+=("$$service")
    elif ! wait "$$service" && [ -z "$$asked$$lost" ]; then
      lost=yes
      say 'a service has failed: stopping the trainer'
      stop trainer
    fi
  done
  services=($${left[@]+"$${left[@]}"})
}

while runs "$$trainer"; do
  look_at_services
  sleep 0.5 &
  wait $$!
done
wait "$$trainer"
code=$$?
asked=$${asked:-none}
for group in $services; do
  stop "$$group"
done
for ((half = 0; half < 2 * $grace_s && $${#services[@]} > 0; half++)); do
  sleep 0.5
  look_at_services
done

# Prints the exit code of the job: that of the first process that failed by itself. Codes 75 and 134
# (aborted by JAX) are consequences of another process's end, 130 and 143 of a signal. If no process
# failed by itself, all of them were ended from outside.
first_failure() {
  local group process code other=
  while read -r group process code; do
    case $$group-$$code in
      trainer-0 | *-130 | *-143) ;;
      *-75 | *-134) other=75 ;;
      trainer-*)
        say "culprit: process $$process of the trainer, exit code $$code"
        echo "$$code"
        return
        ;;
      *-2)
        say "culprit: process $$process of $$group, exit code 2"
        echo 2
        return
        ;;
    esac
  done <"$$ends"
  if [ -z "$$other" ] && grep -q '^trainer [0-9]* 130$$' "$$ends"; then
    other=130
  elif [ -z "$$other" ] && grep -q '^trainer [0-9]* 143$$' "$$ends"; then
    other=143
  fi
  [ -z "$$lost" ] || other=75
  if [ -z "$$other" ] && ((code != 0)); then
    other=75
  fi
  echo "$${other:-0}"
}
code=$$(first_failure)
rm -f "$$ends"

if [ "$$asked" != cancel ] && ((code == 75 || code > 130)); then
  # In any other state, Slurm is already ending or requeueing the job.
  if [ "$$(squeue --noheader --jobs="$$id" --format=%T)" != RUNNING ]; then
    say "exit code $$code; Slurm decides whether the job starts again"
  elif ((restart >= restarts)); then
    say "exit code $$code; started again $$restart times, giving up"
  else
    say "exit code $$code; asking Slurm to start the job again"
    ! scontrol requeue "$$id" || sleep 60
  fi
fi
exit "$$code"
""")


def text(job: Job, options: SlurmOptions) -> str:
  """Returns the batch script of a job."""
  return _script(job, options, ())


def array_text(job: Job, count: int, options: SlurmOptions, *, at_once: int | None = None) -> str:
  """Returns the batch script of a job array, which consists of `count` jobs with the same commands.

  Slurm sets the environment variable SLURM_ARRAY_TASK_ID of each job to its number, counted from 0.

  Args:
    at_once: maximum number of jobs that run at the same time. If None, there is no limit.

  Raises:
    UserError: if `count` or `at_once` is less than 1, or if Slurm cannot run the job.
  """
  if count < 1 or (at_once is not None and at_once < 1):
    raise UserError(f'array of {count} jobs, {at_once} at a time: wanted at least 1')
  limit = '' if at_once is None else f'%{at_once}'
  return _script(job, options, (f'--array=0-{count - 1}{limit}',))


def _script(job: Job, options: SlurmOptions, array: Sequence[str]) -> str:
  launches = f'{job.workdir}/{LAUNCHES}'
  if _UNQUOTABLE.search(launches):
    raise UserError(
      f'job {job.name}: workdir {job.workdir}: has a " or \\, which sbatch does not accept'
    )
  output = launches.replace('%', '%%')
  directives = [
    f'--job-name={job.name}',
    f'--nodes={sum(group.nodes for group in job.groups)}',
    *_node(job, options),
    *([] if job.time_limit_s is None else [f'--time={-(-job.time_limit_s // 60)}']),
    f'--signal=B:USR1@{job.grace_s}',
    '--requeue',
    '--open-mode=append',
    f'--output="{output}/slurm-{"%A_%a" if array else "%j"}.out"',
    *(
      f'--{name}={value}'
      for name in ('partition', 'account', 'qos', 'reservation', 'constraint')
      if (value := getattr(options, name)) is not None
    ),
    *array,
    *options.sbatch,
  ]
  return _SCRIPT.substitute(
    directives='\n'.join(f'#SBATCH {directive}' for directive in directives),
    name=job.name,
    restarts=job.restarts,
    grace_s=job.grace_s,
    directory='' if job.directory is None else f'cd -- {shlex.quote(job.directory)} || exit 2\n',
    environment=''.join(f'export {k}={shlex.quote(v)}\n' for k, v in job.env.items()),
    launches=shlex.quote(launches),
    steps=_steps(job, options),
    services=' '.join(group.name for group in job.services) or "''",
  )


def _node(job: Job, options: SlurmOptions) -> list[str]:
  """Returns the sbatch options for the resources of each node: the most that any group needs."""
  tasks = max(group.processes_per_node for group in job.groups)
  cpus = max(group.processes_per_node * (group.resources.cpus or 1) for group in job.groups)
  memory = max(group.processes_per_node * (group.resources.memory_gib or 0) for group in job.groups)
  gpus = max(group.processes_per_node * group.resources.gpus for group in job.groups)
  for group in job.groups:
    if group.resources.tpu:
      raise UserError(f'group {group.name}: Slurm has no TPUs; use the launcher jobset')
  requests = [f'--ntasks-per-node={tasks}', f'--cpus-per-task={-(-cpus // tasks)}']
  if memory:
    requests.append(f'--mem={memory}G')
  elif options.exclusive:
    requests.append('--mem=0')
  if gpus:
    requests.append(f'--gpus-per-node={gpus}')
  return [*requests, '--exclusive'] if options.exclusive else requests


def _steps(job: Job, options: SlurmOptions) -> str:
  """Returns shell lines that start the job step of each group in the background.

  The lines store the process id of the trainer's srun in the shell variable `trainer`, and the
  process ids of the services' sruns in the array `services`.
  """
  lines, first = ['services=()'], 0
  for group in job.groups:
    lines.append(_step(group, first, options))
    lines.append('trainer=$!' if group is job.trainer else 'services+=($!)')
    first += group.nodes
  return '\n'.join(lines)


def _step(group: ProcessGroup, first: int, options: SlurmOptions) -> str:
  resources, is_trainer = group.resources, group.name == 'trainer'
  srun = [
    'srun',
    f'--job-name={group.name}',
    f'--relative={first}',
    f'--nodes={group.nodes}',
    f'--ntasks={group.processes}',
    f'--ntasks-per-node={group.processes_per_node}',
    *([] if resources.cpus is None else [f'--cpus-per-task={resources.cpus}']),
    # With --gpus-per-task, each process sees only its own GPUs. With --gres=none, a step without
    # GPUs does not wait until GPUs of its nodes are free.
    *([f'--gpus-per-task={resources.gpus}'] if resources.gpus else ['--gres=none']),
    # When a trainer process fails, Slurm ends the whole trainer. When a process of a service fails,
    # the service's other processes continue.
    f'--kill-on-bad-exit={int(is_trainer)}',
    '--wait=0',
    '--label',
    *options.srun,
    *('bash', '-c'),
  ]
  variables = [f'{name}={value}' for name, value in group.env.items()]
  command = ['env', *variables, *group.command] if variables else group.command
  return (
    f'{shlex.join(srun)} "$task" task {group.name} {group.processes_per_node} "$ends" \\\n'
    f'  {shlex.join(command)} &'
  )


def submit(text: str, job: Job, options: SlurmOptions) -> str:
  """Submits a script with sbatch and returns the job's id.

  Raises:
    UserError: if sbatch is not installed here, or if Slurm rejects the job or could never start it.
  """
  check_installed()
  write_files(job, script=('slurm.sh', text))
  job_id = _call(['sbatch', '--parsable'], text).partition(';')[0].strip()
  _check_can_start(job_id, job)
  return job_id


def _check_can_start(job_id: str, job: Job) -> None:
  """Cancels a waiting job that could never start in its partition, and raises UserError.

  By default (`EnforcePartLimits`), Slurm accepts such a job and lets it wait forever. If the reason
  for which a job waits cannot be read, the job stays submitted, so that the caller still gets its
  id.
  """
  try:
    reasons = _call(['squeue', '--noheader', f'--jobs={job_id}', '--format=%r']).split()
  except UserError as error:
    logging.warning('job %s was submitted, but its state is unknown: %s', job_id, error)
    return
  never = next((reason for reason in reasons if reason in _NEVER), None)
  if never is None:
    return
  _call(['scancel', job_id])
  nodes = sum(group.nodes for group in job.groups)
  each = ', '.join(
    f'{group.name}: {group.nodes} nodes of {group.processes_per_node} processes with '
    f'{group.resources.cpus or 1} cores and {group.resources.gpus} GPUs each'
    for group in job.groups
  )
  raise UserError(
    f'sbatch: Slurm would never start the job ({never}), which needs {nodes} nodes ({each}); '
    'request only what the partition has (see sinfo), or name another --partition'
  )


def status(job_id: str, options: SlurmOptions) -> str:
  """Returns a line with a job's state in Slurm, the reason for this state or the job's exit code,
  its run time and its nodes.

  For a job array, the line contains these facts for each element of the array.
  """
  return '; '.join(_states(job_id))


def _states(job_id: str) -> list[str]:
  """Returns a line with the state of a job, in the form that `status` describes. For a job array,
  returns one such line for each element.
  """
  _check_id(job_id)
  command = ['squeue', '--noheader', '--states=all', f'--jobs={job_id}', '--array']
  try:
    lines = _call([*command, '--format=%i %T %r %M %N'])
  except UserError as error:
    if _UNKNOWN_JOB not in str(error):
      raise
    lines = ''
  if not lines.strip() and shutil.which('sacct'):
    command = ['sacct', '--allocations', '--noheader', '--parsable2', f'--jobs={job_id}']
    try:
      lines = _call([*command, '--format=JobID,State,ExitCode,Elapsed,NodeList']).replace('|', ' ')
    except UserError:
      lines = ''
  if not lines.strip():
    raise UserError(f'{job_id}: Slurm does not know this job, or has forgotten it')
  return [' '.join(line.split()) for line in lines.splitlines()]


def logs(job_id: str, options: SlurmOptions) -> None:
  """Prints the output of a job so far."""
  _check_id(job_id)
  try:
    described = _call(['scontrol', '--oneliner', 'show', 'job', job_id])
  except UserError as error:
    if _UNKNOWN_JOB not in str(error):
      raise
    raise UserError(
      f'{job_id}: Slurm does not know this job, or has forgotten it; the output of a past job is '
      f'in WORKDIR/{LAUNCHES}/slurm-{job_id}.out'
    ) from None
  for line in described.splitlines():
    if match := re.search(r' StdOut=(.*?)(?: Power=| [A-Z][A-Za-z]*=|$)', line):
      path = pathlib.Path(match[1])
      print(path.read_text(errors='replace') if path.exists() else f'{path}: not written yet')


def cancel(job_id: str, options: SlurmOptions) -> None:
  """Ends a job so that Slurm does not restart it.

  A running job's script gets SIGUSR2 and then stops the trainer, which may take until the job's
  time limit to commit. After a plain `scancel`, Slurm would kill the trainer once the cluster's
  KillWait has passed.
  """
  states = _states(job_id)
  if all(state.split()[1] in _ENDED for state in states):
    raise UserError(f'{job_id}: the job has ended: {"; ".join(states)}')
  _call(['scancel', '--state=PENDING', job_id])
  if any(state.split()[1] == 'RUNNING' for state in states):
    _call(['scancel', '--batch', '--signal=USR2', job_id])


def _check_id(job_id: str) -> None:
  if not _ID.fullmatch(job_id):
    raise UserError(f'{job_id}: not the id of a Slurm job; wanted a number, as --submit prints it')


def check_installed() -> None:
  """Raises UserError unless jobs can be submitted from this host."""
  _require('sbatch')


def _require(program: str) -> None:
  if shutil.which(program) is None:
    raise UserError(
      f'{program}: no such command; wanted a host of a Slurm cluster from which jobs are submitted'
    )


def _call(command: Sequence[str], stdin: str = '') -> str:
  """Runs a command and returns its standard output.

  Raises:
    UserError: if the command is missing, takes too long or fails. If the command fails, the message
      consists of the text that the command has printed.
  """
  _require(command[0])
  try:
    done = subprocess.run(
      command, input=stdin, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
  except subprocess.TimeoutExpired:
    raise UserError(
      f'{command[0]}: no answer within {_DEADLINE_S:g} s; check that slurmctld is running '
      '(scontrol ping)'
    ) from None
  if done.returncode:
    said = one_line(done.stderr or done.stdout or f'exit code {done.returncode}')
    raise UserError(said if said.startswith(command[0]) else f'{command[0]}: {said}')
  return done.stdout


LAUNCHER = Launcher(
  name='slurm',
  Options=SlurmOptions,
  text=text,
  submit=submit,
  status=status,
  logs=logs,
  cancel=cancel,
)
