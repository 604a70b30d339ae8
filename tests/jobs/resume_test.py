"""The exact guarantee: killed at any moment and started again, a run equals the one that was never
interrupted.
"""

import random
import signal
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


def kill_within_commit(workdir, function, step):
  """Lets the run go on until the commit of `step` is being written, and its process kills itself
  where that function is called.
  """
  environ = job.environment(JAXRL_TEST_KILL=f'{function} {step}')
  process = job.start(workdir, environ=environ, script='tests/support/killed_in_commit.py')
  process.communicate(timeout=600)
  assert process.returncode == -signal.SIGKILL
  assert (workdir / 'checkpoints' / str(step)).exists()
  assert max(job.commits(workdir), default=0) < step


def test_kills_at_random_and_within_commits_change_no_bit(uninterrupted, tmp_path):
  process = job.start(tmp_path / 'run')
  job.wait_for_rows(tmp_path / 'run', random.randrange(1, 8), process)
  job.kill(process)
  # Before COMMIT is written, and while files are digested for it.
  kill_within_commit(tmp_path / 'run', '_commit', 15)
  kill_within_commit(tmp_path / 'run', '_digest', 18)
  job.train(tmp_path / 'run')
  job.assert_equal_runs(tmp_path / 'run', uninterrupted)
  report = audit(tmp_path / 'run' / 'replay')
  assert report.ok, report.lines


@pytest.mark.acceptance
@pytest.mark.parametrize('seed', range(3))
def test_ten_random_kills_change_no_bit(uninterrupted, tmp_path, seed):
  run_with_kills(tmp_path / 'run', kills=10, seed=seed)
  job.assert_equal_runs(tmp_path / 'run', uninterrupted)


COMMITS = ('--config.checkpoint.every_steps=1', '--config.stages.grpo.steps=28')
"""40 steps, each with a commit."""


@pytest.mark.acceptance
@pytest.mark.parametrize(('processes', 'kills'), [(2, 20)])
def test_kills_at_random_moments_of_commits_change_no_bit(tmp_path, processes, kills):
  whole, workdir = tmp_path / 'whole', tmp_path / 'run'
  job.train(whole, *COMMITS, processes=processes, timeout_s=1800)
  rng, incomplete = random.Random(0), 0
  for _ in range(kills):
    newest = max(job.commits(workdir), default=0)
    target = workdir / 'checkpoints' / str(min(newest + rng.randrange(1, 3), 40))
    process = job.start(workdir, *COMMITS, processes=processes)
    deadline = time.monotonic() + 600
    while not target.exists():
      assert process.poll() is None, process.communicate()[1]
      assert time.monotonic() < deadline
      time.sleep(0.002)
    time.sleep(rng.random() * 0.3)
    job.kill(process)
    # Killed before COMMIT, or beside the step after it.
    incomplete += not (target / 'COMMIT').exists()
  assert incomplete > kills / 4
  job.train(workdir, *COMMITS, processes=processes, timeout_s=1800)
  job.assert_equal_runs(workdir, whole)
  report = audit(workdir / 'replay')
  assert report.ok, report.lines
