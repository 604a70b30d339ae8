"""The decoder: embedding, layers (scanned or unrolled), final norm. Heads stay outside: callers contract with them."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.layers import Block, RmsNorm, Rotation
from jaxrl_llm.models.rotary import inverse_frequencies, rotation
from jaxrl_llm.models.spec import ModelOptions, ModelSpec


class Unrolled(nn.Module):
  """Layers one after the other, named '0', '1', ..."""

  spec: ModelSpec
  options: ModelOptions

  @nn.compact
  def __call__(self, x, rotation: Rotation, mask, positions, caches: Cache | None):
    block = nn.remat(Block) if self.options.remat == 'full' else Block
    written = []
    for i in range(self.spec.num_hidden_layers):
      cache = None if caches is None else caches[i]
      x, cache = block(self.spec, self.options, name=str(i))(x, rotation, mask, positions, cache)
      written.append(cache)
    return x, None if caches is None else tuple(written)


class Matrix(nn.Module):
  """A table of `rows` vectors, `kernel` [rows, features]."""

  rows: int
  features: int
  initializer: nn.initializers.Initializer
  param_dtype: str

  @nn.compact
  def __call__(self):
    return self.param('kernel', self.initializer, (self.rows, self.features), self.param_dtype)


class Decoder(nn.Module):
  """Tokens to hidden states after the final norm."""

  spec: ModelSpec
  options: ModelOptions

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'batch time'],
    positions: Int[Array, 'batch time'],
    mask: Bool[Array, 'batch time keys'],
    caches: Cache | None = None,
  ) -> tuple[Float[Array, 'batch time embed'], Cache | None]:
    spec, options = self.spec, self.options
    normal = nn.initializers.normal(spec.initializer_range)
    table = Matrix(spec.vocab_size, spec.hidden_size, normal, options.param_dtype, name='embed')()
    x = jnp.take(table, tokens, axis=0).astype(options.dtype)
    angles = rotation(
      positions, inverse_frequencies(spec.head_dim, theta=spec.rope_theta, scaling=spec.rope_scaling)
    )
    x, caches = self._layers(x, angles, mask, positions, caches)
    x = RmsNorm(spec.rms_norm_eps, options, name='norm')(x)
    if spec.head != 'lm':
      # Zeros: before it has learnt anything a critic values all alike, and a reward model rewards all alike.
      Matrix(1, spec.hidden_size, nn.initializers.zeros, options.param_dtype, name='head')()
    elif not spec.tie_word_embeddings:
      Matrix(spec.vocab_size, spec.hidden_size, normal, options.param_dtype, name='head')()
    return x, caches

  def _layers(self, x, angles: Rotation, mask, positions, caches: Cache | None):
    if not self.options.scan_layers:
      return Unrolled(self.spec, self.options, name='layers')(x, angles, mask, positions, caches)
    if caches is not None:
      raise ValueError('decoding with a cache needs unrolled layers: build the model without scan_layers')
    block = nn.remat(Block, prevent_cse=False) if self.options.remat == 'full' else Block
    scanned = nn.scan(
      block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=nn.broadcast,
      length=self.spec.num_hidden_layers,
    )
    return scanned(self.spec, self.options, name='layers')(x, angles, mask, positions, None)
