import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm.ops import logprobs as module
from jaxrl_llm.ops.logprobs import (
  KernelShardings,
  TimeOrder,
  plan_token_chunk,
  sequence_scores,
  state_values,
  token_logprobs,
  token_values,
)

ROWS, TIME, EMBED, VOCAB = 3, 12, 8, 17


@pytest.fixture
def batch():
  rng = np.random.default_rng(0)
  segments = np.array([[1] * 5 + [2] * 5 + [0] * 2, [1] * 12, [1] * 3 + [0] * 9])
  return dict(
    hidden=jnp.asarray(rng.normal(size=(ROWS, TIME, EMBED)), jnp.float32),
    kernel=jnp.asarray(rng.normal(size=(VOCAB, EMBED)), jnp.float32),
    tokens=jnp.asarray(rng.integers(0, VOCAB, (ROWS, TIME)), jnp.int32),
    segment_ids=jnp.asarray(segments, jnp.int32),
    temperature=jnp.asarray(rng.uniform(0.5, 2.0, (ROWS, 1)) * np.ones((1, TIME)), jnp.float32),
  )


def naive(b):
  """Loops over tokens, in float64."""
  logprobs, entropy = np.zeros((ROWS, TIME)), np.zeros((ROWS, TIME))
  hidden, kernel = np.asarray(b['hidden'], np.float64), np.asarray(b['kernel'], np.float64)
  for r in range(ROWS):
    for t in range(1, TIME):
      segment = int(b['segment_ids'][r, t])
      if segment == 0 or segment != int(b['segment_ids'][r, t - 1]):
        continue
      logits = kernel @ hidden[r, t - 1] / float(b['temperature'][r, t])
      p = np.exp(logits - logits.max())
      p /= p.sum()
      logprobs[r, t] = np.log(p[int(b['tokens'][r, t])])
      entropy[r, t] = -(p * np.log(p)).sum()
  return logprobs, entropy


CUTS = [
  dict(token_chunk=12),
  dict(token_chunk=1),
  dict(token_chunk=4),
  dict(token_chunk=12, time_shards=3),
  dict(token_chunk=4, time_shards=2),
  dict(token_chunk=6, time_shards=6, row_shards=3),
  dict(token_chunk=3, row_shards=3),
]


@pytest.mark.parametrize('cut', CUTS, ids=str)
def test_equals_naive_loop(batch, cut):
  found = jax.jit(functools.partial(token_logprobs, **cut))(**batch)
  logprobs, entropy = naive(batch)
  np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-6)
  np.testing.assert_allclose(found.entropy, entropy, atol=5e-6)


def plain(hidden, kernel, tokens, segment_ids, temperature):
  """All logits at once, with the gradients that JAX derives."""
  logp = jax.nn.log_softmax(hidden[:, :-1] @ kernel.T / temperature[:, 1:, None])
  chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
  continues = (segment_ids[:, 1:] > 0) & (segment_ids[:, 1:] == segment_ids[:, :-1])

  def first(x):
    return jnp.pad(jnp.where(continues, x, 0), ((0, 0), (1, 0)))

  return first(chosen), first(-(jnp.exp(logp) * logp).sum(-1))


@pytest.mark.parametrize('cut', CUTS, ids=str)
def test_hidden_states_may_have_another_order_than_tokens(batch, cut):
  permutation = np.random.default_rng(2).permutation(TIME)
  order = TimeOrder(lambda x: x[:, permutation], lambda x: x[:, np.argsort(permutation)])
  permuted = batch | {'hidden': batch['hidden'][:, permutation]}
  wanted = np.random.default_rng(3).random((ROWS, TIME)) < 0.5
  for asked, mask in ((None, 1), (jnp.asarray(wanted), wanted)):
    found = token_logprobs(**permuted, wanted=asked, order=order, **cut)
    for x, expected in zip(found, naive(batch), strict=True):
      np.testing.assert_allclose(x, mask * expected, atol=5e-6)


@pytest.mark.parametrize('cut', CUTS, ids=str)
def test_gradients_are_those_of_plain_logits_in_float64(batch, cut):
  with jax.enable_x64(True):
    wide = {
      name: jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x
      for name, x in batch.items()
    }
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, ROWS, TIME)))

    def loss(of, **states):
      logprobs, entropy = of(**{**wide, **states})
      assert logprobs.dtype == entropy.dtype == jnp.float64
      return (weights[0] * logprobs + weights[1] * entropy).sum()

    states = {name: wide[name] for name in ('hidden', 'kernel')}

    def gradient(of):
      return jax.value_and_grad(lambda states: loss(of, **states))

    wanted = gradient(plain)(states)
    found = jax.jit(gradient(functools.partial(token_logprobs, **cut)))(states)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    for name, one in wanted[1].items():
      assert found[1][name].dtype == jnp.float64
      assert np.linalg.norm(found[1][name] - one) <= 1e-12 * np.linalg.norm(one)


def test_the_temperature_has_no_gradient(batch):
  def loss(temperature):
    return token_logprobs(**{**batch, 'temperature': temperature}, token_chunk=4).logprobs.sum()

  np.testing.assert_array_equal(jax.grad(loss)(batch['temperature']), 0)


@pytest.mark.parametrize('kernel_dtype', ['bfloat16', 'float32'])
def test_many_chunks_add_up_in_float32(kernel_dtype):
  # Each of 1,023 positions gives the kernel the same gradient, of which a sum in bfloat16 would
  # lose all after 256.
  time = 1024
  ones, ids = jnp.ones((1, time, 1), jnp.bfloat16), jnp.ones((1, time), jnp.int32)

  def loss(kernel):
    return token_logprobs(
      ones, kernel, 0 * ids, ids, jnp.ones((1, time)), token_chunk=1
    ).logprobs.sum()

  found = jax.grad(loss)(jnp.zeros((2, 1), kernel_dtype))
  assert found.dtype == kernel_dtype
  np.testing.assert_allclose(
    np.asarray(found, np.float32), [[(time - 1) / 2], [-(time - 1) / 2]], rtol=2**-8
  )


@pytest.mark.parametrize('token_chunk', [3, 12])
def test_logits_are_not_kept_for_the_backward_pass(batch, token_chunk):
  def of(hidden, kernel):
    return token_logprobs(**{**batch, 'hidden': hidden, 'kernel': kernel}, token_chunk=token_chunk)

  _, backward = jax.vjp(of, batch['hidden'], batch['kernel'])
  kept = [leaf.size for leaf in jax.tree.leaves(backward)]
  assert max(kept) == batch['hidden'].size < ROWS * TIME * VOCAB


def shapes(rows, time, embed, vocab):
  whole = jax.ShapeDtypeStruct((rows, time), jnp.int32)

  def single(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  return single(rows, time, embed), single(vocab, embed), whole, whole, single(rows, time)


def value_and_gradients(**cut):
  """Of a loss that reads all logprobs and entropies, by hidden states and kernel."""

  def loss(*arguments):
    found = token_logprobs(*arguments, **cut)
    return (found.logprobs * jnp.cos(jnp.arange(found.logprobs.shape[1])) + found.entropy**2).sum()

  return jax.value_and_grad(loss, (0, 1))


def test_chunks_take_an_eighth_of_the_temporaries_of_full_logits():
  rows, time, vocab = 2, 64, 131_072

  def temporaries(chunk):
    program = (
      jax.jit(value_and_gradients(token_chunk=chunk)).lower(*shapes(rows, time, 4, vocab)).compile()
    )
    return program.memory_analysis().temp_size_in_bytes

  full = temporaries(time)
  assert full >= rows * time * vocab * 4
  assert temporaries(2) <= full / 8


def collectives(program):
  """(operation, result's shapes, whether it runs once) of each collective of a compiled program."""
  found, once = [], False
  for line in program.as_text().splitlines():
    if not line.startswith(' '):
      once = line.startswith('ENTRY')
    kinds = (
      'all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute|collective-broadcast'
    )
    if operation := re.search(rf' = (.*?) ({kinds})(-start)?\(', line):
      dimensions = [
        [int(n) for n in d.split(',') if n] for d in re.findall(r'\w\[([\d,]*)\]', operation[1])
      ]
      found.append((operation[2], dimensions, once))
  return found


STATES = (4, 48, 8)
SUMS = ('all-reduce', 'reduce-scatter')
WORDS = 1048
"""Of a vocabulary whose multiples are no other size in the programs below."""


def mesh(axes):
  return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@functools.cache
def unsharded():
  return jax.jit(value_and_gradients(token_chunk=STATES[1]))


def sharded(axes, states, kernel, wanted=None, **cut):
  """Compiles for a mesh of eight devices, compares the results with those of one, and returns the
  collectives.

  Args:
    axes: the mesh's, with their sizes.
    states: mesh axes of rows and time.
    kernel: mesh axes of the kernel.
    wanted: as in `token_logprobs`; lies as the tokens do.
    cut: as in `token_logprobs`.
  """
  rng, (rows, time, embed) = np.random.default_rng(0), STATES
  arguments = [
    rng.normal(size=(rows, time, embed)).astype(np.float32),
    rng.normal(size=(WORDS, embed)).astype(np.float32),
    rng.integers(0, WORDS, (rows, time), np.int32),
    np.repeat([[1, 2], [1, 1], [1, 0], [1, 2]], time // 2, axis=1).astype(np.int32),
    rng.uniform(0.5, 2.0, (rows, time)).astype(np.float32),
  ]
  arguments += [] if wanted is None else [wanted]

  def of(*names):
    return NamedSharding(mesh(axes), PartitionSpec(*names))

  places = [of(*states), of(*kernel), *[of(*states)] * (len(arguments) - 2)]
  program = jax.jit(
    value_and_gradients(**cut), in_shardings=places, out_shardings=(of(), tuple(places[:2]))
  )
  program = program.lower(*arguments).compile()
  alone = unsharded()(*arguments)
  found = program(*(jax.device_put(x, place) for x, place in zip(arguments, places)))
  for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(found)):
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)
  return collectives(program)


def of_the_whole_vocabulary(found):
  return [each for each in found if any(n % WORDS == 0 for shape in each[1] for n in shape if n)]


@pytest.mark.parametrize('token_chunk', [48, 12])
def test_a_sharded_vocabulary_stays_sharded(token_chunk):
  found = sharded(
    dict(data=2, tensor=4), ('data',), ('tensor', None), token_chunk=token_chunk, row_shards=2
  )
  assert {name for name, *_ in found} == {'all-reduce'}
  assert not of_the_whole_vocabulary(found)


def test_logits_that_are_made_whole_would_be_seen(monkeypatch):
  whole, logits = NamedSharding(mesh(dict(data=2, tensor=4)), PartitionSpec()), module._logits
  monkeypatch.setattr(
    module, '_logits', lambda *args: jax.lax.with_sharding_constraint(logits(*args), whole)
  )
  found = sharded(dict(data=2, tensor=4), ('data',), ('tensor', None), token_chunk=12)
  assert 'all-gather' in {name for name, *_ in of_the_whole_vocabulary(found)}


def test_the_kernels_gradient_is_reduced_once_and_states_stay_where_the_rows_parts_are_known():
  def moved(size, **cut):
    found = sharded(dict(data=2, tensor=4), ('data',), ('tensor', None), token_chunk=12, **cut)
    return [
      (name, once) for name, each, once in found if any(np.prod(shape) == size for shape in each)
    ]

  kernel, states = STATES[-1] * WORDS // 4, np.prod(STATES)
  assert moved(kernel, row_shards=2) == [('all-reduce', True)] and not moved(states, row_shards=2)
  assert any(name == 'all-gather' for name, _ in moved(states))


@pytest.mark.parametrize('token_chunk', [12, 48])
def test_on_tpus_the_kernels_gradient_is_summed_by_blocks_of_the_vocabulary(
  monkeypatch, token_chunk
):
  """The code for TPUs, on CPUs."""
  axes = dict(fsdp=4, tensor=2)
  stored, used = (NamedSharding(mesh(axes), PartitionSpec(None, name)) for name in ('fsdp', None))
  cut = dict(token_chunk=token_chunk, row_shards=4, shardings=KernelShardings(stored, used))

  def summed():
    """Elements of the sums over devices that have the width of the kernel."""
    found = sharded(axes, ('fsdp',), (None, 'fsdp'), **cut)
    sums = [shape for name, each, _ in found if name in SUMS for shape in each]
    return [int(np.prod(shape)) for shape in sums if STATES[-1] in shape]

  assert STATES[-1] * WORDS in summed()
  monkeypatch.setattr(jax.lax, 'platform_dependent', lambda *x, tpu, **_: tpu(*x))
  # 1,048 words are four blocks of 256, and one that begins earlier.
  assert set(summed()) == {STATES[-1] * 256}


@pytest.mark.parametrize(
  ('platform', 'token_chunk', 'is_first'),
  [
    ('tpu', 12, True),
    ('tpu', 48, True),
    ('cuda', 12, False),
    ('cuda', 48, True),
    ('cpu', 48, False),
  ],
)
def test_the_kernels_gradient_is_summed_before_that_of_the_states_is_used(
  platform, token_chunk, is_first
):
  axes = dict(fsdp=4)
  stored, used = (NamedSharding(mesh(axes), PartitionSpec(None, name)) for name in ('fsdp', None))
  cut = dict(token_chunk=token_chunk, row_shards=4, shardings=KernelShardings(stored, used))
  arguments = shapes(*STATES, WORDS)
  program = jax.jit(value_and_gradients(**cut)).trace(*arguments)
  lowered = program.lower(lowering_platforms=(platform,)).as_text()
  barriers = re.findall(r'optimization_barrier .* : (.+)', lowered)
  kernel = f'tensor<{WORDS}x{STATES[-1]}xf32>'
  assert [kernel in types for types in barriers] == [True] * is_first


@pytest.mark.parametrize('token_chunk', [12, 48])
def test_parts_of_time_stay_where_they_are(token_chunk):
  axes, states = dict(data=2, sequence=4), ('data', 'sequence')
  found = sharded(axes, states, (), token_chunk=token_chunk, time_shards=4, row_shards=2)
  assert {name for name, *_ in found} == {'all-reduce', 'collective-permute'}
  # The shift moves one position of each row to the neighbour.
  moved = [
    shape for name, dimensions, _ in found if name == 'collective-permute' for shape in dimensions
  ]
  assert {int(np.prod(shape)) for shape in moved} == {2}


def test_chunks_across_the_parts_of_time_would_be_seen():
  found = sharded(dict(data=2, sequence=4), ('data', 'sequence'), (), token_chunk=12)
  assert any(
    name == 'all-gather' and np.prod(shape) == np.prod(STATES) / 2
    for name, each, _ in found
    for shape in each
  )


def test_vocabulary_rows_and_time_are_sharded_together():
  axes, states = dict(data=2, sequence=2, tensor=2), ('data', 'sequence')
  found = sharded(axes, states, ('tensor', None), token_chunk=12, time_shards=2, row_shards=2)
  assert {name for name, *_ in found} == {'all-reduce', 'collective-permute'}
  assert not of_the_whole_vocabulary(found)


@pytest.mark.parametrize('cut', CUTS, ids=str)
def test_what_is_not_wanted_is_zero_and_teaches_nothing(batch, cut):
  weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, ROWS, TIME)))

  def loss(states, mask, asked):
    logprobs, entropy = token_logprobs(**{**batch, **states}, **asked, **cut)
    return (mask * (weights[0] * logprobs + weights[1] * entropy)).sum(), (logprobs, entropy)

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
  states = {name: batch[name] for name in ('hidden', 'kernel')}
  for share in (0.0, 0.3, 1.0):
    wanted = jnp.asarray(np.random.default_rng(2).random((ROWS, TIME)) < share)
    (value, _), all_of_them = gradient(states, wanted, {})
    (asked, outputs), found = gradient(states, jnp.ones_like(wanted), {'wanted': wanted})
    np.testing.assert_allclose(asked, value, rtol=1e-5)
    for one in outputs:
      np.testing.assert_array_equal(one[~wanted], 0)
    for name, one in all_of_them.items():
      assert np.linalg.norm(found[name] - one) <= 1e-5 * np.linalg.norm(one), share


def test_chunks_of_what_is_not_wanted_are_not_computed(batch):
  """12 of 36 positions in chunks of 6: whatever the other 24 hold, nothing comes of it."""
  segments, wanted = jnp.ones((ROWS, TIME), jnp.int32), np.zeros((ROWS, TIME), bool)
  wanted[:, 3:7] = True
  poison = jnp.where(jnp.roll(wanted, -1, axis=1)[..., None], batch['hidden'], jnp.nan)

  def gradient(positions):
    def loss(hidden, kernel):
      arguments = {**batch, 'hidden': hidden, 'kernel': kernel, 'segment_ids': segments}
      return token_logprobs(
        **arguments, wanted=jnp.asarray(wanted), token_chunk=positions
      ).logprobs.sum()

    return jax.grad(loss, (0, 1))(poison, batch['kernel'])

  by_hidden, by_kernel = gradient(2)
  assert np.isfinite(by_kernel).all() and (by_hidden[~np.roll(wanted, -1, axis=1)] == 0).all()
  assert np.isnan(gradient(12)[1]).all()


def test_what_is_wanted_is_found_without_moving_states():
  """Parts with more and with less to do; only how many chunks there are is agreed."""
  wanted = np.random.default_rng(3).random(STATES[:2]) < [[0.9], [0.1], [0.3], [0.0]]
  axes, states = dict(data=2, sequence=2, tensor=2), ('data', 'sequence')
  found = sharded(
    axes, states, ('tensor', None), wanted, token_chunk=12, time_shards=2, row_shards=2
  )
  assert {name for name, *_ in found} == {'all-reduce', 'collective-permute'}
  assert not of_the_whole_vocabulary(found)


def test_plan_fits_the_budget_and_divides():
  # 8 rows * 3 positions * 100 words * 4 bytes = 9,600; 12 positions are 38,400.
  assert plan_token_chunk(chunks=8, time=12, vocab=100, budget_bytes=10_000) == 3
  assert plan_token_chunk(chunks=8, time=12, vocab=100, budget_bytes=38_400) == 12
  assert plan_token_chunk(chunks=8, time=12, vocab=100, budget_bytes=1) == 1
  # A device of two has one part's share of a chunk: 3 of its 6 positions, and so 6 of all.
  assert plan_token_chunk(chunks=8, time=12, vocab=100, budget_bytes=10_000, time_shards=2) == 6
  assert plan_token_chunk(chunks=8, time=12, vocab=100, budget_bytes=1, time_shards=4) == 4


@pytest.mark.parametrize(
  ('cut', 'message'),
  [
    (dict(token_chunk=5), 'token_chunk 5 does not divide the 12 positions'),
    (dict(token_chunk=4, time_shards=3), 'time_shards 3 does not divide token_chunk 4'),
    (dict(token_chunk=4, row_shards=2), 'row_shards 2 does not divide the 3 rows'),
  ],
)
def test_cuts_that_do_not_divide_are_refused(batch, cut, message):
  with pytest.raises(ValueError, match=message):
    token_logprobs(**batch, **cut)


# Hidden states of two numbers, (1, 2, ... in reading order) and a second that the kernel (1, 0)
# does not read, so that the output at a place is its own number. The first chunk holds two adjacent
# segments and padding, the second one that ends where the chunk ends, after one of a single token.
PLACES = np.arange(1.0, 13.0).reshape(2, 6)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]])


def read(function, **options):
  hidden = jnp.asarray(np.stack([PLACES, np.full((2, 6), 99.0)], axis=-1), jnp.float32)
  return function(hidden, jnp.array([[1.0, 0.0]]), jnp.asarray(SEGMENTS, jnp.int32), **options)


def test_a_value_is_of_the_state_before_its_token():
  # Entry t is what the place before t says; the first token of a segment has no state before it.
  wanted = [[0, 1, 2, 0, 4, 0], [0, 0, 8, 9, 10, 11]]
  np.testing.assert_array_equal(read(token_values).values, wanted)


def test_state_values_have_the_state_after_each_token_too():
  """That after a segment's last token is no token's value: it is what a cut answer would go on
  from.
  """
  found = read(state_values)
  np.testing.assert_array_equal(found.values, read(token_values).values)
  np.testing.assert_array_equal(found.next_values, [[1, 2, 3, 4, 5, 0], [7, 8, 9, 10, 11, 12]])


def test_a_score_is_read_at_the_last_token_of_each_segment():
  # Segment 1 ends at place 3, 2 at 5; in the second chunk at 7 and, with the chunk, at 12. The
  # third is not there.
  np.testing.assert_array_equal(read(sequence_scores, segments=3).scores, [[3, 5, 0], [7, 12, 0]])


def test_a_chunk_of_one_segment_or_of_none_has_its_score_or_none():
  hidden, kernel = jnp.asarray(PLACES[..., None], jnp.float32), jnp.ones((1, 1))
  ids = jnp.array([[1] * 6, [0] * 6], jnp.int32)
  np.testing.assert_array_equal(
    sequence_scores(hidden, kernel, ids, segments=2).scores, [[6, 0], [0, 0]]
  )
  np.testing.assert_array_equal(
    token_values(hidden, kernel, ids).values, [[0, 1, 2, 3, 4, 5], [0] * 6]
  )


@pytest.mark.parametrize(
  ('function', 'options', 'wanted'),
  [
    # d of the sum over outputs: places whose number is read somewhere, once each.
    (token_values, {}, [[1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 0]]),
    (sequence_scores, {'segments': 2}, [[0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1]]),
  ],
)
def test_gradients_go_to_the_places_that_are_read_and_to_no_padding(function, options, wanted):
  kernel, ids = jnp.array([[1.0, 0.0]]), jnp.asarray(SEGMENTS, jnp.int32)
  hidden = jnp.asarray(np.stack([PLACES, np.full((2, 6), 99.0)], axis=-1), jnp.float32)
  found = jax.grad(lambda h: function(h, kernel, ids, **options)[0].sum())(hidden)
  np.testing.assert_array_equal(found[..., 0], wanted)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_values_and_scores_are_at_least_float32(dtype):
  hidden, kernel, ids = (
    jnp.ones((1, 4, 8), dtype),
    jnp.ones((1, 8), dtype),
    jnp.ones((1, 4), jnp.int32),
  )
  assert token_values(hidden, kernel, ids).values.dtype == jnp.float32
  assert sequence_scores(hidden, kernel, ids, segments=1).scores.dtype == jnp.float32
