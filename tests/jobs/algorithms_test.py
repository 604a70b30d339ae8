"""Algorithms through the real program: what they keep survives a kill, what they leave behind is
read by others.
"""

import gzip
import json
import shutil

import job
import numpy as np
import pytest
import transformers

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.full


@pytest.fixture(scope='module')
def ppo():
  return job.ppo_run()


def stage_rows(workdir, stage, key):
  return [row for row in job.rows(workdir) if row['stage'] == stage and key in row]


def test_ppo_warms_its_critic_up_and_moves_the_policy_after(ppo):
  rows = stage_rows(ppo, 'ppo', 'critic/vf_loss')
  assert len(rows) == 9
  assert ['actor/pg_loss' in row for row in rows] == [False] * 2 + [True] * 7
  assert [row['actor/reference_step'] for row in rows] == [12] * 4 + [16] * 4 + [20]
  # A batch that was sampled from unchanged weights is as fresh as any.
  assert {row['staleness/max'] for row in rows} == {0}
  assert max(row['sampling/sampling_logp_difference/max'] for row in rows) < 1e-4
  penalties = [row['actor/kl_measured'] for row in rows]
  # The reference is the policy before the third batch, for it did not move, and before those after
  # a refresh.
  np.testing.assert_allclose([penalties[i] for i in (0, 1, 2, 4, 8)], 0.0, atol=1e-7)
  assert min(abs(penalties[i]) for i in (3, 5, 6, 7)) > 1e-6
  assert len({row['actor/kl_coef'] for row in rows}) > 3, 'the coefficient is adapted'
  assert {row['perf/compilations'] for row in rows[3:]} == {0}


def test_the_share_of_a_stated_peak_is_that_of_the_seconds_of_each_phase(ppo):
  rows = stage_rows(ppo, 'ppo', 'critic/vf_loss')
  keys = {role: f'perf/mfu/{role}' for role in ('actor', 'critic', 'actor_infer', 'critic_infer')}
  assert all(0 < row[keys[role]] < 10 for row in rows for role in keys if keys[role] in row)
  assert [keys['actor'] in row for row in rows] == [False] * 2 + [True] * 7
  for row in rows[2:]:
    # Two epochs of forward and backward, and one forward pass, of the policy. An epoch may share
    # prefixes that another one does not.
    work = {
      role: row[keys[role]] * row[f'timing_s/{phase}']
      for role, phase in (('actor', 'update_actor'), ('actor_infer', 'old_log_prob'))
    }
    assert work['actor'] == pytest.approx(6 * work['actor_infer'], rel=0.1)


def test_a_chosen_step_is_traced(ppo):
  traces = [path.relative_to(ppo / 'profile').parts for path in (ppo / 'profile').glob('*/*')]
  assert traces == [('step_14', 'process_0')]
  (file,) = (ppo / 'profile').rglob('perfetto_trace.json.gz')
  names = {
    event.get('name', '') for event in json.loads(gzip.decompress(file.read_bytes()))['traceEvents']
  }
  assert any('update' in name for name in names), sorted(names)[:50]


def test_a_killed_ppo_goes_on_bit_for_bit(ppo):
  run = job.killed_ppo_run()
  job.assert_equal_runs(run, ppo)
  killed, whole = (job.without_card(job.files(each / 'critic')) for each in (run, ppo))
  assert killed == whole


def test_exported_critics_and_reward_models_are_loaded_by_transformers_and_start_a_critic(
  ppo, tmp_path
):
  critic = transformers.AutoModelForTokenClassification.from_pretrained(ppo / 'critic')
  assert critic.config.num_labels == 1
  reward = job.reward_model_run()
  held_out = stage_rows(reward, 'reward_model', 'val-core/eval_pairs/rewards/accuracies')
  assert len(held_out) == 2
  model = transformers.AutoModelForSequenceClassification.from_pretrained(reward / 'hf')
  assert model.config.num_labels == 1
  run = tmp_path / 'run'
  critic = (
    f'--config.stages.1.critic.init_from={reward}',
    '--config.stages.1.algorithm.options.critic_warmup=1',
  )
  job.train(run, config=job.small('ppo.py', *critic, steps=2))
  assert len(stage_rows(run, 'ppo', 'critic/vf_loss')) == 2


@pytest.mark.parametrize(
  ('config', 'flags', 'stage', 'key'),
  [
    pytest.param(
      *('opmd.py', ('--config.stages.1.minibatches=2',), 'opmd', 'actor/log_ratio_sum'),
      marks=pytest.mark.acceptance,
    ),
    (
      'mix.py:mix',
      ('--config.stages.1.minibatches=2', '--config.stages.1.source.experts.count=40'),
      'mix',
      'actor/expert_logprob',
    ),
    pytest.param(
      *('dpo.py:online', job.RIGHT, 'online', 'rewards/accuracies'), marks=pytest.mark.acceptance
    ),
  ],
  ids=['opmd', 'mix', 'online'],
)
def test_every_sample_is_accounted_for(tmp_path, config, flags, stage, key):
  """Whatever is chosen of a group, paired, or mixed with experts, and with a kill in between."""
  run = tmp_path / 'run'
  job.killed_and_resumed(run, 14 + 4, config=job.small(config, *flags))
  assert len(stage_rows(run, stage, key)) == 6
  report = audit(run / 'replay')
  assert report.ok, report.lines


def test_a_users_own_algorithm_and_scorer(tmp_path):
  """They lie beside the configuration, which is where they are looked for."""
  for name in (
    'configs/grpo',
    'configs/quickstart',
    'tests/support/fixtures/own_algorithm',
    'tests/support/fixtures/own_scorer',
  ):
    shutil.copy(job.ROOT / f'{name}.py', tmp_path)

  def config(*more):
    return (f'--config={tmp_path}/grpo.py', *job.small('grpo.py', *more)[1:])

  flags = (
    '--config.stages.1.algorithm.name=own_algorithm:ALGORITHM',
    '--config.stages.1.algorithm.options={"baseline":0.25}',
    '--config.rewards.scorers.0.kind=own_scorer:make_scorer',
    '--config.rewards.scorers.0.options={"excess":0.05}',
  )
  run = tmp_path / 'run'
  job.train(run, config=config(*flags))
  rows = stage_rows(run, 'grpo', 'actor/pg_loss')
  assert len(rows) == 6
  assert rows[0]['critic/advantages/mean'] != 0
  assert all('rewards/verifier/share' in row for row in rows)
  bad = '--config.stages.1.algorithm.name=own_algorithm:ALGORTIHM'
  error = job.train(tmp_path / 'bad', bad, config=config(), expect=2).stderr
  assert "module own_algorithm has no 'ALGORTIHM'" in error


def test_tasks_are_drawn_by_what_became_of_them_and_a_killed_run_remembers_it(tmp_path):
  drawn = job.small('grpo.py:dapo', '--config.stages.1.source.sampler.order=prioritised', steps=8)
  job.train(tmp_path / 'whole', config=drawn)
  run = job.killed_and_resumed(tmp_path / 'run', 17, config=drawn)
  job.assert_equal_runs(run, tmp_path / 'whole')
  newest = max(
    (run / 'checkpoints').iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1
  )
  (pool,) = json.loads((newest / 'host.json').read_text())['batches']['sampler']['pools']
  assert pool['draws'] >= 8 * 6 and len(pool['known']) > 20
