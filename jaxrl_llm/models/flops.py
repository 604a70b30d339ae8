"""Model FLOPs: the number of floating-point operations that the model's arithmetic requires.

Invariant: recomputation (remat), padding and masked scores are not counted. The share of a device's
peak (MFU) therefore measures useful work only.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxrl_llm.models.heads import head_size
from jaxrl_llm.models.spec import ModelOptions, ModelSpec


def matmul_params(spec: ModelSpec) -> int:
  """Returns the number of parameters that each token is multiplied with: the kernels of
  projections, MLP and head. Lookups, norms and biases do not count.

  A tied embedding counts once, because only its use as the head is a matrix product.
  """
  d = spec.hidden_size
  attention = d * spec.head_dim * 2 * (spec.num_attention_heads + spec.num_key_value_heads)
  return spec.num_hidden_layers * (attention + 3 * d * spec.intermediate_size) + head_size(spec) * d


def causal_pairs(lengths: Iterable[int]) -> int:
  """Returns Σ n (n + 1) / 2, the number of (query, visible key) pairs in causal sequences of these
  lengths.
  """
  return sum(n * (n + 1) // 2 for n in lengths)


def model_flops(
  spec: ModelSpec, tokens: int, *, pairs: int, backward: bool = True, frozen: bool = False
) -> int:
  """Returns the number of operations of a forward pass or, with `backward`, of a training step. A
  training step has three times as many operations, or twice as many with frozen weights.

  forward = 2 · matmul_params · tokens + 4 · layers · heads · head_dim · pairs

  The first summand is a multiplication and an addition for each parameter and token. The second is
  two multiplications and two additions per pair, head and dimension: one of each for the score, and
  one of each for the product of weight and value. For each product in the forward pass, the
  backward pass has two products. Source: Chowdhery et al. (arXiv:2204.02311), appendix B, but only
  pairs within the causal mask are counted.

  Args:
    tokens: number of tokens in all sequences, without padding.
    pairs: see `causal_pairs`.
    backward: whether gradients are computed.
    frozen: whether the weights are frozen, as with adapters, so that the backward pass does not
      compute their gradients. The operations of the adapters themselves are not counted.
  """
  attention = 4 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * pairs
  passes = 1 if not backward else 2 if frozen else 3
  return passes * (2 * matmul_params(spec) * tokens + attention)


def recomputed_flops(
  spec: ModelSpec, options: ModelOptions, tokens: int, *, pairs: int, once: bool
) -> int:
  """Returns the number of operations that the backward pass of a training step computes again.

  Args:
    options: options of the model. `options.remat` determines what is recomputed of the layers.
    tokens: as in `model_flops`.
    pairs: as in `model_flops`.
    once: whether logits are computed for all tokens at once. Otherwise, the backward pass
      recomputes the logits.
  """

  def forward(pairs: int) -> int:
    return model_flops(spec, tokens, pairs=pairs, backward=False)

  head = 2 * head_size(spec) * spec.hidden_size * tokens
  layers = {
    'none': 0,
    'dots': forward(pairs) - forward(0),  # Only the matrix products of attention.
    'full': forward(pairs) - head,
    'offload': forward(pairs) - head,
  }[options.remat]
  return layers if once else layers + head
