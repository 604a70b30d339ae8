"""Preference losses per pair. Each sequence of a pair is represented by one number, its logprob or
its reward.

Pairs that are absent from a micro-batch have no gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


class PairSums(NamedTuple):
  difference: Float[Array, 'pairs']
  """Value of the chosen sequence minus value of the rejected sequence; 0 for absent pairs."""
  present: Bool[Array, 'pairs']
  """Whether the micro-batch contains exactly one chosen and one rejected sequence of the pair."""


def pair_sums(
  values: Float[Array, 'chunks segments'],
  pair: Int[Array, 'chunks segments'],
  label: Num[Array, 'chunks segments'],
) -> PairSums:
  """Returns chosen minus rejected for each pair, even if its two sequences are in different chunks
  of the micro-batch.

  The results have length `pairs` = chunks * segments, a static upper bound of the number of pairs.
  Pair p has index p - 1. `centering_penalty` takes the sum chosen + rejected, which this function
  returns for `values * label`.

  Args:
    values: one number per sequence. It may be anything where `pair` is 0.
    pair: number of the sequence's pair within the micro-batch, from 1; 0 for a sequence without a
      pair.
    label: 1 for a chosen sequence, -1 for a rejected one. It may be 0 only where `pair` is 0.
  """
  index, label = pair.reshape(-1), label.reshape(-1)

  # Sequences without a pair are summed in segment 0, which is dropped.
  def total(x):
    return jax.ops.segment_sum(x, index, num_segments=index.size + 1)[1:]

  signed = values.reshape(-1) * label.astype(values.dtype)
  present = (total((label > 0).astype(jnp.int32)) == 1) & (
    total((label < 0).astype(jnp.int32)) == 1
  )
  return PairSums(jnp.where(present, total(signed), 0.0), present)


def dpo_loss(
  policy_margin: Float[Array, 'pairs'],
  reference_margin: Float[Array, 'pairs'],
  *,
  beta: float,
  label_smoothing: float = 0.0,
  kind: Literal['sigmoid', 'ipo'] = 'sigmoid',
) -> Float[Array, 'pairs']:
  """Returns the loss of direct preference optimization (DPO) or of IPO.

  sigmoid: -(1 - ε) log σ(β h) - ε log σ(-β h);  ipo: (h - 1 / (2 β))²

  Here h = policy_margin - reference_margin. A margin is the logprob of the chosen answer minus the
  logprob of the rejected answer, in nats. ε = `label_smoothing` is the probability that a label is
  wrong.

  Sources: DPO (arXiv:2305.18290), eq. 7; IPO (arXiv:2310.12036), eq. 17; cDPO (Mitchell 2023) for
  ε. For IPO, the logprob of an answer must be the average over its tokens, as IPO's authors
  confirmed to TRL.

  In float32, sums of thousands of logprobs lose the digits that h needs. Therefore sum logprobs -
  reference over the tokens of each answer, pass the margin of these sums as `policy_margin`, and
  pass 0 as `reference_margin`.

  Raises:
    ValueError: `label_smoothing` is set for ipo, which does not use it.
  """
  if kind == 'ipo' and label_smoothing:
    raise ValueError(
      f'dpo_loss: label_smoothing={label_smoothing} has no meaning for kind=ipo; set it to 0'
    )
  h = policy_margin - reference_margin
  if kind == 'ipo':
    return (h - 0.5 / beta) ** 2
  return -(1.0 - label_smoothing) * jax.nn.log_sigmoid(
    beta * h
  ) - label_smoothing * jax.nn.log_sigmoid(-beta * h)


def bradley_terry_loss(
  margin: Float[Array, 'pairs'], *, target_margin: float | Float[Array, 'pairs'] = 0.0
) -> Float[Array, 'pairs']:
  """Returns a reward model's loss, -log σ(r_chosen - r_rejected - m).

  Sources: Bradley and Terry 1952 for m = 0; Llama 2 (arXiv:2307.09288), eq. 2, for other m.

  Args:
    margin: r_chosen - r_rejected.
    target_margin: m, the margin by which r_chosen should exceed r_rejected.
  """
  return -jax.nn.log_sigmoid(margin - target_margin)


def centering_penalty(chosen_plus_rejected: Float[Array, 'pairs']) -> Float[Array, 'pairs']:
  """Returns (r_chosen + r_rejected)², a penalty that keeps rewards around 0 (arXiv:2312.09244). TRL
  calls the weight of this penalty `center_rewards_coefficient`.
  """
  return chosen_plus_rejected**2
