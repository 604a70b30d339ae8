"""Published weights are whole, own copies; neither a version that is served is sent again nor
weights that are.
"""

import asyncio
import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import assert_same_bits, random_params

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.state import abstract_state, place_params
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import LoraConfig, ModelOptions
from jaxrl_llm.parallel.collectives import traffic
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.parallel.rules import sharding
from jaxrl_llm.rollout.api import joined
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.weights.shares import parameters_of


class RecordingEngine:
  """Keeps what it is given; generates nothing."""

  name = 'recording'

  def __init__(self):
    self.loaded, self.relabelled, self.acknowledged = [], [], []
    self.refuse = False

  @property
  def version(self):
    return self.acknowledged[-1] if self.acknowledged else None

  def generate(self, request):
    raise RuntimeError('generates nothing')

  async def load(self, weights):
    if self.refuse:
      raise RuntimeError('refused')
    self.loaded.append(({name: array.copy() for name, array in weights.leaves}, weights.version))
    self.acknowledged.append(weights.version)

  async def relabel(self, version):
    if self.refuse:
      raise RuntimeError('refused')
    self.relabelled.append(version)
    self.acknowledged.append(version)

  def take_metrics(self):
    return {}

  async def start(self): ...

  async def close(self): ...


@pytest.fixture
def mesh():
  return build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


def params_on(mesh, scale=1):
  kernel = np.arange(32, dtype=np.float32).reshape(8, 4) * scale
  return {
    'layers': {
      '0': {'kernel': jax.device_put(kernel, sharding(mesh, ('mlp', 'embed'), kernel.shape))}
    },
    'norm': {
      'scale': jax.device_put(jnp.ones(4, jnp.bfloat16) * scale, sharding(mesh, ('norm',), (4,)))
    },
  }


def test_gathered_arrays_are_whole_in_the_parameters_own_dtype(mesh):
  host = Gatherer(mesh).gather(params_on(mesh, 3))
  np.testing.assert_array_equal(host['layers']['0']['kernel'], np.arange(32).reshape(8, 4) * 3)
  assert host['norm']['scale'].dtype == jnp.bfloat16
  assert host['norm']['scale'].tolist() == [3, 3, 3, 3]


def test_gathered_arrays_are_no_views_of_what_an_update_overwrites(mesh):
  """Also on one device, where JAX would lend its buffer."""
  for on in (mesh, build_mesh(MeshConfig(), jax.devices()[:1])):
    params = params_on(on)
    host = Gatherer(on).gather(params)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    for _ in range(3):
      params = jax.block_until_ready(update(params))
    np.testing.assert_array_equal(host['layers']['0']['kernel'], np.arange(32).reshape(8, 4))
    assert all(leaf.flags.owndata and leaf.flags.writeable for leaf in jax.tree.leaves(host))


def test_arrays_on_devices_are_copies():
  """Also of an array that needs no change."""
  given = jnp.ones(4)
  gatherer = Gatherer(build_mesh(MeshConfig(), jax.devices()[:1]), on_devices=True)
  ((name, array),) = gatherer.arrays({'norm': {'scale': given}})
  given.delete()
  assert name == 'norm/scale'
  np.testing.assert_array_equal(array, np.ones(4))
  with pytest.raises(RuntimeError, match='on_devices'):
    next(Gatherer(gatherer.mesh).arrays({}))


def test_each_version_is_sent_once_and_again_after_another_one(mesh):
  async def main():
    engine, device = RecordingEngine(), DeviceThread()
    publisher = Publisher(engine, Gatherer(mesh), device)
    await publisher.publish(params_on(mesh, 1), Version(0, 0), moved=Version(0, 0))
    await publisher.publish(params_on(mesh, 1), Version(0, 0), moved=Version(0, 0))
    assert [version for _, version in engine.loaded] == [Version(0, 0)]
    await publisher.publish(params_on(mesh, 2), Version(0, 1), moved=Version(0, 1))
    # Another attempt's step 1 is another version.
    await publisher.publish(params_on(mesh, 3), Version(1, 1), moved=Version(0, 2))
    assert [version for _, version in engine.loaded] == [
      Version(0, 0),
      Version(0, 1),
      Version(1, 1),
    ]
    assert [params['norm/scale'][0] for params, _ in engine.loaded] == [
      1,
      2,
      3,
    ] and not engine.relabelled
    device.close()

  asyncio.run(main())


def test_after_all_was_sent_once_only_what_changes_is(mesh):
  async def main():
    engine, device = RecordingEngine(), DeviceThread()
    publisher = Publisher(
      engine, Gatherer(mesh), device, changing=lambda params: {'norm': params['norm']}
    )
    engine.refuse = True
    with pytest.raises(RuntimeError, match='refused'):
      await publisher.publish(params_on(mesh, 1), Version(0, 0), moved=Version(0, 0))
    engine.refuse = False
    for step in (0, 1, 2):
      await publisher.publish(params_on(mesh, step + 1), Version(0, step), moved=Version(0, step))
    assert [sorted(params) for params, _ in engine.loaded] == [
      ['layers/0/kernel', 'norm/scale']
    ] + 2 * [['norm/scale']]
    assert engine.loaded[2][0]['norm/scale'][0] == 3
    device.close()

  asyncio.run(main())


MIXED = {'data': 2, 'fsdp': 2, 'tensor': 2}


@pytest.mark.parametrize(
  ('axes', 'scan_layers', 'dtype', 'several'),
  [
    (MIXED, True, 'bfloat16', True),
    pytest.param(MIXED, False, 'bfloat16', False, marks=pytest.mark.full),
    pytest.param({'sequence': 2, 'tensor': 4}, True, None, False, marks=pytest.mark.full),
    pytest.param({'fsdp': 8}, True, None, True, marks=pytest.mark.acceptance),
    pytest.param({'sequence': 2, 'tensor': 4}, False, None, True, marks=pytest.mark.acceptance),
  ],
  ids=str,
)
def test_parts_are_the_parameters_bit_for_bit(axes, scan_layers, dtype, several):
  """Whole, by layers and by rows, on one process and as on several."""
  spec = tiny('qwen2', 52, num_hidden_layers=3, tie_word_embeddings=False)
  mesh = build_mesh(MeshConfig(**axes))
  model = build_model(spec, ModelOptions(scan_layers=scan_layers), mesh)
  host = random_params(spec)
  awkward = [np.nan, -np.inf, -0.0, 1e-40, 3.39e38, 1 + 2**-8, 1 + 3 * 2**-8]
  host['embed']['kernel'][51, :7] = host['layers']['2']['mlp']['up']['kernel'][5, :7] = awkward
  params = place_params(model, mesh, stack_layers(host) if scan_layers else host)
  # A layer's largest matrix has 64 · 128 elements.
  parts = list(Gatherer(mesh, dtype=dtype, part_bytes=1, several=several).leaves(params))
  names = collections.Counter(name for name, _ in parts)
  assert names['embed/kernel'] > 1
  wanted = {
    name: leaf if dtype is None else leaf.astype(jnp.bfloat16)
    for name, leaf in flatten(host).items()
  }
  assert_same_bits(dict(joined(parts)), wanted)
  assert_same_bits(Gatherer(mesh).gather(params), stack_layers(host) if scan_layers else host)
  # Only those with the given names are copied to the host.
  some = {'layers/1/mlp/up/kernel', 'norm/scale', 'embed/kernel'}
  gatherer = Gatherer(mesh, dtype=dtype, part_bytes=1, several=several)
  assert_same_bits(
    dict(joined(gatherer.leaves(params, some))), {name: wanted[name] for name in some}
  )


@pytest.mark.parametrize(
  ('axes', 'processes', 'scan_layers', 'part_bytes'),
  [
    (MIXED, [0, 0, 1, 1, 2, 2, 3, 3], True, 1),
    ({'fsdp': 4, 'tensor': 2}, [0, 1, 1, 0, 0, 1, 1, 0], True, 1 << 20),
    pytest.param({'fsdp': 8}, [*range(8)], True, 2_000, marks=pytest.mark.full),
    pytest.param({'fsdp': 2, 'tensor': 4}, [0, 1] * 4, False, 1, marks=pytest.mark.full),
    pytest.param({'data': 8}, [0] * 4 + [1] * 4, False, 1, marks=pytest.mark.acceptance),
    pytest.param({'tensor': 8}, [0, 0, 1, 1] * 2, True, 1, marks=pytest.mark.acceptance),
  ],
  ids=str,
)
def test_each_process_gets_the_parameters_of_its_share_bit_for_bit(
  axes, processes, scan_layers, part_bytes
):
  """Processes whose devices are neighbours, and others; one, two or four devices each."""
  spec = tiny('qwen2', 56, num_hidden_layers=3, tie_word_embeddings=False)
  mesh = build_mesh(MeshConfig(**axes))
  model = build_model(spec, ModelOptions(scan_layers=scan_layers), mesh)
  host = random_params(spec)
  params = place_params(model, mesh, stack_layers(host) if scan_layers else host)
  count = 1 + max(processes)
  shares = [parameters_of(spec, number, count) for number in range(count)]
  gatherer = Gatherer(
    mesh, dtype='bfloat16', part_bytes=part_bytes, several=True, processes=processes
  )
  received = {}
  for number in range(count):
    share = dict(joined(gatherer.share(params, shares, number)))
    assert share.keys() == shares[number]
    received |= share
  wanted = {name: leaf.astype(jnp.bfloat16) for name, leaf in flatten(host).items()}
  assert_same_bits(received, wanted)


@pytest.mark.parametrize('part_bytes', [1, 1 << 20])
def test_adapters_are_merged_into_the_kernels_of_a_share(mesh, part_bytes):
  random, lora = np.random.default_rng(0), LoraConfig(rank=2, alpha=6)
  shapes = {'kernel': (4, 16, 8), 'lora_a': (4, 2, 8), 'lora_b': (4, 16, 2)}
  axes = {'kernel': ('mlp', 'embed'), 'lora_a': (None, 'embed'), 'lora_b': ('mlp', None)}
  host = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  placed = {
    name: jax.device_put(leaf, sharding(mesh, (None, *axes[name]), leaf.shape))
    for name, leaf in host.items()
  }
  gatherer = Gatherer(
    mesh, lora, part_bytes=part_bytes, several=True, processes=[0, 0, 1, 1, 1, 1, 0, 0]
  )
  names = [{f'layers/{layer}/up/kernel' for layer in layers} for layers in ((0, 3), (1, 2))]
  params, received = {'layers': {'up': placed}}, {}
  for number in range(2):
    received |= dict(joined(gatherer.share(params, names, number)))
  for layer in range(4):
    a, b = host['lora_a'][layer].astype(float), host['lora_b'][layer].astype(float)
    wanted = host['kernel'][layer] + lora.scale * b @ a
    np.testing.assert_allclose(received[f'layers/{layer}/up/kernel'], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('processes', [[0] * 8, [0] * 5 + [1] * 3])
def test_every_device_receives_all_parts_if_there_is_nothing_to_exchange(mesh, processes):
  gatherer, params = Gatherer(mesh, several=True, processes=processes), params_on(mesh)
  names = [{'norm/scale'}, {'layers/0/kernel'}]
  for number, wanted in enumerate(names):
    assert dict(gatherer.share(params, names, number)).keys() == wanted


@pytest.mark.parametrize('rows', [4, 5, 12])
def test_the_last_rows_of_an_array_come_once(rows):
  mesh = build_mesh(MeshConfig(fsdp=2, tensor=4))
  kernel = np.arange(52 * 8, dtype=np.float32).reshape(52, 8)
  placed = {'kernel': jax.device_put(kernel, sharding(mesh, ('vocab', 'embed'), (52, 8)))}
  parts = list(Gatherer(mesh, part_bytes=rows * 4 * 8 * 4, several=True).leaves(placed))
  assert len(parts) == 4 * -(-13 // rows) and max(len(part) for _, part in parts) == rows
  np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), kernel)


@pytest.mark.full
def test_publishing_programs_gather_one_layer_in_the_published_data_type():
  spec = tiny('qwen2', 512, num_hidden_layers=8, intermediate_size=192)
  mesh = build_mesh(MeshConfig(fsdp=8))
  model = build_model(spec, ModelOptions(scan_layers=True), mesh)
  shapes = abstract_state(model, optax.sgd(1.0), mesh).params
  programs = Gatherer(mesh, dtype='bfloat16', part_bytes=1, several=True).programs(shapes)
  layer = 2 * 64 * 192
  # Each kind of array has one program: 'gate' stands for 'up', 'key' for 'value'.
  assert {'embed/kernel', 'layers/0/mlp/gate/kernel', 'layers/0/mlp/down/kernel'} <= programs.keys()
  for name, lowered in programs.items():
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= layer, name
    gathers = re.findall(r'= (\w+)\[[\d,]*\]\S* all-gather\(', compiled.as_text())
    assert gathers or 'norm' in name or 'bias' in name, name
    assert set(gathers) <= {'u16'}, name


@pytest.mark.full
def test_programs_of_several_writers_exchange_pieces_and_gather_nothing():
  """A device receives the piece of its process's part, an eighth of all parts of a round. Not every
  process has a part in each round.
  """
  spec = tiny('qwen2', 512, num_hidden_layers=8, intermediate_size=192)
  mesh = build_mesh(MeshConfig(fsdp=8))
  model = build_model(spec, ModelOptions(scan_layers=True), mesh)
  shapes = abstract_state(model, optax.sgd(1.0), mesh).params
  shares = [parameters_of(spec, number, 4) for number in range(4)]
  gatherer = Gatherer(
    mesh, dtype='bfloat16', part_bytes=1, several=True, processes=np.repeat(range(4), 2).tolist()
  )
  gathered = gatherer.counted_programs(shapes)
  exchanged = gatherer.counted_programs(shapes, shares)
  assert {'embed/kernel', 'layers/0/mlp/gate/kernel'} & exchanged.keys()
  received, largest = {}, {}
  for kind, programs in (('gathered', gathered), ('exchanged', exchanged)):
    received[kind], largest[kind] = 0, 0
    for name, (lowered, calls) in programs.items():
      compiled = lowered.compile()
      moved, memory = traffic(compiled.as_text()), compiled.memory_analysis()
      if kind == 'exchanged':
        assert moved.keys() <= {'all-to-all'}, name
        assert all(of.largest.startswith('u16') for of in moved.values()), name
      received[kind] += calls * sum(of.bytes for of in moved.values())
      largest[kind] = max(largest[kind], memory.output_size_in_bytes + memory.temp_size_in_bytes)
  assert received['exchanged'] <= received['gathered'] / 5, received
  assert largest['exchanged'] <= largest['gathered'], largest


class CountingGatherer(Gatherer):
  """Counts how often all processes are asked to go through the parameters."""

  gathered = 0

  def leaves(self, params, names=None):
    self.gathered += 1
    return super().leaves(params, names)

  def take_part(self, params):
    self.gathered += 1
    super().take_part(params)


def test_weights_that_did_not_move_go_by_the_new_version_without_being_sent(mesh):
  """Versions 1 and 2 are 0's weights; 3 is another's, and 4 is 3's."""

  async def main():
    engine, device = RecordingEngine(), DeviceThread()
    gatherer = CountingGatherer(mesh)
    publisher = Publisher(engine, gatherer, device)
    for step, moved in enumerate([0, 0, 0, 3, 3]):
      await publisher.publish(params_on(mesh, moved + 1), Version(0, step), moved=Version(0, moved))
      assert engine.version == Version(0, step)
    assert [version.step for _, version in engine.loaded] == [0, 3]
    assert [params['norm/scale'][0] for params, _ in engine.loaded] == [1, 4]
    assert [version.step for version in engine.relabelled] == [1, 2, 4]
    assert gatherer.gathered == 2
    device.close()

  asyncio.run(main())


def test_a_new_attempts_first_weights_are_sent_although_none_of_its_steps_moved_them(mesh):
  async def main():
    device = DeviceThread()
    for attempt in range(2):
      engine = RecordingEngine()
      publisher = Publisher(engine, Gatherer(mesh), device)
      await publisher.publish(params_on(mesh), Version(attempt, 7), moved=Version(0, 0))
      await publisher.publish(params_on(mesh), Version(attempt, 8), moved=Version(0, 0))
      assert [version for _, version in engine.loaded] == [Version(attempt, 7)]
      assert engine.relabelled == [Version(attempt, 8)]
    device.close()

  asyncio.run(main())


def test_processes_without_an_engine_take_part_in_what_is_sent_and_in_nothing_else(mesh):
  """All processes decide alike: one that gathered alone would wait for ever."""

  async def main():
    device, gatherer = DeviceThread(), CountingGatherer(mesh)
    publisher = Publisher(None, gatherer, device)
    for step, moved in enumerate([0, 0, 2, 2, 5]):
      await publisher.publish(params_on(mesh), Version(0, step), moved=Version(0, moved))
    assert gatherer.gathered == 3
    device.close()

  asyncio.run(main())


def test_a_version_that_the_engine_did_not_take_is_not_taken_for_served(mesh):
  async def main():
    engine, device = RecordingEngine(), DeviceThread()
    publisher = Publisher(engine, Gatherer(mesh), device)
    engine.refuse = True
    with pytest.raises(RuntimeError, match='refused'):
      await publisher.publish(params_on(mesh), Version(0, 0), moved=Version(0, 0))
    engine.refuse = False
    await publisher.publish(params_on(mesh), Version(0, 0), moved=Version(0, 0))
    assert [version for _, version in engine.loaded] == [Version(0, 0)]
    engine.refuse = True
    with pytest.raises(RuntimeError, match='refused'):
      await publisher.publish(params_on(mesh), Version(0, 1), moved=Version(0, 0))
    with pytest.raises(RuntimeError, match='refused'):
      await publisher.publish(params_on(mesh), Version(0, 2), moved=Version(0, 2))
    engine.refuse = False
    # What was refused had moved; the engine still has the weights of 0.
    await publisher.publish(params_on(mesh), Version(0, 2), moved=Version(0, 2))
    assert [version for _, version in engine.loaded] == [
      Version(0, 0),
      Version(0, 2),
    ] and not engine.relabelled
    device.close()

  asyncio.run(main())


def test_a_process_without_an_engine_takes_part_and_keeps_nothing(mesh):
  async def main():
    device = DeviceThread()
    follower = Publisher(None, Gatherer(mesh), device)
    await follower.publish(params_on(mesh), Version(0, 0), moved=Version(0, 0))
    device.close()

  asyncio.run(main())
