"""A real run among scorers that hang, raise, are killed and allocate without end: it finishes and
says so.
"""

import contextlib
import json
import sqlite3
import subprocess

import job
import pytest
from fixtures.hostile_scorers import HARMS, meets
from paths import FIXTURES

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.full

POLICIES = {
  'hangs': {'deadline_s': 2.0, 'weight': 0.25},
  'raises': {'on_failure': 'zero', 'retries': 1, 'weight': 0.5},
  'is_killed': {'on_failure': 'drop_group', 'weight': 0.0},
  'allocates': {'deadline_s': 60.0, 'weight': 0.125},
  'waits': {'deadline_s': 1.0, 'on_failure': 'zero', 'retries': 1, 'weight': 0.0},
  'group_exits': {'on_failure': 'unscorable', 'weight': 0.0},
}
STATUS = {
  'hangs': 'timeout', 'raises': 'error', 'is_killed': 'crashed', 'allocates': 'error',
  'waits': 'timeout', 'group_exits': 'crashed',
}  # fmt: skip


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'hostile'
  workdir.mkdir()
  (workdir / 'scorers.json').write_text('{"workers": 3}')
  hostile = [
    {
      'name': harm,
      'kind': 'hostile_scorers:make_scorer',
      'options': {'harm': harm},
      **POLICIES[harm],
    }
    for harm in HARMS
  ]
  verifier = {'name': 'verifier', 'options': {'partial_credit': True}}
  flags = (
    f'--config.rewards.scorers={json.dumps([verifier, *hostile])}',
    '--config.rewards.workers=2',
    '--config.rewards.memory_limit_mib=1024',
  )
  config = tuple(flag for flag in job.QUICK if 'rewards.scorers' not in flag)
  environ = job.environment(PYTHONPATH=f'{job.ROOT}:{FIXTURES}')
  process = job.start(workdir, *flags, config=config, environ=environ)
  out, err = process.communicate(timeout=300)
  done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
  with contextlib.closing(sqlite3.connect(workdir / 'replay' / 'index.sqlite')) as index:
    issued = [uid for (uid,) in index.execute('SELECT uid FROM samples ORDER BY uid')]
  return workdir, done, issued


def total(workdir, key):
  return sum(row.get(f'run/scorers/{key}', 0.0) for row in job.rows(workdir))


def test_it_finishes(finished):
  workdir, done, _ = finished
  assert done.returncode == 0, done.stderr
  assert 'Traceback' not in done.stderr
  assert len([row for row in job.rows(workdir) if 'actor/pg_loss' in row]) == 8
  report = audit(workdir / 'replay')
  assert report.ok and report.live == (), report.lines
  assert report.states['trained'] > 8 * 6 * 4 / 2


@pytest.mark.parametrize('harm', [harm for harm in HARMS if harm != 'group_exits'])
def test_each_failure_is_counted_once_for_each_call(finished, harm):
  workdir, _, issued = finished
  met = [uid for uid in issued if meets(uid, harm)]
  calls = 1 + POLICIES[harm].get('retries', 0)
  assert met and total(workdir, f'{harm}/{STATUS[harm]}') == calls * len(met)
  assert total(workdir, f'{harm}/retried') == (calls - 1) * len(met)
  policy = POLICIES[harm].get('on_failure', 'unscorable')
  if policy == 'drop_group':
    groups = {uid.rpartition('/')[0] for uid in met}
    assert total(workdir, f'{harm}/dropped_groups') == len(groups)
    assert sum(row.get('run/dropped/scorer_failed', 0.0) for row in job.rows(workdir)) == 4 * len(
      groups
    )
    assert audit(workdir / 'replay').reasons['dropped(scorer failed)'] == 4 * len(groups)
  else:
    assert total(workdir, f'{harm}/{"zeroed" if policy == "zero" else "unscorable"}') == len(met)


def test_a_group_scorer_that_dies_costs_its_group(finished):
  workdir, _, issued = finished
  dropped = {uid.rpartition('/')[0] for uid in issued if meets(uid, 'is_killed')}
  met = {uid.rpartition('/')[0] for uid in issued if meets(uid, 'group_exits', 96)} - dropped
  assert total(workdir, 'group_exits/crashed') == len(met)
  assert total(workdir, 'group_exits/unscorable') == 4 * len(met)


@pytest.mark.parametrize('harm', HARMS)
def test_the_log_says_it_in_one_line(finished, harm):
  workdir, done, _ = finished
  lines = [line for line in done.stderr.splitlines() if f'Scorer {harm} on ' in line]
  count = int(total(workdir, f'{harm}/{STATUS[harm]}'))
  assert len(lines) == count.bit_length(), 'the 1st, 2nd, 4th, … failure'
  assert count == 0 or f': {STATUS[harm]} (1 so far; ' in lines[0]


def test_what_was_said_and_its_weights_are_there_to_be_read(finished):
  workdir, _, issued = finished
  config = json.loads((workdir / 'config.json').read_text())
  weights = {scorer['name']: scorer['weight'] for scorer in config['rewards']['scorers']}
  assert weights == {'verifier': 1.0, **{harm: POLICIES[harm]['weight'] for harm in HARMS}}
  with contextlib.closing(sqlite3.connect(workdir / 'replay' / 'index.sqlite')) as index:
    stored = {
      (uid, name): (status, value)
      for uid, name, status, value in index.execute('SELECT uid, scorer, status, value FROM scores')
    }
  for harm in HARMS[:-1]:
    value = 0.0 if POLICIES[harm].get('on_failure') == 'zero' else None
    for uid in issued:
      assert stored[uid, harm] == ((STATUS[harm], value) if meets(uid, harm) else ('ok', 1.0))


def test_the_file_in_the_run_directory_was_obeyed(finished):
  assert 'Scorer processes: 2, now 3' in finished[1].stderr
