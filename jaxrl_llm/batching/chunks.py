"""Arrays of a packed micro-batch."""

from __future__ import annotations

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Leaf = Array | np.ndarray | jax.ShapeDtypeStruct | jax.stages.ArgInfo
"""An array on the devices or the host, or only its shape when a program is traced or compiled."""


@flax.struct.dataclass
class Chunks:
  """One micro-batch on the device (several: leading axis `micro`): sequences packed into chunks."""

  tokens: Int[Leaf, '*micro chunks time']
  positions: Int[Leaf, '*micro chunks time']
  """Position in the token's segment, from 0."""
  segment_ids: Int[Leaf, '*micro chunks time']
  """Number of the token's segment within its chunk, from 1; 0: padding."""
  loss_mask: Bool[Leaf, '*micro chunks time']
  """Tokens that are trained on."""
  reported: Bool[Leaf, '*micro chunks time']
  """Tokens whose logprobs are reported: all in a sample's loss_mask, even in rows without loss."""
  is_expert: Bool[Leaf, '*micro chunks time']
  behaviour_logprobs: Float[Leaf, '*micro chunks time']
  """Logprobs under the sampler."""
  proximal_logprobs: Float[Leaf, '*micro chunks time']
  """Logprobs under the policy before the batch."""
  reference_logprobs: Float[Leaf, '*micro chunks time']
  """Logprobs under the reference; 0 if no reference is read."""
  advantages: Float[Leaf, '*micro chunks time']
  values: Float[Leaf, '*micro chunks time']
  """Critic values before the batch; 0 without a critic."""
  returns: Float[Leaf, '*micro chunks time']
  """Regression targets of the critic; 0 without a critic."""
  temperature: Float[Leaf, '*micro chunks segments']
  pair: Int[Leaf, '*micro chunks segments']
  """Number of the preference pair in its micro-batch, from 1; 0: no pair."""
  label: Float[Leaf, '*micro chunks segments']
  """Role in the pair: 1 chosen, -1 rejected; 0: no pair."""

  @property
  def segments(self) -> int:
    """Upper bound on segments per chunk."""
    return self.label.shape[-1]


_DTYPES = {
  'tokens': np.int32,
  'positions': np.int32,
  'segment_ids': np.int32,
  'loss_mask': bool,
  'reported': bool,
  'is_expert': bool,
  'behaviour_logprobs': np.float32,
  'proximal_logprobs': np.float32,
  'reference_logprobs': np.float32,
  'advantages': np.float32,
  'values': np.float32,
  'returns': np.float32,
  'temperature': np.float32,
  'pair': np.int32,
  'label': np.float32,
}
_PER_SEGMENT = frozenset({'temperature', 'pair', 'label'})


def shapes(*leading: int, time: int, segments: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of each `Chunks` field, given the axes before `time` or `segments`."""

  def width(name):
    return segments if name in _PER_SEGMENT else time

  return {
    name: jax.ShapeDtypeStruct((*leading, width(name)), dtype) for name, dtype in _DTYPES.items()
  }
