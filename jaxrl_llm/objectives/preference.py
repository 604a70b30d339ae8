"""Preference losses per pair, from one number per sequence: its logprob or its reward.

Pairs that are absent from a micro-batch have no gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


class PairSums(NamedTuple):
  difference: Float[Array, 'pairs']
  """Value of the chosen member minus that of the rejected one; 0 for absent pairs."""
  present: Bool[Array, 'pairs']
  """Whether exactly one chosen and one rejected member are in the micro-batch."""


def pair_sums(
  values: Float[Array, 'chunks segments'],
  pair: Int[Array, 'chunks segments'],
  label: Num[Array, 'chunks segments'],
) -> PairSums:
  """Joins the two members of each pair, whichever chunks of the micro-batch hold them.

  The results have length `pairs` = chunks * segments, a static bound; pair p has index p - 1. For
  the sum chosen + rejected, which `centering_penalty` takes, pass `values * label`.

  Args:
    values: per sequence; may be anything where `pair` is 0.
    pair: 1.. within the micro-batch, 0 for sequences of no pair.
    label: 1 chosen, -1 rejected; 0 only where `pair` is 0.
  """
  index, label = pair.reshape(-1), label.reshape(-1)

  # Sequences of no pair fall into segment 0, which is left out.
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
  """Direct preference optimization, where h = policy_margin - reference_margin, and each margin is
  chosen - rejected, in nats.

  sigmoid: -(1 - ε) log σ(β h) - ε log σ(-β h);  ipo: (h - 1 / (2 β))²

  Sources: DPO (arXiv:2305.18290), eq. 7; cDPO (Mitchell 2023) for ε = `label_smoothing`, the
  probability that a label is wrong; IPO (arXiv:2310.12036), eq. 17. For IPO, average the logprobs
  over the completion's tokens, as its authors confirmed to TRL.

  In float32, sums of thousands of logprobs lose the digits that h needs. Sum logprobs - reference
  over the tokens instead, and pass the margin of these sums as `policy_margin`, with a
  `reference_margin` of 0.

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
  """A reward model's loss, -log σ(r_chosen - r_rejected - m).

  Sources: Bradley and Terry 1952, where m = 0; Llama 2 (arXiv:2307.09288), eq. 2.

  Args:
    margin: r_chosen - r_rejected.
    target_margin: m, by which the chosen reward should exceed the rejected one.
  """
  return -jax.nn.log_sigmoid(margin - target_margin)


def centering_penalty(chosen_plus_rejected: Float[Array, 'pairs']) -> Float[Array, 'pairs']:
  """(r_chosen + r_rejected)², which keeps rewards around 0 (arXiv:2312.09244; TRL's
  `center_rewards_coefficient`).
  """
  return chosen_plus_rejected**2
