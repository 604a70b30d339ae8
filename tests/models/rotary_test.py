"""Rotary frequencies and rotation, by hand."""

import math

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.rotary import inverse_frequencies, rotate, rotation
from jaxrl_llm.models.spec import RopeScaling


def llama3(length, head_dim=8):
  scaling = RopeScaling(
    kind='llama3',
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=length,
  )
  return inverse_frequencies(head_dim=head_dim, rope_theta=10_000.0, scaling=scaling)


def test_plain_and_linear_frequencies_by_hand():
  # theta 100, head_dim 4: 100^0 = 1 and 100^(-2/4) = 0.1; linear by 4 divides both.
  plain = inverse_frequencies(head_dim=4, rope_theta=100.0, scaling=None)
  np.testing.assert_allclose(plain, [1.0, 0.1], rtol=1e-7)
  linear = inverse_frequencies(
    head_dim=4, rope_theta=100.0, scaling=RopeScaling(kind='linear', factor=4.0)
  )
  np.testing.assert_allclose(linear, [0.25, 0.025], rtol=1e-7)


def test_llama3_frequencies_by_hand():
  # theta 10^4, head_dim 8: f = 1, 0.1, 0.01, 0.001, wavelengths 2 pi / f = 6.28, 62.8, 628.3, 6283.
  # Length 640: below 640 / 4 = 160 kept (the first two), above 640 / 1 divided by 8 (the last). The
  # third lies between: s = (640 / 628.31853 - 1) / (4 - 1) = 0.00619721; (1 - s) 0.01 / 8 + s 0.01
  # = 0.00125 (1 + 7 s) = 0.001304226.
  np.testing.assert_allclose(llama3(640), [1.0, 0.1, 0.001304226, 0.000125], rtol=1e-6)


def test_llama3_is_continuous_at_both_boundaries():
  # f = 0.1 has wavelength 62.83185. Length 252 puts the upper boundary at 63, so it is kept; length
  # 251 puts it at 62.75, so it is blended with s = (251 / 62.83185 - 1) / 3 = 0.9982627: 0.1 (s +
  # (1 - s) / 8) = 0.09984799.
  np.testing.assert_allclose(llama3(252)[1], 0.1, rtol=1e-6)
  np.testing.assert_allclose(llama3(251)[1], 0.09984799, rtol=1e-6)
  # Length 62 < wavelength: divided in full; length 63: s = (63 / 62.83185 - 1) / 3 = 0.00089207, so
  # 0.0125 (1 + 7 s).
  np.testing.assert_allclose(llama3(62)[1], 0.0125, rtol=1e-6)
  np.testing.assert_allclose(llama3(63)[1], 0.0125 * (1 + 7 * 0.00089207), rtol=1e-6)


def test_rotation_turns_half_pairs_by_position_times_frequency():
  # Frequencies 1 and 0.1, position 3: (x0, x2) turns by 3, (x1, x3) by 0.3.
  by = rotation(jnp.array([[3]]), np.array([1.0, 0.1], np.float32), dtype=jnp.dtype('float32'))
  x = jnp.array([1.0, 2.0, 0.0, 5.0]).reshape(1, 1, 1, 4)
  wanted = [
    math.cos(3),
    2 * math.cos(0.3) - 5 * math.sin(0.3),
    math.sin(3),
    5 * math.cos(0.3) + 2 * math.sin(0.3),
  ]
  np.testing.assert_allclose(rotate(x, by).reshape(4), wanted, rtol=1e-6)


def test_scores_depend_on_distance_only():
  frequencies = inverse_frequencies(head_dim=16, rope_theta=10_000.0, scaling=None)
  query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

  def turned(x, position):
    return rotate(
      jnp.asarray(x), rotation(jnp.array([[position]]), frequencies, dtype=jnp.dtype('float32'))
    )

  near, far = (float((turned(query, p) * turned(key, p - 4)).sum()) for p in (5, 905))
  assert abs(near - far) < 1e-3 and abs(near - float((query * key).sum())) > 0.1


def test_angles_stay_float32_under_bfloat16():
  # 1000 and 1003 are one number in bfloat16; their cosines differ.
  by = rotation(jnp.array([[1000, 1003]]), np.array([1.0], np.float32), dtype=jnp.dtype('bfloat16'))
  np.testing.assert_allclose(by.cos.reshape(2), [math.cos(1000), math.cos(1003)], atol=1e-5)
  assert rotate(jnp.ones((1, 2, 1, 2), jnp.bfloat16), by).dtype == jnp.bfloat16
