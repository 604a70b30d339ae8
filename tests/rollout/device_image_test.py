"""Versions that are compared on the devices are published as if they were compared on the hosts."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from parameters import random_params
from together import Folder

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import LoraConfig, ModelOptions
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.parallel.rules import sharding
from jaxrl_llm.rollout import device_image
from jaxrl_llm.rollout.device_image import DeviceImage, changed_elements
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.rollout.vllm import version_writer
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.publication import read_published
from jaxrl_llm.rollout.vllm.share_writer import VllmShareWriter
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.deltas import Changes
from jaxrl_llm.weights.tables import entries

SPEC = tiny('llama', 56, num_hidden_layers=2, tie_word_embeddings=True)
EMBEDDING, NORM = 'model.embed_tokens.weight', 'model.layers.1.input_layernorm.weight'
MIXED = {'data': 2, 'fsdp': 2, 'tensor': 2}


@pytest.mark.parametrize('size', [1, 33, 4096, 9000])
@pytest.mark.parametrize('share', [0, 0.02, 0.5, 1])
def test_changed_elements_are_those_that_numpy_finds(size, share):
  random = np.random.default_rng(size)
  old = random.integers(0, 1 << 16, size, np.uint16)
  new = np.where(random.random(size) < share, old ^ 0x8000, old)
  wanted = np.flatnonzero(old != new)
  for capacity in {1, max(1, len(wanted) - 1), max(1, len(wanted)), size}:
    find = jax.jit(changed_elements, static_argnums=2)
    count, positions, bits = map(np.asarray, find(new, old, capacity))
    assert count == len(wanted)
    positions = positions[:count]
    assert len(set(positions)) == min(count, capacity) and set(positions) <= set(wanted)
    np.testing.assert_array_equal(bits[:count], new[positions])


def version(step, *, share=0.01):
  """Parameters of which a step changes one in about a hundred, some only in the sign of a zero or
  of a NaN.
  """
  if step == 0:
    params = random_params(SPEC)
  else:
    params, random = version(step - 1, share=share), np.random.default_rng(step)
    params = jax.tree.map(np.array, params)
    for leaf in jax.tree.leaves(params):
      flat = leaf.reshape(-1)
      flat[random.random(flat.size) < share] *= -2
  awkward = np.array([0.0, np.nan, np.inf, 1e-40, 1 + 2**-8], np.float32)
  params['embed']['kernel'][3, :5] = -awkward if step % 2 else awkward
  params['layers']['1']['mlp']['up']['kernel'][5, -5:] = awkward if step % 2 else -awkward
  return params


SHAPES = {'embed/kernel': (24, 8), 'layers/up/kernel': (4, 16, 8), 'norm/scale': (8,)}
AXES = {
  'embed/kernel': ('vocab', 'embed'),
  'layers/up/kernel': (None, 'mlp', 'embed'),
  'norm/scale': (None,),
}
UNROLLED = {'embed/kernel', 'norm/scale', *(f'layers/{i}/up/kernel' for i in range(4))}


def unrolled(arrays):
  """Bits of the published arrays, keyed by name in the unrolled tree."""
  bits = {name: array.astype(ml_dtypes.bfloat16).view(np.uint16) for name, array in arrays.items()}
  stack = bits.pop('layers/up/kernel')
  return bits | {f'layers/{i}/up/kernel': layer for i, layer in enumerate(stack)}


@pytest.mark.parametrize(
  ('axes', 'processes'),
  [
    (MIXED, [0, 0, 1, 1, 2, 2, 3, 3]),
    (MIXED, [0] * 8),
    pytest.param({'fsdp': 4, 'tensor': 2}, [0, 1, 1, 0, 0, 1, 1, 0], marks=pytest.mark.full),
    pytest.param({'fsdp': 8}, [*range(8)], marks=pytest.mark.acceptance),
    pytest.param({'fsdp': 2, 'tensor': 4}, [0] * 5 + [1] * 3, marks=pytest.mark.full),
  ],
  ids=str,
)
def test_each_process_gets_the_changes_of_its_share(axes, processes, monkeypatch):
  """An array is copied whole if a shard has one change more than the devices collect. So are all
  arrays if the image contains another version than the one to compare with, or an incomplete one.
  """
  monkeypatch.setattr(device_image, '_SMALL', 3)
  monkeypatch.setattr(device_image, '_FEWEST', 1)
  mesh, count = build_mesh(MeshConfig(**axes)), 1 + max(processes)
  gatherer = Gatherer(mesh, dtype='bfloat16', part_bytes=1, several=count > 1, processes=processes)
  images = [DeviceImage(gatherer) for _ in range(count)]
  for image in images[1:]:  # So that programs are compiled once.
    image._comparing, image._sending, image._whole = (
      images[0]._comparing, images[0]._sending, images[0]._whole
    )  # fmt: skip
  names = sorted(UNROLLED)
  shares = [set(names[number::count]) for number in range(count)]
  random, before = np.random.default_rng(0), {}
  host = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
  host['embed/kernel'][3, :4] = [0.0, np.nan, np.inf, 1e-40]
  for step in range(5):
    if step:
      host['embed/kernel'][[3, 3, 17, 23], [6, 0, 7, 4]] *= -1
      host['layers/up/kernel'][[0, 0, 3], [0, 9, 15], [7, 0, 7]] += 1
    if step == 2:  # In one shard of each mesh.
      host['layers/up/kernel'][1, :4, 0] += 1
      host['layers/up/kernel'][2, :3, 0] += 1
    placed = {
      name: jax.device_put(array, sharding(mesh, AXES[name], array.shape))
      for name, array in host.items()
    }
    wanted, whole = unrolled(host), set()
    for number, image in enumerate(images):
      token = {0: None, 4: 'another'}.get(step, str(step - 1))
      received = {}
      yielded = image.share(unflatten(placed), shares, number, before=token, token=str(step))
      for name, leaf in yielded:
        received.setdefault(name, []).append(leaf)
      assert received.keys() == shares[number]
      for name, leaves in received.items():
        if isinstance(leaves[0], Changes):
          (changes,) = leaves
          new, old = wanted[name].reshape(-1), before[name].reshape(-1)
          np.testing.assert_array_equal(changes.positions, np.flatnonzero(new != old), name)
          np.testing.assert_array_equal(changes.bits, new[changes.positions], name)
        else:
          whole.add(name)
          array = np.concatenate(leaves)
          assert array.dtype == ml_dtypes.bfloat16
          np.testing.assert_array_equal(array.view(np.uint16), wanted[name], name)
      assert image.holds == str(step)
    assert whole == {0: UNROLLED, 2: {'layers/1/up/kernel'}, 4: UNROLLED}.get(step, set())
    before = wanted
  begun = images[0].share(unflatten(placed), shares, 0, before='4', token='5')
  next(begun)
  begun.close()
  again = images[0].share(unflatten(placed), shares, 0, before='4', token='6')
  assert not any(isinstance(leaf, Changes) for _, leaf in again)
  calls = {'compare': 0, 'send': 0}
  for name, (_, count) in images[0].counted_programs(unflatten(placed), shares, 0.1).items():
    calls[name.split()[0]] += count
  layers = max(sum(name.startswith('layers') for name in share) for share in shares)
  assert calls == {'compare': len(UNROLLED), 'send': layers + 2}


def test_few_comparisons_are_in_flight():
  """With 32 programs in flight that contain collectives, XLA could deadlock (JAX 0.10)."""
  mesh, shape = build_mesh(MeshConfig(**MIXED)), (64, 64)
  place = sharding(mesh, ('mlp', 'embed'), shape)
  array = jax.device_put(np.ones(shape, np.float32), place)
  params = {f'layers/{i}/up/kernel': array for i in range(40)}
  image = DeviceImage(Gatherer(mesh))
  build, begun, in_flight = image._build_comparing, [], []

  def slow(cut):
    compare = build(cut)

    @jax.jit
    def compute(inputs, before, layer):
      bits, counts, *collected = compare(inputs, before, layer)
      product = jax.lax.fori_loop(0, 100, lambda _, x: x @ inputs[0], inputs[0])
      return bits, counts + (product[0, 0] < 0), *collected

    def counted(*args):
      in_flight.append(sum(not counts.is_ready() for counts in begun))
      compared = compute(*args)
      begun.append(compared[1])
      return compared

    return counted

  image._comparing = functools.cache(slow)
  for step in range(2):
    before = str(step - 1) if step else None
    shares = image.share(unflatten(params), [set(params)], 0, before=before, token=str(step))
    assert dict(shares).keys() == params.keys()
  assert len(in_flight) == 80 and 0 < max(in_flight) <= 8


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_changes_of_a_sixteenth_of_an_array_are_collected_on_one_device(dtype):
  """The array has more elements than 16 bits can number."""
  gatherer = Gatherer(build_mesh(MeshConfig(), jax.devices()[:1]), dtype=dtype)
  image, random = DeviceImage(gatherer), np.random.default_rng(0)
  host = random.normal(size=(300, 256)).astype(np.float32)
  order, limit = random.permutation(host.size), host.size // 16
  for step, count in enumerate((0, limit, limit + 1)):
    host.reshape(-1)[order[:count]] *= -1
    params, token = {'embed': {'kernel': jax.device_put(host)}}, str(step - 1) if step else None
    shared = image.share(params, [{'embed/kernel'}], 0, before=token, token=str(step))
    ((_, leaf),) = shared
    bits = host.astype(jnp.dtype(dtype)).view(f'u{jnp.dtype(dtype).itemsize}')
    if step == 1:
      np.testing.assert_array_equal(leaf.positions, np.sort(order[:count]))
      np.testing.assert_array_equal(leaf.bits, bits.reshape(-1)[leaf.positions])
    else:
      np.testing.assert_array_equal(leaf.view(bits.dtype), bits)


def test_merged_adapters_change_kernels_and_bits_wait_in_host_memory():
  """The bits are those that hosts would compare."""
  mesh, lora = build_mesh(MeshConfig(**MIXED)), LoraConfig(rank=2, alpha=6)
  random = np.random.default_rng(0)
  shapes = {'kernel': (4, 16, 8), 'lora_a': (4, 2, 8), 'lora_b': (4, 16, 2)}
  axes = {'kernel': ('mlp', 'embed'), 'lora_a': (None, 'embed'), 'lora_b': ('mlp', None)}
  host = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  gatherer = Gatherer(mesh, lora, dtype='bfloat16')
  image, names = DeviceImage(gatherer, offload=True), [{f'layers/{i}/up/kernel' for i in range(4)}]
  before = {}
  for step in range(3):
    host['lora_b'][step + 1, 3] += 1e-2
    params = {
      name: jax.device_put(array, sharding(mesh, (None, *axes[name]), array.shape))
      for name, array in host.items()
    }
    params, token = {'layers': {'up': params}}, str(step - 1) if step else None
    received = dict(image.share(params, names, 0, before=token, token=str(step)))
    wanted = {name: bits.view(np.uint16).reshape(-1) for name, bits in gatherer.leaves(params)}
    assert received.keys() == wanted.keys() == names[0]
    for name, new in wanted.items():
      if step:
        changed = np.flatnonzero(new != before[name])
        np.testing.assert_array_equal(received[name].positions, changed)
        np.testing.assert_array_equal(received[name].bits, new[changed])
        assert (len(changed) > 0) == (name == f'layers/{step + 1}/up/kernel')
      else:
        np.testing.assert_array_equal(received[name].view(np.uint16).reshape(-1), new)
    assert {bits.sharding.memory_kind for bits in image._bits.values()} == {'pinned_host'}
    before = wanted


def files(root):
  return {
    str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if path.is_file()
  }


class Interrupted(Folder):
  """Fails amid the parameters of some versions."""

  fails = ()

  async def load(self, weights):
    def leaves():
      for i, leaf in enumerate(weights.leaves):
        if weights.version.step in self.fails and i == 3:
          raise RunError('no space')
        yield leaf

    await super().load(dataclasses.replace(weights, leaves=leaves()))


def published(folder, steps, place, *, gatherer, image, fails=(), restarts=()):
  """Publications of some versions, and the bytes copied from the devices for each; None for a
  version that fails. A restart loses the device's image.
  """
  device = DeviceThread()
  coordinator = Coordinator(device, on_signal=lambda signum: None)
  engine = Interrupted(folder, device)
  engine.fails, made, copied = fails, [], []

  async def main():
    for step in steps:
      if step == 0 or step in restarts:
        publisher = Publisher(
          engine,
          gatherer,
          device,
          coordinator=coordinator,
          writer=VllmShareWriter(folder._spec),
          image=DeviceImage(gatherer) if image else None,
        )
      try:
        await publisher.publish(place(step), Version(0, step), moved=Version(0, step))
      except RunError:
        made.append(None)
      else:
        made.append(engine.published[-1])
      copied.append(publisher.take_metrics().get('perf/publish_copied_bytes'))

  asyncio.run(main())
  device.close()
  return made, copied


def described(publication):
  """All that is known of a publication, but for its folder."""
  return repr(publication).replace(str(publication and publication.directory.parent), '')


def test_versions_are_those_that_hosts_compare_byte_for_byte(tmp_path, monkeypatch):
  """With versions that fail, a restart of the trainer's process alone, and servers that need
  checksums and digests of other slices for some versions.
  """
  mesh = build_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
  model = build_model(SPEC, ModelOptions(scan_layers=True), mesh)
  gatherer, made, copied, needed = Gatherer(mesh, dtype='bfloat16'), {}, {}, {}
  monkeypatch.setattr(version_writer, '_proofs', lambda replicas: needed)

  def place(step):
    slices = {EMBEDDING: {Slice(1, 8, 40)}, NORM: {Slice(0, 3, 9)}}
    more = slices | {EMBEDDING: {Slice(1, 8, 40), Slice(0, 0, 5)}}
    needed.update(slices=more if step == 2 else slices, checksums=step != 5)
    return placed[step]

  placed = [place_params(model, mesh, stack_layers(version(step))) for step in range(10)]
  for name in ('hosts', 'devices'):
    folder = DeltaFolder(tmp_path / name, SPEC, dtype='bfloat16', full_every=4)
    made[name], copied[name] = published(
      folder, range(10), place, gatherer=gatherer, image=name == 'devices',
      fails=(6,), restarts=(8,),
    )  # fmt: skip
  lengths = [each and len(each.deltas) for each in made['hosts']]
  assert lengths == [0, 1, 2, 3, 0, 1, None, 0, 1, 2]
  assert copied['hosts'] == [None] * 10
  whole = made['hosts'][0].nbytes
  assert [copied['devices'][step] for step in (0, 6, 7, 8)] == [whole, None, whole, whole]
  assert all(0 < copied['devices'][step] < whole / 8 for step in (1, 2, 3, 4, 5, 9))
  assert made['hosts'][2].checksums[EMBEDDING].keys() == {None, Slice(1, 8, 40), Slice(0, 0, 5)}
  assert [*map(described, made['hosts'])] == [*map(described, made['devices'])]
  hosts, devices = files(tmp_path / 'hosts'), files(tmp_path / 'devices')
  assert hosts.keys() == devices.keys() and len(hosts) > 8
  for name in hosts:
    assert hosts[name] == devices[name], name
  last = dict(flatten(version(9)))
  for entry in entries(SPEC):
    read = read_published(made['devices'][-1])[entry.hf]
    assert read.tobytes() == last[entry.unrolled].astype(ml_dtypes.bfloat16).tobytes()
