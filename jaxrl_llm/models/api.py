"""A model as pure functions over plain nested dicts. Nothing outside this package knows how it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.cache import Cache, init_cache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.ops.attention import cache_mask, segment_mask

Tokens = Int[Array, 'batch time']
Hidden = Float[Array, 'batch time embed']


class Model(NamedTuple):
  """The functions of one decoder.

  Parameters are nested dicts with kernels `[out, in]`. Layers are 'layers/<i>/...' when unrolled, 'layers/...' with a
  leading layer axis when scanned (`stack_layers`, `unstack_layers`).
  """

  spec: ModelSpec
  options: ModelOptions
  init: Callable[[Array], Params]
  """Random parameters from a key: normal(initializer_range) for matrices, 1 for norms, 0 for biases and value heads."""
  apply: Callable[[Params, Tokens, Tokens, Tokens], Hidden]
  """(params, tokens, positions, segment_ids) to hidden states after the final norm.

  Causal within equal segment ids; 0 is padding; positions restart at 0 in each segment.
  """
  head_kernel: Callable[[Params], Float[Array, 'out embed']]
  """The unembedding (tied or not) of a language model, or the one row of a value head: outputs = hidden @ kernel.T."""
  init_cache: Callable[[int, int], Cache]
  """(batch, length) to an empty cache."""
  decode: Callable[[Params, Tokens, Tokens, Cache], tuple[Hidden, Cache]]
  """(params, tokens, positions, cache) to hidden states and the cache with these tokens written at their positions.

  A token sees the cache's entries up to its own position. Needs unrolled parameters, and a model without scan_layers.
  """
  axes: Callable[[], Any]
  """Logical axis names of each parameter, a tuple per array."""


def build_model(spec: ModelSpec, options: ModelOptions = ModelOptions()) -> Model:
  """The model of a spec."""
  decoder = Decoder(spec, options)

  def init(key):
    one = jnp.zeros((1, 1), jnp.int32)
    return decoder.init(key, one, one, jnp.ones((1, 1, 1), bool))['params']

  def apply(params, tokens, positions, segment_ids):
    return decoder.apply({'params': params}, tokens, positions, segment_mask(segment_ids))[0]

  def head_kernel(params):
    tied = spec.head == 'lm' and spec.tie_word_embeddings
    return params['embed' if tied else 'head']['kernel']

  def decode(params, tokens, positions, cache):
    mask = cache_mask(positions, cache[0]['k'].shape[1])
    return decoder.apply({'params': params}, tokens, positions, mask, cache)

  return Model(
    spec=spec,
    options=options,
    init=init,
    apply=apply,
    head_kernel=head_kernel,
    init_cache=lambda batch, length: init_cache(spec, batch, length, dtype=options.dtype),
    decode=decode,
    axes=lambda: _axes(jax.eval_shape(init, jax.random.key(0)), options),
  )


_AXES: Mapping[str, tuple[str, ...]] = {
  'embed/kernel': ('vocab', 'embed'),
  'head/kernel': ('vocab', 'embed'),
  'query/kernel': ('heads', 'embed'),
  'query/bias': ('heads',),
  'key/kernel': ('kv_heads', 'embed'),
  'key/bias': ('kv_heads',),
  'value/kernel': ('kv_heads', 'embed'),
  'value/bias': ('kv_heads',),
  'output/kernel': ('embed', 'heads'),
  'output/bias': ('norm',),
  'gate/kernel': ('mlp', 'embed'),
  'gate/bias': ('mlp',),
  'up/kernel': ('mlp', 'embed'),
  'up/bias': ('mlp',),
  'down/kernel': ('embed', 'mlp'),
  'down/bias': ('norm',),
}
"""By the last two parts of a parameter's name; norms' scales are ('norm',)."""


def _axes(shapes: Params, options: ModelOptions) -> Any:
  def of(name: str) -> tuple[str, ...]:
    axes = _AXES.get('/'.join(name.split('/')[-2:]), ('norm',))
    return ('layers', *axes) if options.scan_layers and name.startswith('layers/') else axes

  return unflatten({name: of(name) for name in flatten(shapes)})


def count_params(spec: ModelSpec) -> int:
  """Parameters of a model, without making it."""
  shapes = jax.eval_shape(build_model(spec).init, jax.random.key(0))
  return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def is_scanned(params: Params) -> bool:
  return 'attention' in params['layers']


def unstack_layers(params: Params) -> Params:
  """Scanned to unrolled parameters; unrolled ones are returned as they are. NumPy arrays become views."""
  if not is_scanned(params):
    return params
  flat = flatten(params['layers'])
  count = next(iter(flat.values())).shape[0]
  layers = {str(i): unflatten({name: array[i] for name, array in flat.items()}) for i in range(count)}
  return {**params, 'layers': layers}


def stack_layers(params: Params) -> Params:
  """Unrolled to scanned parameters; scanned ones are returned as they are."""
  if is_scanned(params):
    return params
  layers = [flatten(params['layers'][str(i)]) for i in range(len(params['layers']))]
  stack = lambda arrays: (np if isinstance(arrays[0], np.ndarray) else jnp).stack(arrays)
  return {**params, 'layers': unflatten({name: stack([layer[name] for layer in layers]) for name in layers[0]})}
