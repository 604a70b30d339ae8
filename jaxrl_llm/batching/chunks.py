"""The arrays of a packed micro-batch."""

from __future__ import annotations

from typing import Any

import flax.struct

Leaf = Any
"""An array, or what stands for one while a program is traced, sharded or restored: so it is not checked here."""


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
  """bool[chunks, time], tokens that get a logprob: the samples' own loss_mask, also of rows that the loss leaves out"""
  is_expert: Leaf
  """bool[chunks, time]"""
  behaviour_logprobs: Leaf
  """f32[chunks, time], the sampler's"""
  proximal_logprobs: Leaf
  """f32[chunks, time], the policy's before the batch"""
  reference_logprobs: Leaf
  """f32[chunks, time], 0 where no reference is read"""
  advantages: Leaf
  """f32[chunks, time]"""
  values: Leaf
  """f32[chunks, time], the critic's before the batch; 0 where there is none"""
  returns: Leaf
  """f32[chunks, time], what the critic learns; 0 where there is none"""
  temperature: Leaf
  """f32[chunks, segments]"""
  pair: Leaf
  """i32[chunks, segments], 1.. in each micro-batch for sequences of a preference pair, else 0"""
  label: Leaf
  """f32[chunks, segments], 1 chosen, -1 rejected, 0 neither"""
