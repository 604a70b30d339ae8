import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ops.logprobs import plan_token_chunk, sequence_scores, token_logprobs, token_values

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


@pytest.mark.parametrize('token_chunk', [1, 3, 4, 12])
def test_equals_naive_loop(batch, token_chunk):
  found = token_logprobs(**batch, token_chunk=token_chunk)
  logprobs, entropy = naive(batch)
  np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-6)
  np.testing.assert_allclose(found.entropy, entropy, atol=5e-6)


def test_gradients_do_not_depend_on_the_chunk(batch):
  weights = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, TIME)), jnp.float32)

  def loss(hidden, kernel, token_chunk):
    found = token_logprobs(**{**batch, 'hidden': hidden, 'kernel': kernel}, token_chunk=token_chunk)
    return (found.logprobs * weights + found.entropy * weights**2).sum()

  whole = jax.grad(loss, (0, 1))(batch['hidden'], batch['kernel'], 12)
  for chunk in (1, 4):
    for a, b in zip(whole, jax.grad(loss, (0, 1))(batch['hidden'], batch['kernel'], chunk)):
      assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


def test_full_logits_never_exist_in_the_chunked_program():
  rows, time, vocab = 4, 64, 50_000
  shapes = [
    jax.ShapeDtypeStruct(s, d)
    for s, d in [
      ((rows, time, 16), jnp.float32),
      ((vocab, 16), jnp.float32),
      ((rows, time), jnp.int32),
      ((rows, time), jnp.int32),
      ((rows, time), jnp.float32),
    ]
  ]

  def temporaries(chunk):
    loss = lambda h, k, *rest: token_logprobs(h, k, *rest, token_chunk=chunk).logprobs.sum()
    return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

  full = rows * time * vocab * 4
  assert temporaries(64) >= full
  assert temporaries(4) <= full / 4


def test_plan_fits_the_budget_and_divides():
  # 8 rows * 3 positions * 100 words * 4 bytes = 9,600; 12 positions are 38,400.
  assert plan_token_chunk(chunks=8, time=12, vocab=100, budget_bytes=10_000) == 3
  assert plan_token_chunk(chunks=8, time=12, vocab=100, budget_bytes=38_400) == 12
  assert plan_token_chunk(chunks=8, time=12, vocab=100, budget_bytes=1) == 1


def test_chunk_that_does_not_divide_is_refused(batch):
  with pytest.raises(ValueError, match='does not divide'):
    token_logprobs(**batch, token_chunk=5)


# Hidden states of two numbers, (1, 2, ... in reading order) and a second that the kernel (1, 0) does not read, so that
# the output at a place is its own number. The first chunk holds two adjacent segments and padding, the second one that
# ends where the chunk ends, after one of a single token.
PLACES = np.arange(1.0, 13.0).reshape(2, 6)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]])


def read(function, **options):
  hidden = jnp.asarray(np.stack([PLACES, np.full((2, 6), 99.0)], axis=-1), jnp.float32)
  return function(hidden, jnp.array([[1.0, 0.0]]), jnp.asarray(SEGMENTS, jnp.int32), **options)


def test_a_value_is_of_the_state_before_its_token():
  # Entry t is what the place before t says; the first token of a segment has no state before it.
  wanted = [[0, 1, 2, 0, 4, 0], [0, 0, 8, 9, 10, 11]]
  np.testing.assert_array_equal(read(token_values).values, wanted)


def test_a_score_is_read_at_the_last_token_of_each_segment():
  # Segment 1 ends at place 3, 2 at 5; in the second chunk at 7 and, with the chunk, at 12. The third is not there.
  np.testing.assert_array_equal(read(sequence_scores, segments=3).scores, [[3, 5, 0], [7, 12, 0]])


def test_a_chunk_of_one_segment_or_of_none_has_its_score_or_none():
  hidden, kernel = jnp.asarray(PLACES[..., None], jnp.float32), jnp.ones((1, 1))
  ids = jnp.array([[1] * 6, [0] * 6], jnp.int32)
  np.testing.assert_array_equal(sequence_scores(hidden, kernel, ids, segments=2).scores, [[6, 0], [0, 0]])
  np.testing.assert_array_equal(token_values(hidden, kernel, ids).values, [[0, 1, 2, 3, 4, 5], [0] * 6])


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
  hidden, kernel, ids = jnp.ones((1, 4, 8), dtype), jnp.ones((1, 8), dtype), jnp.ones((1, 4), jnp.int32)
  assert token_values(hidden, kernel, ids).values.dtype == jnp.float32
  assert sequence_scores(hidden, kernel, ids, segments=1).scores.dtype == jnp.float32
