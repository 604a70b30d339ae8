"""Computation of the probe in the trainer. The probe consists of fixed token sequences and the
trainer's logprobs for them. After each publication, the engine's logprobs of the same sequences are
compared with the trainer's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.core.types import Params
from jaxrl_llm.models.api import Model
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.api import Probe

SEQUENCES, LENGTH = 2, 160
"""Number of probe sequences, and their length in tokens. The length exceeds 128 tokens, the size of
vLLM's cache blocks on CPUs. The sequences are shorter if the run's sequence limit requires it.
"""


class Prober:
  """Computes the probe of a policy version. Every process takes part, because the forward pass is
  sharded like the parameters.
  """

  def __init__(self, model: Model, mesh: Mesh, *, max_length: int):
    """
    Args:
      max_length: length in tokens of the longest sequence that the servers accept. A probe sequence
        is at least one token shorter, because a server must sample one token after the sequence.
    """
    length = max(2, min(LENGTH, max_length - 1))
    self._sequences = np.random.default_rng(0).integers(
      0, model.spec.vocab_size, (SEQUENCES, length), np.int32
    )

    def forward(params: Params) -> Float[Array, 'sequences time']:
      tokens = jnp.asarray(self._sequences)
      positions, segments = (
        jnp.broadcast_to(jnp.arange(length), tokens.shape),
        jnp.ones_like(tokens),
      )
      hidden = model.apply(params, tokens, positions, segments)
      temperature = jnp.ones(tokens.shape, jnp.float32)
      kernel = model.head_kernel(params)
      return token_logprobs(
        hidden, kernel, tokens, segments, temperature, token_chunk=length
      ).logprobs

    self._forward = jax.jit(forward, out_shardings=replicated(mesh))

  def probe(self, params: Params) -> Probe:
    """Computes the probe. Every process must call this on its device thread."""
    logprobs = np.asarray(self._forward(params).addressable_data(0), np.float32)
    return Probe(sequences=self._sequences, logprobs=logprobs)
