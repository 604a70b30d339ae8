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


def without_last_commit(run):
  """A run as it is when killed after its last commit but one; returns that commit's step."""
  *_, step, last = job.commits(run)
  shutil.rmtree(run / 'checkpoints' / str(last))
  for made in ('hf', 'adapter', 'critic'):
    shutil.rmtree(run / made, ignore_errors=True)
  return step


ADAPTERS = (
  *job.QUICK,
  '--config.policy.lora.rank=4',
  '--config.stages.grpo.algorithm.options={"kl_loss_coef":0.05,"reference":{"every":3}}',
)


@pytest.mark.acceptance
@pytest.mark.parametrize(
  ('config', 'processes'),
  [(job.PPO, 1), (job.PPO, 2), (ADAPTERS, 1)],
  ids=['ppo', 'two processes', 'adapters'],
)
def test_a_branch_equals_its_parent_whatever_is_committed(tmp_path, config, processes):
  """A critic and an adapted coefficient; shards of two processes; adapters and their reference."""
  options = {'config': config, 'processes': processes}
  job.train(tmp_path / 'whole', **options)
  parent = job.copy(tmp_path / 'whole', tmp_path / 'parent')
  step = without_last_commit(parent)
  job.train(tmp_path / 'branch', f'--branch_from={parent}', **options)
  job.assert_equal_runs(tmp_path / 'branch', tmp_path / 'whole')
  for part in ('critic', 'adapter'):
    found, wanted = (
      job.without_card(job.files(tmp_path / run / part)) for run in ('branch', 'whole')
    )
    assert found == wanted
  report = audit(tmp_path / 'branch' / 'replay')
  assert report.ok and report.live == (), report.lines
  assert history.read(tmp_path / 'branch')[-1].parent.step == step


@pytest.mark.acceptance
@pytest.mark.parametrize('reset', [(), ('--reset_store',)], ids=['with its store', 'without'])
def test_a_branch_with_groups_in_flight_accounts_for_every_sample(tmp_path, reset):
  """Its parent was killed at a bound of two; the branch is killed once too."""
  parent, branch = tmp_path / 'parent', tmp_path / 'branch'
  process = job.start(parent, *job.ASYNCHRONOUS)
  job.wait_for_rows(parent, 18, process)
  job.kill(process)
  before = job.files(parent)
  flags = (f'--branch_from={parent}', *reset, *job.ASYNCHRONOUS)
  job.killed_and_resumed(branch, 19, flags=flags)
  assert job.files(parent / 'checkpoints') == {
    name.removeprefix('checkpoints/'): content
    for name, content in before.items()
    if name.startswith('checkpoints/')
  }
  if reset:
    report = audit(branch / 'replay')
    assert report.ok and report.live == (), report.lines
    assert job.rows(branch)[-1]['training/global_step'] == 20
  else:
    job.check_accounts(branch, steps=8, processed=False)


@pytest.mark.acceptance
def test_a_branch_that_is_killed_while_it_is_made_is_made_by_the_same_command(tmp_path):
  """Killed as soon as each of these is there: nothing has the branch's name, the parent stays."""
  parent, branch = interrupted(tmp_path / 'parent'), tmp_path / 'branch'
  half, before = tmp_path / 'branch.branching', job.files(parent)
  flags = (f'--branch_from={parent}:18', '--reset_store')
  for made in ('lock', 'replay/index.sqlite', 'checkpoints/18', 'attempt', 'config.json'):
    shutil.rmtree(half, ignore_errors=True)
    process = job.start(branch, *flags)
    while not (half / made).exists():
      assert process.poll() is None, process.communicate()[1]
    job.kill(process)
    assert half.exists() and not branch.exists()
    assert job.files(parent) == before
  job.train(branch, *flags)
  assert not half.exists() and history.read(branch)[-1].parent.step == 18
  report = audit(branch / 'replay')
  assert report.ok and report.live == (), report.lines
