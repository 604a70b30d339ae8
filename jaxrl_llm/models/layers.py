"""The decoder's parts as Linen modules: projection, norm, attention block, MLP, layer.

Invariant: kernels are `[out, in]` as Hugging Face stores them, and activations are `[batch · time, features]` wherever
they meet a kernel (XLA:CPU multiplies two-dimensional operands fastest); only attention sees batch and time apart.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models import cache as kv_cache
from jaxrl_llm.models.rotary import Rotation, rotate
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.ops.attention import attention


class Context(NamedTuple):
  """What all layers share of one call."""

  rotation: Rotation
  mask: Bool[Array, 'batch time keys']
  positions: Int[Array, 'batch time']


class Projection(nn.Module):
  """y = x · kernelᵀ (+ bias)."""

  features: int
  use_bias: bool
  std: float
  param_dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, 'tokens in']) -> Float[Array, 'tokens out']:
    kernel = self.param('kernel', nn.initializers.normal(self.std), (self.features, x.shape[-1]), self.param_dtype)
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), (((1,), (1,)), ((), ())))
    if self.use_bias:
      y = y + self.param('bias', nn.initializers.zeros, (self.features,), self.param_dtype).astype(x.dtype)
    return y


class RMSNorm(nn.Module):
  """x / √(mean(x²) + eps) · scale, over the last axis; the statistic is at least float32."""

  eps: float
  param_dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, '... features']) -> Float[Array, '... features']:
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],), self.param_dtype)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


class Attention(nn.Module):
  """Self-attention: over the call's own tokens, or, given a cache, over what it holds after these were written."""

  spec: ModelSpec
  param_dtype: jnp.dtype

  @nn.compact
  def __call__(
    self, x: Float[Array, 'tokens embed'], context: Context, cache: kv_cache.LayerCache | None
  ) -> tuple[Float[Array, 'tokens embed'], kv_cache.LayerCache | None]:
    spec = self.spec
    query = self._heads('query', spec.num_attention_heads, x, context)
    key = self._heads('key', spec.num_key_value_heads, x, context)
    value = self._heads('value', spec.num_key_value_heads, x, context)
    if cache is not None:
      cache = kv_cache.write(cache, key, value, context.positions)
      key, value = cache['k'], cache['v']
    mixed = attention(query, key, value, context.mask).reshape(x.shape[0], -1)
    output = Projection(spec.hidden_size, spec.o_bias, spec.initializer_range, self.param_dtype, name='output')
    return output(mixed), cache

  def _heads(self, name: str, heads: int, x: Array, context: Context) -> Float[Array, 'batch time heads head_dim']:
    """Projects to heads; queries and keys are normalised where the family does that, and rotated."""
    spec = self.spec
    project = Projection(heads * spec.head_dim, spec.qkv_bias, spec.initializer_range, self.param_dtype, name=name)
    y = project(x).reshape(*context.positions.shape, heads, spec.head_dim)
    if name == 'value':
      return y
    if spec.qk_norm:
      y = RMSNorm(spec.rms_norm_eps, self.param_dtype, name=f'{name}_norm')(y)
    return rotate(y, context.rotation)


class MLP(nn.Module):
  """SwiGLU: down(silu(gate(x)) · up(x))."""

  spec: ModelSpec
  param_dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, 'tokens embed']) -> Float[Array, 'tokens embed']:
    spec = self.spec
    project = functools.partial(
      Projection, use_bias=spec.mlp_bias, std=spec.initializer_range, param_dtype=self.param_dtype
    )
    gate, up = (project(spec.intermediate_size, name=name)(x) for name in ('gate', 'up'))
    return project(spec.hidden_size, name='down')(jax.nn.silu(gate) * up)


class Layer(nn.Module):
  """Pre-norm residual block: attention, then MLP."""

  spec: ModelSpec
  param_dtype: jnp.dtype

  @nn.compact
  def __call__(
    self, x: Float[Array, 'tokens embed'], context: Context, cache: kv_cache.LayerCache | None
  ) -> tuple[Float[Array, 'tokens embed'], kv_cache.LayerCache | None]:
    spec, param_dtype = self.spec, self.param_dtype
    y = RMSNorm(spec.rms_norm_eps, param_dtype, name='attention_norm')(x)
    y, cache = Attention(spec, param_dtype, name='attention')(y, context, cache)
    x = x + y
    y = RMSNorm(spec.rms_norm_eps, param_dtype, name='mlp_norm')(x)
    return x + MLP(spec, param_dtype, name='mlp')(y), cache
