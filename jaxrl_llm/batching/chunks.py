"""Arrays of a micro-batch, whose sequences are packed into chunks of fixed length."""

from __future__ import annotations

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Leaf = Array | np.ndarray | jax.ShapeDtypeStruct | jax.stages.ArgInfo
"""An array on the devices or on the host or, while a program is traced or compiled, a description
of an array's shape and dtype.
"""


@flax.struct.dataclass
class Chunks:
  """One micro-batch, or several if the arrays have the leading axis `micro`.

  A chunk contains several sequences. The tokens of a sequence that are stored in the chunk are its
  segment: all of them or, if sequences share prefixes, all but the leading tokens that the sequence
  shares with earlier sequences of the chunk. The last token of the prompt is always stored, because
  its hidden state predicts the first token of the response.
  """

  tokens: Int[Leaf, '*micro chunks time']
  positions: Int[Leaf, '*micro chunks time']
  """Position of the token in its sequence, counted from 0."""
  segment_ids: Int[Leaf, '*micro chunks time']
  """Number of the token's segment within its chunk, counted from 1; 0 for padding."""
  loss_mask: Bool[Leaf, '*micro chunks time']
  """Whether the token is trained on."""
  reported: Bool[Leaf, '*micro chunks time']
  """Whether the logprob of the token is reported. It is reported for every token in the loss mask
  of a stored sample, even if the sample is left out of the loss.
  """
  is_expert: Bool[Leaf, '*micro chunks time']
  behaviour_logprobs: Float[Leaf, '*micro chunks time']
  """Logprobs under the policy that sampled the tokens."""
  proximal_logprobs: Float[Leaf, '*micro chunks time']
  """Logprobs under the policy before the update."""
  reference_logprobs: Float[Leaf, '*micro chunks time']
  """Logprobs under the reference model; 0 if the algorithm does not read them."""
  advantages: Float[Leaf, '*micro chunks time']
  values: Float[Leaf, '*micro chunks time']
  """Values under the critic before the update; 0 without a critic."""
  returns: Float[Leaf, '*micro chunks time']
  """Regression targets of the critic; 0 without a critic."""
  temperature: Float[Leaf, '*micro chunks segments']
  pair: Int[Leaf, '*micro chunks segments']
  """Number of the segment's preference pair within the micro-batch, counted from 1; 0 if the
  segment is in no pair.
  """
  label: Float[Leaf, '*micro chunks segments']
  """Role of the segment in its pair: 1 for chosen, -1 for rejected, 0 if it is in no pair."""
  seen_until: Int[Leaf, '*micro chunks time'] | None = None
  """Number of the last segment of the chunk whose tokens attend to this token; 0 for padding.
  Segments are in depth-first order, see `ops.places.Places`. None if sequences do not share
  prefixes.
  """

  @property
  def segments(self) -> int:
    """Upper bound on the number of segments per chunk."""
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
  'seen_until': np.int32,
}
_PER_SEGMENT = frozenset({'temperature', 'pair', 'label'})


def shapes(
  *leading: int, time: int, segments: int, shares_prefixes: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shape and dtype of each field of `Chunks`, keyed by field.

  Args:
    leading: sizes of the axes before the last one.
    time: size of the axis `time`.
    segments: size of the axis `segments`.
    shares_prefixes: whether to include the field `seen_until`.
  """

  def width(name):
    return segments if name in _PER_SEGMENT else time

  return {
    name: jax.ShapeDtypeStruct((*leading, width(name)), dtype)
    for name, dtype in _DTYPES.items()
    if shares_prefixes or name != 'seen_until'
  }
