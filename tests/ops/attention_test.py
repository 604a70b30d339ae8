"""Every implementation of attention against loops over NumPy, and what each of them promises beside
its values.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.ops import fused
from jaxrl_llm.ops.attention import attention, choose, why_not_shared
from jaxrl_llm.ops.places import Places, visible


@dataclasses.dataclass(frozen=True)
class Case:
  """Rows of packed segments, each by its length, with padding after them; or single tokens that
  look into a cache.
  """

  rows: tuple[tuple[int, ...], ...] = ()
  time: int = 20
  heads: tuple[int, int] = (4, 2)
  window: int | None = None
  softcap: float | None = None
  cached: tuple[tuple[int, ...], ...] = ()
  """Positions of each row's queries; the cache has `time` entries."""
  padding: int = 0
  """Position that padding is given."""
  parents: tuple[tuple[tuple[int, int], ...], ...] = ()
  """For each segment of each row, the number of the segment that it continues from, and the
  position at which it does; (0, 0) for a segment that shares nothing. Empty if none does.
  """

  @property
  def rule(self):
    return dict(window=self.window, softcap=self.softcap)

  def places(self) -> tuple[Places, Places]:
    if self.cached:
      positions, indices = (
        np.array(self.cached),
        np.tile(np.arange(self.time), (len(self.cached), 1)),
      )
      return placed(np.ones_like(positions), positions), placed(np.ones_like(indices), indices)
    rest = [self.time - sum(lengths) for lengths in self.rows]
    ids = [
      [i + 1 for i, n in enumerate(row) for _ in range(n)] + [0] * left
      for row, left in zip(self.rows, rest)
    ]
    parents = self.parents or [[(0, 0)] * len(row) for row in self.rows]
    at = [
      [p for n, (_, first) in zip(row, of) for p in range(first, first + n)] + [self.padding] * left
      for row, left, of in zip(self.rows, rest, parents)
    ]
    places = placed(ids, at)
    if self.parents:
      places = places._replace(
        seen_until=jnp.array([*map(self._readers, range(len(ids)), ids, at)])
      )
    return places, places

  def _readers(self, row: int, ids, at) -> list[int]:
    """The last segment on whose path each token is, found by walking the paths."""
    last = [0] * len(ids)
    for segment in range(1, len(self.rows[row]) + 1):
      path = self.path(row, segment)
      for token, place in enumerate(zip(ids, at)):
        if place in path:
          last[token] = segment
    return last

  def path(self, row: int, segment: int) -> set[tuple[int, int]]:
    """Segment and position of all tokens that the last token of a segment sees."""
    length = self.rows[row][segment - 1]
    parent, first = self.parents[row][segment - 1] if self.parents else (0, 0)
    before = {(s, p) for s, p in self.path(row, parent) if p < first} if parent else set()
    return before | {(segment, p) for p in range(first, first + length)}

  def draw(self, dtype) -> tuple[jax.Array, ...]:
    """Queries, keys, values, and a weight for each output."""
    rng = np.random.default_rng(0)
    queries, keys = (x.positions.shape for x in self.places())
    many, few = self.heads
    shapes = (*queries, many), (*keys, few), (*keys, few), (*queries, many)
    return tuple(jnp.asarray(rng.normal(size=(*shape, 16)), dtype) for shape in shapes)


def placed(segment_ids, positions) -> Places:
  return Places(jnp.array(segment_ids, jnp.int32), jnp.array(positions, jnp.int32))


PACKED = ((7, 9), (20,), (), (3, 1, 12))
CASES = {
  'packed': Case(PACKED),
  'no shared heads': Case(PACKED, heads=(2, 2)),
  'one shared head': Case(PACKED, heads=(3, 1)),
  'odd length': Case(((11, 20), (37,)), time=37),
  'shorter than a block': Case(((2, 3),), time=5),
  'window': Case(PACKED, window=2),
  'window of one': Case(PACKED, window=1),
  'softcap': Case(PACKED, softcap=0.7),
  'window and softcap': Case(PACKED, window=6, softcap=0.7),
  'padding at late positions': Case(PACKED, padding=90),
  'prefix of a group': Case(
    ((9, 4, 5), (2, 18)), parents=(((0, 0), (1, 8), (1, 6)), ((0, 0),) * 2)
  ),
  'trees of three levels': Case(
    ((10, 12, 9, 5, 14, 7, 1, 2),),
    time=64,
    parents=(((0, 0), (1, 9), (2, 20), (2, 15), (1, 3), (0, 0), (6, 6), (6, 2)),),
  ),
  'tree, window': Case(
    ((20, 9, 9, 9),), time=50, window=7, parents=(((0, 0), (1, 19), (2, 24), (1, 19)),)
  ),
  'cache': Case(cached=((0, 5, 19), (7, 8, 9))),
  'cache, window': Case(cached=((3,), (18,)), window=5),
}
EXACT = {
  'masked': functools.partial(attention, implementation='masked'),
  'blockwise': functools.partial(attention, implementation='blockwise', block=8),
}
MASKING = {
  'cudnn': functools.partial(fused.cudnn, library='xla'),
}
"""Kernels that take a mask, by the implementation of the same function in plain JAX."""
KERNELS = {
  'splash': functools.partial(attention, implementation='splash', block=128, interpret=True),
  'pallas_gpu': functools.partial(attention, implementation='pallas_gpu', interpret=True),
}
TABLE = [(name, case) for name in EXACT for case in CASES]
TABLE += [('cudnn', case) for case, given in CASES.items() if given.softcap is None]
TABLE += [('splash', 'packed'), ('splash', 'window and softcap'), ('pallas_gpu', 'packed')]


def naive(case, query, key, value):
  """One query, one head at a time, in float64; a query without a key gives 0."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  (segments, positions), (key_segments, key_positions) = (
    map(np.asarray, x[:2]) for x in case.places()
  )
  paths = {
    (b, segment): case.path(b, segment)
    for b, row in enumerate(case.rows)
    for segment in range(1, len(row) + 1)
  }
  share, out = query.shape[2] // key.shape[2], np.zeros(query.shape)
  for b, t in np.ndindex(positions.shape):
    keys = []
    for s in range(key.shape[1]):
      back = positions[b, t] - key_positions[b, s]
      on_path = segments[b, t] == key_segments[b, s] > 0
      if case.parents and segments[b, t] > 0:
        place = int(key_segments[b, s]), int(key_positions[b, s])
        on_path = place in paths[b, int(segments[b, t])]
      if on_path and back >= 0 and (case.window is None or back < case.window):
        keys.append(s)
    for h in range(query.shape[2] if keys else 0):
      scores = key[b, keys, h // share] @ query[b, t, h] / query.shape[-1] ** 0.5
      scores = scores if case.softcap is None else case.softcap * np.tanh(scores / case.softcap)
      weights = np.exp(scores - scores.max())
      out[b, t, h] = weights / weights.sum() @ value[b, keys, h // share]
  return out


def slope(case, inputs, n, direction, step=1e-5):
  """How the naive outputs change with input `n` in that direction, by central differences."""
  inputs = [np.asarray(x, np.float64) for x in inputs]

  def at(shift):
    return naive(case, *inputs[:n], inputs[n] + shift * direction, *inputs[n + 1 :])

  return (at(step) - at(-step)) / (2 * step)


@pytest.mark.parametrize(('name', 'case'), TABLE)
def test_values_and_gradients_are_those_of_naive_loops(name, case):
  case, exact = CASES[case], name in EXACT
  with jax.enable_x64(exact):
    *inputs, weight = case.draw('float64' if exact else 'float32')
    rule = {name: value for name, value in case.rule.items() if value is not None}
    function = functools.partial((EXACT | MASKING | KERNELS)[name], **rule)

    def loss(*inputs):
      out = function(*inputs, *case.places())
      return (out * weight).sum(), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
    np.testing.assert_allclose(out, naive(case, *inputs), atol=1e-12 if exact else 2e-6)
    for n, gradient in enumerate(gradients):
      assert np.isfinite(gradient).all()
      direction = np.random.default_rng(n).normal(size=gradient.shape)
      wanted = (slope(case, inputs, n, direction) * weight).sum()
      np.testing.assert_allclose(
        (gradient * direction).sum(),
        wanted,
        atol=1e-7 if exact else 1e-4,
        rtol=0 if exact else 1e-5,
      )


@pytest.mark.parametrize('name', EXACT)
def test_uniform_scores_average_the_seen_values(name):
  # A query of zeros scores every key 0: weights 1/2 on the two keys of its segment, values 1 and 5
  # -> 3.
  value = jnp.array([1.0, 100.0, 5.0]).reshape(1, 3, 1, 1) * jnp.ones((1, 3, 1, 2))
  places = placed([[2]], [[1]]), placed([[2, 1, 2]], [[0, 0, 1]])
  out = EXACT[name](jnp.zeros((1, 1, 1, 2)), jnp.ones((1, 3, 1, 2)), value, *places)
  np.testing.assert_allclose(out, np.full((1, 1, 1, 2), 3.0), rtol=1e-6)


@pytest.mark.parametrize('scale', [1.0, 1e4])
@pytest.mark.parametrize('name', EXACT)
def test_padding_yields_0_and_sends_no_gradient(name, scale):
  case = CASES['packed']
  *inputs, weight = case.draw('float32')
  inputs = [scale * x for x in inputs]
  seen = np.asarray(case.places()[0].segment_ids > 0)[..., None, None]

  def loss(weight, *inputs):
    out = EXACT[name](*inputs, *case.places())
    return (out * weight).sum(), out

  gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3), has_aux=True))
  everything, out = gradient(weight, *inputs)
  without_padding, _ = gradient(weight * seen, *inputs)
  assert (np.where(seen, 0, out) == 0).all()
  for got, wanted in zip(everything, without_padding):
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, wanted)
    assert (np.where(seen, 0, got) == 0).all()


@pytest.mark.parametrize('name', EXACT)
def test_bfloat16_keeps_float32_statistics(name):
  # 1,024 equal keys: a bfloat16 sum of ones would stall at 256, and the mean of ones would come out
  # as 4.
  one, places = jnp.ones((1, 1024, 1, 4), jnp.bfloat16), placed([[1] * 1024], [range(1024)])
  out = EXACT[name](one, one, one, places, places)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out.astype(np.float32), np.ones(one.shape))


@pytest.mark.parametrize(('window', 'readers'), [(None, (1, 2, 3)), (4, (1, 2))])
def test_blocks_that_are_not_seen_are_not_even_read(window, readers):
  # Segments of four, two and two blocks of 8: what stands in a block that is read would make NaN of
  # 0 · NaN.
  case = Case(((32, 16, 16),), time=64, window=window)
  query, key, value, weight = case.draw('float32')

  def blocks(x):
    return np.isfinite(np.asarray(x)).all((0, 2, 3)).reshape(-1, 8).all(1).tolist()

  def loss(query, value):
    out = EXACT['blockwise'](query, key, value, *case.places(), **case.rule)
    return (out * weight).sum(), out

  gradient_and_out = jax.jit(jax.grad(loss, has_aux=True))
  for poisoned, reading in ((1, readers), (4, (4, 5)), (5, (5,))):
    spoiled = value.at[:, 8 * poisoned : 8 * poisoned + 8].set(np.nan)
    gradient, out = gradient_and_out(query, spoiled)
    wanted = [block not in reading for block in range(8)]
    assert blocks(out) == wanted
    assert blocks(gradient) == wanted


def test_blocks_of_other_branches_are_not_even_read():
  # A prompt of two blocks of 8, and three branches of two blocks each.
  case = Case(((16, 16, 16, 16),), time=64, parents=(((0, 0), (1, 16), (1, 16), (1, 16)),))
  query, key, value, _ = case.draw('float32')
  for poisoned, readers in ((1, (1, 2, 3, 4, 5, 6, 7)), (2, (2, 3)), (4, (4, 5)), (7, (7,))):
    spoiled = value.at[:, 8 * poisoned : 8 * poisoned + 8].set(np.nan)
    out = EXACT['blockwise'](query, key, spoiled, *case.places())
    finite = np.isfinite(np.asarray(out)).all((0, 2, 3)).reshape(-1, 8).all(1).tolist()
    assert finite == [block not in readers for block in range(8)]


def temporaries(implementation, time):
  """Bytes that value and gradient take beside arguments and results."""

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  ids = jax.ShapeDtypeStruct((1, time), jnp.int32)

  def loss(query, key, value, segment_ids, positions):
    places = Places(segment_ids, positions)
    return attention(query, key, value, places, places, implementation=implementation).sum()

  step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
  lowered = step.lower(
    array(1, time, 2, 16), array(1, time, 1, 16), array(1, time, 1, 16), ids, ids
  )
  return lowered.compile().memory_analysis().temp_size_in_bytes


def test_blockwise_memory_is_linear_in_time():
  short, long = temporaries('blockwise', 16_384), temporaries('blockwise', 32_768)
  assert long < 2.3 * short
  assert long < temporaries('masked', 8_192) / 20


def test_who_sees_whom_by_hand():
  # Tokens: two of segment 1, two of segment 2, one of padding, which sees nothing and is seen by
  # nobody.
  places = placed([[1, 1, 2, 2, 0]], [[0, 1, 0, 1, 0]])
  wanted = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
  np.testing.assert_array_equal(visible(places, places)[0], wanted)
  np.testing.assert_array_equal(visible(places, places, window=1)[0], np.diag([1, 1, 1, 1, 0]))
  cache = placed([[1] * 4] * 2, [range(4)] * 2)
  seen = visible(placed([[1, 1]] * 2, [[0, 2], [3, 1]]), cache)
  np.testing.assert_array_equal(seen, [[[1, 0, 0, 0], [1, 1, 1, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]]])
  np.testing.assert_array_equal(
    visible(placed([[1]], [[3]]), placed([[1] * 4], [range(4)]), window=2), [[[0, 0, 1, 1]]]
  )


@pytest.mark.parametrize('name', KERNELS)
def test_kernels_want_the_same_tokens(name):
  case = CASES['cache']
  with pytest.raises(ValueError, match='same tokens'):
    KERNELS[name](*case.draw('float32')[:3], *case.places())


@pytest.mark.parametrize('name', KERNELS)
def test_kernels_share_no_prefixes(name):
  case = CASES['prefix of a group']
  with pytest.raises(ValueError, match='does not share prefixes'):
    KERNELS[name](*case.draw('float32')[:3], *case.places())


def test_who_shares_prefixes():
  short, long = dict(time=8192, keys=8192), dict(time=8200, keys=8200)
  for name in ('masked', 'blockwise'):
    assert why_not_shared(name, **long) is None
  for name in ('cudnn', 'tokamax'):
    assert why_not_shared(name, **short) is None
    assert 'needs a mask of 8200 × 8200' in why_not_shared(name, **long)
  for name in KERNELS:
    assert why_not_shared(name, **short) == f'{name} does not share prefixes'


def test_the_gpus_kernel_refuses_what_it_does_not_have():
  case = CASES['window']
  with pytest.raises(ValueError, match='window'):
    KERNELS['pallas_gpu'](*case.draw('float32')[:3], *case.places(), window=4)


def pick(
  asked='auto', platform='cpu', time=4096, keys=None, dtype='bfloat16', same_tokens=True, **rule
):
  keys = time if keys is None else keys
  return choose(
    asked, platform=platform, time=time, keys=keys, same_tokens=same_tokens, dtype=dtype, **rule
  )


@pytest.mark.parametrize(
  ('wanted', 'given'),
  [
    ('masked', dict(time=256)),
    ('blockwise', dict(time=512)),
    ('masked', dict(asked='masked')),
    ('blockwise', dict(asked='blockwise', time=64, platform='tpu')),
    ('splash', dict(platform='tpu')),
    ('splash', dict(platform='tpu', window=1024, softcap=50.0, shards=4)),
    ('blockwise', dict(platform='tpu', dtype='float64')),
    ('pallas_gpu', dict(platform='gpu', asked='pallas_gpu')),
    ('cudnn', dict(platform='gpu', asked='cudnn', window=1024, shards=2)),
    # A kernel of a GPU is used only after a check (tests/ops/self_check_test.py).
    ('blockwise', dict(platform='gpu')),
    ('masked', dict(platform='gpu', time=64)),
    # A cache: one token a row is masked however long the cache is, within reason, and whatever is
    # asked for.
    ('masked', dict(same_tokens=False, time=1, keys=32_768)),
    ('masked', dict(same_tokens=False, time=1, keys=32_768, platform='tpu', asked='splash')),
    ('blockwise', dict(same_tokens=False, platform='tpu')),
  ],
  ids=str,
)
def test_the_choice(wanted, given):
  assert pick(**given).implementation == wanted


@pytest.mark.parametrize(
  ('block', 'given'),
  [
    (96, dict(time=8 * 96)),
    (100, dict(time=8 * 200)),
    # 131 is a prime number.
    (128, dict(time=8 * 131)),
    # All scores are computed, the length cannot be cut, or consecutive shards are configured.
    (None, dict(asked='masked')),
    (None, dict(asked='cudnn', platform='gpu')),
    (None, dict(time=8 * 96 + 4)),
    (None, dict(may_balance=False)),
  ],
  ids=str,
)
def test_balanced_shards_have_blocks_of_one_piece_if_attention_skips_blocks(block, given):
  choice = pick(**{'asked': 'blockwise', 'shards': 4, **given})
  assert choice.is_balanced == (block is not None) and choice.block == (block or choice.block)
  assert ('balanced shards' in choice.reason) == choice.is_balanced


@pytest.mark.parametrize(
  ('message', 'given'),
  [
    ('splash does not run on this platform .cpu.', dict(asked='splash')),
    ('pallas_gpu does not run on this platform .tpu.', dict(asked='pallas_gpu', platform='tpu')),
    ('not in float64', dict(asked='splash', platform='tpu', dtype='float64')),
    ('cannot be sharded', dict(asked='pallas_gpu', platform='gpu', shards=2)),
    ('neither window nor softcap', dict(asked='pallas_gpu', platform='gpu', window=1024)),
    ('not compute in float32', dict(asked='cudnn', platform='gpu', dtype='float32')),
    ('no softcap', dict(asked='cudnn', platform='gpu', softcap=50.0)),
    ('a mask of 16384 × 16384', dict(asked='cudnn', platform='gpu', time=16_384)),
    ('tokamax is not installed', dict(asked='tokamax', platform='gpu')),
    ('cannot be sharded', dict(asked='tokamax', platform='gpu', shards=2)),
  ],
)
def test_a_kernel_that_cannot_do_it_is_refused_in_one_line(message, given):
  with pytest.raises(UserError, match=f'^policy.attention: .*{message}.*choose auto$'):
    pick(**given)
