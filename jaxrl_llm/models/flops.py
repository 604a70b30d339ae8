"""Floating-point operations of a model, counted from its spec: what a utilisation is a part of.

A compiler's own count sees the body of a scan once, and counts what remat computes again; this one does neither.
"""

from __future__ import annotations

from jaxrl_llm.models.heads import head_size
from jaxrl_llm.models.spec import ModelSpec


def matmul_params(spec: ModelSpec) -> int:
  """Parameters that every token is multiplied with: all kernels, the head's too, but not the embedding's look-up."""
  d, heads = spec.hidden_size, spec.head_dim * (2 * spec.num_attention_heads + 2 * spec.num_key_value_heads)
  return spec.num_hidden_layers * (d * heads + 3 * d * spec.intermediate_size) + head_size(spec) * d


def forward_flops(spec: ModelSpec, *, tokens: int, visible: float) -> float:
  """2 · matmul_params per token, and in each layer and head 4 · head_dim per visible key: scores, then values.

  Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1, with attention counted by what is visible.

  Args:
    tokens: that are computed.
    visible: keys that a token sees, on average: (length + 1) / 2 for causal attention over sequences of that length.
  """
  attention = 4 * spec.num_attention_heads * spec.head_dim * spec.num_hidden_layers * visible
  return tokens * (2 * matmul_params(spec) + attention)


def training_flops(spec: ModelSpec, *, tokens: int, visible: float) -> float:
  """Three times the forward pass: the backward pass has two products for each of the forward's."""
  return 3 * forward_flops(spec, tokens=tokens, visible=visible)
