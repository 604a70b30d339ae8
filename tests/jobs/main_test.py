"""The main job through its command line, on small numbers: what it leaves, and what it says to bad
input.
"""

import json
import os
import pathlib
import signal
import subprocess

import job
import pytest

from jaxrl_llm.runtime.metric_descriptions import METRICS

pytestmark = pytest.mark.full

WRITTEN_ELSEWHERE = {
  'mix': (
    *('actor/expert_logprob', 'actor/mu'),
    *('run/experts/arrived', 'run/experts/added', 'run/experts/waiting'),
  ),
  'opmd': ('actor/log_ratio_sum',),
  'dpo': ('actor/dpo_loss', 'logps/chosen', 'logps/rejected'),
  'reward_model': ('actor/center_loss', 'actor/rm_loss'),
  'dpo, reward_model': (
    'rewards/accuracies',
    'rewards/chosen',
    'rewards/margins',
    'rewards/rejected',
  ),
  'a loss with that term': ('actor/entropy_loss', 'actor/kl', 'actor/kl_loss'),
  'a mask or correction': (
    'actor/off_policy_masked_fraction',
    'rollout_corr/rollout_rs_masked_fraction',
  ),
  'vLLM servers': (
    *('perf/publish_bytes', 'perf/publish_pause_s', 'perf/publish_write_s'),
    *('run/engine_restarts', 'run/engine_retries', 'run/engine_void', 'run/engines_serving'),
    *('run/engine_continued', 'run/engine_kept_tokens', 'run/engine_lost_tokens'),
  ),
  "rollout.vllm.transfer='pull'": ('perf/publish_transfer_s',),
  'rollout.vllm.full_every': ('perf/publish_changed_fraction',),
  "rollout.vllm.compare='devices'": ('perf/publish_copied_bytes',),
  'servers of a registry': ('run/engines', 'run/engine_joined', 'run/engine_left'),
  'rollout.max_steps': (
    *('num_steps/mean', 'num_steps/max', 'num_steps/min'),
    *('response/max_steps_ratio', 'run/split_trajectories'),
  ),
  'explorers': ('perf/explorers', 'perf/explorers_lost_groups'),
  'rollout.explorers.direct': (
    *('perf/direct_delivered', 'perf/direct_undelivered', 'perf/direct_refused'),
    *('perf/direct_expired', 'perf/direct_late'),
  ),
  'an archive': ('perf/archive_s', 'perf/archive_bytes'),
  'devices that report it': ('perf/max_memory_allocated_gb',),
  'a scorer process that ended': ('run/scorers/breaks',),
  'a batch policy': ('run/passed_over',),
  'source.response_lengths': ('response_length/limit',),
  'memory phases': ('perf/memory_moved_bytes',),
  'reward model of the trainer': ('timing_s/reward_model',),
  'runs that follow each other': (
    *('explore/version', 'explore/open', 'explore/expired', 'explore/voided'),
    *('explore/voided_trained', 'explore/left_out', 'perf/unread_batches'),
  ),
  'delayed rewards': ('run/awaiting/joined', 'run/awaiting/open'),
  'speculative decoding': ('speculation/accepted_ratio', 'speculation/tokens_per_step'),
  'partial rollouts': (
    *('partial/cut', 'partial/continued', 'partial/open', 'partial/trained_ratio'),
    'partial/returned',
    *('partial/spans/mean', 'partial/spans/max', 'partial/spans/min'),
  ),
}
"""Documented metrics that neither the quickstart nor PPO writes, by what does."""


@pytest.fixture(scope='module')
def finished():
  return job.quick_run()


def test_leaves_a_whole_run_directory(finished):
  for name in (
    'config.json',
    'metrics.jsonl',
    'report.html',
    'hf/config.json',
    'hf/model.safetensors',
    'hf/tokenizer.json',
  ):
    assert (finished / name).stat().st_size > 0, name
  assert len(list((finished / 'rollouts' / 'grpo').glob('*.jsonl'))) == 8
  printed = job.printed(finished)
  assert 'before' in printed and 'after' in printed and str(finished / 'hf') in printed


def test_evaluates_at_the_start_inside_and_after_each_stage(finished):
  assert [(stage, step) for stage, step, _ in job.accuracies(finished)] == [
    ('sft', 0),
    ('sft', 12),
    ('grpo', 16),
    ('grpo', 20),
  ]


def test_each_step_has_one_row_and_nothing_compiles_after_warm_up(finished):
  steps = [r for r in job.rows(finished) if 'timing_s/step' in r]
  assert [r['training/global_step'] for r in steps] == list(range(1, 21))
  assert [r['perf/compilations'] for r in steps if r['stage'] == 'grpo'][2:] == [0] * 6
  assert [r['perf/compilations'] for r in steps if r['stage'] == 'sft'][2:] == [0] * 10


def test_trainer_and_sampler_agree_on_every_rollout_token(finished):
  for file in (finished / 'rollouts' / 'grpo').glob('*.jsonl'):
    for row in map(json.loads, file.read_text().splitlines()):
      differences = [
        abs(a - b) for a, b in zip(row['trainer_logprobs'], row['behaviour_logprobs'], strict=True)
      ]
      assert max(differences) <= 1e-4


def test_rollouts_carry_advantages_that_follow_from_their_rewards(finished):
  file = sorted((finished / 'rollouts' / 'grpo').glob('*.jsonl'))[-1]
  groups = {}
  for row in map(json.loads, file.read_text().splitlines()):
    groups.setdefault(row['group_id'], []).append(row)
  assert len(groups) == 6
  for rows in groups.values():
    rewards = [r['reward'] for r in rows]
    assert all(
      (r['advantages'][0] > 0) == (r['reward'] > sum(rewards) / 4)
      for r in rows
      if len(set(rewards)) > 1
    )
    assert len(set(rewards)) > 1 or all(set(r['advantages']) == {0.0} for r in rows)


def test_a_finished_run_started_again_changes_nothing(finished, tmp_path):
  workdir = job.copy(finished, tmp_path / 'run')
  before = job.files(workdir / 'rollouts'), job.rows(workdir)
  job.train(workdir)
  assert (job.files(workdir / 'rollouts'), job.rows(workdir)) == before


def test_audit_of_the_store_adds_up(finished):
  from jaxrl_llm.replay.audit import audit

  report = audit(finished / 'replay')
  assert report.ok, report.lines
  assert report.states['trained'] == 8 * 6 * 4


@pytest.mark.parametrize(
  ('flags', 'code', 'words'),
  [
    (['--workdr=x'], 2, ['--workdr', 'did you mean --workdir']),
    (['--config.stages.grpo.stepz=3'], 2, ['stepz', 'steps']),
    (['--config.stages.grpo.steps=many'], 2, ['stages.grpo.steps', 'many', 'integer']),
    (['--config=configs/quickstrat.py'], 2, ['quickstrat.py', 'quickstart.py']),
    (['--config.tasksets.train.source=missing.jsonl'], 2, ['missing.jsonl']),
    (['--config.tasksets.train.match=[0-9]+'], 2, ['train']),
    (['--config.stages.grpo.algorithm.name=grop'], 2, ['grop', 'grpo']),
    (
      ['--config.stages.grpo.algorithm.options={"clip_ratio_hihg":0.3}'],
      2,
      ['clip_ratio_hihg', 'clip_ratio_high'],
    ),
    (['--config.rewards.scorers.0.name=verifyer'], 2, ['verifyer', 'verifier']),
    (['--init_from=no/such/dir'], 2, ['no/such/dir']),
    (['--config.learner.mesh.fsdp=3'], 2, ['mesh', 'the number of devices, 1;']),
  ],
  ids=lambda v: v[0] if isinstance(v, list) else '',
)
def test_bad_input_is_one_clear_line(tmp_path, flags, code, words):
  result = job.train(tmp_path / 'run', *flags, expect=code)
  lines = [
    line for line in result.stderr.splitlines() if line.startswith(('error:', 'run stopped:'))
  ]
  assert len(lines) == 1 and 'Traceback' not in result.stderr, result.stderr
  for word in words:
    assert word in lines[0]


@pytest.mark.parametrize('platform', ['cuda', 'nowhere'])
def test_a_platform_without_devices_is_one_clear_line(tmp_path, platform):
  if platform == 'cuda' and pathlib.Path('/dev/nvidiactl').exists():
    pytest.skip('this machine has a GPU')
  # A fork of a process that has JAX could not change it.
  environment = job.environment(JAX_PLATFORMS=platform)
  command = job.command(tmp_path / 'run')
  ended = subprocess.run(
    command, cwd=job.ROOT, env=environment, capture_output=True, text=True, timeout=300
  )
  lines = [line for line in ended.stderr.splitlines() if line.startswith('error:')]
  assert (ended.returncode, ended.stdout, len(lines)) == (
    2,
    '',
    1,
  ) and 'Traceback' not in ended.stderr, ended
  assert (
    lines[0].startswith(f'error: JAX_PLATFORMS={platform}: ') and 'JAX_PLATFORMS=cpu' in lines[0]
  )
  assert not (tmp_path / 'run').exists()


def test_every_documented_metric_is_written_by_a_run(finished):
  """By the quickstart's or PPO's, but for those of `WRITTEN_ELSEWHERE`."""
  written = {key for run in (finished, job.ppo_run()) for row in job.rows(run) for key in row}
  documented = {key for key in METRICS if '<' not in key}
  assert documented - written == {key for keys in WRITTEN_ELSEWHERE.values() for key in keys}


def test_changed_configuration_is_refused_on_resume(finished, tmp_path):
  result = job.train(
    job.copy(finished, tmp_path / 'run'), '--config.stages.grpo.source.group_size=8', expect=2
  )
  assert 'stages.grpo.source.group_size' in result.stderr and '--branch_from=' in result.stderr
  assert len(result.stderr.strip().splitlines()) == 1


def test_branches_from_a_run_with_init_from(finished, tmp_path):
  workdir = tmp_path / 'branch'
  job.train(
    workdir,
    f'--init_from={finished}',
    '--config.stages.sft.steps=1',
    '--config.stages.grpo.steps=1',
  )

  def score(run):
    return [r['val-aux/eval/score/mean'] for r in job.rows(run) if 'val-aux/eval/score/mean' in r]

  assert score(workdir)[0] == score(finished)[-1] != score(finished)[0]


def test_a_run_in_use_is_refused_and_stops_by_signal_commit_say_how_to_resume_and_change_no_bit(
  finished, tmp_path
):
  run = tmp_path / 'run'
  for signum, count in ((signal.SIGINT, 5), (signal.SIGTERM, 15)):
    process = job.start(run)
    if signum == signal.SIGINT:
      job.wait_for_rows(run, 2, process)
      process.send_signal(signal.SIGSTOP)  # Or this run might end before the next one looks.
      result = job.train(run, expect=2)
      assert str(process.pid) in result.stderr and 'in use' in result.stderr
      process.send_signal(signal.SIGCONT)
    job.wait_for_rows(run, count, process)
    os.kill(process.pid, signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert 'same command' in err
    steps = [r['training/global_step'] for r in job.rows(run) if 'timing_s/step' in r]
    assert job.commits(run)[-1] == steps[-1] < 20
  job.train(run)
  job.assert_equal_runs(run, finished)


MANY_UPDATES = (
  '--config.stages.grpo.minibatches=2',
  '--config.stages.grpo.epochs=2',
  '--config.stages.grpo.algorithm.options='
  '{"kl_loss_coef":0.01,"loss_agg_mode":"seq-mean-token-mean"}',
)


@pytest.fixture(scope='module')
def many_updates():
  return job.finished('many_updates', *MANY_UPDATES)


def test_reference_minibatches_and_epochs_run(many_updates):
  steps = [r for r in job.rows(many_updates) if r['stage'] == 'grpo' and 'actor/pg_loss' in r]
  assert all(r['timing_s/ref'] > 0 and r['timing_s/old_log_prob'] > 0 for r in steps)
  assert steps[0]['actor/ppo_kl'] != 0.0, 'later optimizer steps are off the proximal policy'
  assert steps[-1]['actor/kl'] > 0.0


@pytest.mark.acceptance
def test_reference_minibatches_and_epochs_resume_bit_for_bit(many_updates, tmp_path):
  job.killed_and_resumed(tmp_path / 'killed', 18, flags=MANY_UPDATES)
  job.assert_equal_runs(tmp_path / 'killed', many_updates)


def checkpoint(directory, *, config=None, cut=None, source):
  """A copy of an exported checkpoint, spoilt."""
  import shutil

  shutil.copytree(source / 'hf', directory)
  if config is not None:
    file = directory / 'config.json'
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
  if cut is not None:
    file = directory / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:cut])
  return directory


@pytest.mark.parametrize(
  ('spoil', 'words'),
  [
    (
      {'config': {'model_type': 'mamba', 'architectures': ['MambaForCausalLM']}},
      ['mamba', 'llama', 'qwen2'],
    ),
    ({'cut': 1000}, ['model.safetensors']),
  ],
  ids=['unsupported model_type', 'truncated safetensors'],
)
def test_spoilt_checkpoints_are_one_clear_line(finished, tmp_path, spoil, words):
  directory = checkpoint(tmp_path / 'spoilt', source=finished, **spoil)
  result = job.train(tmp_path / 'run', f'--init_from={directory}', expect=2)
  lines = [line for line in result.stderr.splitlines() if line.startswith('error:')]
  assert len(lines) == 1 and 'Traceback' not in result.stderr, result.stderr
  for word in words:
    assert word in lines[0]


def test_a_full_disk_while_committing_is_one_clear_line_and_loses_nothing(tmp_path):
  """A real small file system, where this process may mount one."""
  import subprocess

  mount = tmp_path / 'small'
  mount.mkdir()
  mounted = subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', 'size=6m', 'tmpfs', str(mount)], capture_output=True
  )
  if mounted.returncode:
    pytest.skip('mounting needs root')
  try:
    result = job.train(mount / 'run', '--config.checkpoint.keep=50', expect=1)
    assert 'Traceback' not in result.stderr, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith('run stopped:')]
    assert 'No space left on device' in line or 'disk' in line
    committed = [int(p.parent.name) for p in (mount / 'run' / 'checkpoints').glob('*/COMMIT')]
    assert committed
    subprocess.run(['mount', '-o', 'remount,size=200m', str(mount)], check=True)
    job.train(mount / 'run', '--config.checkpoint.keep=50')
  finally:
    subprocess.run(['umount', '-l', str(mount)], check=True)
