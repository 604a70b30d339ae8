"""The embedded engine on several devices: against itself on one, and under other loads."""

import asyncio
import dataclasses
import re

import jax
import numpy as np
import pytest
from engine_contract import ask_indexed, continued
from parameters import assert_same_bits

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.state import init_params
from jaxrl_llm.models.api import build_model, unstack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel import memory
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rollout.api import Request, Sampling, Weights
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine
from jaxrl_llm.rollout.embedded.placement import EmbeddedMesh
from jaxrl_llm.rollout.embedded.speculation import SpeculationConfig
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher

VOCAB, LENGTH = 520, 40
# Three blocks of the sampler's vocabulary, and logits that are far from uniform.
SPEC = tiny(
  'qwen3', VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4,
  num_key_value_heads=4, num_hidden_layers=1, head_dim=16, initializer_range=0.3,
  tie_word_embeddings=False,
)  # fmt: skip
MODEL = build_model(SPEC)
V1, V2 = Version(0, 1), Version(0, 2)
MESHES = {1: None, 2: EmbeddedMesh(tensor=2), 8: EmbeddedMesh(data=2, tensor=4)}
"""Mesh by number of devices."""
SPECULATIVE = SpeculationConfig(tokens=2, ngram_min=1)
GREEDY, HOT = Sampling(temperature=0.0), Sampling(temperature=1.3)


@pytest.fixture(scope='module')
def runner():
  with asyncio.Runner() as runner:
    yield runner


@pytest.fixture(scope='module')
def params():
  init = jax.jit(MODEL.init)
  return {
    version: jax.tree.map(np.array, init(jax.random.key(i))) for i, version in ((1, V1), (2, V2))
  }


def started(runner, params, devices, *, run=None, **fields):
  config = EmbeddedConfig(
    **{'slots': 8, 'prefill_rows': 4, 'prefill_buckets': (16,), 'decode_steps': 4, **fields},
    mesh=MESHES[devices],
  )
  engine = EmbeddedEngine(
    MODEL,
    config,
    max_length=LENGTH,
    seed=7,
    run=run or DeviceThread().run,
    devices=jax.devices()[:devices],
  )
  runner.run(engine.start())
  runner.run(engine.load(Weights.of(params[V1], V1)))
  return engine


@pytest.fixture(scope='module')
def on_devices(runner, params):
  """Engine by number of devices."""
  engines = {devices: started(runner, params, devices) for devices in MESHES}
  yield engines
  for engine in engines.values():
    runner.run(engine.close())


def request(number, length=5, **fields):
  prompt = tuple(np.random.default_rng(number).integers(0, VOCAB, length).tolist())
  return Request(
    **{'uid': f'r{number}', 'prompt': prompt, 'max_tokens': 12, 'key': (number, 9), **fields}
  )


async def ask(engine, asked):
  """The completions in the order of sample index."""
  pairs = [pair async for pair in engine.generate(asked)]
  return [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])]


async def ask_all(engine, requests):
  return await asyncio.gather(*(ask(engine, asked) for asked in requests))


def assert_same(found, wanted):
  assert len(found) == len(wanted)
  for a, b in zip(found, wanted):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert a.finish == b.finish


def assert_near(found, wanted):
  """Compares logprobs up to the first token that rounding has changed, of which there are few."""
  equal = 0
  for a, b in zip(found, wanted, strict=True):
    same = np.cumprod(a.tokens[: len(b.tokens)] == b.tokens[: len(a.tokens)]).astype(bool)
    np.testing.assert_allclose(
      a.logprobs[: len(same)][same], b.logprobs[: len(same)][same], rtol=0, atol=1e-5
    )
    equal += same.sum()
  assert equal >= 0.9 * sum(len(completion.tokens) for completion in wanted)


def crowd(count=10):
  return [
    request(100 + i, 1 + i % 16, max_tokens=1 + i % 19, samples=1 + i % 3) for i in range(count)
  ]


def of_every_kind(**fields):
  kinds = (GREEDY, HOT, Sampling(top_p=0.9), Sampling(top_k=5, temperature=0.7))
  return [
    request(i, 3 + 4 * i, samples=3, sampling=sampling, **fields)
    for i, sampling in enumerate(kinds)
  ]


def test_a_request_is_the_same_alone_and_in_any_company(runner, on_devices):
  mine = of_every_kind()
  for devices in (2, 8):
    alone = [runner.run(ask(on_devices[devices], asked)) for asked in mine]
    for order in (1, -1):
      found = runner.run(ask_all(on_devices[devices], [*crowd(), *mine][::order]))[::order]
      for completions, wanted in zip(found[-len(mine) :], alone, strict=True):
        assert_same(completions, wanted)


def test_meshes_agree(runner, on_devices):
  requests = [*of_every_kind(max_tokens=20), *crowd()]
  (one, *others) = (
    [c for found in runner.run(ask_all(engine, requests)) for c in found]
    for engine in on_devices.values()
  )
  for found in others:
    assert_near(found, one)
  # The comparison sees other weights, and other random numbers.
  with pytest.raises(AssertionError):
    assert_near([dataclasses.replace(c, logprobs=c.logprobs + 2e-5) for c in one], one)


def test_a_device_holds_its_part_alone(runner, on_devices):
  sizes = {}
  for devices, engine in on_devices.items():
    arrays = (engine._programs._params, engine._programs._state)
    for device in jax.devices()[:devices]:
      assert memory.device_bytes(arrays, device) == engine.device_bytes
    assert engine.device_bytes == engine._programs.planned_bytes
    sizes[devices] = {
      name: memory.device_bytes(tree, jax.devices()[0])
      for name, tree in zip(('weights', 'cache'), (arrays[0], arrays[1].cache), strict=True)
    }
  assert sizes[1]['cache'] == 2 * sizes[2]['cache'] == 8 * sizes[8]['cache']
  # The norms are on every device.
  for devices, tensor in ((2, 2), (8, 4)):
    assert sizes[1]['weights'] < tensor * sizes[devices]['weights'] < 1.05 * sizes[1]['weights']


def collectives(lowered):
  """(kind, shape) of each collective of a compiled program."""
  found = re.findall(
    r'= (\w+\[[\d,]*\])\S* (all-gather|all-reduce|all-to-all|collective-permute)\(',
    lowered.compile().as_text(),
  )
  return sorted((kind, shape) for shape, kind in found)


def test_a_decode_step_moves_no_weight_and_no_cache(on_devices):
  lowered = on_devices[8]._programs.lower(filtered=False)
  moved = collectives(lowered['decode', False])
  sums = [shape for kind, shape in moved if kind == 'all-reduce' and shape.startswith('f32')]
  # Four slots on each half of the mesh: one sum of the embedding, and two of the layer.
  assert sums == ['f32[4,32]'] * 3
  floats = [
    (kind, shape) for kind, shape in moved if kind != 'all-reduce' and shape.startswith('f32')
  ]
  # The logits, which are divided by rows instead of tokens, and the logprobs of four slots.
  assert {kind for kind, _ in floats} <= {'all-to-all', 'all-gather'}
  for kind, shape in floats:
    assert (shape == 'f32[4]') == (kind == 'all-gather'), floats
  prefill = collectives(lowered['prefill', 16])
  # Two rows of 16 tokens on each half. Of the layer, only keys and values are needed.
  assert prefill == [('all-reduce', 'f32[32,32]')]


def test_parts_of_a_completion_are_the_completion(runner, on_devices):
  """Parts of 6, 5 and 5 tokens, each of which computes its keys and values anew."""
  engine = on_devices[8]
  asked = request(2, samples=2, max_tokens=16, sampling=HOT)
  whole = runner.run(ask(engine, asked))
  parts = runner.run(ask(engine, dataclasses.replace(asked, max_tokens=6)))
  for index, (wanted, part) in enumerate(zip(whole, parts, strict=True)):
    tokens, logprobs = part.tokens.tolist(), part.logprobs.tolist()
    while len(tokens) < 16:
      further = continued(asked, index, tokens, max_tokens=5)
      ((_, part),) = runner.run(ask_indexed(engine, further))
      tokens, logprobs = tokens + part.tokens.tolist(), logprobs + part.logprobs.tolist()
    assert tokens == wanted.tokens.tolist()
    np.testing.assert_allclose(logprobs, wanted.logprobs, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('kv', ['keep', 'recompute'])
def test_weights_in_flight_are_those_of_one_device(runner, params, kv):
  """A load after the third decode call, with drafts."""
  requests = [request(i, max_tokens=24, samples=4, sampling=HOT) for i in range(2)]

  def sampled(devices):
    thread, loading = DeviceThread(), []

    async def run(function, *args, **options):
      is_turn = function.__name__ == '_execute'
      if is_turn and engine.counts['decode_calls'] == 2 and not loading:
        loading.append(asyncio.create_task(engine.load(Weights.of(params[V2], V2))))
        await asyncio.sleep(0)  # The load is next in line.
      return await thread.run(function, *args, **options)

    engine = started(
      runner, params, devices, run=run,
      kv=kv, prefill_buckets=(LENGTH,), speculation=SPECULATIVE, filters=False,
    )  # fmt: skip
    found = runner.run(ask_all(engine, requests))
    runner.run(engine.close())
    return [completion for completions in found for completion in completions]

  one, eight = sampled(1), sampled(8)
  cut = [[(s.start, s.end, s.version) for s in c.segments] for c in one]
  assert all(len(segments) == 2 for segments in cut)
  assert cut == [[(s.start, s.end, s.version) for s in c.segments] for c in eight]
  assert_near(eight, one)


def published(runner, engine, gatherer, placed, version):
  thread = DeviceThread()
  runner.run(Publisher(engine, gatherer, thread).publish(placed, version, moved=version))
  thread.close()


@pytest.mark.parametrize('several', [False, True], ids=['one process', 'several'])
def test_published_weights_go_from_devices_to_devices(runner, on_devices, params, several):
  """From another mesh, data type and arrangement of layers, whose buffers an update then takes."""
  engine = on_devices[8]
  trained = build_mesh(MeshConfig(fsdp=4, tensor=2))
  model = build_model(SPEC, ModelOptions(scan_layers=True), trained)
  placed = init_params(model, trained, seed=5)
  wanted = flatten(unstack_layers(jax.tree.map(np.array, placed)))
  gatherer = Gatherer(trained, on_devices=True, several=several)
  published(runner, engine, gatherer, placed, V2)
  zero = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
  jax.block_until_ready(zero(placed))
  assert_same_bits(
    {name: np.array(leaf) for name, leaf in flatten(engine._programs._params).items()}, wanted
  )
  for name, leaf in flatten(engine._programs._params).items():
    assert leaf.sharding.is_fully_replicated == ('norm' in name), name
  found = runner.run(ask_all(engine, crowd(4)))
  runner.run(engine.load(Weights(version=V2, leaves=sorted(wanted.items()))))
  for completions, same in zip(runner.run(ask_all(engine, crowd(4))), found, strict=True):
    assert_same(completions, same)
  runner.run(engine.load(Weights.of(params[V1], V1)))
  if not several:
    for name, lowered in gatherer.programs(init_params(model, trained, seed=5)).items():
      assert not collectives(lowered), f'{name} is gathered before it is sharded again'


@pytest.mark.full
def test_few_prefills_are_in_flight(runner, params):
  """With 32 programs in flight that contain collectives, XLA could deadlock (JAX 0.10)."""
  engine = started(runner, params, 8, slots=40, prefill_rows=1)
  compiled, begun, in_flight = engine._programs._compiled, [], []
  prefill = compiled['prefill', 16]
  matrix = np.zeros((64, 64), np.float32)

  @jax.jit
  def slow(tokens):
    product = jax.lax.fori_loop(0, 300, lambda _, x: x @ matrix, matrix + tokens[0, 0])
    return tokens + (product[0, 0] != 0)

  def counted(*args):
    in_flight.append(sum(not tokens.is_ready() for tokens in begun))
    prefilled = prefill(*args)
    begun.append(slow(prefilled.tokens))
    return prefilled._replace(tokens=begun[-1])

  compiled['prefill', 16] = counted
  runner.run(ask_all(engine, [request(i, max_tokens=2) for i in range(40)]))
  runner.run(engine.close())
  assert len(in_flight) == 40 and 0 < max(in_flight) <= 8


def test_a_released_engine_is_the_same_when_it_is_restored(runner, on_devices):
  engine = on_devices[8]
  asked, size = [request(i, samples=2) for i in range(3)], engine.device_bytes

  async def main():
    wanted = await ask_all(engine, asked)
    await engine.release('destroy')
    assert engine.device_bytes == 0 < size
    await engine.restore()
    assert engine.device_bytes == size
    return await ask_all(engine, asked), wanted

  for found, wanted in zip(*runner.run(main()), strict=True):
    assert_same(found, wanted)


def test_a_failed_load_ends_the_engine(runner, params):
  """The weights before are freed before a load."""
  engine = started(runner, params, 2, filters=False)
  with pytest.raises(ValueError, match='norm/scale'):
    runner.run(engine.load(Weights.of({'norm': {'scale': np.ones(3)}}, V2)))
  with pytest.raises(RunError, match='no known version'):
    runner.run(ask(engine, request(1)))
  runner.run(engine.close())


@pytest.mark.parametrize(
  ('mesh', 'devices', 'slots', 'message'),
  [
    ({'tensor': 8}, 8, 8, 'tensor=8 does not divide the 4 key-value heads'),
    ({'tensor': 1}, 8, 12, 'data=8 does not divide rollout.embedded.slots, 12'),
    ({'data': 2, 'tensor': 2}, 8, 8, 'data=2 tensor=2 does not match .* of process 0, 8'),
    ({'tensor': 4}, 2, 8, 'data=None tensor=4 does not match .* of process 0, 2'),
    ({'data': 0}, 8, 8, r'mesh\.data: got 0'),
    ({'data': None, 'tensor': None}, 8, 8, 'both None'),
  ],
)
def test_a_mesh_that_cannot_work_is_refused(mesh, devices, slots, message):
  with pytest.raises(UserError, match=message) as error:
    EmbeddedEngine(
      MODEL,
      EmbeddedConfig(slots=slots, mesh=EmbeddedMesh(**mesh)),
      max_length=LENGTH,
      seed=0,
      run=DeviceThread().run,
      devices=jax.devices()[:devices],
    )
  assert '\n' not in str(error.value)
