"""One half of the loop alone: a run that only rolls out, and runs that learn from what it
stored.
"""

import json

import job
import pytest

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.full


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
  """Eight batches of six groups of four, at a bound of one, killed in between."""
  flags = ('--config.stages.grpo.source.rollout_only=true', '--config.stages.grpo.source.bound=1')
  return job.killed_and_resumed(tmp_path_factory.mktemp('stored') / 'run', 12 + 4, flags=flags)


def recorded(stored, /, *, steps=8, **fields):
  """Flags of a run that learns from it, of another seed."""
  source = {'@type': 'Recorded', 'tasksets': ['train'], 'groups_per_batch': 6, 'group_size': 4}
  source |= {'run': str(stored), 'stage': 'grpo', **fields}
  return (
    '--config.seed=1',
    f'--config.stages.grpo.steps={steps}',
    f'--config.stages.grpo.source={json.dumps(source)}',
  )


@pytest.fixture(scope='module')
def learnt(stored, tmp_path_factory):
  """A run that learns from it: ten batches of six of the 48 groups, a pass, and two batches more;
  what was stored.
  """
  before, run = job.files(stored), tmp_path_factory.mktemp('learnt') / 'run'
  job.train(run, *recorded(stored, steps=10))
  return run, before


def test_a_stage_that_only_rolls_out_stores_its_samples_and_trains_nothing(stored):
  report = audit(stored / 'replay')
  assert report.ok and report.states['admitted'] == 8 * 6 * 4 and report.states['trained'] == 0, (
    report.lines
  )
  steps = [row for row in job.rows(stored) if row['stage'] == 'grpo' and 'critic/score/mean' in row]
  assert len(steps) == 8 and not any('actor/pg_loss' in row for row in steps)
  sealed = {
    (row['source'], row['index']) for plan in job.plans(stored, 'grpo') for row in plan['rows']
  }
  assert len(sealed) == 8 * 6 * 4 and all((stored / source).exists() for source, _ in sealed)
  (before, after) = (accuracy for _, step, accuracy in job.accuracies(stored) if step in (12, 20))
  assert before == after


def test_another_run_learns_from_it_each_group_once_a_pass_and_resumes_exactly(
  stored, learnt, tmp_path
):
  """The other run is only read."""
  whole, before = learnt
  run = job.killed_and_resumed(tmp_path / 'run', 12 + 5, flags=recorded(stored, steps=10))
  job.assert_equal_runs(run, whole)
  assert job.files(stored) == before
  drawn = [[row['group'] for row in plan['rows']] for plan in job.plans(whole, 'grpo')]
  assert all(len(groups) == 24 and len(set(groups)) == 6 for groups in drawn)
  wanted = {row['group'] for plan in job.plans(stored, 'grpo') for row in plan['rows']}
  assert {group for groups in drawn[:8] for group in groups} == wanted and len(wanted) == 48
  steps = [row for row in job.rows(whole) if 'actor/pg_loss' in row]
  assert len(steps) == 10 and not any('staleness/max' in row for row in steps)
  rewards = {
    row['uid']: row['reward'] for plan in job.plans(stored, 'grpo') for row in plan['rows']
  }
  assert all(
    row['reward'] == rewards[row['uid']]
    for plan in job.plans(whole, 'grpo')
    for row in plan['rows']
  )


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'run': 'no/such/run'}, ('no/such/run is not the directory of a run', 'config.json')),
    ({'stage': 'sft'}, ('0 groups', 'do not fill a batch of 6')),
    ({'group_size': 2}, ('stages.grpo.source.group_size: 2', 'groups of 4', 'raise it')),
    ({'bound': 1}, ("Recorded has no field 'bound'",)),
  ],
)
def test_unusable_sources_are_reported_in_one_line(stored, tmp_path, fields, words):
  done = job.train(tmp_path / 'run', *recorded(stored, **fields), expect=2)
  (line,) = [line for line in done.stderr.splitlines() if line.startswith('error:')]
  assert all(word in line for word in words), line


def test_another_vocabulary_is_refused(stored, tmp_path):
  done = job.train(
    tmp_path / 'run', *recorded(stored), '--config.policy.tokenizer.kind=bpe', expect=2
  )
  (line,) = [line for line in done.stderr.splitlines() if line.startswith('error:')]
  assert 'another vocabulary' in line


def test_both_halves_are_replayed_bit_for_bit(stored, learnt):
  """The last batch of the run that only rolled out, and an update on recorded rollouts."""
  for workdir, step in ((stored, 20), (learnt[0], 15)):
    done = job.call('launch/replay.py', f'--workdir={workdir}', f'--step={step}')
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f'step {step} (grpo)') and ': equal' in last
