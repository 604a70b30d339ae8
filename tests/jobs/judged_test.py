"""A run that trains a policy, then a reward model, and then the policy against this model."""

import asyncio
import json
import re

import jax
import job
import judged
import numpy as np
import pytest

from jaxrl_llm.app.offline.evaluation import chosen_steps
from jaxrl_llm.app.offline.reopen import config_of_run, reopen
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import unflatten
from jaxrl_llm.master.reward_model import RewardModel
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.tasks.tokenizer import Tokenizer
from jaxrl_llm.weights.hf import read_spec

pytestmark = pytest.mark.full

STEPS = judged.STEPS
CONFIG = (
  '--config=tests/support/judged.py',
  *job.SMALL,
  *(f'--config.stages.{name}.steps={steps}' for name, steps in STEPS.items()),
  '--config.stages.sft.source.count=400',
  '--config.stages.preferred.evaluate_every=2',
  *('--config.stages.grpo.source.groups_per_batch=6', '--config.stages.grpo.source.group_size=4'),
  *('--config.preferences.0.size=300', '--config.preferences.1.size=50'),
)
BEGUN = STEPS['sft'] + STEPS['preferred']
"""Number of batches before the last stage."""
FORGETFUL = '--config.checkpoint.keep=1'
PHASES = '--config.phases=' + json.dumps({'policy': 'disk', 'reward_model': 'destroy'})


@pytest.fixture(scope='module')
def whole():
  return job.finished('judged', '--config.checkpoint.keep=99', config=CONFIG)


def rows_of(run, stage):
  return [row for row in job.rows(run) if row['stage'] == stage and 'training/global_step' in row]


def test_rollouts_are_scored_with_the_weights_at_the_end_of_the_stage(whole):
  files = sorted((whole / 'rollouts' / 'grpo').iterdir())
  rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
  assert len(rows) == STEPS['grpo'] * 6 * 4
  tokenizer = Tokenizer.from_directory(whole / 'tokenizer')
  sequences = []
  for row in rows:
    messages = [{'role': 'user', 'content': row['prompt']}]
    before, after = tokenizer.render_answer(messages, row['completion'])
    sequences.append([*before, *after])
  # The policy's limit is 13 tokens, without the stop token of an answer that reached it.
  assert max(map(len, sequences)) == 14
  spec, mesh = with_head(read_spec(whole / 'hf'), 'scalar'), build_mesh(MeshConfig())
  committed = {
    '/'.join(re.findall(r"'(\w+)'", path)): np.frombuffer(data, dtype).reshape(shape)
    for path, (dtype, shape, data) in job.arrays(whole, BEGUN).items()
  }
  of_params = {
    name.removeprefix('train/params/'): array
    for name, array in committed.items()
    if name.startswith('train/params/')
  }
  params = jax.tree.map(jax.numpy.asarray, unflatten(of_params))
  model = RewardModel(build_model(spec), params, mesh, max_length=16, sequences=24)
  wanted = [score for i in range(0, len(rows), 24) for score in model(sequences[i : i + 24])]
  found = [row['scores']['helpful']['value'] for row in rows]
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  assert np.std(found) > 0.01


def test_the_policy_continues_where_its_own_last_stage_ended(whole):
  """Evaluations measure the policy alone, and its new attempt begins with the weights of `sft`."""
  assert [row[:2] for row in job.accuracies(whole)] == [
    ('sft', 0),
    ('sft', STEPS['sft']),
    ('grpo', BEGUN + STEPS['grpo']),
  ]
  held_out = 'val-core/eval_pairs/rewards/accuracies'
  assert [held_out in row for row in rows_of(whole, 'preferred')] == [False, True] * 2
  first = rows_of(whole, 'grpo')[0]
  # Trainer and sampler agree: the rollouts come from the weights that the first update changes.
  assert first['sampling/sampling_logp_difference/max'] < 1e-3
  report = audit(whole / 'replay')
  assert report.ok, report.lines


def test_commits_of_a_reward_model_are_none_of_the_policy(whole):
  config = config_of_run(whole)
  assert job.commits(whole) == [3, 6, 9, 12, 14, 15, 16, 18, 20]
  assert chosen_steps(whole, config, None) == [3, 6, 9, 12, 18, 20]

  async def read(step):
    async with reopen(config, whole) as past:
      await past.policy(step)

  with pytest.raises(UserError, match='step 16: stage preferred trains a reward model, so its'):
    asyncio.run(read(16))


def test_killed_in_both_stages_and_without_other_commits_it_ends_bit_for_bit(whole, tmp_path):
  """The last kill comes after a commit of the last stage, so the reward model's is an older one. In
  memory phases, the reward model is read from it again for each batch.
  """
  before = 1 + STEPS['sft'] + 1
  counts = before + 2, before + STEPS['preferred'] + 3
  run = job.killed_and_resumed(tmp_path / 'run', *counts, config=CONFIG, flags=(FORGETFUL, PHASES))
  job.assert_equal_runs(run, whole)
  assert BEGUN in job.commits(run), 'the last stage may still be extended'
  job.train(run, FORGETFUL, PHASES, '--config.stages.grpo.steps=6', config=CONFIG)
  assert job.commits(run)[-1] == BEGUN + 6


@pytest.mark.acceptance
def test_two_processes_killed_and_resumed_equal_an_uninterrupted_run(tmp_path):
  wanted = job.finished('judged_by_two', config=CONFIG, processes=2)
  count = 1 + STEPS['sft'] + 1 + STEPS['preferred'] + 2
  run = job.killed_and_resumed(
    tmp_path / 'run', count, config=CONFIG, flags=(FORGETFUL,), processes=2
  )
  job.assert_equal_runs(run, wanted)
