"""Model FLOPs: the floating-point operations that the model's arithmetic requires.

Invariant: recomputation (remat), padding and masked scores are not counted, so that the share of a
device's peak measures useful work (MFU).
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxrl_llm.models.heads import head_size
from jaxrl_llm.models.spec import ModelSpec


def matmul_params(spec: ModelSpec) -> int:
  """Number of parameters in matrix products per token: projections, MLP and head. Lookups, norms
  and biases do not count.

  A tied embedding counts once, as the head.
  """
  d = spec.hidden_size
  attention = d * spec.head_dim * 2 * (spec.num_attention_heads + spec.num_key_value_heads)
  return spec.num_hidden_layers * (attention + 3 * d * spec.intermediate_size) + head_size(spec) * d


def causal_pairs(lengths: Iterable[int]) -> int:
  """Number of (query, visible key) pairs in sequences of these lengths: Σ n (n + 1) / 2."""
  return sum(n * (n + 1) // 2 for n in lengths)


def model_flops(spec: ModelSpec, tokens: int, *, pairs: int, backward: bool = True) -> int:
  """Operations of a forward pass or, with `backward`, of a training step: three times as many.

  forward = 2 · matmul_params · tokens + 4 · layers · heads · head_dim · pairs: a multiplication and
  an addition for each parameter and token, and two of each (for the scores, and for their product
  with the values) per pair, head and dimension. The backward pass has two products where the
  forward pass has one. Source: Chowdhery et al. (arXiv:2204.02311), appendix B, counting only pairs
  within the causal mask.

  Args:
    tokens: number of tokens in all sequences, without padding.
    pairs: see `causal_pairs`.
    backward: whether gradients of all parameters are computed.
  """
  attention = 4 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * pairs
  return (3 if backward else 1) * (2 * matmul_params(spec) * tokens + attention)
