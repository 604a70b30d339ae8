"""Updates of real runs made again by the command that a user types: equal to the last bit, or it
says what is not.
"""

import dataclasses
import json
import math
import re
import shutil
import sqlite3

import job
import numpy as np
import pytest

from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.replay.segments import SegmentReader, write_segment

pytestmark = pytest.mark.full


@pytest.fixture(scope='module')
def run():
  return job.quick_run()


@pytest.fixture
def replay(tmp_path):
  """Calls the command: its lines, those on stderr where it is to fail with 2; nothing is left in
  its scratch folder.
  """
  scratch = tmp_path / 'scratch'
  scratch.mkdir()

  def call(workdir, *flags, expect=0, **environment):
    env = job.environment(TMPDIR=str(scratch), **environment)
    done = job.call('launch/replay.py', f'--workdir={workdir}', *flags, expect=expect, environ=env)
    assert not list(scratch.iterdir())
    return (done.stdout + (done.stderr if expect else '')).splitlines()

  return call


def test_the_last_step_is_equal_and_so_is_its_commit_and_nothing_is_written(run, replay):
  before = job.files(run)
  first, last = replay(run)
  row = next(row for row in job.rows(run) if row['training/global_step'] == 20)
  assert first.startswith('step 19 (grpo), loss ') and first.endswith(': equal')
  assert last.startswith(
    f'step 20 (grpo), loss {row["actor/loss"]}, grad norm {row["actor/grad_norm"]}: equal'
  )
  assert last.endswith(f'{len(job.newest_arrays(run))} arrays of its commit')
  assert job.files(run) == before


def test_without_a_commit_before_it_a_step_is_reached_from_the_beginning_through_the_stages(
  run, replay
):
  lines = replay(run, '--step=13')
  stages = [f'step {step} (sft)' for step in range(1, 13)] + ['step 13 (grpo)']
  assert [line.partition(',')[0] for line in lines] == stages
  assert all(line.endswith(': equal') for line in lines)


def test_a_critic_a_moving_reference_and_adapted_coefficients_are_equal_after_kills(replay):
  run = job.killed_ppo_run()
  lines = replay(run)
  assert [line.partition(' (')[0] for line in lines] == ['step 19', 'step 20', 'step 21']
  assert (
    all(': equal' in line and 'critic loss' in line for line in lines)
    and 'of its commit' in lines[-1]
  )
  lines = replay(run, '--step=14')
  assert lines[-1].startswith('step 14 (ppo)') and all(': equal' in line for line in lines)


def test_what_was_changed_is_found(run, replay, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(run, copy)
  metrics = copy / 'metrics.jsonl'
  rows = [json.loads(line) for line in metrics.read_text().splitlines()]
  (row,) = (row for row in rows if row['training/global_step'] == 20 and 'actor/loss' in row)
  loss = row['actor/loss']
  row['actor/loss'], row['actor/nothing'] = math.nextafter(loss, 1.0), 0.0
  metrics.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  first, last = replay(copy, expect=1)
  assert first.endswith(': equal')
  assert (
    f'2 differ: actor/loss {loss}, recorded {row["actor/loss"]}; actor/nothing nothing, recorded '
    '0.0' in last
  )

  shutil.copy(run / 'metrics.jsonl', metrics)
  (segment,) = (copy / 'replay/segments').glob('00000019-*')
  sealed = segment.read_bytes()
  samples = SegmentReader(segment.parent).read([(segment.name, i) for i in range(24)])
  logprobs = samples[5].behaviour_logprobs.copy()
  logprobs[-1] = np.nextafter(logprobs[-1], np.float32(-99))
  samples[5] = dataclasses.replace(samples[5], behaviour_logprobs=logprobs)
  write_segment(segment.parent, segment.name, [encode(sample) for sample in samples])
  first, last = replay(copy, expect=1)
  assert first.endswith(': equal')
  assert 'differ: ' in last and 'rollout_corr/' in last

  at = len(sealed) // 2
  segment.write_bytes(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])
  *_, line = replay(copy, expect=1)
  assert line.startswith('error: segment ') and segment.name in line and 'cannot be read' in line


def test_what_cannot_be_made_again_is_one_line(run, replay, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(run, copy)
  (line,) = replay(copy, '--step=99', expect=2)
  assert 'has the steps 1 to 20' in line
  (line,) = replay(copy, expect=2, NPROC='1')
  assert 'cannot be replayed bit for bit here' in line and "NPROC '2' → '1'" in line
  (line,) = replay(tmp_path / 'nowhere', expect=2)
  assert 'not the directory of a run' in line
  with sqlite3.connect(copy / 'replay/index.sqlite') as db:
    db.execute('DELETE FROM plans WHERE step = 18')
  (line,) = replay(copy, expect=2)
  assert (
    'the plan of step 19, which the replay from the commit at step 18 needs, is not recorded'
    in line
  )


def test_a_run_that_has_lost_its_index_is_not_resumed_and_loses_nothing_more(run, tmp_path):
  copy = job.copy(run, tmp_path / 'copy')
  (copy / 'replay/index.sqlite').unlink()

  def found():
    return {name: content for name, content in job.files(copy).items() if name != 'lock'}

  before = found()
  error = job.train(copy, expect=2).stderr.splitlines()[-1]
  assert error.startswith('error: ') and 'cannot resume from its commit at step 20' in error
  assert re.search(
    r'whose files are missing or changed: \S+/replay/index\.sqlite \(store [0-9a-f]{16}\) \(jaxrl '
    r'buffer --rebuild recreates it\); restore them',
    error,
  )
  assert found() == before
