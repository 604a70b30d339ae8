import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.learner.optimizer import (
  OptimizerConfig,
  build_optimizer,
  clipped,
  learning_rate,
  optimizer_shardings,
)
from jaxrl_llm.learner.state import abstract_state, init_state, param_shardings, place_params
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.parallel.rules import replicated


def rates(updates: int, **fields) -> list[float]:
  schedule = learning_rate(OptimizerConfig(peak_lr=2.0, **fields), updates)
  return [float(schedule(n)) for n in range(updates)]


@pytest.mark.parametrize(
  ('fields', 'expected'),
  [
    ({}, [2.0] * 4),
    # Linear to a quarter: 2 -> 0.5 over 4 updates is 0.375 each; 0.5 would be the fifth's.
    ({'schedule': 'linear', 'end_lr_fraction': 0.25}, [2.0, 1.625, 1.25, 0.875]),
    # Cosine: 1 + cos(pi n / 4).
    ({'schedule': 'cosine'}, [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]),
    # Cosine to a quarter: 0.5 + 1.5 (1 + cos(pi n / 4)) / 2.
    (
      {'schedule': 'cosine', 'end_lr_fraction': 0.25},
      [2.0, 1.25 + 0.75 * 0.5**0.5, 1.25, 1.25 - 0.75 * 0.5**0.5],
    ),
    # Two updates of warm-up: half, all; then constant.
    ({'warmup_steps': 2}, [1.0, 2.0, 2.0, 2.0]),
    # One: nothing to warm up, and nothing divided by zero.
    ({'warmup_steps': 1}, [2.0, 2.0, 2.0, 2.0]),
    ({'warmup_steps': 1, 'schedule': 'linear'}, [2.0, 2.0, 4 / 3, 2 / 3]),
    # Warm-up of 2, then 2 -> 0 over the 2 that are left.
    ({'warmup_steps': 2, 'schedule': 'linear'}, [1.0, 2.0, 2.0, 1.0]),
    ({'warmup_steps': 4, 'schedule': 'cosine'}, [0.5, 1.0, 1.5, 2.0]),
    # A warm-up longer than the stage never reaches the peak.
    ({'warmup_steps': 8, 'schedule': 'cosine'}, [0.25, 0.5, 0.75, 1.0]),
  ],
)
def test_hand_worked_schedules(fields, expected):
  np.testing.assert_allclose(rates(4, **fields), expected, rtol=1e-6)


def test_the_rate_after_the_stage_is_the_end_rate():
  for schedule in ('linear', 'cosine'):
    config = OptimizerConfig(peak_lr=2.0, schedule=schedule, warmup_steps=3, end_lr_fraction=0.1)
    after = [float(learning_rate(config, 10)(n)) for n in (10, 11, 1000)]
    np.testing.assert_allclose(after, [0.2] * 3, rtol=1e-6)


def params_of(value: float):
  return {
    'layer': {'kernel': jnp.full((1, 1), value), 'bias': jnp.full((1,), value)},
    'norm': {'scale': jnp.full((1,), value)},
  }


def run(config: OptimizerConfig, params, grads, updates: int = 100):
  optimizer = build_optimizer(config, updates)
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  for g in grads:
    steps, state = update(clipped(g, config), state, params)
    params = optax.apply_updates(params, steps)
  return params, state


def test_two_updates_by_hand():
  # b1 0.9, b2 0.95. g = 1: m/(1-0.9) = v/(1-0.95) = 1, step -lr. g = -1: m = 0.09 - 0.1 = -0.01,
  # over 1 - 0.81 is -1/19; v = 0.0475 + 0.05 = 0.0975, over 1 - 0.9025 is 1: +lr/19.
  config = OptimizerConfig(peak_lr=0.1, max_grad_norm=1e9, eps=0.0)
  params, _ = run(config, params_of(5.0), [params_of(1.0), params_of(-1.0)])
  np.testing.assert_allclose(params['layer']['kernel'], [[5.0 - 0.1 + 0.1 / 19]], rtol=1e-6)


def test_the_rate_follows_the_number_of_updates():
  # Equal gradients make every Adam step of size lr; rates 0.05, 0.1, 0.1: 0.25 in all.
  config = OptimizerConfig(peak_lr=0.1, warmup_steps=2, max_grad_norm=1e9, eps=0.0)
  params, _ = run(config, params_of(5.0), [params_of(1.0)] * 3)
  np.testing.assert_allclose(params['norm']['scale'], [4.75], rtol=1e-6)


def test_gradients_are_clipped_together():
  # Gradients 3 and 4 (norm 5) come down to norm 1: 0.6 and 0.8. The first moment after one update
  # is a tenth of them.
  grads = {'a': {'kernel': jnp.array([[3.0]])}, 'b': {'kernel': jnp.array([[4.0]])}}
  _, state = run(OptimizerConfig(peak_lr=0.1, max_grad_norm=1.0), grads, [grads])
  moment = flatten(optax.tree.get(state, 'mu'))
  np.testing.assert_allclose(
    [moment['a/kernel'][0, 0], moment['b/kernel'][0, 0]], [0.06, 0.08], rtol=1e-5
  )
  # A norm below the limit is left alone.
  _, state = run(OptimizerConfig(peak_lr=0.1, max_grad_norm=5.1), grads, [grads])
  np.testing.assert_allclose(flatten(optax.tree.get(state, 'mu'))['b/kernel'], [[0.4]], rtol=1e-5)


@pytest.mark.parametrize('scan', [False, True], ids=['unrolled', 'scanned'])
def test_weight_decay_pulls_kernels_only(scan):
  """With zero gradients a step is -lr * decay * p on kernels: 1 - 0.1 * 0.5; norms and biases stay,
  stacked or not.
  """
  model = build_model(
    tiny('qwen2', 8, num_hidden_layers=1, hidden_size=8, intermediate_size=8),
    ModelOptions(scan_layers=scan),
  )
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  ones = jax.tree.map(lambda s: np.ones(s.shape, np.float32), shapes)
  zeros = jax.tree.map(np.zeros_like, ones)
  params, _ = run(OptimizerConfig(peak_lr=0.1, weight_decay=0.5), ones, [zeros])
  found = {
    name: sorted(set(np.unique(leaf).round(6).tolist())) for name, leaf in flatten(params).items()
  }
  assert any(name.endswith('bias') for name in found) and any(
    name.endswith('scale') for name in found
  )
  for name, values in found.items():
    np.testing.assert_allclose(
      values, [0.95] if name.endswith('kernel') else [1.0], rtol=1e-6, err_msg=name
    )


MESH = {'data': 2, 'fsdp': 2, 'tensor': 2}


def test_moments_lie_as_their_parameters_do():
  mesh = build_mesh(MeshConfig(**MESH), jax.devices()[:8])
  model = build_model(tiny('qwen3', 16, hidden_size=16, intermediate_size=16))
  optimizer = build_optimizer(OptimizerConfig(peak_lr=0.1, weight_decay=0.1, warmup_steps=2), 10)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  wanted = param_shardings(model, mesh)
  whole = replicated(mesh)
  shardings = optimizer_shardings(optimizer, shapes, wanted, whole)
  assert jax.tree.structure(shardings) == jax.tree.structure(jax.eval_shape(optimizer.init, shapes))
  for name in ('mu', 'nu'):
    assert flatten(optax.tree.get(shardings, name)) == flatten(wanted)
  counts = optax.tree.get_all_with_path(shardings, 'count')
  assert len(counts) == 2 and all(sharding == whole for _, sharding in counts)
  # It is a mesh on which that means something: a kernel is cut in four.
  kernel = flatten(wanted)['layers/0/mlp/up/kernel']
  assert kernel.shard_shape((16, 16)) == (8, 8)


def test_a_fresh_state_lies_as_the_abstract_one_says():
  mesh = build_mesh(MeshConfig(**MESH), jax.devices()[:8])
  model = build_model(tiny('qwen3', 16, hidden_size=16, intermediate_size=16))
  optimizer = build_optimizer(OptimizerConfig(peak_lr=0.1), 10)
  host = jax.tree.map(
    lambda s: np.zeros(s.shape, s.dtype), jax.eval_shape(model.init, jax.random.key(0))
  )
  state = init_state(place_params(model, mesh, host), optimizer, mesh)
  abstract = abstract_state(model, optimizer, mesh)
  assert jax.tree.structure(state) == jax.tree.structure(abstract)
  for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.sharding.is_equivalent_to(wanted.sharding, found.ndim)
