"""The real training programs, compiled for devices that are not here, by the command that a user types."""

import json
import re
import subprocess
import sys

import job
import pytest

from jaxrl_llm.app.cli import AOT_ENVIRONMENT

pytestmark = [
  pytest.mark.full,
  pytest.mark.skipif(not AOT_ENVIRONMENT.exists(), reason='wants the compilers: bash launch/install_aot.sh'),
]
MODEL = dict(
  hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
  head_dim=128, vocab_size=32_768, tie_word_embeddings=False,
)  # fmt: skip

CUT = ('--config.learner.mesh.fsdp=4', '--config.learner.mesh.tensor=2')


def dry_run(topology, *flags, config='sizes.py:0.5b', model=MODEL, expect=0):
  """Standard output, or the error where one is expected."""
  model_flag = f'--config.policy.model={json.dumps(model)}'
  command = [sys.executable, 'launch/train.py', f'--config=configs/{config}', '--dry_run', f'--topology={topology}']
  done = subprocess.run(
    [*command, model_flag, *flags], cwd=job.ROOT, env=job.environment(), capture_output=True, text=True, timeout=900
  )
  assert done.returncode == expect, done.stderr[-3000:]
  return done.stderr if expect else done.stdout


def line_of(program, text):
  (found,) = [line for line in text.splitlines() if line.startswith(f'{program} of grpo: ')]
  return found


def megabytes(what, line):
  return float(re.search(rf'{what} ([\d.,]+)', line)[1].replace(',', ''))


@pytest.fixture(scope='module')
def sharded():
  # Logits of a quarter of the positions at a time.
  return dry_run('v5e:2x4', *CUT, '--config.learner.logits_budget_bytes=33554432')


def test_the_training_step_compiles_for_a_tpu_slice_with_its_fused_attention(sharded):
  assert '8 × TPU v5 lite: data=1 fsdp=4 sequence=1 tensor=2' in sharded
  assert 'attention in training: splash (the kernel of tpu)' in sharded
  update = line_of('update', sharded)
  assert 'does not fit' not in update
  assert re.search(r'all-gather \d+ \(', update) and re.search(r'reduce-scatter \d+ \(', update)
  assert re.search(r'[\d.]+ TFLOP a full micro-batch, [\d.]+ s at 40% of peak', update)
  assert 'does not fit' not in line_of('logprobs', sharded)


def test_a_cut_vocabulary_is_never_gathered(sharded):
  """The largest gathers are of kernels, of the vocabulary's half: neither logits nor a whole kernel."""
  assert 'logits for 512 of 2048 tokens at a time' in sharded
  for program in ('update', 'logprobs'):
    largest = re.search(r'all-gather \d+ \([\d.,]+ MB, largest (\w+\[[\d,]*\])\)', line_of(program, sharded))[1]
    assert str(MODEL['vocab_size'] // 2) in largest and str(MODEL['vocab_size']) not in largest


def test_each_device_holds_its_part_of_what_a_role_keeps(sharded):
  whole, part = (float(n) for n in re.search(r'policy +│ +([\d.]+) │ +([\d.]+) │', sharded).groups())
  assert part == pytest.approx(whole / 8, rel=0.02)


def test_moments_in_host_memory_leave_the_devices():
  model = MODEL | dict(hidden_size=512, intermediate_size=4096, num_hidden_layers=2, vocab_size=4096)
  compiled = lambda *flags: line_of(
    'update', dry_run('v5e:2x4', *CUT, '--config.policy.scan_layers=false', *flags, model=model)
  )
  own, offloaded = compiled(), compiled('--config.stages.0.optimizer.offload=true')
  moments = megabytes('in host memory', offloaded)
  assert 'in host memory' not in own and moments > 10
  assert megabytes('arguments', own) - megabytes('arguments', offloaded) == pytest.approx(moments, rel=0.01)
  # Not only between updates: those of one parameter at a time are there while an update is applied.
  assert megabytes('update of grpo:', own) - megabytes('update of grpo:', offloaded) >= 0.5 * moments


def test_the_training_step_compiles_for_a_gpu():
  text = dry_run('h100:4', '--config.learner.mesh.fsdp=2', '--config.learner.mesh.tensor=2')
  assert 'attention in training: blockwise' in text
  assert '4 × NVIDIA H100 80GB HBM3: data=1 fsdp=2 sequence=1 tensor=2' in text
  assert 'does not fit' not in line_of('update', text)


def test_what_does_not_fit_is_refused_and_says_by_how_much():
  huge = MODEL | dict(hidden_size=8192, intermediate_size=131_072, num_hidden_layers=1)
  error = dry_run('v5e:1x1', model=huge, expect=2)
  assert re.search(r'^error: topology v5e:1x1: update of grpo[^\n]*more memory than a device has', error, re.M)


def test_a_shape_that_the_compiler_does_not_know_is_one_line():
  error = dry_run('v5e:3x5', expect=2)
  assert re.search(r"^error: topology 'v5e:3x5': the compiler does not know it: .+", error, re.M)


def test_training_for_devices_that_are_not_here_is_refused():
  command = [sys.executable, 'launch/train.py', '--config=configs/quickstart.py', '--topology=v5e:2x4']
  done = subprocess.run(command, cwd=job.ROOT, env=job.environment(), capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.splitlines()[-1].startswith('error: --topology: compiles and trains nothing')
