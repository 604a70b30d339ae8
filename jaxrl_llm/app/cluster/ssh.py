"""Launcher for hosts that are reached by ssh: runs a job as one POSIX shell script.

The script runs on any machine that can log in to all hosts by ssh without a password. It copies the
job's files, and a script for each process, to `Job.workdir` on the hosts. The copies have mode
0600, and their contents travel over the connection, so that no command line shows them. The script
then starts the processes and supervises them until they end. The file `ssh_launcher.sh` describes
how the script reacts when a process ends, and with which code the script exits. On its host, each
process is started and watched by the script `ssh_process.sh`. Every host needs setsid, timeout and
mktemp (from util-linux and coreutils), and a POSIX shell as login shell.

Each process writes its output to `logs/GROUP-NUMBER.log` in the run directory. If the job
runs in the background, the script's own output is in `logs/launcher.log`. The file
`launch/state.json` contains the state that `--status` prints. A job's id is its run directory.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from jaxrl_llm.app.cluster.files import LAUNCHES
from jaxrl_llm.app.cluster.job import TRAINER, Job, Launcher, ProcessGroup
from jaxrl_llm.core.errors import UserError, one_line

_SCRIPTS = pathlib.Path(__file__).parent
_HOST = re.compile(
  r'([A-Za-z0-9_][A-Za-z0-9._-]{0,31}@)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?'
)
_STATE = {
  'job': re.compile('[a-z0-9-]+'),
  'state': re.compile('starting|running|ended'),
  'host': re.compile('[A-Za-z0-9._-]+'),
  'fifo': re.compile(r'/tmp/jaxrl\.[A-Za-z0-9]{1,32}/news'),
}
"""Patterns that the text fields of `state.json` must match, keyed by field.

The file's other fields are the numbers `restarts`, `at` and `code`; `code` may be null.
"""
_STATE_BYTES = 1 << 16
_SILENCE_S = 30
"""Seconds without a message after which the connection between the launching script and a process
is considered lost. The process is then ended on its host, and the launching script closes the
connection.
"""
_START_S = 300
"""Maximum time in seconds for copying the files to all hosts."""
_LOOK_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SshOptions:
  """Settings of the ssh launcher."""

  hosts: tuple[str, ...] = ()
  """Hosts of the job's nodes, each as HOST or USER@HOST, separated by commas. There is one entry
  for each node: first the trainer's nodes, then the nodes of the other groups in the order of the
  groups. The same host may be listed for several nodes. Required.
  """
  coordinator: str | None = None
  """Name or address under which all hosts can reach the first host. If unset, it is the first host
  as given in --hosts, without USER@.
  """
  port: int = 8476
  """Port on which the JAX coordinator listens. It must be free on the first host."""
  ssh_config: str | None = None
  """Configuration file for ssh. If unset, ssh reads the user's configuration."""

  def __post_init__(self):
    for host in self.every_host:
      if not _HOST.fullmatch(host):
        raise UserError(f'--hosts: {host!r} is not a host; wanted HOST or USER@HOST')
    if self.coordinator is not None and not _HOST.fullmatch(self.coordinator):
      raise UserError(f'--coordinator={self.coordinator}: wanted the name of a host')
    if not 1024 <= self.port <= 65535:
      raise UserError(f'--port={self.port}: wanted 1024 to 65535')
    if self.ssh_config is not None and not self.ssh_config.isprintable():
      raise UserError(f'--ssh_config={self.ssh_config}: wanted a path of printable characters')

  @property
  def every_host(self) -> tuple[str, ...]:
    """All hosts. An element of `hosts` may itself be a list of hosts, separated by commas."""
    return tuple(host for part in self.hosts for host in part.split(','))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Process:
  """One process of the job."""

  group: ProcessGroup
  number: int
  """Number of the process within its group, from 0."""
  host: str
  env: Mapping[str, str]
  """Environment variables that the launcher sets."""

  @property
  def name(self) -> str:
    return f'{self.group.name}-{self.number}'


def text(job: Job, options: SshOptions) -> str:
  """Returns the shell script.

  Raises:
    UserError: if the number of hosts differs from the job's number of nodes, or if a group needs
      TPUs, which this launcher cannot assign.
  """
  processes = _processes(job, options)
  hosts = list(dict.fromkeys(process.host for process in processes))
  scripts = [
    {_script(job, p): _process_text(job, p) for p in processes if p.host == host} for host in hosts
  ]
  config = f' -F {shlex.quote(options.ssh_config)}' if options.ssh_config else ''
  parts = [
    '#!/bin/sh',
    f"# Job {job.name}: {len(processes)} processes on {len(hosts)} hosts. Contains the job's key.",
    'set -u',
    f'job={job.name}',
    f'folder={shlex.quote(job.workdir.rstrip("/"))}/{LAUNCHES}',
    f'processes={len(processes)} trainers={job.trainer.processes} hosts={len(hosts)}',
    f'restarts={job.restarts} grace={job.grace_s} silence={_SILENCE_S}',
    f'limit={job.time_limit_s or 0}',
    '',
    *_cases('host_name', [f'echo {host}' for host in hosts]),
    *_cases('process_name', [f'echo "{p.name} on {p.host}"' for p in processes]),
    *_cases(
      'process', [_remote(config, p.host, f'sh {shlex.quote(_script(job, p))}') for p in processes]
    ),
    *_cases(
      'files_of', [_copying(config, host, job.files, mine) for host, mine in zip(hosts, scripts)]
    ),
    _read('ssh_launcher.sh'),
  ]
  return '\n'.join(parts)


def _read(name: str) -> str:
  return (_SCRIPTS / name).read_text()


def _processes(job: Job, options: SshOptions) -> list[_Process]:
  hosts, nodes = options.every_host, sum(group.nodes for group in job.groups)
  if len(hosts) != nodes:
    groups = ', '.join(f'{group.name} {group.nodes}' for group in job.groups)
    raise UserError(
      f'--hosts: {len(hosts)} hosts for a job of {nodes} nodes ({groups}); wanted one for each '
      'node, separated by commas; the same host may be listed for several nodes'
    )
  for group in job.groups:
    if group.resources.tpu:
      raise UserError(
        f'group {group.name}: the launcher ssh cannot assign TPUs; leave --tpu out, or use the '
        'launcher jobset'
      )
  coordinator = (options.coordinator or hosts[0]).rpartition('@')[2]
  next_gpu: collections.Counter[str] = collections.Counter()
  processes, node = [], 0
  for group in job.groups:
    for number in range(group.processes):
      host = hosts[node + number // group.processes_per_node]
      env = {'PYTHONUNBUFFERED': '1'}
      if group.resources.cpus:
        env['NPROC'] = str(group.resources.cpus)
      if gpus := group.resources.gpus:
        env['CUDA_VISIBLE_DEVICES'] = ','.join(
          map(str, range(next_gpu[host], next_gpu[host] + gpus))
        )
        next_gpu[host] += gpus
      env |= {**job.env, **group.env}
      if group.name == TRAINER:
        env['JAX_COORDINATOR_ADDRESS'] = f'{coordinator}:{options.port}'
        env['JAX_NUM_PROCESSES'] = str(group.processes)
        env['JAX_PROCESS_ID'] = str(number)
      processes.append(_Process(group=group, number=number, host=host, env=env))
    node += group.nodes
  return processes


def _script(job: Job, process: _Process) -> str:
  """Returns the path, on the host of a process, of the script that runs the process."""
  return f'{job.workdir.rstrip("/")}/{LAUNCHES}/{process.name}.sh'


def _process_text(job: Job, process: _Process) -> str:
  directory = f'  cd -- {shlex.quote(job.directory)} || exit 2\n' if job.directory else ''
  exports = ''.join(
    f'export {name}={shlex.quote(value)}\n' for name, value in sorted(process.env.items())
  )
  log = f'{job.workdir.rstrip("/")}/logs/{process.name}.log'
  return (
    'unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID\n'
    f'{exports}'
    f'log={shlex.quote(log)} grace={job.grace_s} silence={_SILENCE_S}\n'
    f'start() {{\n{directory}  exec setsid {shlex.join(process.group.command)}\n}}\n'
    f'{_read("ssh_process.sh")}'
  )


def _cases(name: str, commands: Sequence[str]) -> list[str]:
  """Returns the lines of a shell function whose argument is the number of the command to run."""
  cases = [f'{i})\n{command}\n;;' for i, command in enumerate(commands)]
  return [f'{name}() {{', 'case $1 in', *cases, 'esac', '}', '']


def _remote(config: str, host: str, command: str) -> str:
  return f'remote{config} -- {host} {shlex.quote("exec " + command)}'


def _copying(config: str, host: str, files: Mapping[str, str], scripts: Mapping[str, str]) -> str:
  """Returns a shell command that writes files on a host.

  The remote shell reads the contents from its standard input. Existing files are kept if they
  belong to `files`, so that a restarted job has the same secret key. Scripts are overwritten.
  """
  lines = [_PUT]
  for path, content in sorted(files.items()):
    lines.append(f'[ -e {shlex.quote(path)} ] || put {shlex.quote(path)} {shlex.quote(content)}')
  for path, content in sorted(scripts.items()):
    lines.append(f'put {shlex.quote(path)} {shlex.quote(content)}')
  script, end = '\n'.join(lines), 'END'
  while end in script:
    end += '_'
  return f"{_remote(config, host, 'sh')} <<'{end}'\n{script}\n{end}"


_PUT = """\
set -eu
umask 077
for program in setsid timeout mktemp; do
  command -v "$program" >/dev/null || { echo "$program: no such program" >&2; exit 2; }
done
put() {
  mkdir -p -- "${1%/*}"
  copy=$(mktemp -- "$1.XXXXXX")
  printf %s "$2" >"$copy"
  mv -f -- "$copy" "$1"
}"""


def submit(script: str, job: Job, options: SshOptions) -> str:
  """Runs the script in the background and returns the job's id, which is its run directory.

  Returns as soon as the script has begun to start the processes.

  Raises:
    UserError: if ssh is not installed, if the run directory cannot be written, if a job is already
      running in it, or if a host cannot be used.
  """
  if shutil.which('ssh') is None:
    raise UserError('ssh: no such program in PATH; install an OpenSSH client')
  folder, log = (
    pathlib.Path(job.workdir, LAUNCHES),
    pathlib.Path(job.workdir, 'logs', 'launcher.log'),
  )
  try:
    for made in (folder, log.parent):
      made.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (state := _state_if_any(job.workdir)) is not None and _fifo(state) is not None:
      raise UserError(f'{job.workdir}: a job is running there; --cancel it, or wait for its end')
    written = folder / 'job.sh'
    written.unlink(missing_ok=True)
    with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'w') as file:
      file.write(script)
    (folder / 'state.json').unlink(missing_ok=True)
    begin = log.stat().st_size if log.exists() else 0
    with log.open('ab') as output:
      launcher = subprocess.Popen(
        ['sh', str(written)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
      )
  except (OSError, UnicodeEncodeError) as error:
    raise UserError(f'{job.workdir}: the job cannot be written there: {one_line(error)}') from error
  _await_start(launcher, job.workdir, log, begin)
  return job.workdir


def _await_start(launcher: subprocess.Popen, workdir: str, log: pathlib.Path, begin: int) -> None:
  """Waits until the launching script has begun to start the processes. Also returns if the script
  has ended since then.

  Args:
    begin: size of the script's log before the script was started.

  Raises:
    UserError: if a host cannot be used, or if copying the files takes too long.
  """
  deadline = time.monotonic() + _START_S
  while time.monotonic() < deadline:
    ended = launcher.poll() is not None
    state = _state_if_any(workdir)
    if state is not None and state['state'] == 'running':
      return
    if ended and (state is None or state['code'] == 2):
      with log.open('rb') as file:
        file.seek(begin)
        said = file.read(_STATE_BYTES).decode(errors='replace').splitlines()
      errors = [line.partition('error: ')[2] for line in said if 'error: ' in line]
      raise UserError(one_line(errors[0] if errors else (said or ['the launcher ended'])[-1]))
    if ended:
      return
    time.sleep(_LOOK_S)
  launcher.terminate()
  raise UserError(f'ssh: the files were not copied within {_START_S} s; see {log}')


def _state(workdir: str) -> dict:
  """Returns the content of the job's `state.json`. Raises UserError if it is missing or invalid."""
  state = _state_if_any(workdir)
  if state is None:
    raise UserError(f'{workdir}: wanted the run directory of a job that ssh has started here')
  return state


def _state_if_any(workdir: str) -> dict | None:
  path = pathlib.Path(workdir, LAUNCHES, 'state.json')
  try:
    with path.open('rb') as file:
      state = json.loads(file.read(_STATE_BYTES))
    for key, pattern in _STATE.items():
      if not pattern.fullmatch(state[key]):
        raise ValueError(f'{key} is {state[key]!r}')
    for key, most in (('restarts', 1 << 31), ('at', 1 << 40), ('code', 1 << 8)):
      if not (key == 'code' and state[key] is None) and not 0 <= state[key] < most:
        raise ValueError(f'{key} is {state[key]!r}')
  except (FileNotFoundError, NotADirectoryError):
    return None
  except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
    raise UserError(f'{path}: {one_line(error)}; wanted what the ssh launcher writes') from error
  return state


def _this_host() -> str:
  return re.sub(r'[^A-Za-z0-9._-]', '', os.uname().nodename)


@contextlib.contextmanager
def _opened(fifo: str) -> Iterator[int]:
  descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
  try:
    yield descriptor
  finally:
    os.close(descriptor)


def _fifo(state: Mapping) -> str | None:
  """Returns the path of the FIFO from which the launching script of a job reads messages.

  Returns None if the script has ended or runs on another machine.
  """
  path = state['fifo']
  if state['state'] == 'ended' or state['host'] != _this_host():
    return None
  try:
    with _opened(path) as descriptor:
      status = os.fstat(descriptor)
      return path if stat.S_ISFIFO(status.st_mode) and status.st_uid == os.geteuid() else None
  except OSError as error:
    # ENXIO means that no process has the FIFO open for reading.
    if error.errno in (errno.ENXIO, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
      return None
    raise UserError(f'{path}: {error.strerror}') from error


def status(workdir: str, options: SshOptions) -> str:
  """Returns a line such as "RUNNING on HOST since …; restarts 0"."""
  state = _state(workdir)
  at = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(state['at']))
  where, restarts = f'on {state["host"]} since {at}', f'restarts {state["restarts"]}'
  if state['state'] == 'ended':
    line = f'ENDED with exit code {state["code"]} {where}; {restarts}'
  elif state['host'] != _this_host():
    line = (
      f'{state["state"].upper()} {where}, if its launcher is still alive (only known there); '
      f'{restarts}'
    )
  elif _fifo(state) is None:
    line = f'LOST: its launcher was killed; it was {state["state"]} {where}; {restarts}'
  else:
    line = f'{state["state"].upper()} {where}; {restarts}'
  return one_line(f'{state["job"]}: {line}')


def logs(workdir: str, options: SshOptions) -> None:
  """Prints the log files in this machine's run directory, each after a line with its name."""
  _state(workdir)
  for path in sorted(pathlib.Path(workdir, 'logs').glob('*.log')):
    sys.stdout.write(f'==> {path.name} <==\n')
    sys.stdout.flush()
    try:
      with path.open('rb') as file:
        shutil.copyfileobj(file, sys.stdout.buffer)
    except OSError as error:
      raise UserError(f'{path}: {error.strerror}') from error
    sys.stdout.buffer.flush()


def cancel(workdir: str, options: SshOptions) -> None:
  """Asks the launching script, through its FIFO, to stop the job.

  The script reacts as if it had received SIGTERM: the processes have the grace period to commit and
  end.
  """
  state = _state(workdir)
  if state['state'] == 'ended':
    raise UserError(f'{workdir}: the job has ended with exit code {state["code"]}')
  if state['host'] != _this_host():
    raise UserError(f'{workdir}: the launcher runs on {state["host"]}; cancel it there')
  fifo = _fifo(state)
  if fifo is None:
    raise UserError(f'{workdir}: the launcher was killed; its processes have ended, too')
  try:
    with _opened(fifo) as descriptor:
      os.write(descriptor, b'cancel\n')
  except OSError as error:
    raise UserError(f'{workdir}: the launcher is ending: {error.strerror}') from error


LAUNCHER = Launcher(
  name='ssh',
  Options=SshOptions,
  text=text,
  submit=submit,
  status=status,
  logs=logs,
  cancel=cancel,
)
