"""A policy that is trained against a reward model of the trainer, which an earlier run has trained:
its scores, its memory phase, and what a kill changes (nothing).
"""

import collections
import json
import shutil

import job
import numpy as np
import pytest

from jaxrl_llm.app.composition.reward_role import build_reward_model
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.serve.reward import load
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.runtime import events
from jaxrl_llm.runtime.events import Edge

STEPS = 3
SCORERS = [
  {'name': 'verifier', 'options': {'partial_credit': True}},
  {'name': 'helpful', 'kind': 'reward_model', 'weight': 0.5},
]
DROPS = [{'name': 'reward_std', 'options': {'min_std': 0.06}}]
"""Drops groups by the reward model's scores, so that batches need further rounds of rollouts."""
PHASES = {'policy': 'disk', 'reward_model': 'destroy'}
ROLE = 'reward model'


def config(*flags, init_from=None):
  reward_model = {'init_from': str(init_from or job.reward_model_run()), 'dtype': 'float32'}
  return job.small(
    'quickstart.py',
    f'--config.rewards.scorers={json.dumps(SCORERS)}',
    f'--config.reward_model={json.dumps(reward_model)}',
    f'--config.stages.1.source.processors={json.dumps(DROPS)}',
    *flags,
    steps=STEPS,
  )


def in_phases(**phases):
  return (f'--config.phases={json.dumps(PHASES | phases)}',)


@pytest.fixture(scope='module')
def resident():
  return job.finished('scored_by_trainer', config=config())


@pytest.fixture(scope='module')
def phases():
  """Killed after its second batch of rollouts, and resumed from before the first."""
  return job.shared(
    'scored_in_phases',
    lambda run: job.killed_and_resumed(run, 12 + 2, config=config(), flags=in_phases()),
  )


def rollouts(run):
  files = sorted((run / 'rollouts' / 'grpo').iterdir())
  return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def ledgers(run):
  found = [event for event in events.read(run / events.FILE) if event is not None]
  return [event.fields for event in found if event.edge == Edge.LEDGER]


@pytest.mark.full
def test_scores_are_those_of_the_same_model_as_a_service(resident):
  model, tokenizer = load(
    str(job.reward_model_run()), dtype='float32', max_length=40, sequences=24, tensor=1
  )
  rows = rollouts(resident)
  assert len(rows) == STEPS * 6 * 4
  prompts = [[{'role': 'user', 'content': row['prompt']}] for row in rows]
  rendered = [
    [*before, *after]
    for before, after in (
      tokenizer.render_answer(prompt, row['completion'])
      for prompt, row in zip(prompts, rows, strict=True)
    )
  ]
  wanted = [score for i in range(0, len(rows), 24) for score in model(rendered[i : i + 24])]
  found = [row['scores']['helpful']['value'] for row in rows]
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  assert np.std(found) > 0.01
  rewards = [
    row['scores']['verifier']['value'] + 0.5 * row['scores']['helpful']['value'] for row in rows
  ]
  np.testing.assert_allclose([row['reward'] for row in rows], rewards)
  report = audit(resident / 'replay')
  assert report.ok, report.lines
  assert report.reasons['dropped(reward std)'] >= 4, 'no group was dropped by its scores'


@pytest.mark.full
def test_a_killed_run_in_memory_phases_equals_a_resident_one_bit_for_bit(phases, resident):
  job.assert_equal_runs(phases, resident)
  rows = [row for row in job.rows(phases) if 'actor/pg_loss' in row and row['stage'] == 'grpo']
  assert rows[-1]['perf/compilations'] == 0
  assert min(row['timing_s/reward_model'] for row in rows) > 0


@pytest.mark.full
def test_the_reward_model_is_on_the_devices_in_its_phase_alone_and_the_ledger_adds_up(phases):
  checked = json.loads(
    job.call('launch/train.py', *config(), *in_phases(), '--check', '--json').stdout
  )
  predicted = checked['phases']
  (size,) = [role['bytes_per_device'] for role in checked['memory'] if role['role'] == ROLE]
  assert predicted['reward'] == {ROLE: size}
  assert checked['reward_model']['max_length'] >= 6 + 7 + 1
  seen = collections.Counter()
  for ledger in ledgers(phases):
    held = {role: size for role, size in ledger['roles'].items() if size}
    assert ledger['total'] == sum(held.values()) + ledger['other'] and ledger['other'] >= 0
    if ledger['phase'] == 'reward':
      assert held == predicted['reward']
    else:
      assert ROLE not in held, ledger['phase']
    seen[ledger['phase']] += 1
  # Each round enters both phases, and there are more rounds than batches.
  assert seen['reward'] > STEPS and seen['rollout'] > STEPS
  moves = collections.Counter(
    event.edge
    for event in events.read(phases / events.FILE)
    if event is not None and event.kind == 'request' and event.fields.get('role') == ROLE
  )
  passes = collections.Counter(
    event.kind
    for event in events.read(phases / events.FILE)
    if event is not None and event.edge == Edge.REWARD_PASS
  )
  assert passes['request'] >= passes['reply'] >= seen['reward'] - 1
  assert min(moves[Edge.RELOAD], moves[Edge.OFFLOAD]) >= STEPS


@pytest.mark.full
def test_another_model_in_the_directory_is_refused(resident, tmp_path):
  """Stored rollouts were scored with the former one."""
  (*_, newest) = (resident / 'checkpoints' / str(step) for step in job.commits(resident))
  committed = json.loads((newest / 'host.json').read_text())
  shutil.copytree(job.reward_model_run() / 'hf', tmp_path / 'model')
  weights = tmp_path / 'model' / 'model.safetensors'

  def built():
    chosen = configured(init_from=tmp_path / 'model')
    return build_reward_model(chosen, build_mesh(MeshConfig()), build_model(tiny('llama', 30)))

  same = built()
  same.check(committed)
  weights.write_bytes(weights.read_bytes()[:-1] + b'?')
  with pytest.raises(UserError, match='has changed since the run began'):
    built().check(committed)
  with pytest.raises(UserError, match='has changed since the run began'):
    same.read(build_mesh(MeshConfig()))


@pytest.mark.acceptance
@pytest.mark.parametrize('residency', ['offload', 'disk'])
def test_two_processes_killed_and_resumed_equal_an_uninterrupted_run(tmp_path, residency):
  flags = in_phases(reward_model=residency)
  whole = job.finished('scored_by_two', config=config(), processes=2)
  run = tmp_path / 'run'
  job.killed_and_resumed(run, 12 + 2, config=config(), flags=flags, processes=2)
  job.assert_equal_runs(run, whole)
  for ledger in ledgers(run):
    assert (ledger['roles'].get(ROLE, 0) > 0) == (ledger['phase'] == 'reward')


def configured(*flags, init_from='somewhere'):
  spec, *rest = (*config(init_from=init_from), *flags)
  pairs = (flag.removeprefix('--config.').split('=', 1) for flag in rest)
  return apply_overrides(load_file(spec.removeprefix('--config='), Config), dict(pairs))


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--config.reward_model=null'], "'helpful': the trainer has no reward model"),
    (['--config.rewards.scorers=[{"name":"verifier"}]'], 'reward_model: no stage with Rollouts'),
    (
      ['--config.stages.1.source.rewards={"verifier":1.0}'],
      'reward_model: no stage with Rollouts has a scorer',
    ),
    (
      ['--config.stages.1.source.bound=1'],
      'reward_model: stages.grpo.source.bound is 1, but the trainer scores a batch when all of',
    ),
    ([*job.PARTIAL], 'reward_model: rollout.partial is set'),
    (
      ['--config.rewards.scorers=[{"name":"reward_model"}]'],
      'evaluation.held_out: only the reward model of the trainer scores taskset eval',
    ),
    (['--config.reward_model.max_rounds=-1'], 'reward_model.max_rounds'),
    (['--config.reward_model.sequences_per_pass=0'], 'reward_model.sequences_per_pass'),
  ],
)
def test_contradictions_are_refused_with_one_line(flags, words):
  assert configured().reward_model is not None
  with pytest.raises(UserError) as error:
    configured(*flags)
  assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.acceptance
def test_the_doctor_tries_batches_with_the_reward_model(tmp_path):
  said = job.train(tmp_path / 'run', '--doctor', config=config()).stdout
  assert '0 failure' in said and 'step_time grpo' in said, said
