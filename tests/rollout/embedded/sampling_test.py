"""Draws against exact probabilities, an independent filter in float64, and edges of the
inversion.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit import assert_fits

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.api import Request, Sampling
from jaxrl_llm.rollout.embedded.sampling import (
  BLOCK,
  _first_above,
  _invert,
  draw,
  draw_filtered,
  row_key,
)

draw_j, filtered_j = jax.jit(draw), jax.jit(draw_filtered)


def log_softmax(logits):
  logits = np.asarray(logits, np.float64)
  top = logits.max(-1, keepdims=True)
  return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def keys(rows, word=0):
  return np.stack([row_key(seed=1, words=(word,), sample_index=i) for i in range(rows)])


@pytest.mark.parametrize('vocab', [7, BLOCK, 1000])
def test_draws_follow_the_tempered_distribution(vocab):
  logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
  rows, times, temperature = 400, 60, 0.7
  wide = jnp.broadcast_to(jnp.asarray(logits), (rows, vocab))
  key, heat = jnp.asarray(keys(rows)), jnp.full(rows, temperature, jnp.float32)
  drawn = [draw_j(wide, key, jnp.full(rows, t), heat) for t in range(times)]
  tokens = np.concatenate([d.tokens for d in drawn])
  exact = log_softmax(logits / temperature)
  assert_fits(tokens, np.exp(exact))
  np.testing.assert_allclose(np.concatenate([d.logprobs for d in drawn]), exact[tokens], atol=2e-6)


@pytest.mark.parametrize('other', ['position', 'sample'])
def test_draws_of_other_counters_are_independent(other):
  # Two draws from 4 equal tokens each: the 16 pairs are equally likely.
  rows = 8000
  logits, heat = jnp.zeros((rows, 4)), jnp.ones(rows)
  if other == 'position':
    first, second = (draw_j(logits, keys(rows), jnp.full(rows, t), heat).tokens for t in (3, 4))
  else:
    tokens = draw_j(logits, keys(rows), jnp.full(rows, 3), heat).tokens
    first, second = tokens[:-1], tokens[1:]
  assert_fits(np.asarray(first * 4 + second), np.full(16, 1 / 16))


def test_key_is_a_function_of_each_counter():
  base = {'seed': 5, 'words': (1, 2), 'sample_index': 0}
  variants = [base, {**base, 'seed': 6}, {**base, 'seed': 5 + 2**32}, {**base, 'words': (2, 1)}]
  variants += [{**base, 'words': (1, 2, 0)}, {**base, 'words': (1,)}, {**base, 'sample_index': 1}]
  found = {tuple(row_key(**variant).tolist()) for variant in variants}
  assert len(found) == len(variants)
  assert row_key(**base).tolist() == row_key(**base).tolist()


def test_a_row_does_not_feel_its_neighbours_or_its_place():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(16, 700)).astype(np.float32) * 3
  key, at, heat = keys(16), np.arange(16), np.where(np.arange(16) % 5, 0.9, 0.0).astype(np.float32)
  top_k, top_p = (
    rng.integers(1, 50, 16).astype(np.int32),
    rng.uniform(0.2, 1, 16).astype(np.float32),
  )
  order = rng.permutation(16)
  for function, extra in ((draw_j, ()), (filtered_j, (top_k, top_p))):
    straight = function(logits, key, at, heat, *extra)
    permuted = function(*(x[order] for x in (logits, key, at, heat, *extra)))
    np.testing.assert_array_equal(straight.tokens[order], permuted.tokens)
    np.testing.assert_array_equal(straight.logprobs[order], permuted.logprobs)
    noise = np.where(np.arange(16)[:, None] == 3, logits, np.nan)
    alone = function(noise, key, at, heat, *extra)
    assert alone.tokens[3] == straight.tokens[3] and alone.logprobs[3] == straight.logprobs[3]


@pytest.mark.parametrize('vocab', [5, 3 * BLOCK + 1])
def test_greedy_takes_the_first_largest_logit_at_temperature_one(vocab):
  logits = np.zeros((2, vocab), np.float32)
  logits[0, [2, 4]] = 3.0
  logits[1, -1] = 1.0
  drawn = draw_j(logits, keys(2), jnp.zeros(2, jnp.int32), jnp.zeros(2))
  assert drawn.tokens.tolist() == [2, vocab - 1]
  # log(e^3 / (2 e^3 + n - 2)) and log(e / (e + n - 1)).
  wanted = [3 - np.log(2 * np.exp(3) + vocab - 2), 1 - np.log(np.e + vocab - 1)]
  np.testing.assert_allclose(drawn.logprobs, wanted, rtol=1e-6)


def test_zero_weights_are_never_chosen_and_indices_stay_in_range():
  edges = np.array([0.0, 2.0**-23, 0.5, 1 - 2.0**-23, 1 - 2.0**-24, 1.0], np.float32)
  cases = [
    [0, 1, 0, 0],
    [0, 0, 1e-30, 0],
    [0, 2e-38, 0, 2e-38],
    [0, 1, 1e-9, 0],
    [0, 0.1, 0.1, 0.1],
  ]
  for case in cases:
    weights = np.broadcast_to(np.array(case, np.float32), (len(edges), 4))
    chosen = np.asarray(jax.jit(_first_above)(weights, edges))
    assert all(case[i] > 0 for i in chosen), (case, chosen)
  # All of the weight is 2: of the first block up to a uniform of 1/2, of the last from there on.
  wide = np.zeros((len(edges), 2 * BLOCK + 3), np.float32)
  wide[:, [BLOCK - 1, 2 * BLOCK + 1]] = 1.0
  index, total = jax.jit(_invert)(wide, np.stack([edges, edges], 1))
  # A uniform is below 1; 1 stands for a product that rounds up to the total, where the largest
  # weight is taken.
  assert index.tolist() == [BLOCK - 1] * 2 + [2 * BLOCK + 1] * 3 + [BLOCK - 1]
  assert total.tolist() == [2.0] * 6


def test_masked_tokens_are_never_drawn():
  logits = np.full((2000, 600), -np.inf, np.float32)
  logits[:, [10, 300, 599]] = [0.0, 1.0, 2.0]
  drawn = draw_j(logits, keys(2000), jnp.zeros(2000, jnp.int32), jnp.ones(2000))
  assert set(drawn.tokens.tolist()) == {10, 300, 599}
  assert np.isfinite(drawn.logprobs).all()


def kept_by_sorting(logits, top_k, top_p):
  """Top-k, then the shortest prefix of the renormalised rest that reaches top_p; no ties in the
  input.
  """
  order = np.argsort(-logits)
  order = order[: top_k if top_k > 0 else len(order)]
  mass = np.exp(log_softmax(logits[order]))
  return order[: 1 + int(np.searchsorted(np.cumsum(mass), top_p))] if top_p < 1 else order


def test_filters_equal_sorting():
  rng = np.random.default_rng(2)
  rows, vocab = 64, 500
  logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 4
  heat = rng.uniform(0.5, 1.5, rows).astype(np.float32)
  top_k = rng.choice([-1, 1, 3, 40, 10_000], rows).astype(np.int32)
  top_p = rng.choice([0.05, 0.5, 0.9, 0.99, 1.0], rows).astype(np.float32)
  seen = [set() for _ in range(rows)]
  for t in range(40):
    drawn = filtered_j(logits, keys(rows), jnp.full(rows, t), heat, top_k, top_p)
    for row in range(rows):
      scaled = logits[row].astype(np.float64) / heat[row]
      kept = kept_by_sorting(scaled, top_k[row], top_p[row])
      token = int(drawn.tokens[row])
      seen[row].add(token)
      assert token in kept
      wanted = log_softmax(scaled[kept])[list(kept).index(token)]
      np.testing.assert_allclose(drawn.logprobs[row], wanted, atol=3e-6)
  assert max(map(len, seen)) > 5


def test_top_p_applies_to_what_top_k_left():
  # Probabilities .4 .3 .2 .1: top-k 2 leaves 4/7 and 3/7, and 4/7 reaches 0.5 alone. Without top-k,
  # .4 does not.
  logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]] * 2000, np.float32))
  n = len(logits)
  both = filtered_j(
    logits, keys(n), jnp.zeros(n, jnp.int32), jnp.ones(n), jnp.full(n, 2), jnp.full(n, 0.5)
  )
  assert set(both.tokens.tolist()) == {0} and not np.asarray(both.logprobs).any()
  only_p = filtered_j(
    logits, keys(n), jnp.zeros(n, jnp.int32), jnp.ones(n), jnp.full(n, -1), jnp.full(n, 0.5)
  )
  assert set(only_p.tokens.tolist()) == {0, 1}
  assert_fits(np.asarray(only_p.tokens), np.array([4 / 7, 3 / 7]))


def test_filters_that_are_off_change_nothing():
  logits = np.random.default_rng(3).normal(size=(64, 300)).astype(np.float32)
  args = (logits, keys(64), np.arange(64), np.where(np.arange(64) % 4, 1.0, 0.0).astype(np.float32))
  off = filtered_j(*args, np.full(64, -1, np.int32), np.ones(64, np.float32))
  plain = draw_j(*args)
  np.testing.assert_array_equal(off.tokens, plain.tokens)
  np.testing.assert_array_equal(off.logprobs, plain.logprobs)


def test_greedy_rows_ignore_filters():
  logits = np.random.default_rng(4).normal(size=(8, 50)).astype(np.float32)
  zero = np.zeros(8, np.float32)
  drawn = filtered_j(
    logits, keys(8), np.arange(8), zero, np.full(8, 1, np.int32), np.full(8, 0.1, np.float32)
  )
  assert drawn.tokens.tolist() == logits.argmax(-1).tolist()
  np.testing.assert_allclose(drawn.logprobs, log_softmax(logits).max(-1), atol=1e-6)


def test_tied_tokens_are_kept_together():
  logits = np.array([[2.0, 1.0, 1.0, -5.0, 0.0, -0.0]] * 500, np.float32)
  run = functools.partial(
    filtered_j, logits, keys(500), jnp.zeros(500, jnp.int32), jnp.full(500, 3.0)
  )
  assert set(run(jnp.full(500, 2), jnp.ones(500)).tokens.tolist()) == {0, 1, 2}
  assert set(run(jnp.full(500, 4), jnp.ones(500)).tokens.tolist()) == {0, 1, 2, 4, 5}


@pytest.mark.parametrize(
  'fields', [{'temperature': -1.0}, {'temperature': float('nan')}, {'top_p': 0.0}, {'top_k': 0}]
)
def test_impossible_sampling_is_refused(fields):
  with pytest.raises(UserError, match=next(iter(fields))):
    Sampling(**fields)


def test_impossible_requests_are_refused():
  for fields in ({'prompt': ()}, {'max_tokens': 0}, {'samples': 0}):
    with pytest.raises(UserError, match='request r'):
      Request(**{'uid': 'r', 'prompt': (1,), 'max_tokens': 1, 'key': (0,), **fields})
  with pytest.raises(ValueError, match='uint32'):
    Request(uid='r', prompt=(1,), max_tokens=1, key=(2**32,))
