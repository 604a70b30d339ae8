"""A run on an engine of a user's own."""

import json
import shutil

import job
import pytest
from fixtures import own_engine
from paths import ROOT

from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import load_file

pytestmark = pytest.mark.full


def test_a_run_on_it_is_that_of_the_engine_that_it_wraps(tmp_path):
  """It lies beside the configuration."""
  for file in (ROOT / 'configs' / 'quickstart.py', own_engine.__file__):
    shutil.copy(file, tmp_path)
  config = (f'--config={tmp_path}/quickstart.py', *job.QUICK[1:], '--config.stages.grpo.steps=3')
  prompt = load_file(f'{tmp_path}/quickstart.py', Config).rollout.embedded.prefill_buckets
  embedded = {
    'slots': 24,
    'prefill_rows': 16,
    'prefill_buckets': list(prompt),
    'decode_steps': 8,
    'filters': False,
  }
  options = json.dumps({'metric': 'run/asked', 'embedded': embedded})
  own = ('--config.rollout.engine=own_engine:ENGINE', f'--config.rollout.engine_options={options}')
  job.train(tmp_path / 'own', *own, config=config)
  job.train(tmp_path / 'embedded', config=config)
  rows = job.rows(tmp_path / 'own')
  asked = [row.pop('run/asked', 0.0) for row in rows]
  assert sum(asked) >= 3 * 6, 'three batches of six groups'
  untimed = [
    {key: value for key, value in row.items() if not key.startswith(job.UNTIMED)} for row in rows
  ]
  assert untimed == job.untimed(tmp_path / 'embedded')
  own, embedded = (
    job.without_card(job.files(tmp_path / name / 'hf')) for name in ('own', 'embedded')
  )
  assert own == embedded
