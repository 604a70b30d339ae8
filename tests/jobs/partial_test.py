"""Partial rollouts in the quickstart's job: nothing is lost, trained twice or changed by a kill."""

import collections
import contextlib
import json
import math
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import time

import job
import pytest
from paths import FIXTURES
from stored import assert_rebuilt

from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.browse import open_copy

pytestmark = pytest.mark.full


@pytest.fixture(scope='module')
def uninterrupted():
  return job.finished('partial', *job.PARTIAL)


def test_answers_are_spread_over_batches_and_trained_on_once(uninterrupted):
  rows = [row for row in job.rows(uninterrupted) if 'partial/cut' in row]
  assert len(rows) == 8 and rows[0]['partial/cut'] > 0
  # Twice the groups of a batch may be open, of which the batch takes six.
  assert max(row['partial/open'] for row in rows) == 6
  assert max(row['partial/spans/max'] for row in rows) >= 2
  assert all(0 < row['partial/trained_ratio'] <= 1 for row in rows)
  assert min(row['partial/trained_ratio'] for row in rows) < 0.5
  # Tokens of earlier weights are not trained on, and sampler and trainer agree on the others.
  assert all(row['staleness/max'] == 0 and row['run/clock_decisions'] == 0 for row in rows)
  assert all(abs(row['rollout_corr/kl']) < 1e-6 for row in rows)
  report = audit(uninterrupted / 'replay')
  assert report.ok, report.lines
  assert set(report.uses) == {1} and report.states['trained'] == 8 * 6 * 4
  assert report.live == ()
  with contextlib.closing(sqlite3.connect(uninterrupted / 'replay' / 'index.sqlite')) as db:
    (scored,) = db.execute(
      'SELECT max(n) FROM (SELECT count(*) AS n FROM scores GROUP BY uid, scorer)'
    ).fetchone()
  assert scored == 1


def kill_and_resume(workdir, kills, seed):
  """Kills at `kills` random moments of the second stage."""
  rng, done = random.Random(seed), 12
  for _ in range(kills):
    process = job.start(workdir, *job.PARTIAL)
    job.wait_for_rows(workdir, min(done + rng.randrange(1, 4), 22), process)
    time.sleep(rng.random() * 0.1)
    job.kill(process)
    done = len(job.rows(workdir))
  job.train(workdir, *job.PARTIAL)


def test_kills_with_partials_open_change_no_bit(uninterrupted, tmp_path):
  kill_and_resume(tmp_path / 'run', kills=2, seed=time.time_ns())
  job.assert_equal_runs(tmp_path / 'run', uninterrupted)
  report = audit(tmp_path / 'run' / 'replay')
  assert report.ok and report.live == () and set(report.uses) == {1}, report.lines
  assert_rebuilt(tmp_path / 'run' / 'replay', tmp_path / 'rebuilt')


TURNS = (
  *job.PARTIAL,
  '--config.rollout.workflow={"kind":"second_try:SecondTry"}',
  '--config.rollout.max_prompt_length=12',
  '--config.rollout.max_response_length=24',
  '--config.rollout.embedded.prefill_buckets=(8,36)',
)
"""Two turns, each of which spends the budget more than once."""
EXPLORERS = '--config.rollout.explorers={"processes":2,"groups":3}'


def test_two_turns_in_explorers_equal_those_of_this_process_also_when_both_are_killed(tmp_path):
  options = {'flags': TURNS, 'environ': job.environment(PYTHONPATH=str(FIXTURES))}
  here, there = tmp_path / 'here', tmp_path / 'there'
  job.train(here, *TURNS, environ=options['environ'])
  options['flags'] = (*TURNS, EXPLORERS)
  job.killed_and_resumed(there, 12 + 3, **options)
  job.assert_equal_runs(there, here)
  rows = [row for row in job.rows(here) if 'partial/cut' in row]
  assert sum(row['partial/continued'] for row in rows) > 4 and rows[-1]['run/clock_decisions'] == 0
  for run in (here, there):
    report = audit(run / 'replay')
    assert report.ok and report.live == () and set(report.uses) == {1}, report.lines
    with contextlib.closing(open_copy(run / 'replay', tmp_path / f'{run.name} copy')) as store:
      plan = [row['uid'] for row in store.plans()[19]['rows']]
      samples = store.read(plan)
  assert any((sample.role == Role.TOOL).any() for sample in samples)
  assert any(len({s.version.step for s in sample.segments}) > 1 for sample in samples)


@pytest.mark.acceptance
def test_above_bound_0_older_spans_are_trained_on_and_a_kill_loses_no_sample(tmp_path):
  flags = (
    '--config.rollout.partial=' + json.dumps({'budget': 3, 'max_spans': 4, 'loss': 'all'}),
    job.PARTIAL[1],
    '--config.stages.grpo.source.bound=1',
  )
  workdir = tmp_path / 'run'
  process = job.start(workdir, *flags)
  job.wait_for_rows(workdir, 16, process)
  job.kill(process)
  job.train(workdir, *flags)
  rows = [row for row in job.rows(workdir) if 'partial/cut' in row]
  assert len(rows) == 8 and max(row['partial/spans/max'] for row in rows) >= 2
  assert all(row['partial/trained_ratio'] == 1 for row in rows)
  assert max(row['staleness/max'] for row in rows) > 1, 'older than what the bound lets start'
  report = audit(workdir / 'replay')
  assert report.ok and report.live == (), report.lines
  assert set(report.uses) == {1} and report.states['trained'] == 8 * 6 * 4


@pytest.mark.acceptance
@pytest.mark.parametrize('seed', range(3))
def test_five_kills_with_partials_open_change_no_bit(uninterrupted, tmp_path, seed):
  kill_and_resume(tmp_path / 'run', kills=5, seed=seed)
  job.assert_equal_runs(tmp_path / 'run', uninterrupted)
  report = audit(tmp_path / 'run' / 'replay')
  assert report.ok and report.live == () and set(report.uses) == {1}, report.lines


@pytest.mark.acceptance
def test_fifteen_kills_of_trainer_and_explorers_with_turns_half_way_change_no_bit(
  tmp_path, record_property
):
  environ, rng = job.environment(PYTHONPATH=str(FIXTURES)), random.Random(15)
  here, there = tmp_path / 'here', tmp_path / 'there'
  steps = '--config.stages.grpo.steps=24'
  job.train(here, *TURNS, steps, environ=environ)
  flags, killed = (*TURNS, steps, EXPLORERS), collections.Counter()
  while killed.total() < 15:
    process = job.start(there, *flags, environ=environ)
    done = len(job.rows(there))
    job.wait_for_rows(there, max(13, done), process)
    for _ in range(rng.randrange(1, 3)):
      time.sleep(rng.random() * 0.6)
      running = explorers_of(there)
      if running:
        os.kill(rng.choice(running), signal.SIGKILL)
        killed['explorer'] += 1
    time.sleep(rng.random() * 0.6)
    assert process.poll() is None, process.communicate()[1]
    job.kill(process)
    killed['trainer'] += 1
  job.train(there, *flags, environ=environ)
  record_property('kills', str(dict(killed)))
  job.assert_equal_runs(there, here)
  report = audit(there / 'replay')
  assert report.ok and report.live == () and set(report.uses) == {1}, report.lines


SORTING = (
  '--config=configs/quickstart.py:number_sorting',
  '--config.tasksets.train.options.min_numbers=2',
  '--config.tasksets.eval.options.min_numbers=2',
)
"""Flags of a task whose right answers have 8, 11 or 14 tokens, each about as often."""


@pytest.mark.acceptance
@pytest.mark.parametrize(
  ('task', 'steps', 'budget', 'buckets'),
  [
    (('--config=configs/quickstart.py',), 140, 5, (6, 13)),
    (SORTING, 120, 11, (13, 27)),
  ],
  ids=['spell_backward', 'number_sorting'],
)
def test_a_budget_below_the_longest_answers_costs_no_accuracy(
  tmp_path, record_property, task, steps, budget, buckets
):
  """Over three seeds, GRPO with the loss `all` learns what it learns without a budget, from the
  same policy after SFT, at the same bound and in as many steps. Two standard errors are those of
  the difference of two means over three evaluations of 512 tasks.
  """
  common = (
    f'--config.stages.grpo.steps={steps}',
    '--config.stages.grpo.source.bound=1',
    '--config.stages.grpo.algorithm.options.rollout_is=token',
  )
  partial = (
    '--config.rollout.partial=' + json.dumps({'budget': budget, 'max_spans': 2, 'loss': 'all'}),
    f'--config.rollout.embedded.prefill_buckets={buckets}',
  )
  accuracies, before = {'without': [], 'with': []}, []
  for seed in range(3):
    parent = tmp_path / f'sft{seed}'
    options = {'config': (*task, f'--config.seed={seed}'), 'timeout_s': 1800}
    job.train(parent, '--config.stages.grpo.steps=1', **options)
    before += [value for _, step, value in job.accuracies(parent) if step == 500]
    for name, flags in (('without', ()), ('with', partial)):
      run = tmp_path / f'{name}{seed}'
      job.train(run, f'--branch_from={parent}:500', *common, *flags, **options)
      accuracies[name].append(job.accuracies(run)[-1][2])
    cut = [row['partial/cut'] for row in job.rows(tmp_path / f'with{seed}') if 'partial/cut' in row]
    assert statistics.fmean(cut) >= 4, 'groups per batch'
  record_property('accuracies', str({'before': before, **accuracies}))
  without, with_budget = (statistics.fmean(values) for values in accuracies.values())
  variances = [value * (1 - value) / (3 * 512) for value in (without, with_budget)]
  assert without > statistics.fmean(before) + 0.2
  assert with_budget >= without - 2 * math.sqrt(sum(variances)), accuracies


def explorers_of(run):
  """Process ids of the run's explorers."""
  listed = subprocess.run(['ps', '-eo', 'pid,args'], capture_output=True, text=True, check=True)
  return [
    int(line.split()[0])
    for line in listed.stdout.splitlines()
    if 'jaxrl_llm.app.serve.explorer' in line
    and 'guard.py' not in line
    and os.path.realpath(f'/proc/{line.split()[0]}/fd/1').startswith(str(run))
  ]
