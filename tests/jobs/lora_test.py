"""Adapters through the real program: what is committed, what a kill leaves, what is refused, what
comes out.
"""

import json
import time

import job
import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.full
RANK, ALPHA = 4, 8


def config(base, *flags):
  """The quickstart's job in seconds, on another run's weights; GRPO with a reference that is
  refreshed.
  """
  grpo = {'kl_loss_coef': 0.05, 'reference': {'every': 3}}
  return (
    *job.QUICK,
    f'--config.policy.init_from={base}',
    f'--config.policy.lora.rank={RANK}',
    f'--config.policy.lora.alpha={ALPHA}',
    '--config.stages.grpo.minibatches=2',
    f'--config.stages.grpo.algorithm.options={json.dumps(grpo)}',
    *flags,
  )


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  """A copy, which a test may damage and mend."""
  return job.copy(job.quick_run(), tmp_path_factory.mktemp('base') / 'run')


@pytest.fixture(scope='module')
def adapted(base, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('lora') / 'run'
  job.train(workdir, config=config(base))
  return workdir


def weights(run, part='hf'):
  return load_file(
    run / part / ('model.safetensors' if part == 'hf' else 'adapter_model.safetensors')
  )


def test_adapters_alone_are_committed_and_move(adapted, base):
  arrays = job.newest_arrays(adapted)
  for path, (_, shape, _) in arrays.items():
    assert 'lora_' in path or not shape, path

  def of(*words):
    return [path for path in arrays if 'lora_a' in path and all(word in path for word in words)]

  targets = 2 * 7
  assert len(of("['params']")) == len(of("['reference']")) == targets
  assert len(of("['opt_state']")) == 2 * targets
  rows = [row for row in job.rows(adapted) if 'actor/reference_step' in row]
  assert [row['actor/reference_step'] for row in rows] == [12, 12, 12, 15, 15, 15, 18, 18]
  assert max(row['sampling/sampling_logp_difference/max'] for row in rows) < 1e-4
  assert {row['perf/compilations'] for row in rows[1:]} == {0}
  assert sum(row['actor/kl_loss'] for row in rows) > 0, (
    'the reference stands still while the adapters move'
  )


def test_the_merged_export_is_base_and_adapter(adapted, base):
  before, after, adapter = weights(base), weights(adapted), weights(adapted, 'adapter')
  assert before.keys() == after.keys()
  for name in after:
    module = f'base_model.model.{name.removesuffix(".weight")}'
    if f'{module}.lora_A.weight' in adapter:
      a, b = (adapter[f'{module}.lora_{part}.weight'].astype(np.float64) for part in 'AB')
      assert np.abs(b).max() > 0
      np.testing.assert_allclose(
        after[name], before[name] + ALPHA / RANK * b @ a, rtol=0, atol=1e-6
      )
    else:
      np.testing.assert_array_equal(after[name], before[name])
  assert (
    json.loads((adapted / 'adapter/adapter_config.json').read_text())['base_model_name_or_path']
    == f'{base}/hf'
  )


def flip_last_bit(file):
  data = bytearray(file.read_bytes())
  data[-1] ^= 1
  file.write_bytes(data)


@pytest.mark.parametrize(
  'kills',
  [(18,), pytest.param((5, 18), marks=pytest.mark.acceptance)],
  ids=['in GRPO', 'in each stage'],
)
def test_a_killed_run_goes_on_bit_for_bit_and_on_no_other_weights(adapted, base, tmp_path, kills):
  run = tmp_path / 'run'
  for count in kills:
    process = job.start(run, config=config(base))
    job.wait_for_rows(run, count, process)
    while not job.commits(run):  # A commit ends while later steps run.
      assert process.poll() is None
      time.sleep(0.01)
    job.kill(process)
    if count == kills[0]:
      flip_last_bit(base / 'hf/model.safetensors')
      error = job.train(run, config=config(base), expect=2).stderr
      commit = f'the commit at step {job.commits(run)[-1]}'
      assert f'no longer gives the weights that the adapters of {commit} were trained on' in error
      flip_last_bit(base / 'hf/model.safetensors')
  job.train(run, config=config(base))
  job.assert_equal_runs(run, adapted)
  killed, whole = (job.without_card(job.files(each / 'adapter')) for each in (run, adapted))
  assert killed == whole


@pytest.mark.acceptance
def test_two_processes_do_the_same(adapted, base, tmp_path):
  run = tmp_path / 'run'
  job.train(run, config=config(base), processes=2)
  found, wanted = (
    [row['actor/loss'] for row in job.rows(path) if 'actor/loss' in row][:12]
    for path in (run, adapted)
  )
  np.testing.assert_allclose(found, wanted, rtol=1e-4)
  for name, array in weights(run, 'adapter').items():
    assert array.shape == weights(adapted, 'adapter')[name].shape


@pytest.mark.parametrize(
  ('name', 'flags', 'stage', 'key'),
  [
    (
      'ppo.py',
      ('--config.stages.1.steps=3', '--config.stages.1.algorithm.options.critic_warmup=1'),
      'ppo',
      'critic/vf_loss',
    ),
    pytest.param(
      *('dpo.py', ('--config.stages.1.steps=3',), 'dpo', 'rewards/accuracies'),
      marks=pytest.mark.acceptance,
    ),
  ],
)
def test_other_algorithms_train_adapters_too(base, tmp_path, name, flags, stage, key):
  run = tmp_path / 'run'
  own = [
    flag
    for flag in config(base, *flags)
    if not flag.startswith(('--config=', '--config.stages.grpo'))
  ]
  own = [flag.replace('stages.sft', 'stages.0') for flag in own]
  pairs = (
    ('--config.preferences.0.size=300', '--config.preferences.1.size=50') if stage == 'dpo' else ()
  )
  small = ('groups_per_batch=6', 'group_size=4') if stage == 'ppo' else ()
  small = tuple(f'--config.stages.1.source.{setting}' for setting in small)
  job.train(run, config=(f'--config=configs/{name}', *own, *pairs, *small))
  assert len([row for row in job.rows(run) if row['stage'] == stage and key in row]) == 3
  assert all(
    'lora_' in p or not shape or 'critic' in p
    for p, (_, shape, _) in job.newest_arrays(run).items()
  )
