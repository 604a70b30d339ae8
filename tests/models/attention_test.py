"""Attention over a mesh of eight devices: the same values and gradients as on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.attention import sharded_attention
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.layers import cut
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.ops.attention import Choice
from jaxrl_llm.ops.places import Places
from jaxrl_llm.parallel.balance import exchanged, in_balanced_order, in_natural_order
from jaxrl_llm.parallel.mesh import AXES, SEQUENCE, MeshConfig, build_mesh

MESHES = {
  'fsdp': dict(fsdp=8),
  'tensor': dict(tensor=2),
  # 12 heads that share 3: parts of 3 or of 2 heads, across the borders of the groups of 4 and
  # within them.
  'tensor does not divide the shared heads': dict(tensor=4),
  'groups are cut': dict(tensor=6),
  'sequence': dict(sequence=8),
  'mixed': dict(data=2, sequence=2, tensor=2),
}


def mesh_of(name):
  sizes = dict.fromkeys(AXES, 1) | MESHES[name]
  return build_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def draw(dtype, time=40, rows=((10, 20), (40,), (), (7, 9, 11), (33, 3), (1, 1, 1), (25,), (39,))):
  rng = np.random.default_rng(0)
  ids = [[i + 1 for i, n in enumerate(row) for _ in range(n)] for row in rows]
  at = [[p for n in row for p in range(n)] for row in rows]

  def full(lists):
    return jnp.array([x + [0] * (time - len(x)) for x in lists], jnp.int32)

  def shape(heads):
    return (len(rows), time, heads, 16)

  arrays = tuple(jnp.asarray(rng.normal(size=shape(heads)), dtype) for heads in (12, 3, 3, 12))
  return arrays, Places(full(ids), full(at))


BLOCK = {'splash': 128}
"""Sizes of blocks by implementation, where they are not 8."""


def value_and_gradient(mesh, implementation, arrays, places, **rule):
  *inputs, weight = arrays

  def loss(*inputs):
    choice = Choice(implementation, '', block=BLOCK.get(implementation, 8))
    out = sharded_attention(*inputs, places, places, choice=choice, mesh=mesh, **rule)
    return (out * weight).sum(), out

  gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
  return jax.device_get((out, *gradients))


def balanced_value_and_gradient(mesh, implementation, arrays, places, **rule):
  """As `value_and_gradient`, with balanced shards, but in natural order."""
  shards = mesh.shape[SEQUENCE]
  *inputs, weight = (in_balanced_order(x, shards) for x in arrays)
  places = jax.tree.map(lambda x: in_balanced_order(x, shards), places)

  def loss(*inputs):
    choice = Choice(implementation, '', BLOCK.get(implementation, 8), is_balanced=True)
    out = sharded_attention(*inputs, places, places, choice=choice, mesh=mesh, **rule)
    return (out * weight).sum(), out

  gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
  return jax.device_get([in_natural_order(x, shards) for x in (out, *gradients)])


def assert_same(found, wanted, tolerance):
  for got, want in zip(found, wanted, strict=True):
    assert np.linalg.norm(want) > 0
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


QUICK = ('groups are cut', 'mixed')
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MESHES]


@pytest.mark.parametrize('implementation', ['masked', 'blockwise'])
@pytest.mark.parametrize('name', CASES)
def test_no_mesh_changes_values_or_gradients(name, implementation):
  with jax.enable_x64(True):
    case = draw('float64')
    wanted = value_and_gradient(None, 'masked', *case, window=12, softcap=2.0)
    found = value_and_gradient(mesh_of(name), implementation, *case, window=12, softcap=2.0)
  assert_same(found, wanted, 1e-12)


@pytest.mark.parametrize('name', [pytest.param('sequence', marks=pytest.mark.full), 'mixed'])
def test_balanced_shards_change_no_values_or_gradients(name):
  with jax.enable_x64(True):
    case = draw('float64', time=48)
    wanted = value_and_gradient(None, 'masked', *case, window=12, softcap=2.0)
    found = balanced_value_and_gradient(mesh_of(name), 'blockwise', *case, window=12, softcap=2.0)
  assert_same(found, wanted, 1e-12)


@pytest.mark.parametrize('shards', [2, 3, 4, 8])
def test_rows_are_exchanged_between_devices_into_natural_order(shards):
  mesh = build_mesh(MeshConfig(fsdp=1, sequence=shards), jax.devices()[:shards])
  x = jnp.arange(2 * 6 * shards * 3.0).reshape(2, 6 * shards, 3)
  exchange = jax.jit(lambda x: exchanged(cut(x, mesh), mesh))
  np.testing.assert_array_equal(exchange(in_balanced_order(x, shards)), x)
  np.testing.assert_array_equal(in_natural_order(in_balanced_order(x, shards), shards), x)
  by_shard = np.split(np.asarray(in_balanced_order(x, shards)[0, :, 0]) // 9, shards)
  assert [list(dict.fromkeys(part)) for part in by_shard] == [
    [i, 2 * shards - 1 - i] for i in range(shards)
  ]
  compiled = exchange.lower(x).compile().as_text()
  assert 'collective-permute' in compiled and 'all-gather' not in compiled


def test_a_length_that_no_device_count_divides():
  with jax.enable_x64(True):
    case = draw('float64', time=41)
    found = value_and_gradient(mesh_of('mixed'), 'blockwise', *case)
    assert_same(found, value_and_gradient(None, 'masked', *case), 1e-12)


@pytest.mark.full
def test_splash_over_cut_sequences_and_heads():
  case = draw('float32', time=300, rows=((100, 190), (299,)))
  found = value_and_gradient(
    mesh_of('mixed'), 'splash', *case, window=90, softcap=2.0, interpret=True
  )
  assert_same(found, value_and_gradient(None, 'masked', *case, window=90, softcap=2.0), 1e-6)


@pytest.mark.full
def test_splash_with_balanced_shards():
  case = draw('float32', time=512, rows=((100, 190), (499,)))
  rule = dict(window=200, softcap=2.0)
  found = balanced_value_and_gradient(mesh_of('mixed'), 'splash', *case, **rule, interpret=True)
  assert_same(found, value_and_gradient(None, 'masked', *case, **rule), 1e-6)


@functools.cache
def gradient_of_a_model(mesh_name, **options):
  """Of a scanned decoder with remat, over packed rows."""
  with jax.enable_x64(True):
    spec = tiny(
      'qwen3', 19, hidden_size=24, intermediate_size=40, head_dim=16, num_attention_heads=4
    )
    mesh = None if mesh_name is None else mesh_of(mesh_name)
    model = build_model(
      spec, ModelOptions(dtype='float64', scan_layers=True, remat='full', **options), mesh
    )
    shapes = flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = {
      name: jnp.asarray(0.3 * rng.normal(size=x.shape) + (x.ndim == 1))
      for name, x in shapes.items()
    }
    (_, places), weight = draw('float64'), rng.normal(size=(8, 40, 24))
    tokens = jnp.asarray(rng.integers(0, 19, (8, 40)), jnp.int32)

    def loss(params):
      hidden = model.apply(unflatten(params), tokens, places.positions, places.segment_ids)
      return (hidden * weight * (places.segment_ids > 0)[..., None]).sum()

    return jax.device_get(jax.jit(jax.grad(loss))(params))


@pytest.mark.full
@pytest.mark.parametrize('name', [None, 'mixed'])
def test_a_decoder_by_blocks_has_the_same_gradient(name):
  found, wanted = (
    gradient_of_a_model(name, attention='blockwise'),
    gradient_of_a_model(None, attention='masked'),
  )
  assert found.keys() == wanted.keys()
  assert_same(found.values(), [wanted[path] for path in found], 1e-12)


def test_a_kernel_that_is_not_there_is_refused_when_the_model_is_built():
  with pytest.raises(UserError, match='splash does not run on this platform'):
    build_model(tiny('qwen2', 9), ModelOptions(attention='splash'))
