"""Jobs on this machine: the script, its start in the background, its state and its end."""

import dataclasses
import sys
import time

import pytest

from jaxrl_llm.app.cluster import local
from jaxrl_llm.app.cluster.job import Job, ProcessGroup, ProcessResources
from jaxrl_llm.core.errors import UserError

OPTIONS = local.LocalOptions()


def job_of(tmp_path, trainer: str, service: str | None = None, **fields) -> Job:
  """A job of two trainer processes and perhaps a service, each a line of Python."""
  preamble = 'import os, signal, sys, time; '
  groups = [
    ProcessGroup(
      name='trainer', command=(sys.executable, '-c', preamble + trainer), processes_per_node=2
    )
  ]
  if service:
    groups.append(ProcessGroup(name='rollout', command=(sys.executable, '-c', preamble + service)))
  return Job(
    name='job',
    workdir=str(tmp_path / "a 'run'"),
    directory=str(tmp_path),
    groups=tuple(groups),
    **fields,
  )


def state_after(job_id: str, *, running: bool = False) -> str:
  """The state of a job once it has ended, or while it runs."""
  deadline = time.monotonic() + 60
  while local.status(job_id, OPTIONS).startswith('RUNNING') is not running:
    assert time.monotonic() < deadline
    time.sleep(0.02)
  return local.status(job_id, OPTIONS)


def test_gpus_are_shared_out_to_processes_and_then_to_services(tmp_path):
  job = job_of(tmp_path, 'pass', 'pass')
  groups = [
    dataclasses.replace(job.trainer, resources=ProcessResources(gpus=2, cpus=3)),
    dataclasses.replace(job.services[0], nodes=2, resources=ProcessResources(gpus=2)),
  ]
  text = local.text(dataclasses.replace(job, groups=tuple(groups)), OPTIONS)
  assert ' --gpus=2 ' in text and 'env NPROC=3' in text
  assert 'CUDA_VISIBLE_DEVICES=4,5' in text and 'CUDA_VISIBLE_DEVICES=6,7' in text


def test_a_job_runs_in_the_background_until_it_ends(tmp_path, capsys):
  trainer = 'print("variable", os.environ["A"]); sys.exit(3)'
  job = job_of(tmp_path, trainer, env={'A': "it's $HOME"})
  job_id = local.submit(local.text(job, OPTIONS), job, OPTIONS)
  assert state_after(job_id) == 'ENDED exit code 3'
  local.logs(job_id, OPTIONS)
  assert "] variable it's $HOME" in capsys.readouterr().out
  with pytest.raises(UserError, match='its job is not running'):
    local.cancel(job_id, OPTIONS)


def test_a_cancelled_job_commits_and_its_services_stay_until_then(tmp_path, capsys):
  trainer = """
def commit(*_):
  time.sleep(0.2)
  print('committed', os.path.exists('served'), flush=True)
  sys.exit(143)
signal.signal(signal.SIGTERM, commit)
open('ready' + os.environ['JAX_PROCESS_ID'], 'w').close()
time.sleep(60)"""
  service = """
def leave(*_):
  os.remove('served')
  sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open('served', 'w').close()
time.sleep(60)"""
  job = job_of(tmp_path, f'exec({trainer!r})', f'exec({service!r})')
  job_id = local.submit(local.text(job, OPTIONS), job, OPTIONS)
  deadline = time.monotonic() + 60
  while not all((tmp_path / name).exists() for name in ('ready0', 'ready1', 'served')):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  with pytest.raises(UserError, match='its job is already running'):
    local.submit(local.text(job, OPTIONS), job, OPTIONS)
  local.cancel(job_id, OPTIONS)
  assert state_after(job_id) == 'ENDED exit code 143'
  local.logs(job_id, OPTIONS)
  assert capsys.readouterr().out.count('committed True') == 2
  assert not (tmp_path / 'served').exists()


def test_a_run_directory_without_a_job_is_one_line(tmp_path):
  with pytest.raises(UserError, match='no job was submitted'):
    local.status(str(tmp_path), OPTIONS)
