"""The decoder as a Linen module with unrolled or scanned layers.

Invariant: unrolled layers (`layers/<i>/...`) and scanned layers (`layers/...` with a leading layer
axis) compute the same function. Only the arrangement of the parameters differs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import chosen
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.heads import head_size, is_tied
from jaxrl_llm.models.layers import LAYER_INPUT, PRODUCT, Context, Layer, RMSNorm, cut
from jaxrl_llm.models.rotary import inverse_frequencies, rotation
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.ops.places import Places
from jaxrl_llm.parallel.balance import exchanged, in_balanced_order
from jaxrl_llm.parallel.mesh import SEQUENCE


def balanced_shards(options: ModelOptions, mesh: Mesh | None, time: int) -> int:
  """Returns the number of shards of the time axis if the layers see rows of `time` tokens in
  balanced order (`parallel.balance`), and otherwise 1.
  """
  if mesh is None or mesh.shape[SEQUENCE] == 1:
    return 1
  choice = chosen(options, mesh, time=time, keys=time, same_tokens=True)
  return mesh.shape[SEQUENCE] if choice.is_balanced else 1


class Table(nn.Module):
  """A kernel used as a lookup table (embedding) or as a factor of hidden states (head)."""

  rows: int
  columns: int
  std: float
  param_dtype: jnp.dtype

  @nn.compact
  def __call__(self) -> Float[Array, 'rows columns']:
    return self.param(
      'kernel', nn.initializers.normal(self.std), (self.rows, self.columns), self.param_dtype
    )


POLICIES: Mapping[str, Any] = {
  'full': None,
  'dots': jax.checkpoint_policies.save_only_these_names(PRODUCT),
  'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src='device',
    offload_dst='pinned_host',
  ),
}


def remat_layer(remat: str, *, in_scan: bool) -> type[nn.Module]:
  """Returns the layer class with the rematerialisation policy of `ModelOptions.remat`."""
  if remat == 'none':
    return Layer
  # Barriers against common-subexpression elimination are unnecessary inside a scan, because the
  # compiler does not merge subexpressions of different iterations.
  return nn.remat(Layer, prevent_cse=not in_scan, policy=POLICIES[remat])


class UnrolledLayers(nn.Module):
  """Layers in sequence, each with its own parameters and named by its index."""

  spec: ModelSpec
  options: ModelOptions
  mesh: Mesh | None

  @nn.compact
  def __call__(self, x, context: Context, cache: Cache | None):
    layer = remat_layer(self.options.remat, in_scan=False)
    written = []
    for i in range(self.spec.num_hidden_layers):
      part = None if cache is None else cache[i]
      x, part = layer(self.spec, self.options, self.mesh, name=str(i))(x, context, part)
      written.append(part)
    return x, None if cache is None else tuple(written)


def scanned_layers(
  spec: ModelSpec, options: ModelOptions, mesh: Mesh | None, *, name: str
) -> nn.Module:
  """Builds a module that scans one layer over stacked parameters. The module takes no KV cache,
  because decoding uses `UnrolledLayers`.
  """
  layer = remat_layer(options.remat, in_scan=True)
  scan = nn.scan(
    layer,
    variable_axes={'params': 0},
    split_rngs={'params': True},
    in_axes=(nn.broadcast, nn.broadcast),
    length=spec.num_hidden_layers,
  )
  return scan(spec, options, mesh, name=name)


class Decoder(nn.Module):
  """Maps tokens to hidden states after the final norm. Given a cache, also returns the updated
  cache.
  """

  spec: ModelSpec
  options: ModelOptions
  mesh: Mesh | None = None

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'batch time'],
    places: Places,
    cache: Cache | None = None,
    *,
    in_natural_order: bool = True,
  ) -> tuple[Float[Array, 'batch time embed'], Cache | None]:
    """Returns the hidden states and the updated cache.

    Args:
      in_natural_order: whether hidden states are in the order of `tokens`. If False, and the shards
        of the time axis are balanced (`balanced_shards`), they are in balanced order, and none are
        exchanged between devices.
    """
    spec, options = self.spec, self.options
    dtype, param_dtype = jnp.dtype(options.dtype), jnp.dtype(options.param_dtype)
    table = functools.partial(
      Table, columns=spec.hidden_size, std=spec.initializer_range, param_dtype=param_dtype
    )
    frequencies = inverse_frequencies(
      head_dim=spec.head_dim, rope_theta=spec.rope_theta, scaling=spec.rope_scaling
    )
    # Flatten the tokens of all rows into one dimension unless the time axis is sharded over
    # devices.
    flat = self.mesh is None or self.mesh.shape[SEQUENCE] == 1
    shards = 1 if cache is not None else balanced_shards(options, self.mesh, tokens.shape[-1])
    if shards > 1:
      # Everything that depends on neighbouring tokens is computed before or after the decoder, in
      # the natural order.
      tokens, places = jax.tree.map(lambda x: in_balanced_order(x, shards), (tokens, places))
    context = Context(rotation(places.positions, frequencies, dtype=dtype), places)
    x = table(spec.vocab_size, name='embed')()[tokens.reshape(-1) if flat else tokens].astype(dtype)
    x = cut(x, self.mesh)
    layers = scanned_layers if options.scan_layers else UnrolledLayers
    x, cache = layers(spec, options, self.mesh, name='layers')(x, context, cache)
    x = RMSNorm(spec.rms_norm_eps, param_dtype, name='norm')(x)
    if not is_tied(spec):
      # This call only creates the head's parameter in `init`. Callers multiply hidden states by
      # this parameter themselves.
      table(head_size(spec), name='head')()
    if shards > 1 and in_natural_order:
      x = exchanged(cut(x, self.mesh), self.mesh)
    return x.reshape(*tokens.shape, spec.hidden_size), cache
