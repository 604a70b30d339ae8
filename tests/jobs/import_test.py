"""Imported configurations train: a script for verl and a command line for TRL, on tiny data."""

import itertools
import json
import pathlib

import job
import pyarrow
import pyarrow.parquet
import pytest
from importing import FILES

pytestmark = pytest.mark.acceptance

WORDS = [''.join(letters) for letters in itertools.permutations('cats', 3)]
REWARD = (
  'def compute_score(data_source, solution_str, ground_truth, extra_info):\n'
  '  return float(solution_str == ground_truth)\n'
)
BREVITY = 'def brevity(completions, **kwargs):\n  return [-len(c) / 10 for c in completions]\n'


def trained(tmp_path: pathlib.Path, command: str, file: str, **define: object) -> list[dict]:
  """Imports a file, checks the configuration and trains it; returns the rows of metrics."""
  config = tmp_path / 'imported.py'
  variables = [f'--define={name}={value}' for name, value in define.items()]
  job.call(f'launch/{command}.py', FILES / file, f'--output={config}', *variables)
  train = ('launch/train.py', f'--config={config}', f'--workdir={tmp_path / "run"}')
  environ = job.environment(PYTHONPATH=f'{job.ROOT}:{tmp_path}')
  assert 'stages' in job.call(*train, '--check', environ=environ).stdout
  job.call(*train, environ=environ)
  return job.rows(tmp_path / 'run')


def test_a_script_for_verl_trains(tmp_path):
  for name, words in (('train', WORDS[:18]), ('test', WORDS[18:])):
    rows = [
      {
        'data_source': 'words',
        'prompt': [{'role': 'user', 'content': f'{word}>'}],
        'reward_model': {'style': 'rule', 'ground_truth': word[::-1]},
        'extra_info': {'index': index},
      }
      for index, word in enumerate(words)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f'{name}.parquet')
  (tmp_path / 'reward.py').write_text(REWARD)
  define = dict(DATA_DIR=tmp_path, MODEL=job.quick_run() / 'hf', REWARD=tmp_path / 'reward.py')
  rows = trained(tmp_path, 'import_verl', 'verl_grpo.sh', **define)
  assert [row['training/global_step'] for row in rows if 'actor/pg_loss' in row] == [1, 2, 3]
  assert all('actor/kl_loss' in row for row in rows if 'actor/pg_loss' in row)
  assert job.accuracies(tmp_path / 'run', 'test')


def test_a_command_line_for_trl_trains(tmp_path):
  data = tmp_path / 'words.jsonl'
  lines = [json.dumps({'prompt': f'{word}>', 'solution': word[::-1]}) for word in WORDS]
  data.write_text('\n'.join(lines))
  (tmp_path / 'my_rewards.py').write_text(BREVITY)
  rows = trained(tmp_path, 'import_trl', 'trl_grpo.sh', DATA=data, MODEL=job.quick_run() / 'hf')
  assert [row['training/global_step'] for row in rows if 'actor/pg_loss' in row] == [1, 2, 3, 4]
