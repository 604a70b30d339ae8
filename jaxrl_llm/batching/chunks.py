"""The arrays of a packed micro-batch."""

from __future__ import annotations

from typing import Any

import flax.struct

Leaf = Any
"""An array, or its stand-in while a program is traced, sharded or restored; hence no shape check here."""


@flax.struct.dataclass
class Chunks:
  """One micro-batch on the device (or several, with a leading axis): sequences packed into chunks."""

  tokens: Leaf
  """i32[chunks, time]"""
  positions: Leaf
  """i32[chunks, time], from 0 in each segment"""
  segment_ids: Leaf
  """i32[chunks, time], 1.. in each chunk, 0 = padding"""
  loss_mask: Leaf
  """bool[chunks, time], tokens that are trained on"""
  reported: Leaf
  """bool[chunks, time], tokens with a reported logprob: the samples' loss_mask, also of rows left out of the loss"""
  is_expert: Leaf
  """bool[chunks, time]"""
  behaviour_logprobs: Leaf
  """f32[chunks, time], under the sampler"""
  proximal_logprobs: Leaf
  """f32[chunks, time], under the policy before the batch"""
  reference_logprobs: Leaf
  """f32[chunks, time], under the reference; 0 if no reference is read"""
  advantages: Leaf
  """f32[chunks, time]"""
  values: Leaf
  """f32[chunks, time], critic values before the batch; 0 without a critic"""
  returns: Leaf
  """f32[chunks, time], regression targets of the critic; 0 without a critic"""
  temperature: Leaf
  """f32[chunks, segments]"""
  pair: Leaf
  """i32[chunks, segments], number of the preference pair in its micro-batch, from 1; 0 = no pair"""
  label: Leaf
  """f32[chunks, segments], 1 chosen, -1 rejected, 0 neither"""
