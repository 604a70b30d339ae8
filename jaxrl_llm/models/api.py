"""Interface to models for the rest of the project: pure functions over plain nested dicts.

Invariant: parameters are data. No function here stores parameters, and types of module libraries
never leave this package.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.models import cache as kv_cache
from jaxrl_llm.models import heads, lora
from jaxrl_llm.models.attention import chosen
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.decoder import Decoder, balanced_shards
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.ops.places import Places

AXES = {
  'embed': ('vocab', 'embed'),
  'head': ('vocab', 'embed'),
  'query': ('heads', 'embed'),
  'key': ('kv_heads', 'embed'),
  'value': ('kv_heads', 'embed'),
  'output': ('embed', 'heads'),
  'gate': ('mlp', 'embed'),
  'up': ('mlp', 'embed'),
  'down': ('embed', 'mlp'),
}
"""Logical axes (out, in) of each module's kernel. The bias and the adapter matrix B have the axis
out, and the adapter matrix A has the axis in.
"""


class Model(NamedTuple):
  """A model as functions of its parameters, which are nested dicts of arrays. Kernels are `[out,
  in]`.

  init: random key -> parameters. Kernels and heads are drawn from a normal distribution with
    standard deviation initializer_range; norms are 1 and biases 0. A key gives the same numbers
    whether or not layers are scanned, and with or without adapters.
  apply: (params, tokens, positions, segment_ids, seen_until=None, in_natural_order=True) -> hidden
    states after the final norm, in the compute dtype. Attention is causal and stays within tokens
    of equal segment id; id 0 is padding. Positions restart at 0 in each segment. With `seen_until`,
    segments share prefixes, see `ops.places.Places`. If `params` have no adapters, `apply` computes
    the base model. `in_natural_order` is an argument only of models with `balanced_shards`.
  head_kernel: params -> `[out, embed]`. Logits (or values) are hidden · kernelᵀ.
  init_cache: (batch, length) -> an empty KV cache.
  decode: (params, tokens, positions, cache) -> (hidden states, cache). Writes each token's key and
    value to the cache index equal to the token's position. Each token attends to the cache indices
    up to its position. The parameters must be in the unrolled form (see `unstack_layers`).
  axes: () -> parameter tree with a tuple of logical axis names in place of each array.
  """

  spec: ModelSpec
  options: ModelOptions
  init: Callable[[Array], Params]
  apply: Callable[..., Array]
  head_kernel: Callable[[Params], Array]
  init_cache: Callable[[int, int], Cache]
  decode: Callable[[Params, Array, Array, Cache], tuple[Array, Cache]]
  axes: Callable[[], Any]
  mesh: Mesh | None = None
  """Mesh over which `apply` and `decode` shard activations. If None, the compiler derives shardings
  from the arguments.
  """
  balanced_shards: Callable[[int], int] = lambda time: 1
  """Function of the number of tokens of a row. Returns the number of shards of the time axis if
  they are balanced, and otherwise 1. If they are, `apply` with `in_natural_order=False` returns
  hidden states in balanced order (`parallel.balance`), and exchanges none of them between devices.
  """

  def shapes(self) -> Params:
    """Returns the shapes and data types of the parameters that `init` returns."""
    return _shapes_of(self.init)


def build_model(
  spec: ModelSpec, options: ModelOptions | None = None, mesh: Mesh | None = None
) -> Model:
  """Builds the functions of a model from its spec, compute options and mesh."""
  options = ModelOptions() if options is None else options
  # This call raises UserError if the configured kernel is unavailable.
  chosen(options, mesh, time=1, keys=1, same_tokens=True)
  decoder = Decoder(spec, options, mesh)
  unrolled = Decoder(spec, dataclasses.replace(options, scan_layers=False, remat='none'), mesh)

  def apply(
    params: Params,
    tokens: Int[Array, 'batch time'],
    positions: Int[Array, 'batch time'],
    segment_ids: Int[Array, 'batch time'],
    seen_until: Int[Array, 'batch time'] | None = None,
    *,
    in_natural_order: bool = True,
  ) -> Float[Array, 'batch time embed']:
    places = Places(segment_ids, positions, seen_until)
    hidden, _ = decoder.apply({'params': params}, tokens, places, in_natural_order=in_natural_order)
    return hidden

  def decode(
    params: Params,
    tokens: Int[Array, 'batch time'],
    positions: Int[Array, 'batch time'],
    cache: Cache,
  ) -> tuple[Float[Array, 'batch time embed'], Cache]:
    return unrolled.apply(
      {'params': params}, tokens, Places(jnp.ones_like(positions), positions), cache
    )

  init = _init_of(spec, options)
  return Model(
    spec=spec,
    options=options,
    init=init,
    apply=apply,
    head_kernel=lambda params: heads.head_kernel(params, spec),
    init_cache=lambda batch, length: kv_cache.init_cache(
      spec, batch, length, dtype=jnp.dtype(options.dtype)
    ),
    decode=decode,
    axes=lambda: _axes(_shapes_of(init), scanned=options.scan_layers),
    mesh=mesh,
    balanced_shards=functools.partial(balanced_shards, options, mesh),
  )


# A command builds the same model several times. The models share one function, so that JAX traces
# it once.
@functools.lru_cache(maxsize=16)
def _init_of(spec: ModelSpec, options: ModelOptions) -> Callable[[Array], Params]:
  # Parameters do not depend on the attention. A kernel might not run on the default devices.
  plain = dataclasses.replace(options, scan_layers=True, remat='none', attention='masked')
  scanned = Decoder(spec, plain)

  def init(key: PRNGKeyArray | UInt32[Array, '2']) -> Params:
    token = jnp.zeros((1, 1), jnp.int32)
    params = scanned.init(key, token, Places(token + 1, token))['params']
    if options.lora is not None:
      params = lora.join(lora.fresh(params, options.lora, jax.random.fold_in(key, 1)), params)
    return params if options.scan_layers else unstack_layers(params)

  return init


def _shapes_of(init: Callable[[Array], Params]) -> Params:
  return _traced(init, bool(jax.config.jax_enable_x64))


@functools.lru_cache(maxsize=16)
def _traced(init: Callable[[Array], Params], wide: bool) -> Params:
  """Returns the shapes of the parameters that `init` returns. `wide` states whether 64-bit types
  are enabled, because that determines the data types.
  """
  return jax.eval_shape(init, jax.random.key(0))


def is_stacked(params: Params) -> bool:
  """Returns whether the parameters or adapters of the layers are scanned: stacked along a leading
  axis.
  """
  return '0' not in params['layers']


def unstack_layers(params: Params) -> Params:
  """Converts scanned to unrolled parameters, as views if they are NumPy arrays. Unrolled parameters
  are returned unchanged.
  """
  if not is_stacked(params):
    return params
  flat = flatten(params['layers'])
  count = next(iter(flat.values())).shape[0]
  layers = {str(i): unflatten({name: leaf[i] for name, leaf in flat.items()}) for i in range(count)}
  return {**params, 'layers': layers}


def stack_layers(params: Params) -> Params:
  """Converts unrolled to scanned parameters. Scanned parameters are returned unchanged."""
  if is_stacked(params):
    return params
  layers = [flatten(params['layers'][name]) for name in sorted(params['layers'], key=int)]
  return {
    **params,
    'layers': unflatten({name: _stack([layer[name] for layer in layers]) for name in layers[0]}),
  }


def _stack(leaves: list) -> Array | np.ndarray:
  return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else jnp.stack(leaves)


def count_params(spec: ModelSpec) -> int:
  """Returns the number of parameters of a model. A tied embedding counts once."""
  d, ff = spec.hidden_size, spec.intermediate_size
  queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
  layer = d * (2 * queries + 2 * keys) + 3 * d * ff + 2 * d
  layer += spec.qkv_bias * (queries + 2 * keys) + spec.o_bias * d
  layer += spec.mlp_bias * (2 * ff + d) + spec.qk_norm * 2 * spec.head_dim
  head = 0 if heads.is_tied(spec) else heads.head_size(spec) * d
  return spec.vocab_size * d + spec.num_hidden_layers * layer + d + head


def _axes(shapes: Params, *, scanned: bool) -> Params:
  """Returns the parameter tree with the logical names of each array's dimensions."""

  def names(path: str) -> tuple[str, ...]:
    *_, module, leaf = path.split('/')
    kernel = AXES.get(module, ())
    axes = {
      'scale': ('norm',),
      'kernel': kernel,
      'bias': kernel[:1],
      'lora_a': ('lora', *kernel[1:]),
      'lora_b': (*kernel[:1], 'lora'),
    }[leaf]
    return ('layers', *axes) if scanned and path.startswith('layers/') else axes

  return unflatten({path: names(path) for path in flatten(shapes)})
