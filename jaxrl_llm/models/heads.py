"""Output heads. A head is one kernel `[out, embed]`; a tied head uses the embedding as its kernel.
A 'value' or 'scalar' head has a single row. A new head is drawn from a normal distribution with
standard deviation `initializer_range`, as `transformers` initialises `score`.

Invariant: the decoder never applies the head. Callers multiply hidden states by
`head_kernel(params, spec)` themselves, so that logits `[batch, time, vocab]` need not be
materialised.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from jaxrl_llm.core.types import Params
from jaxrl_llm.models.spec import ModelSpec


def head_size(spec: ModelSpec) -> int:
  """Returns the number of outputs per hidden state."""
  return spec.vocab_size if spec.head == 'lm' else 1


def is_tied(spec: ModelSpec) -> bool:
  """Returns whether the embedding serves as the head's kernel."""
  return spec.head == 'lm' and spec.tie_word_embeddings


def with_head(spec: ModelSpec, head: Literal['lm', 'value', 'scalar']) -> ModelSpec:
  """Returns the spec with another head. For 'value' and 'scalar', `tie_word_embeddings` becomes
  False, so that an 'lm' head that later replaces this head is not tied either.
  """
  return dataclasses.replace(
    spec, head=head, tie_word_embeddings=head == 'lm' and spec.tie_word_embeddings
  )


def has_head(params: Params, spec: ModelSpec) -> bool:
  """Returns whether a parameter tree has the output head of `spec`. For a tied head, the tree must
  not contain a separate head kernel. For any other head, it must contain one of the right shape.
  """
  kernel = params['head']['kernel'] if 'head' in params else None
  if is_tied(spec) or kernel is None:
    return is_tied(spec) and kernel is None
  return kernel.shape == (head_size(spec), spec.hidden_size)


def fresh_head(
  spec: ModelSpec, key: PRNGKeyArray | UInt32[Array, '2'], *, dtype: str = 'float32'
) -> Float[Array, 'out embed']:
  """Samples the head's kernel from a normal distribution with mean 0 and standard deviation
  `initializer_range`. Its shape is `[1, embed]` for 'value' and 'scalar', and `[vocab, embed]` for
  'lm'.
  """
  shape = (head_size(spec), spec.hidden_size)
  return spec.initializer_range * jax.random.normal(key, shape, jnp.dtype(dtype))


def replace_head(
  params: Params,
  spec: ModelSpec,
  kernel: Float[Array, 'out embed'] | Float[np.ndarray, 'out embed'],
) -> Params:
  """Replaces the head in a parameter tree.

  Args:
    params: scanned or unrolled tree. Its head, if any, is dropped; all other arrays are shared with
      the result, not copied.
    spec: spec of the resulting model, as returned by `with_head`.
    kernel: kernel of the new head, already in the right dtype and on the right devices.

  Raises:
    ValueError: the kernel's shape does not match the spec, or the spec is tied, so that there is no
      separate head.
  """
  if is_tied(spec):
    raise ValueError(f'a {spec.family} spec with tied embeddings has no separate head to replace')
  wanted = (head_size(spec), spec.hidden_size)
  if kernel.shape != wanted:
    raise ValueError(f'kernel of a {spec.head} head: got {kernel.shape}, wanted {wanted}')
  return {**params, 'head': {'kernel': kernel}}


def head_kernel(params: Params, spec: ModelSpec) -> Float[Array, 'out embed']:
  """Returns the head's kernel: `[vocab, embed]` for 'lm', `[1, embed]` for 'value' and 'scalar'."""
  return params['embed']['kernel'] if is_tied(spec) else params['head']['kernel']


def outputs(
  hidden: Float[Array, '*batch embed'], kernel: Float[Array, 'out embed']
) -> Float[Array, '*batch out']:
  """Computes hidden · kernelᵀ in at least float32: logits, or values with a last axis of size 1."""
  wide = jnp.promote_types(hidden.dtype, jnp.float32)
  return jnp.einsum(
    '...d,od->...o', hidden, kernel.astype(hidden.dtype), preferred_element_type=wide
  )
