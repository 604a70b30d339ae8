"""Trials run, fail, stop and go on as the ledger says, with stand-ins for the runs."""

import fcntl
import multiprocessing
import os
import random
import signal
import sys
import threading
import time

import pytest
from sweeping import RATE, executed, open_sweep, sweep_file

from jaxrl_llm.app.sweeps.ledger import TrialState
from jaxrl_llm.app.sweeps.runner import Machine
from jaxrl_llm.app.sweeps.task import StepChild
from jaxrl_llm.core.errors import RunError

STEPS = "overrides={'stages.grpo.steps': 8}"
TWO = f"axes={{'{RATE}': (0.01, 0.02)}}, {STEPS}"


def states(ledger):
  return [str(entry.state) for entry in ledger.entries()]


def test_every_trial_runs_once_and_reports_its_objective(tmp_path):
  ledger, runner, notes = open_sweep(sweep_file(tmp_path, TWO), tmp_path)
  assert runner.run() == 0
  assert states(ledger) == ['finished', 'finished']
  for entry in ledger.entries():
    assert executed(ledger, entry) == list(range(1, 9)) and entry.step == 8 and entry.attempts == 1
  assert [(r.trial, r.step) for r in ledger.reports() if r.trial == 1] == [
    (1, s) for s in (2, 4, 6, 8)
  ]
  assert '000-peak_lr-0.01: finished at step 8' in notes
  ledger, runner, notes = open_sweep(tmp_path / 'sweep.py', tmp_path)
  assert runner.run() == 0 and notes == []


def test_failures_are_retried_then_marked_and_the_others_go_on(tmp_path):
  fields = (
    f"trials=[{{'name': 'crashes'}}, {{'name': 'invalid'}}, {{'name': 'fine'}}], retries=1, {STEPS}"
  )
  ledger, runner, notes = open_sweep(sweep_file(tmp_path, fields), tmp_path)
  assert runner.run() == 1
  crashed, invalid, fine = ledger.entries()
  assert (crashed.state, crashed.attempts, crashed.exit_code) == (TrialState.FAILED, 2, 1)
  assert crashed.error == 'run stopped: the disk is full'
  assert (invalid.state, invalid.attempts, invalid.exit_code) == (TrialState.FAILED, 1, 2)
  assert fine.state == TrialState.FINISHED and any('starts again' in note for note in notes)
  assert ledger.retry() == 2 and states(ledger) == ['waiting', 'waiting', 'finished']


@pytest.mark.full
def test_a_signal_lets_the_runs_commit_and_the_next_start_repeats_no_step(tmp_path):
  fields = f"axes={{'{RATE}': (0.01, 0.02, 0.03)}}, overrides={{'stages.grpo.steps': 40}}"
  file = sweep_file(tmp_path, fields)
  ledger, runner, _ = open_sweep(file, tmp_path)

  def interrupt():
    if any(entry.step >= 6 for entry in ledger.entries()):
      runner._show = list
      signal.raise_signal(signal.SIGINT)

  runner._show = interrupt
  assert runner.run() == 130
  assert 'waiting' in states(ledger) and set(states(ledger)) <= {'waiting', 'finished'}
  ledger, runner, _ = open_sweep(file, tmp_path)
  assert runner.run() == 0 and states(ledger) == ['finished'] * 3
  for entry in ledger.entries():
    assert executed(ledger, entry) == list(range(1, 41)) and entry.failures == 0


@pytest.mark.full
def test_a_sweep_killed_at_any_moment_goes_on_and_loses_nothing(tmp_path):
  fields = f"axes={{'{RATE}': (0.01, 0.02, 0.03)}}, overrides={{'stages.grpo.steps': 120}}"
  file, rng = sweep_file(tmp_path, fields), random.Random(0)
  for _ in range(5):
    child = multiprocessing.get_context('fork').Process(target=_run, args=(file, tmp_path))
    child.start()
    time.sleep(0.2 + rng.random())
    os.kill(child.pid, signal.SIGKILL)
    child.join()
  ledger, runner, _ = open_sweep(file, tmp_path)
  assert runner.run() == 0 and states(ledger) == ['finished'] * 3
  for entry in ledger.entries():
    # A killed sweep's runs commit before they end, so not even then is a step repeated.
    assert executed(ledger, entry) == list(range(1, 121)) and entry.failures == 0
    steps = [report.step for report in ledger.reports() if report.trial == entry.number]
    assert steps == list(range(2, 121, 2))


def _run(file, sweepdir):
  open_sweep(file, sweepdir)[1].run()


@pytest.mark.full
def test_early_stopping_repeats_no_step(tmp_path):
  pytest.importorskip('optuna')
  fields = (
    f"axes={{'{RATE}': (0.04, 0.03, 0.02, 0.01)}}, overrides={{'stages.grpo.steps': 40, "
    "'checkpoint.every_minutes': 0.03}, early_stopping=SuccessiveHalving(first_step=4, factor=2)"
  )
  ledger, runner, notes = open_sweep(sweep_file(tmp_path, fields), tmp_path)
  assert runner.run() == 0
  entries = ledger.entries()
  assert entries[0].state == TrialState.FINISHED and entries[3].state == TrialState.STOPPED
  assert any('stopped early' in note for note in notes)
  for entry in entries:
    assert executed(ledger, entry) == list(range(1, entry.step + 1)), 'each step once'
  assert sum(entry.step for entry in entries) < 160


def test_trials_branch_from_a_finished_run_of_their_seed(tmp_path):
  fields = (
    f"axes={{'{RATE}': (0.01, 0.02)}}, seeds=(1, 2), {STEPS}, "
    "start=BaseRun(base='quickstart', overrides={'stages.grpo.steps': 4})"
  )
  ledger, runner, notes = open_sweep(sweep_file(tmp_path, fields), tmp_path)
  entries = ledger.entries()
  assert [entry.trial.is_start for entry in entries] == [True, True, False, False, False, False]
  flags = runner.arguments(entries[3])
  assert f'--init_from={ledger.workdir(entries[1])}' in flags and '--config.seed=2' in flags
  assert runner.run() == 0
  begun = [note for note in notes if note.endswith(': runs')]
  assert {note[:3] for note in begun[:2]} == {'000', '001'}
  assert [len(executed(ledger, entry)) for entry in ledger.entries()] == [4, 4, 8, 8, 8, 8]


def test_a_start_that_fails_fails_its_trials(tmp_path):
  fields = (
    f"axes={{'{RATE}': (0.01, 0.02)}}, retries=0, start=BaseRun(base='quickstart', "
    "overrides={'name': 'crashes'})"
  )
  ledger, runner, _ = open_sweep(sweep_file(tmp_path, fields), tmp_path)
  assert runner.run() == 1 and states(ledger) == ['failed'] * 3
  assert ledger.entries()[1].error == '000-start: failed'


def test_a_misspelt_objective_ends_the_sweep_after_one_trial(tmp_path):
  file = sweep_file(tmp_path, f"axes={{'{RATE}': (0.01, 0.02, 0.03)}}, {STEPS}")
  file.write_text(file.read_text().replace('acc/greedy', 'acc/gredy'))
  ledger, runner, _ = open_sweep(file, tmp_path)
  with pytest.raises(
    RunError, match=r"acc/gredy': not among .* did you mean 'val-core/eval/acc/gr"
  ):
    runner.run()
  assert states(ledger).count('finished') < 3
  file.write_text(file.read_text().replace('acc/gredy', 'acc/greedy'))
  ledger, runner, _ = open_sweep(file, tmp_path)
  assert runner.run() == 0
  assert {report.trial for report in ledger.reports()} == {0, 1, 2}


@pytest.mark.full
def test_a_run_that_is_still_alive_is_waited_for(tmp_path):
  ledger, runner, notes = open_sweep(sweep_file(tmp_path, TWO), tmp_path)
  workdir = ledger.workdir(ledger.entries()[0])
  workdir.mkdir(parents=True)
  lock = (workdir / 'lock').open('a')
  fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  threading.Timer(1.0, lock.close).start()
  assert runner.run() == 0
  assert notes[0] == '000-peak_lr-0.01: waits for its earlier process to end'
  assert [entry.attempts for entry in ledger.entries()] == [1, 1]


def test_in_a_step_of_slurm_a_run_gets_each_signal_once(tmp_path):
  log = tmp_path / 'log'
  child = StepChild('trial', log=log)
  child.start([sys.executable, '-c', 'print(7); exit(3)'], dict(os.environ), first_line='sweep:')
  deadline = time.monotonic() + 30
  while child.is_running() and time.monotonic() < deadline:
    time.sleep(0.01)
  assert child.exit_code == 3 and child.lines() == ['7']
  ledger, runner, _ = open_sweep(sweep_file(tmp_path, TWO), tmp_path)
  runner._machine = Machine(parallel=2, in_step=True)
  assert runner.run() == 0 and states(ledger) == ['finished'] * 2


def test_trials_share_cores_and_gpus(monkeypatch):
  for name in ('NPROC', 'CUDA_VISIBLE_DEVICES'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', 'host:1')
  machine = Machine(parallel=2, gpus_per_trial=2)
  assert machine.environment(1)['CUDA_VISIBLE_DEVICES'] == '2,3'
  assert int(machine.environment(0)['NPROC']) >= 1
  assert 'JAX_COORDINATOR_ADDRESS' not in machine.environment(0)
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '7,GPU-a,3')
  assert machine.gpus(0) == ['7', 'GPU-a'] and machine.gpus(1) == ['3']
  assert Machine().environment(0)['CUDA_VISIBLE_DEVICES'] == '7,GPU-a,3'
