"""Eight devices as a mesh, and the table that says which dimension is cut over which axis."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh, data_parallel_ranks
from jaxrl_llm.parallel.rules import replicated, sharding, sharding_of_batch, tree_shardings

SHAPES = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if np.prod(s) == 8]


def mesh_of(data, fsdp, sequence, tensor):
  return build_mesh(MeshConfig(data=data, fsdp=fsdp, sequence=sequence, tensor=tensor))


@pytest.mark.parametrize('shape', SHAPES)
def test_a_mesh_has_every_device_once(shape):
  mesh = mesh_of(*shape)
  assert mesh.axis_names == ('data', 'fsdp', 'sequence', 'tensor')
  assert mesh.devices.shape == shape
  assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in jax.devices())
  assert set(mesh.axis_types) == {AxisType.Auto}
  assert data_parallel_ranks(mesh) == shape[0] * shape[1]


@pytest.mark.parametrize(
  ('config', 'shape'),
  [
    (MeshConfig(), (1, 8, 1, 1)),
    (MeshConfig(data=None, fsdp=2, tensor=2), (2, 2, 1, 2)),
    (MeshConfig(data=2, fsdp=4, tensor=None), (2, 4, 1, 1)),
    (MeshConfig(sequence=None, fsdp=2), (1, 2, 4, 1)),
  ],
)
def test_an_open_axis_takes_the_devices_that_are_left(config, shape):
  assert build_mesh(config).devices.shape == shape


@pytest.mark.parametrize(
  'config',
  [
    MeshConfig(data=3),
    MeshConfig(data=2, fsdp=2, tensor=1),
    MeshConfig(data=16),
    MeshConfig(data=0),
    MeshConfig(data=0, fsdp=8),
    MeshConfig(data=-1),
    MeshConfig(data=-2, fsdp=-4),
    MeshConfig(data=None, fsdp=None),
  ],
)
def test_a_mesh_that_does_not_fit_is_one_line(config):
  with pytest.raises(UserError, match=r'^mesh: [^\n]*$'):
    build_mesh(config)


def test_slices_are_rows_of_the_mesh():
  # Devices of this process are slices in the order in which they are given.
  mixed = [jax.devices()[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]
  mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2, slices=2), mixed)
  assert mesh.axis_names == ('data', 'fsdp', 'sequence', 'tensor')
  assert set(mesh.axis_types) == {AxisType.Auto}
  assert [device.id for device in mesh.devices[0].flat] == [0, 4, 1, 5]
  with pytest.raises(UserError, match=r'^mesh: data=1 is not a multiple of [^\n]*$'):
    build_mesh(MeshConfig(data=1, slices=2))


def test_some_devices_may_be_chosen():
  mesh = build_mesh(MeshConfig(data=2, fsdp=None), jax.devices()[:4])
  assert mesh.devices.shape == (2, 2, 1, 1)


@pytest.mark.parametrize(
  ('axes', 'shape', 'part'),
  [
    # mesh 2 x 2 x 1 x 2: 'vocab', 'heads', 'kv_heads', 'mlp' over tensor, 'embed' over fsdp,
    # 'batch' over data and fsdp
    (('vocab', 'embed'), (6, 4), (3, 2)),
    (('heads', 'embed'), (6, 4), (3, 2)),
    (('embed', 'mlp'), (4, 6), (2, 3)),
    (('layers', 'kv_heads', 'embed'), (2, 6, 4), (2, 3, 2)),
    (('norm',), (4,), (4,)),
    ((None, 'embed'), (4, 4), (4, 2)),
    (('batch', None), (8, 3), (2, 3)),
    (('vocab', 'embed'), (7, 4), (7, 2)),  # 2 does not divide 7: whole
    (('batch',), (6,), (3,)),  # 4 does not divide 6, data alone does
    ((), (), ()),
  ],
)
def test_a_dimension_is_cut_where_the_table_says_and_the_devices_divide_it(axes, shape, part):
  assert sharding(mesh_of(2, 2, 1, 2), axes, shape).shard_shape(shape) == part


@pytest.mark.parametrize('axes', [('vocab',), ('vocab', 'embed', 'norm')])
def test_each_dimension_needs_its_name(axes):
  with pytest.raises(ValueError):
    sharding(mesh_of(2, 2, 1, 2), axes, (4, 4))


def test_an_unknown_axis_is_not_taken_for_a_whole_one():
  with pytest.raises(KeyError, match='hidden'):
    sharding(mesh_of(2, 2, 1, 2), ('hidden',), (4,))


@pytest.mark.parametrize('shape', SHAPES)
def test_sharded_weights_compute_the_same_on_every_mesh(shape):
  mesh = mesh_of(*shape)
  rng = np.random.default_rng(0)
  host = {
    'up': {'kernel': rng.integers(-4, 5, (16, 8)).astype(np.float32)},
    'scale': np.arange(8, dtype=np.float32),
  }
  axes = {'up': {'kernel': ('mlp', 'embed')}, 'scale': ('norm',)}
  shardings = tree_shardings(mesh, axes, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, host)))
  params = jax.device_put(host, shardings)
  for array, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(host)):
    np.testing.assert_array_equal(np.asarray(array), wanted)
  tokens = rng.integers(-4, 5, (3, 8, 8)).astype(np.float32)
  x = jax.device_put(tokens, sharding_of_batch(mesh))
  got = jax.jit(lambda p, x: (x * p['scale']) @ p['up']['kernel'].T)(params, x)
  # Small integers: every order of summation is exact in float32.
  np.testing.assert_array_equal(np.asarray(got), (tokens * host['scale']) @ host['up']['kernel'].T)


@pytest.mark.parametrize('shape', SHAPES)
def test_rank_r_holds_its_chunks_in_every_micro_batch_and_the_other_axes_share_them(shape):
  mesh, (data, fsdp, sequence, tensor) = mesh_of(*shape), shape
  ranks, per_rank = data * fsdp, 2
  array = jax.device_put(
    np.arange(3 * ranks * per_rank).reshape(3, ranks * per_rank), sharding_of_batch(mesh)
  )
  held = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
  for d, f, s, t in itertools.product(range(data), range(fsdp), range(sequence), range(tensor)):
    rank = d * fsdp + f
    wanted = np.asarray(array)[:, rank * per_rank : (rank + 1) * per_rank]
    np.testing.assert_array_equal(held[mesh.devices[d, f, s, t]], wanted)


def test_replicated_is_whole_everywhere():
  array = jax.device_put(np.arange(6), replicated(mesh_of(2, 2, 1, 2)))
  assert all(shard.data.shape == (6,) for shard in array.addressable_shards)
  assert len(array.addressable_shards) == 8
