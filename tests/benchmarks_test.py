"""The benchmarks run: on shapes that measure nothing, and what they take for granted holds."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from paths import ROOT

PEERS = ROOT / '.venv-peers'
# As Python has it for a script: what lies beside it can be imported.
sys.path.append(str(ROOT / 'benchmarks'))

from updates import Row, lognormal_lengths, pack_rows, random_rows  # noqa: E402


def run(script, *arguments, **more):
  environment = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, str(ROOT / 'benchmarks' / script), *arguments]
  return subprocess.run(
    command, capture_output=True, text=True, env=environment, timeout=900, **more
  )


def test_what_an_accelerator_needs_imports_neither_grain_nor_an_engine():
  """A machine with one may have JAX, Flax and optax alone."""
  absent = (
    'grain',
    'array_record',
    'vllm',
    'torch',
    'transformers',
    'datasets',
    'aiohttp',
    'pebble',
    'safetensors',
  )
  code = (
    f'import sys; sys.modules.update(dict.fromkeys({absent})); import updates; import '
    'jaxrl_llm.models.flops'
  )
  environment = os.environ | {'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "benchmarks"}'}
  subprocess.run([sys.executable, '-c', code], check=True, env=environment)


def test_lengths_are_those_the_benchmarks_speak_of():
  lengths = lognormal_lengths(100_000)
  assert 130 < np.mean(lengths) < 145
  assert 330 < np.percentile(lengths, 95) < 380
  assert max(lengths) == 512


def test_rows_are_packed_as_they_are():
  rows = random_rows([5, 3, 8, 2], prompt_len=2, vocab=50)
  batch = pack_rows(rows, chunks=1, chunk_len=8)
  chunks, packing = batch.chunks, batch.packing
  assert int(batch.used) == packing.micro_batches == 3
  for i, row in enumerate(rows):
    at = (
      packing.micro_batch[i],
      packing.chunk[i],
      slice(packing.offset[i], packing.offset[i] + len(row.tokens)),
    )
    assert np.array_equal(chunks.tokens[at], row.tokens)
    assert np.array_equal(chunks.positions[at], np.arange(len(row.tokens)))
    assert (np.asarray(chunks.segment_ids[at]) == packing.segment[i]).all()
    trained = np.arange(len(row.tokens)) >= row.prompt_len
    assert np.array_equal(chunks.loss_mask[at], trained)
    np.testing.assert_allclose(chunks.advantages[at], trained * np.float32(row.advantage))
  assert int(chunks.loss_mask.sum()) == sum(len(row.tokens) - row.prompt_len for row in rows)


def test_padded_rows_have_a_chunk_each():
  rows = random_rows([5, 3, 8], prompt_len=2, vocab=50)
  batch = pack_rows(rows, chunks=2, chunk_len=8, apart=True)
  assert int(batch.used) == 2
  lengths = (np.asarray(batch.chunks.segment_ids) > 0).sum(-1).reshape(-1)
  assert sorted(lengths.tolist()) == [0, 3, 5, 8]


def test_pairs_share_their_number():
  lengths = (4, 3, 8, 8, 2, 2)
  rows = [Row(np.arange(n, dtype=np.int32), 1, label=(1, -1)[i % 2]) for i, n in enumerate(lengths)]
  batch = pack_rows(rows, chunks=2, chunk_len=8)
  numbers, labels = np.asarray(batch.chunks.pair), np.asarray(batch.chunks.label)
  for micro, some in enumerate(numbers):
    for number in range(1, some.max() + 1):
      assert sorted(labels[micro][some == number].tolist()) == [-1, 1]
  assert (numbers > 0).sum() == 6


@pytest.mark.full
def test_loading_runs():
  done = run('loading.py', '--rows=8', '--tokens=64', '--disk_ms=20', '--step_ms=1')
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert 'all arrays are equal' in lines and lines[-1] == 'all rows are equal', done.stdout


@pytest.mark.full
def test_packing_runs():
  done = run('packing.py', '--tiny', '--rows=32', '--trained=16', '--rounds=1')
  assert done.returncode == 0, done.stderr
  last = done.stdout.splitlines()[-1]
  assert re.fullmatch(
    r'16 rows, \d+ tokens: packed [\d.]+ full, .+; padded .+: ratio [\d.]+', last
  ), done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
  ('parts', 'told'),
  [
    ('product,attention', ('product: ', 'attention 0.5B masked: values')),
    pytest.param('steps,offload', ('0.5B here: ', 'offload: '), marks=pytest.mark.acceptance),
  ],
)
def test_accelerator_runs_without_one(parts, told):
  small = (
    '--tiny',
    '--minutes=60',
    '--steps=1',
    '--chunks=2',
    '--micro_batches=2',
    '--models=0.5B',
  )
  done = run('accelerator.py', *small, f'--parts={parts}')
  assert done.returncode == 0, done.stdout + done.stderr
  for line in told:
    assert line in done.stdout, done.stdout


@pytest.mark.full
def test_buffer_runs_and_leaves_nothing(tmp_path):
  stores = tmp_path / 'stores'
  done = run(
    'buffer.py',
    '--rows=640',
    '--index_rows=1600',
    '--batch=64',
    '--drawable=20',
    f'--directory={stores}',
  )
  assert done.returncode == 0, done.stdout + done.stderr
  for part in (
    '640 samples of 1024 tokens',
    '100 %: samples per second: written',
    'index of 1,600',
    '2 groups can be',
  ):
    assert part in done.stdout, done.stdout
  assert done.stdout.count('candidates and draw: ') == 2 and not stores.exists()


@pytest.mark.full
def test_accelerator_begins_nothing_when_the_time_is_over():
  done = run('accelerator.py', '--tiny', '--minutes=0', '--models=0.5B')
  assert done.returncode == 0, done.stderr
  assert done.stdout.count('skipped, no time is left') == 5


@pytest.mark.acceptance
@pytest.mark.skipif(
  not PEERS.exists(), reason='.venv-peers is missing: launch/install_peers.sh makes it'
)
@pytest.mark.parametrize(
  ('flags', 'works'),
  [
    (('--against=trl', '--works=grpo,groups'), ('grpo: trl', 'grpo, groups: trl')),
    (
      (),
      (
        'logprobs: trl',
        'generate: trl',
        'grpo: trl',
        'grpo, lognormal lengths: trl',
        'dpo: trl',
        'grpo: tunix',
      ),
    ),
  ],
  ids=['grpo of trl', 'every work'],
)
def test_all_sides_do_the_same_work(flags, works):
  """The script itself refuses to measure works whose results differ."""
  done = run('steps.py', '--tiny', '--rounds=1', '--chunks=4', *flags, cwd=ROOT)
  assert done.returncode == 0, done.stdout + done.stderr
  cost = r'[\d.]+ s, [\d.]+ CPU-s; '
  for work in works:
    line = rf'^{work} {cost}here {cost}ratio [\d.]+, CPU [\d.]+ \(both found '
    assert re.search(line, done.stdout, re.MULTILINE), done.stdout


@pytest.mark.full
def test_speculation_runs():
  result = run('speculation.py', '--prompts=2', '--length=8', '--rounds=1')
  assert result.returncode == 0, result.stderr
  assert result.stdout.startswith('random: ') and '16 of 16 tokens equal' in result.stdout


@pytest.mark.full
def test_the_embedded_engine_waits_for_the_same_answers_as_the_fleet():
  """Without a budget, both wait for the longest answer of each batch."""
  flags = ('--slots=16', '--groups=2', '--unit=1000', '--batches=2', '--warm_up=0')
  tables = []
  for engine in ('fleet', 'embedded'):
    result = run('partial_rollouts.py', f'--engine={engine}', '--bounds=0', '--budgets=0', *flags)
    assert result.returncode == 0, result.stderr
    tables.append([cell.strip() for cell in result.stdout.splitlines()[-1].split('|')[1:-1]])
  fleet, embedded = tables
  assert fleet == embedded[:8] and float(fleet[6]) > 2500 and float(embedded[8]) > 0


def test_docstrings_and_comments_are_drawn_with_their_code(tmp_path):
  package = tmp_path / 'jaxrl_llm'
  package.mkdir()
  (package / 'module.py').write_text(
    '"""Describes the module."""\n\n'
    'LIMIT = 3\n"""Describes the constant."""\n\n'
    'def double(x: int) -> int:\n  """Describes the function."""\n'
    '  # A comment of\n  # two lines.\n  y = 2 * x\n'
    '  return y  # noqa: RET504\n'
  )
  result = run('docstrings.py', '--seed=1', f'--tree={tmp_path}')
  assert result.returncode == 0, result.stderr
  first, *entries = result.stdout.strip().split('\n\n')
  assert first == '4 of 4 texts, seed 1'
  assert sorted(entry.split('. ', 1)[1] for entry in entries) == [
    'jaxrl_llm/module.py:1\n  module\n    Describes the module.',
    'jaxrl_llm/module.py:4\n  LIMIT = 3\n    Describes the constant.',
    'jaxrl_llm/module.py:7\n  def double(x: int) -> int\n    Describes the function.',
    'jaxrl_llm/module.py:8\n  y = 2 * x\n    A comment of\n    two lines.',
  ]
