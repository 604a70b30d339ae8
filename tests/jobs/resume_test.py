"""The exact guarantee: killed at any moment and started again, a run equals the one that was never
interrupted.
"""

import random
import time

import job
import pytest

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.full


@pytest.fixture(scope='module')
def uninterrupted():
  return job.quick_run()


def run_with_kills(workdir, kills, seed):
  """Kills at `kills` moments: after a random number of further rows, and a random part of a
  step. The last kill comes after a commit, so that the run resumes from one.
  """
  rng = random.Random(seed)
  done = 0
  for kill in range(kills):
    process = job.start(workdir)
    # A whole run has 24 rows: 20 steps and four evaluations. Every third step is committed.
    further = done + rng.randrange(1, 6)
    job.wait_for_rows(workdir, min(max(further, 8 if kill == kills - 1 else 0), 22), process)
    time.sleep(rng.random() * 0.1)
    job.kill(process)
    done = len(job.rows(workdir))
  job.train(workdir)


def test_three_random_kills_change_no_bit(uninterrupted, tmp_path):
  run_with_kills(tmp_path / 'run', kills=3, seed=time.time_ns())
  job.assert_equal_runs(tmp_path / 'run', uninterrupted)
  report = audit(tmp_path / 'run' / 'replay')
  assert report.ok, report.lines


@pytest.mark.acceptance
@pytest.mark.parametrize('seed', range(3))
def test_ten_random_kills_change_no_bit(uninterrupted, tmp_path, seed):
  run_with_kills(tmp_path / 'run', kills=10, seed=seed)
  job.assert_equal_runs(tmp_path / 'run', uninterrupted)
