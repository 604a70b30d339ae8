"""Speculative decoding by prompt lookup: drafts the next tokens of a sequence by copying the tokens
after an earlier occurrence of its last tokens.

Invariant: drafts affect how many tokens a decode step samples, but never which tokens. At every
position of the draft, the decode program samples a token in the same way as without a draft. It
keeps the sampled tokens up to and including the first that differs from the draft. This is
speculative sampling (Leviathan et al., arXiv:2211.17192) for a proposal that puts all its mass on
one token d: d is accepted with its probability p(d), and a rejected draft is replaced by a sample
from p without d, renormalised.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxrl_llm.core.errors import UserError

_MAX_TOKENS, _MAX_NGRAM = 32, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
  """Speculative decoding by prompt lookup. Sampled tokens have the same distribution as without
  it.
  """

  tokens: int = 4
  """Number of tokens to draft per decode step. A step computes one token more than this in every
  slot, whether or not the slot has a draft.
  """
  ngram_min: int = 2
  """Minimum number of tokens at the end of a sequence that must also occur earlier in the sequence
  (prompt or answer) before a draft is made.
  """
  ngram_max: int = 4
  """Maximum number of tokens at the end of a sequence that are compared with earlier tokens. The
  draft copies the tokens after the longest match or, among equally long matches, after the latest.
  """

  def __post_init__(self):
    where = 'rollout.embedded.speculation'
    if not 1 <= self.tokens <= _MAX_TOKENS:
      raise UserError(f'{where}.tokens: got {self.tokens}, wanted 1 to {_MAX_TOKENS}')
    if not 1 <= self.ngram_min <= self.ngram_max <= _MAX_NGRAM:
      raise UserError(
        f'{where}: ngram_min {self.ngram_min} and ngram_max {self.ngram_max}, wanted 1 <= '
        f'ngram_min <= ngram_max <= {_MAX_NGRAM}'
      )


def propose(
  history: Int32[Array, 'rows length'], position: Int32[Array, 'rows'], config: SpeculationConfig
) -> tuple[Int32[Array, 'rows drafted'], Bool[Array, 'rows']]:
  """Drafts the `config.tokens` tokens that follow each row's newest token. Returns (drafts, whether
  each row has a draft). A row without a draft gets arbitrary tokens of its history instead.

  The copied range may overlap the draft, as in LZ77, so a repeated pattern is continued even if it
  is shorter than the draft.

  Args:
    history: tokens of each row's sequence. Entries after the newest token are not read.
    position: index of each row's newest token.
  """
  length = history.shape[1]
  indices = jnp.arange(length, dtype=jnp.int32)
  alike = indices < position[:, None]
  agreeing = jnp.zeros_like(history)
  for back in range(config.ngram_max):
    newest = jnp.take_along_axis(history, jnp.maximum(position - back, 0)[:, None], axis=1)
    shifted = jnp.roll(history, back, axis=1)
    alike &= (shifted == newest) & (indices >= back)
    agreeing += alike
  # Among matches of equal length, the one with the largest index has the highest score.
  scores = jnp.where(agreeing >= config.ngram_min, agreeing * length + indices, -1).max(-1)
  distance = position - jnp.where(scores < 0, 0, scores % length)
  offsets = jnp.arange(config.tokens, dtype=jnp.int32) % jnp.maximum(distance, 1)[:, None]
  sources = jnp.minimum((position - distance + 1)[:, None] + offsets, position[:, None])
  return jnp.take_along_axis(history, sources, axis=1), scores >= 0
