"""The layers of the decoder. Kernels are stored `[out, in]`, as Hugging Face stores them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models import cache as kv
from jaxrl_llm.models.rotary import rotate
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.ops.attention import attention

Rotation = tuple[Float[Array, 'batch time half'], Float[Array, 'batch time half']]


class Projection(nn.Module):
  """x Wᵀ + b, in the compute dtype."""

  features: int
  use_bias: bool
  stddev: float
  options: ModelOptions

  @nn.compact
  def __call__(self, x: Float[Array, 'tokens in']) -> Float[Array, 'tokens out']:
    dtype, param_dtype = self.options.dtype, self.options.param_dtype
    shape = (self.features, x.shape[-1])
    kernel = self.param('kernel', nn.initializers.normal(self.stddev), shape, param_dtype)
    y = jax.lax.dot_general(x, kernel.astype(dtype), (((1,), (1,)), ((), ())))
    if self.use_bias:
      y = y + self.param('bias', nn.initializers.zeros, (self.features,), param_dtype).astype(dtype)
    return y


class RmsNorm(nn.Module):
  """x / √(mean(x²) + eps) * scale, the statistics in float32."""

  eps: float
  options: ModelOptions

  @nn.compact
  def __call__(self, x: Float[Array, '*shape features']) -> Float[Array, '*shape features']:
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],), self.options.param_dtype)
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return scale.astype(x.dtype) * y.astype(x.dtype)


class Attention(nn.Module):
  """Grouped-query attention over the sequence itself, or over a cache that it extends."""

  spec: ModelSpec
  options: ModelOptions

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'batch time embed'],
    rotation: Rotation,
    mask: Bool[Array, 'batch time keys'],
    positions: Int[Array, 'batch time'],
    cache: kv.LayerCache | None,
  ) -> tuple[Float[Array, 'batch time embed'], kv.LayerCache | None]:
    spec, (batch, time, embed) = self.spec, x.shape
    flat = x.reshape(batch * time, embed)
    project = lambda name, heads: Projection(
      heads * spec.head_dim, spec.qkv_bias, spec.initializer_range, self.options, name=name
    )(flat).reshape(batch, time, heads, spec.head_dim)
    q = project('query', spec.num_attention_heads)
    k = project('key', spec.num_key_value_heads)
    v = project('value', spec.num_key_value_heads)
    if spec.qk_norm:
      q = RmsNorm(spec.rms_norm_eps, self.options, name='query_norm')(q)
      k = RmsNorm(spec.rms_norm_eps, self.options, name='key_norm')(k)
    q, k = rotate(q, *rotation), rotate(k, *rotation)
    if cache is not None:
      cache = {'k': kv.write(cache['k'], k, positions), 'v': kv.write(cache['v'], v, positions)}
      k, v = cache['k'], cache['v']
    y = attention(q, k, v, mask).reshape(batch * time, spec.num_attention_heads * spec.head_dim)
    out = Projection(embed, spec.o_bias, spec.initializer_range, self.options, name='output')(y)
    return out.reshape(x.shape), cache


class GatedMlp(nn.Module):
  """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

  spec: ModelSpec
  options: ModelOptions

  @nn.compact
  def __call__(self, x: Float[Array, 'batch time embed']) -> Float[Array, 'batch time embed']:
    spec, flat = self.spec, x.reshape(-1, x.shape[-1])
    project = lambda name, features: Projection(
      features, spec.mlp_bias, spec.initializer_range, self.options, name=name
    )
    gate, up = project('gate', spec.intermediate_size)(flat), project('up', spec.intermediate_size)(flat)
    return project('down', x.shape[-1])(jax.nn.silu(gate) * up).reshape(x.shape)


class Block(nn.Module):
  """One pre-norm decoder layer. Its second result is the layer's cache (None where there is none)."""

  spec: ModelSpec
  options: ModelOptions

  @nn.compact
  def __call__(self, x, rotation, mask, positions, cache):
    norm = lambda name: RmsNorm(self.spec.rms_norm_eps, self.options, name=name)
    y, cache = Attention(self.spec, self.options, name='attention')(
      norm('attention_norm')(x), rotation, mask, positions, cache
    )
    x = x + y
    return x + GatedMlp(self.spec, self.options, name='mlp')(norm('mlp_norm')(x)), cache
