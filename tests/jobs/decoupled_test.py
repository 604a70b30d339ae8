"""Runs of which one trains and the others explore. They share only files."""

import contextlib
import itertools
import json
import pathlib
import shutil
import signal

import job
import pytest
import serving

from jaxrl_llm.master.following import FOLLOWED
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store

SFT = 2
FIRST = SFT + 2
"""Rows of the trainer when its rollouts begin: its demonstrations and two evaluations."""


def explorer(trains, **follow):
  """Flags of a run that explores for the run `trains` until it is stopped."""
  return (
    '--config.seed=1',
    '--config.stages.sft.steps=1',
    '--config.stages.grpo.steps=200',
    '--config.stages.grpo.evaluate_every=null',
    '--config.stages.grpo.source.rollout_only=true',
    f'--config.stages.grpo.source.follow={json.dumps({"run": str(trains), **follow})}',
  )


def trainer(explores, *, steps, **fields):
  """Flags of a run that trains on what the run `explores`, or each of several runs, shares."""
  source = {'@type': 'Followed', 'tasksets': ['train'], 'groups_per_batch': 6, 'group_size': 4}
  run = str(explores) if isinstance(explores, pathlib.Path) else [*map(str, explores)]
  source |= {'run': run, **fields}
  return (
    f'--config.stages.sft.steps={SFT}',
    f'--config.stages.grpo.steps={steps}',
    '--config.stages.grpo.evaluate_every=null',
    f'--config.stages.grpo.source={json.dumps(source)}',
  )


def trained_together(folder, *, steps, kills, bound, engine=(), processes=1, explorers=1):
  """Runs a trainer to its end and explorers beside it, and kills each of them.

  Args:
    kills: (run, rows of the trainer when it is killed) of each kill.
    engine: flags of the explorer's engine.
    processes: processes of the trainer.
    explorers: number of exploring runs, which divide the tasks.

  Returns:
    The run directories of the explorers and of the trainer.
  """
  explores = [folder / f'explores-{i}' for i in range(explorers)]
  trains = folder / 'trains'
  flags = {
    run: (*explorer(trains, batches_per_version=1, share=[i, explorers]), *engine)
    for i, run in enumerate(explores)
  }
  several, alive = dict.fromkeys(explores, 1) | {trains: processes}, {}
  flags[trains] = trainer(explores[0] if explorers == 1 else explores, steps=steps, bound=bound)
  try:
    alive = {run: job.start(run, *flags[run], processes=several[run]) for run in flags}
    for name, rows in kills:
      job.wait_for_rows(trains, rows, alive[trains], timeout_s=600)
      run = folder / name
      job.kill(alive[run])
      for directory in flags:
        assert audit(directory / 'replay').ok
      alive[run] = job.start(run, *flags[run], processes=several[run])
    _, err = alive[trains].communicate(timeout=600)
    assert alive[trains].returncode == 0, err
    for run in explores:
      alive[run].send_signal(signal.SIGTERM)
    for run in explores:
      _, err = alive[run].communicate(timeout=60)
      assert alive[run].returncode == 128 + signal.SIGTERM, err
  finally:
    for process in alive.values():
      with contextlib.suppress(Exception):
        job.kill(process)
  return *explores, trains


def check_accounts(*runs, steps, bound):
  *explores, trains = runs
  explored, trained = [audit(run / 'replay') for run in explores], audit(trains / 'replay')
  assert all(report.ok for report in explored), [report.lines for report in explored]
  assert trained.ok and trained.live == (), trained.lines
  assert trained.states['trained'] == steps * 6 * 4, trained.lines
  grpo = job.plans(trains, 'grpo')
  assert len(grpo) == steps
  assert all(plan['step'] - row['version_step'] <= bound for plan in grpo for row in plan['rows'])
  updated = [row for row in job.rows(trains) if 'actor/pg_loss' in row and row['stage'] == 'grpo']
  assert len(updated) == steps and any(row['critic/advantages/max'] > 0 for row in updated)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """A pair in which each batch is explored with the weights that it updates; the trainer was
  killed.
  """
  kills = [('trains', FIRST + 4)]
  return trained_together(tmp_path_factory.mktemp('decoupled'), steps=5, kills=kills, bound=0)


@pytest.mark.full
def test_one_run_trains_on_what_another_explores(runs):
  check_accounts(*runs, steps=5, bound=0)
  explored = [row for row in job.rows(runs[0]) if 'explore/version' in row]
  assert {row['explore/version'] for row in explored} >= set(range(SFT, SFT + 5))
  written = {key for row in job.rows(runs[1]) for key in row}
  assert written >= {
    *('explore/open', 'explore/expired', 'explore/voided', 'explore/voided_trained'),
    *('explore/left_out', 'perf/unread_batches'),
  }


@pytest.mark.full
def test_the_trainer_repeats_its_batches_and_weights_bit_for_bit(runs, tmp_path):
  """From an earlier commit, with the same shared batches: as if it had been killed there."""
  explores, trains = runs
  again = job.copy(trains, tmp_path / 'trains')
  for step in job.commits(again)[1:]:
    shutil.rmtree(again / 'checkpoints' / str(step))
  flags = trainer(explores, steps=5, bound=0)
  job.train(again, *flags)
  job.assert_equal_runs(again, trains)
  done = job.call('launch/replay.py', f'--workdir={trains}', '--step=6')
  last = done.stdout.strip().splitlines()[-1]
  assert last.startswith('step 6 (grpo)') and ': equal' in last


@pytest.mark.acceptance
def test_each_of_the_two_runs_is_killed_three_times(tmp_path):
  rows = itertools.count(FIRST + 2, 2)
  kills = [(name, next(rows)) for _ in range(3) for name in ('explores-0', 'trains')]
  explores, trains = trained_together(tmp_path, steps=24, kills=kills, bound=2)
  check_accounts(explores, trains, steps=24, bound=2)
  updated = [row for row in job.rows(trains) if 'explore/voided' in row]
  lag = [row['staleness/mean'] for row in updated]
  assert max(row['staleness/max'] for row in updated) <= 2
  print('mean staleness', sum(lag) / len(lag))


@pytest.mark.acceptance
def test_two_runs_explore_for_one_trainer_and_each_is_killed(tmp_path):
  kills = [
    (name, FIRST + 2 + 3 * i) for i, name in enumerate(('explores-0', 'trains', 'explores-1'))
  ]
  runs = trained_together(tmp_path, steps=14, kills=kills, bound=2, explorers=2)
  check_accounts(*runs, steps=14, bound=2)
  uids = [row['uid'] for plan in job.plans(runs[-1], 'grpo') for row in plan['rows']]
  with contextlib.closing(open_store(runs[-1] / 'replay')) as store:
    origins = [copy['store'] for copy in store.derived(uids, FOLLOWED).values()]
  assert len(set(origins)) == 2 and len(origins) == len(uids)


@pytest.mark.acceptance
def test_a_trainer_of_two_processes_learns_from_a_run_with_a_real_vllm_server(tmp_path):
  engine = (
    '--config.rollout.engine=vllm',
    f'--config.rollout.vllm.environment={serving.ENVIRONMENT}',
    '--config.rollout.vllm.servers=1',
  )
  kills = [('trains', FIRST + 3), ('explores-0', FIRST + 6)]
  explores, trains = trained_together(
    tmp_path, steps=10, kills=kills, bound=2, engine=engine, processes=2
  )
  check_accounts(explores, trains, steps=10, bound=2)
