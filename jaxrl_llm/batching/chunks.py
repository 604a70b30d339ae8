"""The arrays of a packed micro-batch."""

from __future__ import annotations

import flax.struct
from jaxtyping import Array, Bool, Float, Int


@flax.struct.dataclass
class Chunks:
  """One micro-batch on the device: `[chunks, time]` per token, `[chunks, segments]` per sequence."""

  tokens: Int[Array, '*b chunks time']
  positions: Int[Array, '*b chunks time']
  segment_ids: Int[Array, '*b chunks time']
  loss_mask: Bool[Array, '*b chunks time']
  is_expert: Bool[Array, '*b chunks time']
  behaviour_logprobs: Float[Array, '*b chunks time']
  proximal_logprobs: Float[Array, '*b chunks time']
  reference_logprobs: Float[Array, '*b chunks time']
  advantages: Float[Array, '*b chunks time']
  temperature: Float[Array, '*b chunks segments']
