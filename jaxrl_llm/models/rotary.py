"""Rotary position embeddings, in the half-rotation convention of Hugging Face's weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.spec import RopeScaling


def inverse_frequencies(
  head_dim: int, *, theta: float, scaling: RopeScaling | None
) -> Float32[np.ndarray, 'half_head_dim']:
  """theta^(-2i/d), stretched by `scaling`.

  linear: all divided by the factor (Chen et al. 2023, arXiv:2306.15595). llama3: wavelengths above
  original/low_freq_factor are divided, those below original/high_freq_factor kept, those between interpolated
  (Llama 3 herd, arXiv:2407.21783; constants as in transformers).
  """
  frequencies = (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))).astype(np.float32)
  if scaling is None:
    return frequencies
  if scaling.kind == 'linear':
    return (frequencies / np.float32(scaling.factor)).astype(np.float32)
  original, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
  wavelengths = 2 * np.pi / frequencies
  kept = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
  return (frequencies * (kept + (1.0 - kept) / scaling.factor)).astype(np.float32)


def rotation(
  positions: Int[Array, 'batch time'], frequencies: Float32[np.ndarray, 'half']
) -> tuple[Float[Array, 'batch time half'], Float[Array, 'batch time half']]:
  """Cosines and sines of each position's angles, float32."""
  angles = positions[..., None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def rotate(
  x: Float[Array, 'batch time heads head_dim'],
  cosines: Float[Array, 'batch time half'],
  sines: Float[Array, 'batch time half'],
) -> Float[Array, 'batch time heads head_dim']:
  """Turns the pairs (x[i], x[i + d/2]) by the position's angles; computed in float32."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  c, s = cosines[:, :, None, :], sines[:, :, None, :]
  return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(x.dtype)
