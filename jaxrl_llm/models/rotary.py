"""Rotary position embedding in Hugging Face's half-rotation convention, with linear and llama3
frequency scaling.

Invariant: regardless of the compute dtype, angles, sines and cosines are computed in float32, or in
float64 for float64 models.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.spec import RopeScaling


class Rotation(NamedTuple):
  """Cosines and sines of each token's rotation angles, one angle per rotated pair. All layers and
  heads share them.
  """

  cos: Float[Array, 'batch time 1 pairs']
  sin: Float[Array, 'batch time 1 pairs']


def inverse_frequencies(
  *, head_dim: int, rope_theta: float, scaling: RopeScaling | None
) -> Float[np.ndarray, 'pairs']:
  """Returns the rotation per position, in radians, of each of the head_dim / 2 rotated pairs.

  Without scaling, fᵢ = θ^(-2i / head_dim). With kind 'linear', the result is fᵢ / factor. With kind
  'llama3', it depends on the wavelength λᵢ = 2π / fᵢ, the original length L, and the factors low
  (low_freq_factor) and high (high_freq_factor):

    λ < L / high:  f
    λ > L / low:   f / factor
    in between:    (1 - s) f / factor + s f,  s = (L / λ - low) / (high - low)

  Source: `_compute_llama3_parameters` and the functions next to it in modeling_rope_utils of
  transformers. Every step is rounded to float32 as in that code, because at position 100,000 an
  error of 2 ulp in a frequency changes the angle by 0.01 radians.
  """
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  # NumPy's float32 power can differ from torch's by an ulp. The float64 power, rounded to float32,
  # nearly always equals torch's.
  frequencies = np.float32(1.0) / np.power(rope_theta, exponents.astype(np.float64)).astype(
    np.float32
  )
  if scaling is None:
    return frequencies
  stretched = frequencies / np.float32(scaling.factor)
  if scaling.kind == 'linear':
    return stretched
  length, low, high = (
    scaling.original_max_position_embeddings,
    scaling.low_freq_factor,
    scaling.high_freq_factor,
  )
  wavelengths = np.float32(2 * math.pi) / frequencies
  smooth = (np.float32(length) / wavelengths - np.float32(low)) / np.float32(high - low)
  blended = (1 - smooth) * stretched + smooth * frequencies
  frequencies = np.where(wavelengths < length / high, frequencies, blended)
  return np.where(wavelengths > length / low, stretched, frequencies).astype(np.float32)


def rotation(
  positions: Int[Array, 'batch time'], frequencies: Float[np.ndarray, 'pairs'], *, dtype: jnp.dtype
) -> Rotation:
  """Computes the cosines and sines at `positions` (see `Places`) in at least float32."""
  angles = positions[..., None, None].astype(jnp.promote_types(dtype, jnp.float32)) * frequencies
  return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(
  x: Float[Array, 'batch time heads head_dim'], by: Rotation
) -> Float[Array, 'batch time heads head_dim']:
  """Rotates each pair (x[i], x[i + head_dim / 2]) by the angle of the pair."""
  first, second = jnp.split(x.astype(by.cos.dtype), 2, axis=-1)
  turned = jnp.concatenate(
    [first * by.cos - second * by.sin, second * by.cos + first * by.sin], axis=-1
  )
  return turned.astype(x.dtype)
