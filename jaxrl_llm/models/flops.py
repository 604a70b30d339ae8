"""The floating-point operations that a model's own arithmetic asks for, whatever a program does beside it.

Invariant: what is computed again (remat), for padding, or for masked scores is not counted, so that a share of a
device's peak says what was achieved.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxrl_llm.models.heads import head_size
from jaxrl_llm.models.spec import ModelSpec


def matmul_params(spec: ModelSpec) -> int:
  """Parameters that each token is multiplied with: projections, MLP and head; a lookup, norms and biases are none.

  A tied embedding counts once, as the head.
  """
  d = spec.hidden_size
  attention = d * spec.head_dim * 2 * (spec.num_attention_heads + spec.num_key_value_heads)
  return spec.num_hidden_layers * (attention + 3 * d * spec.intermediate_size) + head_size(spec) * d


def causal_pairs(lengths: Iterable[int]) -> int:
  """Pairs of a query and a key that it sees, over sequences of these lengths: Σ n (n + 1) / 2."""
  return sum(n * (n + 1) // 2 for n in lengths)


def model_flops(spec: ModelSpec, tokens: int, *, pairs: int, backward: bool = True) -> int:
  """Operations of a forward pass, and with `backward` of a training step, which are three times as many.

  forward = 2 · matmul_params · tokens + 4 · layers · heads · head_dim · pairs: a multiplication and an addition for
  each parameter and token, and twice that (scores, and their product with the values) for each pair, head and
  dimension. The backward pass has two products where the forward pass has one. Source: Chowdhery et al.
  (arXiv:2204.02311), appendix B, with the pairs that a causal mask leaves instead of all.

  Args:
    tokens: of all sequences, padding not counted.
    pairs: see `causal_pairs`.
    backward: whether gradients by all parameters are computed.
  """
  attention = 4 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * pairs
  return (3 if backward else 1) * (2 * matmul_params(spec) * tokens + attention)
