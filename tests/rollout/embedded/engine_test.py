"""The embedded engine against full forwards and naive loops, and against itself under other
loads.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_contract import ask_indexed, continued
from stepwise import stepwise_logprobs

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.rollout.api import CUT, Request, Sampling, Weights
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine, plan_buckets
from jaxrl_llm.rollout.embedded.sampling import draw, row_key
from jaxrl_llm.rollout.embedded.speculation import SpeculationConfig
from jaxrl_llm.rollout.repetition import RepetitionDetection

VOCAB, LENGTH = 40, 40
# Wide kernels: logits that are far from uniform, so that a wrong cache entry or position shows.
SPEC = tiny(
  'qwen3', VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=2, initializer_range=0.3
)
MODEL = build_model(SPEC)
V1, V2 = Version(0, 1), Version(0, 2)
COMPILED = '/jax/core/compile/backend_compile_duration'


class DeviceThread:
  """The project's executor, with a door: closed, device calls wait before they begin."""

  def __init__(self):
    self._executor = concurrent.futures.ThreadPoolExecutor(1)
    self.door = asyncio.Event()
    self.door.set()
    self.broken: Exception | None = None

  async def run(self, function, *args, **kwargs):
    await self.door.wait()
    if self.broken is not None:
      raise self.broken
    return await asyncio.get_running_loop().run_in_executor(
      self._executor, functools.partial(function, *args, **kwargs)
    )


@pytest.fixture(scope='module')
def runner():
  with asyncio.Runner() as runner:
    yield runner


@pytest.fixture(scope='module')
def params():
  init = jax.jit(MODEL.init)
  return {V1: init(jax.random.key(1)), V2: init(jax.random.key(2))}


def make(runner, params, **fields):
  thread = DeviceThread()
  config = EmbeddedConfig(
    **{'slots': 6, 'prefill_rows': 3, 'prefill_buckets': (8, 16), 'decode_steps': 4, **fields}
  )
  engine = EmbeddedEngine(MODEL, config, max_length=LENGTH, seed=7, run=thread.run)
  runner.run(engine.start())
  runner.run(engine.load(Weights.of(params[V1], V1)))
  return engine, thread


@pytest.fixture(scope='module')
def opened(runner, params):
  engine, thread = make(runner, params)
  yield engine, thread
  runner.run(engine.close())


@pytest.fixture
def engine(opened, runner, params):
  """On version 1, whatever the test before did."""
  runner.run(opened[0].load(Weights.of(params[V1], V1)))
  return opened[0]


def request(number, length=5, **fields):
  prompt = tuple(np.random.default_rng(number).integers(0, VOCAB, length).tolist())
  return Request(
    **{'uid': f'r{number}', 'prompt': prompt, 'max_tokens': 12, 'key': (number, 9), **fields}
  )


async def ask(engine, asked):
  """The completions in the order of sample index."""
  return [
    c for _, c in sorted([pair async for pair in engine.generate(asked)], key=lambda pair: pair[0])
  ]


async def ask_all(engine, requests):
  return await asyncio.gather(*(ask(engine, asked) for asked in requests))


def assert_same(found, wanted):
  assert len(found) == len(wanted)
  for a, b in zip(found, wanted):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert a.finish == b.finish


@jax.jit
def full_logits(params, tokens):
  """Logits after every token of one sequence, by the trainer's forward."""
  tokens = tokens[None]
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = MODEL.apply(params, tokens, positions, jnp.ones_like(tokens))
  return (hidden @ MODEL.head_kernel(params).T)[0]


def logits_after(params, tokens):
  """Padded to one shape; causal attention does not look at the padding behind."""
  padded = np.zeros(LENGTH, np.int32)
  padded[: len(tokens)] = tokens
  return np.asarray(full_logits(params, padded), np.float64)[: len(tokens)]


def log_softmax(logits):
  top = logits.max(-1, keepdims=True)
  return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def forward_logprobs(params, prompt, tokens, temperature):
  logits = logits_after(params, [*prompt, *tokens.tolist()])[len(prompt) - 1 : -1]
  return log_softmax(logits / (temperature or 1.0))[np.arange(len(tokens)), tokens]


def test_logprobs_are_those_of_the_full_forward(runner, engine, params):
  shapes = [(1, 1.0), (2, 0.7), (5, 1.3), (8, 1.0), (9, 1.0), (16, 0.0), (17, 2.0)]
  requests = [
    request(i, length, max_tokens=20, samples=2, sampling=Sampling(temperature=heat))
    for i, (length, heat) in enumerate(shapes)
  ]
  errors = []
  for asked, completions in zip(requests, runner.run(ask_all(engine, requests))):
    for completion in completions:
      wanted = forward_logprobs(
        params[V1], asked.prompt, completion.tokens, asked.sampling.temperature
      )
      errors.append(np.abs(wanted - completion.logprobs))
  errors = np.concatenate(errors)
  assert len(errors) == 2 * 20 * len(shapes)
  assert errors.mean() <= 1e-5 and errors.max() <= 1e-4, (errors.mean(), errors.max())


def test_greedy_is_the_naive_loop(runner, engine, params):
  for length in (1, 7):
    asked = request(length, length, sampling=Sampling(temperature=0.0), samples=2)
    tokens = list(asked.prompt)
    for _ in range(asked.max_tokens):
      tokens.append(int(logits_after(params[V1], tokens)[-1].argmax()))
    for completion in runner.run(ask(engine, asked)):
      assert completion.tokens.tolist() == tokens[length:]


def test_tokens_are_the_draws_of_their_counters(runner, engine, params):
  asked = request(4, 6, samples=2, sampling=Sampling(temperature=1.5))
  for index, completion in enumerate(runner.run(ask(engine, asked))):
    key = row_key(seed=7, words=asked.key, sample_index=index)
    tokens = list(asked.prompt)
    for _ in range(asked.max_tokens):
      logits = logits_after(params[V1], tokens)[-1:].astype(np.float32)
      drawn = jax.jit(draw)(logits, key[None], np.array([len(tokens)]), np.array([1.5], np.float32))
      tokens.append(int(drawn.tokens[0]))
    assert completion.tokens.tolist() == tokens[6:]


def crowd(seed, count):
  rng = np.random.default_rng(seed)
  return [
    request(
      100 + i,
      int(rng.integers(1, 17)),
      max_tokens=int(rng.integers(1, 20)),
      samples=int(rng.integers(1, 4)),
    )
    for i in range(count)
  ]


def test_a_request_is_the_same_alone_and_in_any_company(runner, engine):
  mine = [
    request(i, 3 + 3 * i, samples=3, sampling=Sampling(temperature=heat))
    for i, heat in enumerate((1.0, 0.5))
  ]
  alone = [runner.run(ask(engine, asked)) for asked in mine]
  for seed in range(3):
    others = crowd(seed, 12)
    at = np.random.default_rng(seed).permutation(len(others) + 2)
    mixed = [[*mine, *others][i] for i in at]
    found = runner.run(ask_all(engine, mixed))
    for i, wanted in enumerate(alone):
      assert_same(found[int(np.flatnonzero(at == i)[0])], wanted)


def test_steps_per_call_change_no_token(runner, engine, params):
  requests = crowd(5, 10)
  wanted = runner.run(ask_all(engine, requests))
  other, _ = make(runner, params, decode_steps=1, filters=False)
  for found, same in zip(runner.run(ask_all(other, requests)), wanted):
    assert_same(found, same)
  runner.run(other.close())


def test_samples_share_one_prefill_and_differ(runner, engine):
  before = engine.counts['prefilled_prompts'], engine.counts['prefill_calls']
  completions = runner.run(ask(engine, request(1, samples=15)))
  assert (engine.counts['prefilled_prompts'], engine.counts['prefill_calls']) == (
    before[0] + 1,
    before[1] + 1,
  )
  assert len({tuple(c.tokens.tolist()) for c in completions}) == 15
  assert_same(runner.run(ask(engine, request(1, samples=2))), completions[:2])


def test_seed_and_key_decide_the_draws(runner, engine):
  first, other, again = (runner.run(ask(engine, request(1, key=key))) for key in ((1,), (2,), (1,)))
  assert first[0].tokens.tolist() != other[0].tokens.tolist()
  assert_same(again, first)


def test_a_stop_token_ends_a_completion_and_belongs_to_it(runner, engine):
  free = runner.run(ask(engine, request(3, max_tokens=20)))[0]
  assert free.finish == Finish.LENGTH and len(free.tokens) == 20
  stop = int(free.tokens[9])
  at = free.tokens.tolist().index(stop)
  cut = runner.run(ask(engine, request(3, max_tokens=20, stop_ids=(stop,))))[0]
  assert cut.finish == Finish.STOP
  assert cut.tokens.tolist() == free.tokens[: at + 1].tolist()
  np.testing.assert_array_equal(cut.logprobs, free.logprobs[: at + 1])
  shorter = runner.run(ask(engine, request(3, max_tokens=at, stop_ids=(stop,)))) if at else []
  assert all(c.finish == Finish.LENGTH and len(c.tokens) == at for c in shorter)


@pytest.mark.parametrize(
  'sampling',
  [
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2)),
  ],
  ids=['greedy', 'sampled', 'repetition'],
)
def test_a_completion_in_parts_is_the_completion_in_one_go(runner, engine, sampling):
  """Parts of 6, 5 and 5 tokens, each of which computes its keys and values anew."""
  asked = request(2, samples=4, max_tokens=16, sampling=sampling, stop_ids=(7,))
  whole = runner.run(ask(engine, asked))
  parts = runner.run(ask(engine, dataclasses.replace(asked, max_tokens=6)))
  for index, (wanted, part) in enumerate(zip(whole, parts, strict=True)):
    tokens, logprobs = part.tokens.tolist(), part.logprobs.tolist()
    while part.finish == Finish.LENGTH and len(tokens) < 16:
      further = continued(asked, index, tokens, max_tokens=5)
      ((found, part),) = runner.run(ask_indexed(engine, further))
      assert found == index and part.segments[0].start == 0
      tokens, logprobs = tokens + part.tokens.tolist(), logprobs + part.logprobs.tolist()
    assert (tokens, part.finish) == (wanted.tokens.tolist(), wanted.finish)
    np.testing.assert_allclose(logprobs, wanted.logprobs, atol=1e-5)
  if sampling.repetition_detection is not None:
    assert Finish.REPETITION in {completion.finish for completion in whole}


def test_free_slots_are_refilled_at_once(runner, engine):
  lengths = np.random.default_rng(0).permutation([1, 2, 3, 5, 8, 20] * 8).tolist()
  requests = [request(i, 1 + i % 9, max_tokens=n) for i, n in enumerate(lengths)]
  before = engine.counts['decode_steps']
  done = runner.run(ask_all(engine, requests))
  assert [len(c.tokens) for (c,) in done] == lengths
  # Six workers that take the next completion the moment they are free.
  free_at = [0] * 6
  for length in lengths:
    heapq.heapreplace(free_at, free_at[0] + length)
  assert engine.counts['decode_steps'] - before == max(free_at)
  assert engine.free_slots == 6


def test_completions_come_as_they_end(runner, engine):
  async def order():
    ended = []

    async def one(asked):
      async for index, _ in engine.generate(asked):
        ended.append((asked.uid, index))

    await asyncio.gather(one(request(1, max_tokens=20)), one(request(2, max_tokens=2, samples=2)))
    return ended

  assert runner.run(order()) == [('r2', 0), ('r2', 1), ('r1', 0)]


def test_nothing_compiles_after_start(runner, engine, params):
  compiled = []

  def listener(name, duration, **_):
    if name == COMPILED:
      compiled.append(name)

  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    jax.jit(lambda x: x * 3 + len(compiled))(1.0)
    assert len(compiled) == 1, 'the listener does not see compilations'
    for version in (V2, V1):
      host = jax.tree.map(np.asarray, params[version])
      runner.run(engine.load(Weights.of(host, version)))
      kinds = [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(top_p=0.9),
        Sampling(top_k=3, temperature=0.5),
      ]
      requests = [
        request(
          i,
          1 + i % 16,
          max_tokens=1 + i % 20,
          samples=1 + i % 9,
          sampling=kinds[i % 4],
          stop_ids=(i, i + 1),
        )
        for i in range(30)
      ]
      runner.run(ask_all(engine, requests))
    assert len(compiled) == 1
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)


def test_filtered_requests_wait_for_their_own_wave(runner, engine, params):
  filters = Sampling(temperature=1.5, top_k=4, top_p=0.8)
  requests = [
    request(i, max_tokens=10, samples=2, sampling=filters if i % 2 else Sampling(temperature=1.5))
    for i in range(8)
  ]
  alone = [runner.run(ask(engine, asked)) for asked in requests]
  together = runner.run(ask_all(engine, requests))
  for asked, found, wanted in zip(requests, together, alone):
    assert_same(found, wanted)
    for completion in found:
      logits = (
        logits_after(params[V1], [*asked.prompt, *completion.tokens.tolist()])[
          len(asked.prompt) - 1 : -1
        ]
        / 1.5
      )
      for row, token, logprob in zip(logits, completion.tokens, completion.logprobs):
        kept = np.argsort(-row)
        if asked.sampling.filtered:
          mass = np.exp(log_softmax(row[kept[:4]]))
          kept = kept[: 1 + int(np.searchsorted(np.cumsum(mass), 0.8))]
        assert token in kept
        np.testing.assert_allclose(
          logprob, log_softmax(row[kept])[list(kept).index(token)], atol=1e-4
        )


async def load_between(engine, thread, requests, load, *, after_calls):
  """Starts requests, and a load that is next in line when `after_calls` decode calls have ended."""
  until = engine.counts['decode_calls'] + after_calls
  running = asyncio.gather(*(ask(engine, asked) for asked in requests))
  while engine.counts['decode_calls'] < until:
    await asyncio.sleep(0)
  thread.door.clear()
  loading = asyncio.create_task(load())
  await asyncio.sleep(0.01)
  thread.door.set()
  await loading
  return await running


def test_segments_say_which_version_drew_each_token(runner, opened, engine, params):
  requests = [request(i, max_tokens=24, samples=3) for i in range(4)]
  old = runner.run(ask_all(engine, requests))

  def load():
    return engine.load(Weights.of(params[V2], V2))

  found = runner.run(load_between(engine, opened[1], requests, load, after_calls=2))
  new = runner.run(ask_all(engine, requests))
  assert engine.version == V2
  # Two requests of three samples fill the six slots: they are cut; the other two begin after the
  # load.
  for asked, completions, before in zip(requests[:2], found, old):
    for completion, same in zip(completions, before):
      first, second = completion.segments
      assert (first.version, first.start, first.finish, first.engine) == (V1, 0, CUT, 'embedded')
      assert (second.version, second.start, second.end, second.finish) == (
        V2,
        first.end,
        24,
        'length',
      )
      assert first.end in (8, 12)
      np.testing.assert_array_equal(completion.tokens[: first.end], same.tokens[: first.end])
      np.testing.assert_array_equal(completion.logprobs[: first.end], same.logprobs[: first.end])
      versions = [V1] * first.end + [V2] * (24 - first.end)
      wanted = stepwise_logprobs(
        MODEL, [params[v] for v in versions], asked.prompt, completion.tokens
      )
      np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)
  for completions, after in zip(found[2:], new[2:]):
    assert_same(completions, after)
    assert all([s.version for s in c.segments] == [V2] for c in completions)


def test_running_samples_are_prefilled_again_where_asked(runner, params):
  """Tokens after a load are as if the new weights had read all of the sample, with or without
  drafts.
  """
  speculation = SpeculationConfig(tokens=2, ngram_min=1)
  for more in ({}, {'speculation': speculation}):
    engine, thread = make(runner, params, kv='recompute', prefill_buckets=(), **more)
    requests = [request(i, max_tokens=24, samples=3) for i in range(2)]
    load = functools.partial(engine.load, Weights.of(params[V2], V2))
    found = runner.run(load_between(engine, thread, requests, load, after_calls=2))
    for asked, completions in zip(requests, found):
      for completion in completions:
        first, second = completion.segments
        assert (first.version, second.version) == (V1, V2) and first.end >= 8
        for version, segment in zip((V1, V2), completion.segments):
          logits = logits_after(params[version], [*asked.prompt, *completion.tokens.tolist()])
          known = log_softmax(logits)[len(asked.prompt) - 1 : -1]
          wanted = known[np.arange(24), completion.tokens][segment.start : segment.end]
          drawn = completion.logprobs[segment.start : segment.end]
          np.testing.assert_allclose(drawn, wanted, atol=1e-4)
    runner.run(engine.close())


def test_loads_in_quick_succession_leave_no_empty_segment(runner, opened, engine, params):
  async def twice():
    await engine.load(Weights.of(params[V2], Version(0, 5)))
    await engine.load(Weights.of(params[V2], V2))

  ((completion,),) = runner.run(
    load_between(engine, opened[1], [request(1, max_tokens=24)], twice, after_calls=1)
  )
  assert all(segment.end > segment.start for segment in completion.segments)
  assert completion.segments[0].version == V1 and completion.segments[-1].version == V2


def test_weights_by_another_name_change_the_name_alone(runner, opened, engine, params):
  """What is running when the name changes goes by the new one from its first token under these
  weights.
  """
  requests = [request(i, max_tokens=24, samples=3) for i in range(4)]
  old = runner.run(ask_all(engine, requests))
  prefilled = engine.counts['prefilled_prompts']

  def relabel():
    return engine.relabel(V2)

  found = runner.run(load_between(engine, opened[1], requests, relabel, after_calls=2))
  assert engine.version == V2
  assert engine.counts['prefilled_prompts'] == prefilled + 4, 'what is cached stays'
  for completions, before in zip(found, old):
    assert_same(completions, before)
    for completion in completions:
      assert [(s.version, s.start, s.end) for s in completion.segments] == [
        (V2, 0, len(completion.tokens))
      ]


def test_a_new_name_is_not_that_of_the_weights_before(runner, opened, engine, params):
  """Cut by a load, then renamed, and cut again by a load of the first weights: three segments, two
  sets of weights.
  """
  named, last = Version(0, 3), Version(0, 4)

  async def change():
    calls = engine.counts['decode_calls']
    await engine.load(Weights.of(params[V2], V2))
    while engine.counts['decode_calls'] < calls + 2:
      await asyncio.sleep(0)
    await engine.relabel(named)
    assert engine.version == named
    await engine.load(Weights.of(params[V1], last))

  asked = request(1, max_tokens=34)
  ((completion,),) = runner.run(load_between(engine, opened[1], [asked], change, after_calls=1))
  assert [s.version for s in completion.segments] == [V1, named, last]
  assert all(s.end > s.start for s in completion.segments)
  drawn_by = dict(zip([V1, named, last], [V1, V2, V1]))
  versions = [drawn_by[s.version] for s in completion.segments for _ in range(s.start, s.end)]
  wanted = stepwise_logprobs(MODEL, [params[v] for v in versions], asked.prompt, completion.tokens)
  np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


def test_the_engine_keeps_its_own_copy_of_weights(runner, engine, params):
  asked = request(1)
  wanted = runner.run(ask(engine, asked))
  host = jax.tree.map(np.array, params[V1])
  runner.run(engine.load(Weights.of(host, V1)))
  for leaf in jax.tree.leaves(host):
    leaf[...] = 0
  assert_same(runner.run(ask(engine, asked)), wanted)
  device = jax.tree.map(jnp.array, params[V1])
  runner.run(engine.load(Weights.of(device, V1)))
  jax.block_until_ready(
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(device)
  )
  assert_same(runner.run(ask(engine, asked)), wanted)


def test_weights_may_come_flat_or_scanned(runner, engine, params):
  asked = request(1)
  wanted = runner.run(ask(engine, asked))
  host = jax.tree.map(np.asarray, params[V1])
  for form in (flatten(host), stack_layers(host), flatten(stack_layers(host))):
    runner.run(engine.load(Weights.of(params[V2], V2)))
    runner.run(engine.load(Weights.of(form, V1)))
    assert_same(runner.run(ask(engine, asked)), wanted)


def test_foreign_weights_are_refused_and_change_nothing(runner, engine, params):
  wanted = runner.run(ask(engine, request(1)))
  flat = flatten(params[V2])
  for wrong in (
    {**flat, 'norm/scale': np.ones(3)},
    {**flat, 'extra/kernel': np.ones(3)},
    {name: leaf for name, leaf in flat.items() if name != 'norm/scale'},
  ):
    with pytest.raises(ValueError, match=r'norm/scale|extra/kernel'):
      runner.run(engine.load(Weights.of(wrong, V2)))
  assert engine.version == V1
  assert_same(runner.run(ask(engine, request(1))), wanted)


def test_cancelled_requests_free_their_slots(runner, engine):
  asked = request(1)
  wanted = runner.run(ask(engine, asked))

  async def cancel():
    doomed = [
      asyncio.create_task(ask(engine, request(i, max_tokens=24, samples=4))) for i in range(10, 14)
    ]
    until = engine.counts['decode_calls'] + 1
    while engine.counts['decode_calls'] < until:
      await asyncio.sleep(0)
    assert engine.free_slots == 0
    for task in doomed:
      task.cancel()
    await asyncio.wait(doomed)
    before = engine.counts['tokens']
    survivor = await ask(engine, asked)
    return survivor, engine.counts['tokens'] - before

  survivor, tokens = runner.run(cancel())
  assert_same(survivor, wanted)
  # The survivor's 12; what was given up draws at most once more, 4 tokens in each of the 6 slots.
  assert tokens <= 12 + 6 * 4
  assert engine.free_slots == 6


def test_leaving_the_iteration_frees_the_slots(runner, engine):
  async def first_only():
    completions = engine.generate(request(1, max_tokens=24, samples=20))
    index, _ = await anext(completions)
    await completions.aclose()
    await ask(engine, request(2))
    return index

  assert runner.run(first_only()) in range(6)
  assert engine.free_slots == 6


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'length': 5, 'max_tokens': 36},
      '5 prompt tokens and max_tokens 36 exceed the maximum length of 40',
    ),
    ({'length': 18}, r'a prompt of 18 tokens fits none of .*\(8, 16\); add one of at least 17'),
    ({'prompt': (1, VOCAB)}, 'outside the vocabulary of 40'),
    ({'stop_ids': (-1,)}, 'outside the vocabulary of 40'),
    ({'stop_ids': tuple(range(9))}, '9 stop ids, wanted at most .* 8'),
  ],
)
def test_what_cannot_be_served_is_refused(runner, engine, fields, message):
  with pytest.raises(UserError, match=message):
    runner.run(ask(engine, request(1, **fields)))
  assert len(runner.run(ask(engine, request(1)))[0].tokens) == 12


def test_the_longest_sequence_fits(runner, engine, params):
  (completion,) = runner.run(ask(engine, request(1, 17, max_tokens=LENGTH - 17)))
  wanted = forward_logprobs(params[V1], request(1, 17).prompt, completion.tokens, 1.0)
  np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


def test_a_failed_device_call_fails_every_request(runner, params):
  engine, thread = make(
    runner, params, slots=2, prefill_rows=1, prefill_buckets=(16,), filters=False
  )
  with pytest.raises(UserError, match='filters'):
    runner.run(ask(engine, request(1, sampling=Sampling(top_k=2))))
  thread.broken = OSError('device gone')

  async def both():
    return await asyncio.gather(
      *(ask(engine, request(i)) for i in range(4)), return_exceptions=True
    )

  assert [str(error) for error in runner.run(both())] == ['device gone'] * 4
  with pytest.raises(RunError, match='device gone'):
    runner.run(ask(engine, request(9)))
  with pytest.raises(RunError, match='device gone'):
    runner.run(engine.load(Weights.of(params[V2], V2)))
  runner.run(engine.close())


def test_closing_fails_what_runs(runner, params):
  engine, _ = make(runner, params, slots=2, prefill_rows=1, prefill_buckets=(16,), filters=False)

  async def close_under_way():
    running = asyncio.create_task(ask(engine, request(1, max_tokens=24, samples=8)))
    while not engine.counts['decode_calls']:
      await asyncio.sleep(0)
    await engine.close()
    await running

  with pytest.raises(RunError, match='closed'):
    runner.run(close_under_way())


def test_planned_buckets():
  assert plan_buckets((32, 8, 8), max_length=24) == (8, 24)
  # Prompts have at most 63 tokens, of which 62 are prefilled.
  assert plan_buckets((), max_length=64) == (16, 32, 64)
  # 66: at most 64 are prefilled; 67: 65 are.
  assert plan_buckets((), max_length=66) == (16, 32, 64)
  assert plan_buckets((), max_length=67) == (16, 32, 64, 67)
  assert plan_buckets((), max_length=13) == (13,)


def test_config_refuses_impossible_shapes():
  for fields in ({'slots': 0}, {'decode_steps': 0}, {'prefill_buckets': (0,)}):
    with pytest.raises(UserError, match=next(iter(fields))):
      EmbeddedConfig(**fields)


def test_request_numbers_make_distinct_prompts():
  prompts = [request(i).prompt for i in range(15)]
  assert all(a != b for a, b in itertools.combinations(prompts, 2))


def test_a_released_engine_takes_no_device_memory_and_samples_the_same_when_it_is_restored(
  runner, params
):
  asked = [request(i, samples=2) for i in range(3)]
  engine, _ = make(runner, params)

  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if name == COMPILED else None
  )

  async def main():
    wanted = await ask_all(engine, asked)
    size = engine.device_bytes
    for version in (V1, V2):
      await engine.release('destroy')
      assert engine.is_released and engine.device_bytes == 0 < size
      if version == V2:
        await engine.load(Weights.of(params[V2], V2))
        assert engine.device_bytes == 0
      waiting = asyncio.create_task(ask_all(engine, asked))
      await asyncio.sleep(0.01)
      assert not waiting.done()
      compiled.clear()
      await engine.restore()
      found = await waiting
      assert not compiled and engine.device_bytes == size
      if version == V1:
        for pair in zip(found, wanted, strict=True):
          assert_same(*pair)
      assert {s.version for group in found for c in group for s in c.segments} == {version}
    await engine.close()

  runner.run(main())


def test_an_engine_with_completions_in_progress_is_not_released(runner, params):
  engine, thread = make(runner, params)

  async def main():
    running = asyncio.create_task(ask(engine, request(1, max_tokens=20)))
    while engine.counts['decode_calls'] == 0:
      await asyncio.sleep(0.001)
    thread.door.clear()
    releasing = asyncio.create_task(engine.release('destroy'))
    thread.door.set()
    with pytest.raises(RuntimeError, match='1 completions in progress, the first of request r1'):
      await releasing
    assert len((await running)[0].tokens) > 0
    abandoned = asyncio.create_task(ask(engine, request(2, max_tokens=20)))
    calls = engine.counts['decode_calls']
    while engine.counts['decode_calls'] == calls:
      await asyncio.sleep(0.001)
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    await engine.release('destroy')
    assert engine.device_bytes == 0
    await engine.close()

  runner.run(main())
