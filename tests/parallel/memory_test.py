"""Arrays that leave the devices come back with their bits, their shardings and their programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.parallel import memory
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh


@pytest.fixture
def mesh():
  return build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


def tree_on(mesh):
  def place(array, *spec, kind='device'):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind))

  return {
    'sharded': place(jnp.arange(32.0).reshape(4, 8), 'fsdp', 'tensor'),
    'whole': place(jnp.arange(5, dtype=jnp.bfloat16)),
    'scalar': place(jnp.int32(7)),
    'on the host': place(jnp.arange(4.0), 'data', kind='pinned_host'),
  }


PER_DEVICE = 32 * 4 // 4 + 5 * 2 + 4
"""Of `tree_on`: 'sharded' has four different parts; what is on the host does not count."""


def away(tree, way, folder):
  if way == 'host':
    return memory.to_host(tree)
  if way == 'disk':
    return memory.to_disk(tree, folder / 'role')
  return memory.to_disk(memory.to_host(tree), folder / 'role')


@pytest.mark.parametrize('way', ['host', 'disk', 'host, then disk'])
def test_arrays_come_back_with_bits_shardings_and_without_compilation(mesh, way, tmp_path):
  tree = tree_on(mesh)
  bits = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), tree)
  homes, device = memory.shardings_of(tree), mesh.local_devices[3]
  doubled = jax.jit(
    lambda t: jax.tree.map(lambda x: x + x, {k: t[k] for k in ('sharded', 'whole')})
  )
  doubled(tree)
  assert memory.device_bytes(tree, device) == PER_DEVICE
  live = memory.live_bytes(device)
  moved = away(tree, way, tmp_path)
  assert memory.device_bytes(moved, device) == 0
  assert memory.live_bytes(device) == live - PER_DEVICE
  if way != 'host':
    assert all(isinstance(leaf, memory.StoredArray) for leaf in jax.tree.leaves(moved))
  back = memory.restored(moved, homes)
  assert jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), back) == bits
  assert memory.shardings_of(back) == homes
  assert memory.live_bytes(device) >= live
  doubled(back)
  assert doubled._cache_size() == 1
  assert not [*tmp_path.rglob('*-*')], 'files are removed'


def test_arrays_in_files_can_come_back_to_host_memory(mesh, tmp_path):
  tree = {'x': tree_on(mesh)['sharded']}
  homes = [home.with_memory_kind('pinned_host') for home in memory.shardings_of(tree)]
  back = memory.restored(memory.to_disk(tree, tmp_path), homes)
  assert memory.is_on_host(back['x'].sharding)
  np.testing.assert_array_equal(np.asarray(back['x']), np.arange(32.0).reshape(4, 8))


@pytest.mark.parametrize('damage', ['changed', 'cut', 'gone'])
def test_a_damaged_file_is_an_error_of_one_line(mesh, damage, tmp_path):
  tree = {'x': tree_on(mesh)['sharded']}
  homes = memory.shardings_of(tree)
  stored = memory.to_disk(tree, tmp_path)
  file = sorted(tmp_path.iterdir())[2]
  if damage == 'gone':
    file.unlink()
  else:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if damage == 'changed' else b''))
  with pytest.raises(RunError, match=r'cannot be read: .*; start the same command again') as error:
    memory.restored(stored, homes)
  assert str(file) in str(error.value) and '\n' not in str(error.value)


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(mesh, tmp_path):
  (tmp_path / 'role').mkdir()
  (tmp_path / 'role' / '0-0').mkdir()
  with pytest.raises(RunError, match=r"cannot be written .*'offload' in place of 'disk'"):
    memory.to_disk({'x': tree_on(mesh)['whole']}, tmp_path / 'role')
