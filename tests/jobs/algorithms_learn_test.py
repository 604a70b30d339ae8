"""Each algorithm learns its small task by its own configuration, and not from a broken signal.

By hand (acceptance): minutes each. What each reached is in docs/develop/acceptance.md.
"""

import statistics
import subprocess
import sys

import job
import pytest

pytestmark = pytest.mark.acceptance
PAIRS = 'val-core/eval_pairs/rewards/accuracies'


def learn(workdir, config, *flags, seed=0, control=None):
  train = job.command(
    workdir, f'--config.seed={seed}', *flags, config=(f'--config=configs/{config}',)
  )
  command = [*train[:1], 'tests/support/controls.py', control, *train[2:]] if control else train
  done = subprocess.run(
    command, cwd=job.ROOT, env=job.environment(), capture_output=True, text=True, timeout=3000
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert command[0] == sys.executable


def curve(workdir, stage):
  """Greedy accuracy where the stage began, and at each of its evaluations."""
  found = job.accuracies(workdir)
  first = next(i for i, (name, _, _) in enumerate(found) if name == stage)
  return [value for _, _, value in found[first - 1 :]]


def column(workdir, key):
  return [row[key] for row in job.rows(workdir) if key in row]


@pytest.mark.parametrize('seed', range(3))
def test_ppo_learns_and_its_critic_explains_more_and_more(tmp_path, seed):
  """While the policy stands still; later its mistakes get rare, and with them what there is to
  explain.
  """
  warmup = 120
  learn(tmp_path / 'run', 'ppo.py', seed=seed)
  start, *_, end = curve(tmp_path / 'run', 'ppo')
  assert start < 0.5 and end >= 0.9
  explained = column(tmp_path / 'run', 'critic/vf_explained_var')
  # The first batch's values are those of a critic that has not learnt yet.
  assert explained[0] < 0.2 < 0.35 < statistics.fmean(explained[warmup - 10 : warmup])


@pytest.mark.parametrize(
  'config', ['opmd.py', *(f'grpo.py:{name}' for name in ('dr_grpo', 'dapo', 'gspo', 'cispo'))]
)
def test_algorithms_of_groups_learn(tmp_path, config):
  learn(tmp_path / 'run', config)
  start, *_, end = curve(tmp_path / 'run', config.removesuffix('.py').rpartition(':')[2])
  assert start < 0.5 and end >= 0.85


@pytest.mark.parametrize('name', ['rloo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline'])
def test_reinforce_and_its_kin_learn(tmp_path, name):
  learn(tmp_path / 'run', f'grpo.py:{name}')
  start, *_, end = curve(tmp_path / 'run', name)
  assert start < 0.5 and end >= 0.85


@pytest.mark.parametrize('config', ['ppo.py', 'opmd.py'])
def test_random_rewards_teach_nothing(tmp_path, config):
  stage = config.removesuffix('.py')
  flags = (f'--config.stages.{stage}.steps=80', f'--config.stages.{stage}.evaluate_every=20')
  flags += ('--config.stages.ppo.algorithm.options.critic_warmup=40',) if stage == 'ppo' else ()
  learn(tmp_path / 'run', config, *flags, control='coin')
  start, *after = curve(tmp_path / 'run', stage)
  assert max(after) <= start + 0.05


@pytest.mark.parametrize('config', ['dpo.py:pairs', 'reward_model.py'])
def test_pairs_are_ranked_correctly(tmp_path, config):
  learn(tmp_path / 'run', config)
  assert column(tmp_path / 'run', PAIRS)[-1] >= 0.9


@pytest.mark.parametrize('config', ['dpo.py:pairs', 'reward_model.py'])
def test_swapped_pairs_teach_the_opposite(tmp_path, config):
  """Held-out pairs are judged by what training pairs say, not by anything else in them."""
  swapped = (
    '--config.preferences.train_pairs.chosen={word}',
    '--config.preferences.train_pairs.wrong=["{answer}"]',
  )
  learn(tmp_path / 'run', config, *swapped)
  assert column(tmp_path / 'run', PAIRS)[-1] <= 0.1


@pytest.mark.parametrize('variant', ['online', 'rejection'])
def test_pairs_and_shortest_answers_of_the_policys_own_rollouts_teach(tmp_path, variant):
  learn(tmp_path / 'run', f'dpo.py:{variant}')
  start, *_, end = curve(tmp_path / 'run', variant)
  assert end >= start + 0.3


@pytest.mark.parametrize('seed', range(3))
def test_mix_learns_where_neither_of_its_parts_does(tmp_path, seed):
  """The starting policy never succeeds: no rollout teaches anything, and the expert rows alone are
  too few.
  """
  for variant, flags in (('mix', ()), ('sft', ()), ('grpo', ('--config.stages.grpo.steps=200',))):
    learn(tmp_path / variant, f'mix.py:{variant}', *flags, seed=seed)
  ends = {variant: curve(tmp_path / variant, variant) for variant in ('mix', 'sft', 'grpo')}
  assert max(ends['grpo']) < 0.05
  assert ends['mix'][-1] >= max(ends['sft']) + 0.25
  assert ends['mix'][-1] >= max(ends['grpo']) + 0.25
