"""Branches of a run: exact where nothing is left behind, and independent of their parent."""

import shutil

import job
import pytest

from jaxrl_llm.replay.audit import audit
from jaxrl_llm.runtime import history

pytestmark = pytest.mark.full


def interrupted(path):
  """A copy of QUICK's run as it is when killed after its commit at step 18, with step 20 undone."""
  run = job.copy(job.quick_run(), path)
  shutil.rmtree(run / 'checkpoints' / '20')
  for made in ('hf', 'report.html'):
    shutil.rmtree(run / made) if (run / made).is_dir() else (run / made).unlink()
  return run


def test_a_branch_of_an_interrupted_run_equals_the_uninterrupted_one_and_outlives_it(tmp_path):
  parent, branch = interrupted(tmp_path / 'parent'), tmp_path / 'branch'
  before = job.files(parent)
  flags = (f'--branch_from={parent}:18',)
  # Killed when it is half made: nothing has the branch's name, and the same command makes it.
  (tmp_path / 'branch.branching' / 'checkpoints').mkdir(parents=True)
  process = job.start(branch, *flags)
  job.wait_for_rows(branch, len(job.rows(job.quick_run())) - 2, process)
  job.kill(process)
  assert {name: of for name, of in job.files(parent).items() if name != 'lock'} == {
    name: of for name, of in before.items() if name != 'lock'
  }
  shutil.rmtree(parent)
  job.train(branch, *flags)
  job.assert_equal_runs(branch, job.quick_run())
  assert not (tmp_path / 'branch.branching').exists()
  report = audit(branch / 'replay')
  assert report.ok and report.live == (), report.lines
  (_, entry) = history.read(branch)
  assert (entry.parent.run, entry.parent.step, entry.parent.reset) == (str(parent), 18, ())
  assert f'branched from {parent} at step 18' in (branch / 'report.html').read_text()


def test_a_branch_leaves_behind_what_it_is_told_to_and_takes_other_values(tmp_path):
  branch = tmp_path / 'branch'
  flags = (
    f'--branch_from={job.quick_run()}:18',
    '--reset_optimizer',
    '--reset_data',
    '--config.seed=5',
    '--config.stages.grpo.steps=7',
    '--config.stages.grpo.optimizer.peak_lr=2e-4',
  )
  job.train(branch, *flags)
  whole = job.rows(job.quick_run())
  done = [row for row in job.rows(branch) if row['training/global_step'] <= 18]
  assert done == [row for row in whole if row['training/global_step'] <= 18]
  assert job.commits(branch) == [18, 19]
  report = audit(branch / 'replay')
  assert report.ok and report.live == (), report.lines
  (_, entry) = history.read(branch)
  assert entry.parent.reset == ('optimizer', 'data')
  assert {change.key for change in entry.changes} == {
    'seed',
    'stages.grpo.steps',
    'stages.grpo.optimizer.peak_lr',
  }
  said = job.train(tmp_path / 'other', *flags[:1], '--config.seed=5', expect=2).stderr
  assert 'seed: 0 in the run, 5 now' in said and 'add --reset_data' in said
  assert said.count('\n') == 1 and not (tmp_path / 'other').exists()
  assert not (tmp_path / 'other.branching').exists()
