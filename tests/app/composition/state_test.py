"""The weights with which a stage begins, and the commits that are kept for them."""

import dataclasses
import types

import jax
import judged
import numpy as np
import pytest
from paths import ROOT

from jaxrl_llm.app.composition.reward_role import build_reward_model
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.stages import build_stages
from jaxrl_llm.app.composition.state import (
  begin_stage,
  commits_needed,
  committed_bests,
  critic_model,
  first_suite,
  model_of,
  reward_params,
  starting_state,
  unknown_bests,
)
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.state import Learned, TrainState, init_params, init_state
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints

BESTS = {'sft': (0.5, 4)}
"""The best evaluation of the first stage, which ends at step 6."""


@pytest.fixture(scope='module')
def config():
  loaded = load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)
  steps = {'stages.sft.steps': '6', 'stages.sft.evaluate_every': '2', 'stages.grpo.steps': '2'}
  config = apply_overrides(loaded, steps)
  sft, grpo = config.stages
  last = dataclasses.replace(grpo, name='last', init_from=('best:sft', 'grpo'))
  return dataclasses.replace(config, stages=(sft, grpo, last))


@pytest.fixture(scope='module')
def mesh():
  return build_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope='module')
def stages(config, mesh):
  return build_stages(config, mesh, 30, {})


@pytest.mark.parametrize(
  ('step', 'bests', 'needed'),
  [
    (1, {}, set()),
    (5, BESTS, {4}),
    (7, BESTS, {4}),
    (8, {**BESTS, 'grpo': (0.9, 7)}, {4, 8}),
    (9, BESTS, set()),
  ],
)
def test_commits_from_which_a_later_stage_may_begin_are_kept(config, stages, step, bests, needed):
  assert commits_needed(config, stages, step, bests) == needed


@pytest.mark.parametrize(
  ('step', 'evaluated', 'same', 'known'),
  [
    (5, True, True, True),
    (5, True, False, False),
    (6, False, False, False),
    (6, True, False, True),
    (7, False, False, True),
  ],
)
def test_accuracies_of_another_suite_count_only_for_a_stage_that_has_ended(
  config, stages, step, evaluated, same, known
):
  suite = first_suite(config) if same else {'suite': 'another'}
  committed = {'step': step, 'evaluated': evaluated, 'best_of': suite, 'bests': {'sft': [0.5, 4]}}
  assert committed_bests(committed, config, stages) == (BESTS if known else {})


@pytest.mark.parametrize(
  ('step', 'evaluated', 'missing'),
  [(5, True, []), (6, False, []), (6, True, ['sft']), (8, True, ['sft']), (9, True, [])],
)
def test_a_commit_without_the_best_evaluation_of_an_ended_stage_is_told_apart(
  config, stages, step, evaluated, missing
):
  """A commit of an earlier version of this program records none."""
  committed = {'step': step, 'evaluated': evaluated}
  assert unknown_bests(committed, config, stages) == missing


def test_a_stage_begins_with_the_mean_of_the_best_evaluation_and_the_end_of_another(
  config, stages, mesh, tmp_path
):
  shape = dict(
    num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8, num_attention_heads=2
  )
  model = build_model(tiny('qwen3', 12, num_key_value_heads=1, **shape))
  checkpoints = Checkpoints(tmp_path / 'checkpoints', CheckpointConfig(keep=9), leads=True)
  weights = {step: init_params(model, mesh, seed=step) for step in (2, 4, 6, 8)}
  for step in (2, 4, 6):
    # A copy: without an accelerator, the commit holds the arrays themselves.
    train = init_state(weights[step], stages[0].policy.optimizer, mesh)
    host = {'stage': 'sft', 'evaluated': True, 'reference_step': 0, 'algorithm_state': None}
    checkpoints.save(step, {'train': train}, host)
  setup = Setup(
    config=config,
    workdir=tmp_path,
    stages=stages,
    model=model,
    checkpoints=checkpoints,
    process=types.SimpleNamespace(mesh=mesh),
    explorer_command=None,
  )
  policy = TrainState(params=weights[8], opt_state=None, updates=None, skipped=None)
  state = LoopState(Learned(policy), 8, bests=BESTS)
  begun = starting_state(stages[-1], setup, state).learned.policy.params
  jax.tree.map(
    lambda x, a, b: np.testing.assert_allclose(x, (a + b) / 2, rtol=1e-6),
    *(begun, weights[4], weights[8]),
  )
  with pytest.raises(UserError, match="'best:sft', but no evaluation of sft had a scored answer"):
    starting_state(stages[-1], setup, dataclasses.replace(state, bests={}))


STEPS = {'sft': 6, 'preferred': 4, 'grpo': 5, 'last': 3}
"""Steps of the stages of a run whose second one trains the reward model of the third."""


@pytest.fixture(scope='module')
def scored():
  config = judged.get_config()
  last = dataclasses.replace(config.stages[-1], name='last')
  source = dataclasses.replace(last.source, rewards={'verifier': 1.0})
  stages = (*config.stages, dataclasses.replace(last, source=source))
  config = dataclasses.replace(config, stages=stages)
  return apply_overrides(config, {f'stages.{n}.steps': str(steps) for n, steps in STEPS.items()})


@pytest.mark.parametrize(
  ('step', 'needed'),
  [
    (5, set()),
    (6, {6}),  # `grpo` continues with the policy, although another stage comes between.
    (9, {6}),
    (10, {6, 10}),
    (11, {10}),
    (14, {10}),  # A run that is killed in `grpo` needs the reward model again.
    (15, {10}),  # `grpo` may still be extended.
    (16, set()),  # `last` is scored without it.
    (18, set()),
  ],
)
def test_the_commit_of_a_reward_model_is_kept_as_long_as_it_scores(scored, mesh, step, needed):
  assert commits_needed(scored, build_stages(scored, mesh, 30, {}), step, {}) == needed


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_policy_and_reward_model_of_a_run_each_keep_their_weights(
  scored, mesh, tmp_path, dtype, tied
):
  """The reward model begins with the body of the policy, and the policy goes on without it."""
  scored = apply_overrides(scored, {'reward_model.dtype': dtype})
  shape = dict(
    num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8, num_attention_heads=2
  )
  spec = tiny('qwen3', 12, num_key_value_heads=1, tie_word_embeddings=tied, **shape)
  model = build_model(spec, mesh=mesh)
  stages = build_stages(scored, mesh, 12, {})
  sft, preferred, grpo, _ = stages
  setup = Setup(
    config=scored,
    workdir=tmp_path,
    stages=stages,
    model=model,
    checkpoints=Checkpoints(tmp_path / 'checkpoints', CheckpointConfig(keep=9), leads=True),
    process=types.SimpleNamespace(mesh=mesh),
    reward_model=build_reward_model(scored, mesh, model),
    explorer_command=None,
  )

  def save(step, stage, params):
    train = init_state(params, stage.policy.optimizer, mesh)
    host = {'stage': stage.name, 'evaluated': True, 'reference_step': 0, 'algorithm_state': None}
    setup.checkpoints.save(step, {'train': train}, host)

  policy = init_params(model, mesh, seed=1)
  save(6, sft, policy)
  state = LoopState(Learned(TrainState(policy, None, None, None)), 6)
  critic = critic_model(model)
  begun = begin_stage(preferred, scored, state, mesh, model_of(preferred, model), critic)
  found = begun.learned.policy.params
  assert found['head']['kernel'].shape == (1, 16) and np.std(found['head']['kernel']) > 0
  same = {name: found[name] for name in found if name != 'head'}
  jax.tree.map(np.testing.assert_array_equal, same, {name: policy[name] for name in same})

  trained = jax.tree.map(lambda leaf: leaf + 1.0, found)
  save(10, preferred, trained)
  state = LoopState(Learned(TrainState(trained, None, None, None)), 10)
  after = starting_state(grpo, setup, state).learned.policy.params
  jax.tree.map(np.testing.assert_array_equal, after, policy)
  scorer = reward_params(setup)
  jax.tree.map(
    lambda x, wanted: np.testing.assert_array_equal(x, np.asarray(wanted.astype(dtype))),
    *(scorer, trained),
  )
  assert {leaf.dtype.name for leaf in jax.tree.leaves(scorer)} == {dtype}


def test_a_missing_commit_of_the_reward_model_is_one_line(scored, mesh, tmp_path):
  model = build_model(tiny('qwen3', 12), mesh=mesh)
  setup = Setup(
    config=scored,
    workdir=tmp_path,
    stages=build_stages(scored, mesh, 12, {}),
    model=model,
    checkpoints=Checkpoints(tmp_path / 'checkpoints', CheckpointConfig(), leads=True),
    process=types.SimpleNamespace(mesh=mesh),
    reward_model=build_reward_model(scored, mesh, model),
    explorer_command=None,
  )
  with pytest.raises(UserError, match=r'^[^\n]*$') as caught:
    reward_params(setup)
  message = 'reward_model.init_from: the commit at step 10 (stage:preferred) no longer exists, only'
  assert message in str(caught.value)
