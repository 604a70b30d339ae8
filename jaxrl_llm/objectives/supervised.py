"""Losses on given tokens."""

from __future__ import annotations

from jaxtyping import Array, Float


def negative_log_likelihood(logprobs: Float[Array, 'chunks time']) -> Float[Array, 'chunks time']:
  """lossₜ = -log p(tokenₜ | tokens before it). Masking and reduction are the caller's."""
  return -logprobs
