"""A policy learns to use a calculator from the rewards of its environment.

By hand (acceptance): minutes each. What was reached is in docs/develop/acceptance.md.
"""

import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

import job
import pytest
from paths import FIXTURES

pytestmark = pytest.mark.acceptance


def write_tasks(file: pathlib.Path, seed: int) -> None:
  """Writes all sums of two numbers from 10 to 49, each with a wrong sum."""
  draw, rows = random.Random(seed), []
  for left in range(10, 50):
    for right in range(10, 50):
      row = {'left': left, 'right': right, 'answer': str(left + right)}
      rows.append({**row, 'guess': str(draw.randrange(20, 99))})
  draw.shuffle(rows)
  file.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))


def learn(workdir, *flags, seed=0, control=None):
  """Mean reward of the first ten and of the last ten batches of GRPO."""
  tasks = workdir.parent / 'sums.jsonl'
  write_tasks(tasks, seed)
  config = (f'--config={FIXTURES / "calculator.py"}:{tasks}', job.SMALL[0])
  train = job.command(workdir, f'--config.seed={seed}', *flags, config=config)
  command = [sys.executable, 'tests/support/controls.py', control, *train[2:]] if control else train
  path = os.pathsep.join(map(str, (job.ROOT, FIXTURES, job.ROOT / 'configs')))
  done = subprocess.run(
    command,
    cwd=job.ROOT,
    env=job.environment(PYTHONPATH=path),
    capture_output=True,
    text=True,
    timeout=3000,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  key = 'rewards/environment/mean'
  rewards = [row[key] for row in job.rows(workdir) if key in row]
  return statistics.fmean(rewards[:10]), statistics.fmean(rewards[-10:])


@pytest.mark.parametrize('seed', range(3))
def test_the_calculator_is_learnt_from_rewards_of_the_environment(tmp_path, seed):
  start, end = learn(tmp_path / 'run', seed=seed)
  assert end >= 1.5 * start


@pytest.mark.parametrize('seed', range(3))
def test_shuffled_advantages_teach_no_calculator(tmp_path, seed):
  start, end = learn(tmp_path / 'run', seed=seed, control='shuffled')
  assert end <= 1.2 * start
