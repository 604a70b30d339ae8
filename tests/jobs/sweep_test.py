"""Sweeps of real runs: each trial is a run that resumes exactly, and no step is executed twice."""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import job
import pytest
from paths import ROOT
from sweeping import RATE, sweep_file

from jaxrl_llm.app.sweeps.ledger import Ledger, TrialState
from jaxrl_llm.config.load import parse_overrides
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.runtime import events

FLAGS = tuple(flag for flag in job.QUICK if not flag.startswith('--config='))


def sweep_flags(file: object, sweepdir: pathlib.Path, *more: str) -> list[str]:
  programs = f'--config.compilation_cache={job.session() / "programs"}'
  return [f'--sweep={file}', f'--sweepdir={sweepdir}', *FLAGS, programs, *more]


def start(flags: list[str]) -> subprocess.Popen:
  """The sweep in a process of its own, without its output."""
  command = [sys.executable, 'launch/sweep.py', *flags]
  return subprocess.Popen(
    command, cwd=ROOT, env=job.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )


def entries_of(sweepdir: pathlib.Path) -> list:
  if not (sweepdir / 'ledger.sqlite').exists():
    return []
  ledger = Ledger(sweepdir)
  entries = ledger.entries()
  ledger.close()
  return entries


def wait_for(condition, *, timeout_s: float = 600) -> None:
  deadline = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.1)


def updates(workdir: pathlib.Path) -> collections.Counter:
  """How often each optimizer step of a run was executed, over all its starts."""
  log = events.read(workdir / events.FILE)
  begun = {}
  executed = collections.Counter()
  for event in filter(None, log):
    if event.edge == events.Edge.GRADIENT_UPDATE and event.kind == 'request':
      begun[event.attempt, event.id] = event.fields['batch']
    elif event.edge == events.Edge.GRADIENT_UPDATE:
      executed[begun[event.attempt, event.of]] += 1
  return executed


@pytest.mark.full
def test_a_sweep_of_two_trials_runs_once_and_compares_them(tmp_path):
  file, sweepdir = sweep_file(tmp_path, f"axes={{'{RATE}': (5e-4,)}}, seeds=(0, 1)"), tmp_path / 's'
  done = job.call('launch/sweep.py', *sweep_flags(file, sweepdir, '--parallel=2'))
  assert 'comparison: ' in done.stdout and (sweepdir / 'compare.html').stat().st_size > 50_000
  entries = entries_of(sweepdir)
  assert [(e.state, e.attempts, e.step) for e in entries] == [(TrialState.FINISHED, 1, 20)] * 2
  runs = [sweepdir / 'trials' / entry.id for entry in entries]
  for run in runs:
    assert updates(run) == dict.fromkeys(range(1, 21), 1) and audit(run / 'replay').ok
  # The first trial has the values of the run that other tests share, and equals it.
  job.assert_equal_runs(runs[0], job.quick_run())
  assert json.loads((runs[1] / 'config.json').read_text())['seed'] == 1


@pytest.mark.acceptance
def test_a_sweep_killed_twice_ends_with_six_trials_and_a_page(tmp_path):
  sweepdir = tmp_path / 's'
  flags = sweep_flags('quickstart_lr', sweepdir, '--parallel=2')

  def under_way(number: int, steps: int) -> bool:
    found = [
      e for e in entries_of(sweepdir) if e.number == number and e.state == TrialState.RUNNING
    ]
    return bool(found) and found[0].step >= steps

  process = start(flags)
  wait_for(lambda: under_way(0, 5) or process.poll() is not None)
  process.kill()  # The sweep alone: the guards of its trials end them.
  process.wait()
  process = start(flags)
  wait_for(lambda: any(under_way(n, 14) for n in (2, 3)) or process.poll() is not None)
  victim = next(n for n in (2, 3) if under_way(n, 14))
  workdir = sweepdir / 'trials' / entries_of(sweepdir)[victim].id
  os.kill(int((workdir / 'lock').read_text()), signal.SIGKILL)
  assert process.wait(timeout=1200) == 0
  entries = entries_of(sweepdir)
  assert [entry.state for entry in entries] == [TrialState.FINISHED] * 6
  assert entries[victim].failures == 1 and entries[victim].attempts == 2
  assert sum(entry.failures for entry in entries) == 1
  for entry in entries:
    run = sweepdir / 'trials' / entry.id
    assert entry.step == 20 and audit(run / 'replay').ok
  page = (sweepdir / 'compare.html').read_text()
  assert all(entry.id in page for entry in entries)
  # The trial that was killed equals the run that was not.
  rate, seed = entries[victim].trial.overrides[RATE], entries[victim].trial.seed
  job.train(tmp_path / 'alone', f'--config.{RATE}={rate}', f'--config.seed={seed}')
  job.assert_equal_runs(workdir, tmp_path / 'alone')


@pytest.mark.acceptance
def test_a_sweep_of_four_is_one_job_array(tmp_path):
  slurm_cluster = pytest.importorskip('slurm_cluster')
  if not slurm_cluster.is_installed():
    pytest.skip('no Slurm: bash tests/support/slurm.sh install')
  file = sweep_file(tmp_path, f"axes={{'{RATE}': (2e-4, 5e-4)}}, seeds=(1, 2)")
  sweepdir = tmp_path / 's'
  flags = sweep_flags(
    file, sweepdir, '--launcher=slurm', '--submit', '--cpus=1', '--parallel=2', '--grace_s=60'
  )
  with slurm_cluster.running(nodes=2) as cluster:
    said = cluster.call(sys.executable, 'launch/sweep.py', *flags)
    job_id = said.split()[1].rstrip(':')
    wait_for(lambda: any(entry.step >= 14 for entry in entries_of(sweepdir)[:2]))
    number = next(entry.number for entry in entries_of(sweepdir) if entry.step >= 14)
    cluster.call('scontrol', 'requeue', f'{job_id}_{number}')
    cluster.wait_for_requeue(f'{job_id}_{number}')
    cluster.wait_for_end(job_id)
  entries = entries_of(sweepdir)
  assert [entry.state for entry in entries] == [TrialState.FINISHED] * 4
  assert entries[number].attempts == 2 and sum(entry.attempts for entry in entries) == 5
  for entry in entries:
    run = sweepdir / 'trials' / entry.id
    assert entry.step == 20 and entry.failures == 0 and audit(run / 'replay').ok
    assert updates(run) == dict.fromkeys(range(1, 21), 1), 'requeued with a commit'


BRANCHES = """import dataclasses
from jaxrl_llm.api import load_config

def get_config(stage):
  config = load_config('quickstart', {overrides})
  return dataclasses.replace(config, stages=tuple(s for s in config.stages if s.name == stage))
"""
"""A configuration with one stage of the quickstart."""


@pytest.mark.acceptance
def test_early_stopping_and_branching_repeat_no_step(tmp_path):
  pytest.importorskip('optuna')
  branches, sweepdir = tmp_path / 'branches.py', tmp_path / 's'
  branches.write_text(BRANCHES.format(overrides=parse_overrides(FLAGS)))
  fields = (
    f"axes={{'stages.0.optimizer.peak_lr': (5e-4, 1e-9, 0.0)}}, "
    f"start=BaseRun(base='{branches}:sft'), "
    'early_stopping=SuccessiveHalving(first_step=4, factor=3)'
  )
  file = sweep_file(tmp_path, fields)
  file.write_text(
    file.read_text()
    .replace("base='quickstart'", f"base='{branches}:grpo'")
    .replace('val-core/eval/acc/greedy', 'critic/score/mean')
  )
  programs = f'--config.compilation_cache={job.session() / "programs"}'
  job.call('launch/sweep.py', f'--sweep={file}', f'--sweepdir={sweepdir}', programs)
  entries = entries_of(sweepdir)
  assert [entry.trial.is_start for entry in entries] == [True, False, False, False]
  assert entries[0].step == 12 and TrialState.STOPPED in {entry.state for entry in entries}
  executed = [updates(sweepdir / 'trials' / entry.id) for entry in entries]
  # Steps executed = union of the trials' steps: none twice, and the start's by no other trial.
  assert [dict(steps) for steps in executed] == [
    dict.fromkeys(range(1, entry.step + 1), 1) for entry in entries
  ]
  assert all(entry.step <= 8 for entry in entries[1:])
