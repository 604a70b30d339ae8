"""What turns hidden states into outputs: one kernel `[out, embed]`, the embedding itself where that is tied.

Invariant: whoever needs outputs contracts hidden states with `head_kernel(params)`; the decoder never does, so that
`[batch, time, vocab]` need not exist. A value or scalar head is one freshly drawn row, normal(initializer_range), as
`transformers` initialises `score`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.core.types import Params
from jaxrl_llm.models.spec import ModelSpec


def head_size(spec: ModelSpec) -> int:
  """Outputs per hidden state."""
  return spec.vocab_size if spec.head == 'lm' else 1


def is_tied(spec: ModelSpec) -> bool:
  """Whether the embedding serves as the head's kernel."""
  return spec.head == 'lm' and spec.tie_word_embeddings


def head_kernel(params: Params, spec: ModelSpec) -> Float[Array, 'out embed']:
  """The head's kernel: `[vocab, embed]` for 'lm', `[1, embed]` for 'value' and 'scalar'."""
  return params['embed']['kernel'] if is_tied(spec) else params['head']['kernel']


def outputs(hidden: Float[Array, '*batch embed'], kernel: Float[Array, 'out embed']) -> Float[Array, '*batch out']:
  """hidden · kernelᵀ in at least float32: logits, or values with a last axis of one."""
  wide = jnp.promote_types(hidden.dtype, jnp.float32)
  return jnp.einsum('...d,od->...o', hidden, kernel.astype(hidden.dtype), preferred_element_type=wide)
