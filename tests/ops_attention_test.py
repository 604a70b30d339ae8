"""Attention against loops over NumPy, its masks by hand, and rows that may look at nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ops.attention import attention, cache_mask, segment_mask


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def naive(query, key, value, mask):
  """One query, one head at a time, in float64; a row without a key gives 0."""
  batch, time, heads, dim = query.shape
  share = heads // key.shape[2]
  out = np.zeros(query.shape)
  for b, t, h in np.ndindex(batch, time, heads):
    keys = [s for s in range(key.shape[1]) if mask[b, t, s]]
    if keys:
      scores = np.array([np.dot(query[b, t, h].astype(np.float64), key[b, s, h // share]) / dim**0.5 for s in keys])
      weights = np.exp(scores - scores.max())
      weights /= weights.sum()
      out[b, t, h] = sum(w * value[b, s, h // share] for w, s in zip(weights, keys))
  return out


def test_attention_equals_naive_loops_with_shared_heads_and_empty_rows():
  query, key, value = draw(0, 2, 5, 6, 8), draw(1, 2, 7, 2, 8), draw(2, 2, 7, 2, 8)
  mask = np.random.default_rng(3).random((2, 5, 7)) < 0.5
  mask[1, 2] = False
  got = jax.jit(attention)(query, key, value, mask)
  np.testing.assert_allclose(got, naive(query, key, value, mask), atol=1e-6)
  assert (np.asarray(got)[1, 2] == 0).all()


def test_uniform_scores_average_the_allowed_values():
  # A query of zeros scores every key 0: weights 1/2 on the two allowed keys, values 1 and 5 -> 3.
  value = jnp.array([1.0, 100.0, 5.0]).reshape(1, 3, 1, 1) * jnp.ones((1, 3, 1, 2))
  mask = jnp.array([[[True, False, True]]])
  out = attention(jnp.zeros((1, 1, 1, 2)), jnp.ones((1, 3, 1, 2)), value, mask)
  np.testing.assert_allclose(out, np.full((1, 1, 1, 2), 3.0), rtol=1e-6)


@pytest.mark.parametrize('scale', [1.0, 1e4])
def test_empty_rows_send_no_gradient_and_no_nan(scale):
  query, key, value = scale * draw(0, 1, 3, 2, 4), scale * draw(1, 1, 3, 1, 4), draw(2, 1, 3, 1, 4)
  mask = jnp.array([[[True, False, False], [False, False, False], [True, True, True]]])

  def loss(q, k, v, rows):
    return (attention(q, k, v, mask)[:, rows] ** 2).sum()

  everything = jax.grad(loss, argnums=(0, 1, 2))(query, key, value, np.array([0, 1, 2]))
  without_empty = jax.grad(loss, argnums=(0, 1, 2))(query, key, value, np.array([0, 2]))
  for got, wanted in zip(everything, without_empty):
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, wanted)
  assert (np.asarray(everything[0])[0, 1] == 0).all()


def test_gradient_equals_finite_differences():
  query, key, value = draw(0, 1, 2, 2, 4), draw(1, 1, 3, 1, 4), draw(2, 1, 3, 1, 4)
  mask = jnp.array([[[True, True, False], [True, True, True]]])
  weight = draw(3, 1, 2, 2, 4)
  with jax.enable_x64(True):
    inputs = [jnp.asarray(x, jnp.float64) for x in (query, key, value)]

    def loss(*x):
      return (attention(*x, mask) * weight.astype(np.float64)).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2))(*inputs)
    for n, gradient in enumerate(gradients):
      direction = np.random.default_rng(n).normal(size=inputs[n].shape)

      def shifted(step, n=n, direction=direction):
        return loss(*[x + step * direction if i == n else x for i, x in enumerate(inputs)])

      numeric = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
      assert abs(numeric - (gradient * direction).sum()) < 1e-8


def test_bfloat16_keeps_float32_statistics():
  # 1,024 equal keys: a bfloat16 sum of ones would stall at 256, and the mean of ones would come out as 4.
  one = jnp.ones((1, 1024, 1, 4), jnp.bfloat16)
  out = attention(one[:, :1], one, one, jnp.ones((1, 1, 1024), bool))
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out.astype(np.float32), np.ones((1, 1, 1, 4)))


def test_segment_mask_by_hand():
  # Tokens: two of segment 1, two of segment 2, one of padding, which sees nothing and is seen by nobody.
  mask = segment_mask(jnp.array([[1, 1, 2, 2, 0]])).astype(int)
  wanted = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
  np.testing.assert_array_equal(mask[0], wanted)


def test_cache_mask_by_hand():
  mask = cache_mask(jnp.array([[0, 2], [3, 1]]), length=4).astype(int)
  np.testing.assert_array_equal(mask, [[[1, 0, 0, 0], [1, 1, 1, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]]])
