"""SIGTERM with a grace period, at any moment of a job of two processes: it ends with the documented
code, and goes on to the result of a run that met nothing.
"""

import os
import random
import signal
import time

import job
import pytest

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.acceptance

GRACE_S = 30.0


def before_anything(run, process):
  time.sleep(2.0)


def during_the_set_up(run, process):
  wait_for((run / 'config.json').exists, process)


def with_rows(count, seed):
  """A random part of a step after the row `count`: rollouts, update, evaluation or commit."""

  def wait(run, process):
    job.wait_for_rows(run, count, process)
    time.sleep(random.Random(seed).random() * 0.5)

  wait.__name__ = f'with_{count}_rows'
  return wait


def during_a_commit(run, process):
  committed = len(job.commits(run))
  wait_for(lambda: len(list((run / 'checkpoints').glob('*'))) > committed, process)


def during_the_export(run, process):
  wait_for((run / 'hf').exists, process)


def wait_for(condition, process):
  deadline = time.monotonic() + 300
  while not condition():
    assert process.poll() is None, process.communicate()[1]
    assert time.monotonic() < deadline
    time.sleep(0.002)


MOMENTS = [
  before_anything,
  during_the_set_up,
  with_rows(1, 1),
  with_rows(4, 2),
  during_a_commit,
  with_rows(12, 3),
  with_rows(15, 4),
  with_rows(18, 5),
  during_a_commit,
  during_the_export,
]


ASYNCHRONOUS_MOMENTS = [
  before_anything,
  during_the_set_up,
  with_rows(4, 6),
  with_rows(13, 7),
  with_rows(16, 8),
  during_a_commit,
  with_rows(21, 9),
  with_rows(26, 10),
  during_a_commit,
  during_the_export,
]
"""Most of them while rollouts of several versions are under way."""


def stop_at(moments, run, record_property, *flags, config):
  """Starts a run of two processes and ends it with SIGTERM, once at each of the moments."""
  environment = job.environment(JAXRL_GRACE_S=f'{GRACE_S:g}')
  for number, moment in enumerate(moments):
    process = job.start(run, *flags, config=config, processes=2, environ=environment)
    moment(run, process)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    seconds = time.monotonic() - started
    line = f'{moment.__name__}: {process.returncode} after {seconds:.1f} s, {job.commits(run)}'
    print(line)
    record_property(f'{number} {moment.__name__}', line)
    finished = moment is during_the_export and process.returncode == 0
    assert finished or process.returncode == 128 + signal.SIGTERM, said
    assert 'Traceback' not in said


def test_sigterm_at_ten_moments_changes_no_bit(tmp_path, record_property):
  whole = job.finished('two_processes', config=job.PPO_OF_TWO, processes=2)
  run = tmp_path / 'run'
  stop_at(MOMENTS, run, record_property, config=job.PPO_OF_TWO)
  job.train(run, config=job.PPO_OF_TWO, processes=2)
  job.assert_equal_runs(run, whole)
  report = audit(run / 'replay')
  assert report.ok, report.lines


def test_sigterm_at_ten_moments_of_an_asynchronous_run_loses_no_group(tmp_path, record_property):
  run, flags = tmp_path / 'run', (*job.ASYNCHRONOUS, '--config.stages.grpo.steps=21')
  stop_at(ASYNCHRONOUS_MOMENTS, run, record_property, *flags, config=job.QUICK)
  job.train(run, *flags, processes=2)
  job.check_accounts(run, steps=21, processed=False)
