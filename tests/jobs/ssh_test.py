"""A job of two trainers over a real sshd equals one on this machine, also when one is killed."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import job
import pytest
import sshd
from paths import ROOT

from jaxrl_llm.app.cluster import ssh
from jaxrl_llm.app.cluster.job import Job, ProcessGroup

pytestmark = pytest.mark.acceptance

FLAGS = job.small('quickstart.py', steps=3)


def over_ssh(workdir: pathlib.Path, client: pathlib.Path) -> tuple[Job, ssh.SshOptions]:
  """The job that trains FLAGS in two processes."""
  env = {
    name: value
    for name, value in job.environment(NPROC='1').items()
    if name in ('JAX_PLATFORMS', 'XLA_FLAGS', 'NPROC', 'PYTHONPATH')
  }
  command = job.command(workdir, config=FLAGS)
  made = Job(
    name='ssh',
    groups=(ProcessGroup(name='trainer', command=tuple(command), nodes=2),),
    workdir=str(workdir),
    directory=str(ROOT),
    env=env,
    restarts=2,
    grace_s=20,
  )
  return made, ssh.SshOptions(hosts=sshd.HOSTS, ssh_config=str(client), port=free_port())


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def trainers(workdir: pathlib.Path) -> list[int]:
  """Processes that train in a directory."""
  wanted = f'--workdir={workdir}'.encode()
  found = []
  for entry in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      words = (entry / 'cmdline').read_bytes().split(b'\0')
    except OSError:
      continue
    if wanted in words and words[0].decode() == sys.executable:
      found.append(int(entry.name))
  return found


@pytest.fixture(scope='module')
def client(tmp_path_factory):
  with sshd.serving(tmp_path_factory.mktemp('sshd') / 'keys') as config:
    yield config


@pytest.fixture(scope='module')
def on_this_machine(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('local') / 'run'
  train = job.command(workdir, config=FLAGS, processes=2)
  subprocess.run(train, cwd=ROOT, env=job.environment(NPROC='1'), check=True, timeout=900)
  return workdir


def finish(made: Job, options: ssh.SshOptions) -> str:
  deadline = time.monotonic() + 900
  while 'ENDED' not in (line := ssh.status(made.workdir, options)):
    assert time.monotonic() < deadline, line
    time.sleep(0.5)
  return line


def test_a_job_over_ssh_equals_one_on_this_machine(client, on_this_machine, tmp_path):
  made, options = over_ssh(tmp_path / 'run', client)
  ssh.submit(ssh.text(made, options), made, options)
  line = finish(made, options)
  assert 'ENDED with exit code 0' in line and line.endswith('restarts 0')
  job.assert_equal_runs(tmp_path / 'run', on_this_machine)


@pytest.mark.parametrize('victim', ['trainer', 'connection'])
def test_a_lost_process_costs_no_step(client, on_this_machine, tmp_path, victim):
  workdir = tmp_path / 'run'
  made, options = over_ssh(workdir, client)
  ssh.submit(ssh.text(made, options), made, options)
  deadline = time.monotonic() + 600
  while len(job.rows(workdir)) < 8:
    assert time.monotonic() < deadline, ssh.status(made.workdir, options)
    time.sleep(0.05)
  killed = trainers(workdir)[-1]
  if victim == 'connection':  # The ssh client that runs the script of a process.
    script = f'{workdir}/launch/trainer-1.sh'
    found = subprocess.run(
      ['pgrep', '-f', f'^ssh .*{script}'], capture_output=True, text=True, check=True, timeout=30
    )
    killed = int(found.stdout.split()[0])
  os.kill(killed, signal.SIGKILL)
  line = finish(made, options)
  assert 'ENDED with exit code 0' in line and line.endswith('restarts 1')
  assert trainers(workdir) == []
  job.assert_equal_runs(workdir, on_this_machine)
