"""Training adapters: their gradient is that of the merged weights by the chain rule, and nothing
else is touched.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning import (
  CHUNK,
  LIMITS,
  SETTING,
  Case,
  host_params,
  rollouts,
  write_samples,
)

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.learner.optimizer import OptimizerConfig, build_optimizer
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import GrpoConfig
from jaxrl_llm.learner.state import (
  abstract_base,
  abstract_state,
  init_state,
  init_trained,
  place_params,
)
from jaxrl_llm.learner.supervised import SftConfig, sft
from jaxrl_llm.learner.update import build_update, gradients
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import stack_layers, unstack_layers
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.rollout.gatherer import Gatherer

LORA = LoraConfig(rank=3, alpha=6)
GRPO = policy_gradient(GrpoConfig(rollout_is='none', entropy_coeff=0.01), SETTING)
SFT = sft(SftConfig(), SETTING)
ON_POLICY = ('proximal_logprobs',)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('rows')
  write_samples(path)
  return path


@functools.cache
def host_adapters():
  """Away from the 0 that they begin with, where A would have no gradient."""
  adapters = lora.fresh(host_params('decoder'), LORA, jax.random.key(3))
  rng = np.random.default_rng(4)
  return jax.tree.map(
    lambda x: np.asarray(x) + 0.2 * rng.normal(size=x.shape).astype(np.float32), adapters
  )


class Adapted(Case):
  """A case that trains adapters, or all of the weights that these are merged into."""

  def __init__(self, folder, *, merge=False, **cut):
    super().__init__(folder, rows=rollouts(), lora=None if merge else LORA, **cut)
    tree = lora.join(host_adapters(), host_params('decoder'))
    tree = jax.tree.map(lambda x: np.asarray(x, self.dtype), tree)
    tree = jax.device_get(lora.merge(tree, LORA)) if merge else tree
    tree = place_params(
      self.model, self.mesh, stack_layers(tree) if self.model.options.scan_layers else tree
    )
    self.trained, self.base = lora.split(tree, self.model.spec, self.model.options)

  def gradients(self, algorithm):
    packed, constants = self.packed(algorithm)
    function = functools.partial(
      gradients, self.model, algorithm.loss, token_chunk=CHUNK, on_policy=ON_POLICY
    )
    used = jnp.asarray(packed.used)
    jitted = jax.jit(
      lambda params, base: function(params, packed.chunks, used, constants, base=base)
    )
    return lambda trained: jax.device_get(jitted(trained, self.base))


@functools.cache
def compute(folder, **cut):
  with jax.enable_x64(cut.get('dtype', 'float64') == 'float64'):
    case = Adapted(folder, **cut)
    found = case.gradients(GRPO)(case.trained)
  return found._replace(
    grads=flatten(unstack_layers(found.grads) if case.model.options.scan_layers else found.grads)
  )


def assert_same(found, wanted, limit, of_loss):
  assert abs(found.loss - wanted.loss) <= of_loss * max(1.0, abs(wanted.loss))
  assert found.grads.keys() == wanted.grads.keys()
  for name, tensor in wanted.grads.items():
    scale = np.linalg.norm(tensor)
    assert scale > 1e-7, name
    assert np.linalg.norm(found.grads[name] - tensor) <= limit * scale, name


def test_the_gradient_is_that_of_the_merged_weights_by_the_chain_rule(folder):
  """W + s·B·A: the gradient of A is s·Bᵀ·dW, that of B is s·dW·Aᵀ; and only they have one."""
  found, merged = compute(folder), compute(folder, merge=True)
  adapters, wanted = flatten(jax.tree.map(np.float64, host_adapters())), {}
  for name in adapters:
    module = name.rpartition('/')[0]
    dw, a, b = (
      merged.grads[f'{module}/kernel'],
      adapters[f'{module}/lora_a'],
      adapters[f'{module}/lora_b'],
    )
    wanted[name] = LORA.scale * (b.T @ dw if name.endswith('lora_a') else dw @ a.T)
  assert_same(found, merged._replace(grads=wanted), *LIMITS['float64'])


@functools.cache
def supervised(folder):
  """A case, and its gradients as a function of the adapters; compiled once for both of them."""
  case = Adapted(folder)
  return case, case.gradients(SFT)


@pytest.mark.parametrize('kind', ['lora_a', 'lora_b'])
def test_the_gradient_is_that_of_finite_differences(folder, kind):
  with jax.enable_x64(True):
    case, function = supervised(folder)
    rng, trained = np.random.default_rng(5), flatten(case.trained)
    direction = {
      name: rng.normal(size=x.shape) * name.endswith(kind) for name, x in trained.items()
    }

    def loss(step):
      return function(
        unflatten({name: x + step * direction[name] for name, x in trained.items()})
      ).loss

    length = np.sqrt(sum((x**2).sum() for x in direction.values()))
    direction = {name: x / length for name, x in direction.items()}
    grads = flatten(function(case.trained).grads)
    slope = sum((grads[name] * direction[name]).sum() for name in grads)
    assert abs(slope) > 1e-3
    assert slope == pytest.approx((loss(1e-5) - loss(-1e-5)) / 2e-5, rel=1e-7)


@pytest.mark.full
@pytest.mark.parametrize(
  'cut',
  [
    {'scan': True},
    {'scan': True, 'remat': 'full', 'chunks': 1},
    {'axes': (('fsdp', 8),), 'chunks': 2},
    {'axes': (('fsdp', 2), ('sequence', 2), ('tensor', 2)), 'chunks': 2},
  ],
  ids=str,
)
def test_scan_remat_packing_and_mesh_change_nothing(folder, cut):
  assert_same(compute(folder, **cut), compute(folder), *LIMITS['float64'])


CONFIG = OptimizerConfig(peak_lr=1e-2, weight_decay=0.1)


def build(case, config=CONFIG):
  """The update, and its state and batch."""
  optimizer = build_optimizer(config, 10)
  state = init_state(case.trained, optimizer, case.mesh)
  options = dict(updates=10, token_chunk=CHUNK)
  return (
    build_update(case.model, SFT.loss, optimizer, config, case.mesh, state, **options),
    state,
    case.packed(SFT),
  )


@pytest.mark.full
@pytest.mark.parametrize('axes', [(), (('fsdp', 2), ('tensor', 2))], ids=str)
def test_an_update_moves_the_adapters_alone(folder, axes):
  case = Adapted(folder, dtype='float32', axes=axes, chunks=2)
  update, state, (packed, constants) = build(case)
  before, base = jax.device_get(flatten(state.params)), jax.device_get(flatten(case.base))
  shardings = jax.tree.map(lambda x: x.sharding, state)
  state, report = update(state, packed.chunks, packed.used, constants, case.base)
  assert not report.skipped and not report.empty
  assert jax.tree.map(lambda x: x.sharding, state) == shardings
  after = flatten(state.params)
  assert after.keys() == before.keys() and all(map(lora.is_adapter, after))
  for name in after:
    assert np.abs(np.asarray(after[name]) - before[name]).max() > 1e-4, name
  # Neither donated nor overwritten, and of no size to the optimizer: its moments are two copies of
  # the adapters.
  for name, leaf in flatten(case.base).items():
    np.testing.assert_array_equal(leaf, base[name])

  def sizes(tree):
    return sorted(x.shape for x in jax.tree.leaves(tree) if x.ndim)

  assert sizes(state.opt_state) == sorted(2 * [x.shape for x in after.values()])


def test_what_is_restored_and_compiled_for_is_what_is_trained(folder):
  case = Adapted(folder, dtype='float32', axes=(('fsdp', 2), ('tensor', 2)), chunks=2)
  _, state, _ = build(case)

  def describe(tree):
    return {
      jax.tree_util.keystr(path): (x.shape, x.dtype, x.sharding)
      for path, x in jax.tree.leaves_with_path(tree)
    }

  optimizer = build_optimizer(CONFIG, 10)
  assert describe(abstract_state(case.model, optimizer, case.mesh)) == describe(state)
  assert describe(abstract_base(case.model, case.mesh)) == describe(case.base)
  fresh = init_trained(case.model, case.mesh, seed=0)
  assert describe(fresh) == describe(case.trained)


@pytest.mark.full
def test_no_gradient_of_a_targets_kernel_is_computed(folder):
  """In the compiled program no product has the kernel's shape, in which there is one where all is
  trained.
  """

  def products(merge):
    case = Adapted(folder, merge=merge, dtype='float32')
    update, state, (packed, constants) = build(case)
    program = update.lower(state, packed.chunks, packed.used, constants, case.base).compile()
    kernels = {x.shape for x in flatten(host_params('decoder')['layers']).values() if x.ndim == 2}
    shapes = {
      tuple(map(int, s.split(',')))
      for s in re.findall(r'= f32\[(\d+,\d+)\]\S* dot\(', program.as_text())
    }
    return kernels & (shapes | {shape[::-1] for shape in shapes})

  assert len(products(merge=True)) >= 4
  assert products(merge=False) == set()


def test_what_is_gathered_for_an_engine_is_merged_on_any_mesh(folder):
  case = Adapted(
    folder, dtype='float32', axes=(('fsdp', 2), ('sequence', 2), ('tensor', 2)), chunks=2
  )
  params = lora.join(case.trained, case.base)
  found = flatten(Gatherer(case.mesh, LORA).gather(params))
  for name, array in Gatherer(case.mesh, LORA, on_devices=True).arrays(params):
    np.testing.assert_array_equal(np.array(array), found[name], err_msg=name)
  wanted = flatten(lora.merge(lora.join(host_adapters(), host_params('decoder')), LORA))
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)
