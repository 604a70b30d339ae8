"""A policy learns, from rewards of its environment, to use a calculator, and to fetch a key before
it opens a door.

By hand (acceptance): minutes each. What was reached is in docs/develop/acceptance.md.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys

import job
import pytest
from paths import FIXTURES

pytestmark = pytest.mark.acceptance


def sums():
  """All sums of two numbers from 10 to 49."""
  for left, right in itertools.product(range(10, 50), repeat=2):
    yield {'left': left, 'right': right, 'answer': str(left + right)}


def rooms():
  """All pairs of two different rooms, whose names have two letters."""
  names = [''.join(letters) for letters in itertools.product('abcdef', 'ghijk')]
  for key, door in itertools.permutations(names, 2):
    yield {'key': key, 'door': door}


TASKS = {'calculator': sums, 'key_game': rooms}


def learn(workdir, task, *flags, seed=0, control=None):
  """Mean reward of the first two and of the last ten batches of the stage after SFT."""
  file = workdir.parent / 'tasks.jsonl'
  rows = [*TASKS[task]()]
  random.Random(seed).shuffle(rows)
  file.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
  config = (f'--config={FIXTURES / task}.py:{file}',)
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
  return statistics.fmean(rewards[:2]), statistics.fmean(rewards[-10:])


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('task', TASKS)
def test_a_task_is_learnt_from_rewards_of_the_environment(tmp_path, task, seed):
  start, end = learn(tmp_path / 'run', task, seed=seed)
  assert start <= 0.6 and end >= 0.75


def test_ppo_learns_the_key_game(tmp_path):
  flags = (
    '--config.stages.grpo.algorithm={"name":"ppo","options":{"critic_warmup":20}}',
    '--config.stages.grpo.critic={"optimizer":{"peak_lr":1e-3,"b2":0.99}}',
    '--config.stages.grpo.optimizer={"peak_lr":3e-4,"b2":0.99}',
    '--config.stages.grpo.source.groups_per_batch=128',
    '--config.stages.grpo.source.group_size=1',
    '--config.stages.grpo.minibatches=2',
    '--config.stages.grpo.steps=140',
  )
  start, end = learn(tmp_path / 'run', 'key_game', *flags)
  assert start <= 0.6 and end >= 0.75


def test_two_vllm_servers_play_the_key_game(tmp_path):
  flags = (
    '--config.rollout.engine=vllm',
    '--config.rollout.vllm.environment=.venv-vllm',
    '--config.rollout.vllm.servers=2',
  )
  start, end = learn(tmp_path / 'run', 'key_game', *flags)
  assert start <= 0.6 and end >= 0.75


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('task', TASKS)
def test_shuffled_advantages_teach_nothing(tmp_path, task, seed):
  start, end = learn(tmp_path / 'run', task, seed=seed, control='shuffled')
  assert end <= start + 0.1
