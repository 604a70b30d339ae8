"""Linen modules of the decoder: projection, norm, attention block, MLP and layer.

Invariant: kernels are `[out, in]`, as Hugging Face stores them. In products with kernels,
activations are `[batch · time, features]`, because XLA:CPU multiplies two-dimensional operands
fastest. If time is sharded over devices, they are `[batch, time, features]` instead. Only attention
distinguishes batch from time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.models import cache as kv_cache
from jaxrl_llm.models.attention import KEYS, QUERIES, chosen, sharded_attention
from jaxrl_llm.models.rotary import Rotation, rotate
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.ops.linear import linear
from jaxrl_llm.ops.places import Places
from jaxrl_llm.ops.swiglu import swiglu
from jaxrl_llm.parallel.rules import constrain

LAYER_INPUT, PRODUCT = 'layer_input', 'product'
"""Names that rematerialisation policies use for a layer's input and for a product with a kernel."""


class Context(NamedTuple):
  """Inputs shared by all layers in one call."""

  rotation: Rotation
  places: Places
  """Places of the tokens in this call."""


def cut(
  x: Float[Array, '*tokens features'], mesh: Mesh | None, features: str | None = None
) -> Array:
  """Shards activations over the mesh by token, and their last dimension by the logical axis
  `features`. If `features` is None, the last dimension is not sharded.
  """
  return constrain(x, mesh, *('batch', 'time')[: x.ndim - 1], features)


class Projection(nn.Module):
  """y = x · kernelᵀ, plus a bias with `use_bias`, plus an adapter term if the parameters contain an
  adapter (see `models.lora`).
  """

  features: int
  use_bias: bool
  std: float
  options: ModelOptions

  @nn.compact
  def __call__(self, x: Float[Array, '*tokens in']) -> Float[Array, '*tokens out']:
    param_dtype = jnp.dtype(self.options.param_dtype)
    kernel = self.param(
      'kernel', nn.initializers.normal(self.std), (self.features, x.shape[-1]), param_dtype
    )
    y = checkpoint_name(linear(x, kernel, self.options.reduce_dtype), PRODUCT)
    if self.use_bias:
      y = y + self.param('bias', nn.initializers.zeros, (self.features,), param_dtype).astype(
        x.dtype
      )
    return y + self._adapted(x) if self.has_variable('params', 'lora_a') else y

  def _adapted(self, x: Float[Array, '*tokens in']) -> Float[Array, '*tokens out']:
    """Returns alpha/rank · (x · Aᵀ) · Bᵀ without materialising B · A."""
    a, b = (self.get_variable('params', name) for name in ('lora_a', 'lora_b'))
    return linear(self.options.lora.scale * linear(x, a), b)


class RMSNorm(nn.Module):
  """x / √(mean(x²) + eps) · scale over the last axis. The mean is computed in at least float32."""

  eps: float
  param_dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, '... features']) -> Float[Array, '... features']:
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],), self.param_dtype)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


class Attention(nn.Module):
  """Self-attention. Without a cache, tokens attend to the tokens of the same call. Given a cache,
  the tokens' keys and values are first written to the cache, and tokens attend to its entries.
  """

  spec: ModelSpec
  options: ModelOptions
  mesh: Mesh | None

  @nn.compact
  def __call__(
    self, x: Float[Array, '*tokens embed'], context: Context, cache: kv_cache.LayerCache | None
  ) -> tuple[Float[Array, '*tokens embed'], kv_cache.LayerCache | None]:
    spec = self.spec
    query = self._heads('query', spec.num_attention_heads, x, context)
    key = self._heads('key', spec.num_key_value_heads, x, context)
    value = self._heads('value', spec.num_key_value_heads, x, context)
    of_keys = context.places
    if cache is not None:
      cache = kv_cache.write(cache, key, value, context.places.positions)
      (key, value), of_keys = kv_cache.entries(cache), kv_cache.places(cache)
    query = constrain(query, self.mesh, *QUERIES)
    key, value = (constrain(x, self.mesh, *KEYS) for x in (key, value))
    choice = chosen(
      self.options,
      self.mesh,
      time=query.shape[1],
      keys=key.shape[1],
      same_tokens=of_keys is context.places,
    )
    mixed = sharded_attention(
      query, key, value, context.places, of_keys, choice=choice, mesh=self.mesh
    )
    mixed = cut(mixed.reshape(*x.shape[:-1], -1), self.mesh, 'heads')
    output = Projection(
      spec.hidden_size, spec.o_bias, spec.initializer_range, self.options, name='output'
    )
    return output(mixed), cache

  def _heads(
    self, name: str, heads: int, x: Float[Array, '*tokens embed'], context: Context
  ) -> Float[Array, 'batch time {heads} head_dim']:
    """Projects `x` to heads. Queries and keys are then normalised if the spec has qk_norm, and
    rotated.
    """
    spec = self.spec
    project = Projection(
      heads * spec.head_dim, spec.qkv_bias, spec.initializer_range, self.options, name=name
    )
    y = project(x).reshape(*context.places.positions.shape, heads, spec.head_dim)
    if name == 'value':
      return y
    if spec.qk_norm:
      y = RMSNorm(spec.rms_norm_eps, jnp.dtype(self.options.param_dtype), name=f'{name}_norm')(y)
    return rotate(y, context.rotation)


class MLP(nn.Module):
  """SwiGLU: down(silu(gate(x)) · up(x))."""

  spec: ModelSpec
  options: ModelOptions
  mesh: Mesh | None

  @nn.compact
  def __call__(self, x: Float[Array, '*tokens embed']) -> Float[Array, '*tokens embed']:
    spec = self.spec
    project = functools.partial(
      Projection, use_bias=spec.mlp_bias, std=spec.initializer_range, options=self.options
    )
    gate, up = (
      cut(project(spec.intermediate_size, name=name)(x), self.mesh, 'mlp')
      for name in ('gate', 'up')
    )
    return project(spec.hidden_size, name='down')(swiglu(gate, up))


class Layer(nn.Module):
  """Pre-norm residual block: attention followed by MLP."""

  spec: ModelSpec
  options: ModelOptions
  mesh: Mesh | None

  @nn.compact
  def __call__(
    self, x: Float[Array, '*tokens embed'], context: Context, cache: kv_cache.LayerCache | None
  ) -> tuple[Float[Array, '*tokens embed'], kv_cache.LayerCache | None]:
    whole = self.spec, self.options, self.mesh
    x = checkpoint_name(x, LAYER_INPUT)
    norm = functools.partial(RMSNorm, self.spec.rms_norm_eps, jnp.dtype(self.options.param_dtype))
    y, cache = Attention(*whole, name='attention')(norm(name='attention_norm')(x), context, cache)
    x = cut(x + y, self.mesh)
    return cut(x + MLP(*whole, name='mlp')(norm(name='mlp_norm')(x)), self.mesh), cache
