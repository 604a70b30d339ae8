"""The critic's loss per token."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class ValueLoss(NamedTuple):
  loss: Float[Array, 'chunks time']
  clipped: Bool[Array, 'chunks time']
  """Tokens at which the clip takes effect (`critic/vf_clipfrac`)."""


def value_loss(
  values: Float[Array, 'chunks time'],
  old_values: Float[Array, 'chunks time'],
  returns: Float[Array, 'chunks time'],
  *,
  cliprange_value: float | None,
  mask: Bool[Array, 'chunks time'] | None = None,
) -> ValueLoss:
  """Returns PPO's clipped value loss, or half the squared error if `cliprange_value` is None.

  lossₜ = 0.5 max((vₜ - Rₜ)², (v_oldₜ + clip(vₜ - v_oldₜ, ±c) - Rₜ)²)

  Here v are the values, R the returns, and c is `cliprange_value`. Source: the code of Schulman et
  al. 2017 (arXiv:1707.06347), as in verl. `old_values` and `returns` must be constants.

  Args:
    mask: tokens that count. Elsewhere the loss is 0 and has no gradient. If None, all tokens count,
      and all inputs must be finite.
  """
  if mask is not None:
    values, old_values, returns = (jnp.where(mask, x, 0.0) for x in (values, old_values, returns))
  plain = (values - returns) ** 2
  if cliprange_value is None:
    return ValueLoss(0.5 * plain, jnp.zeros_like(plain, bool))
  # `near` equals v_old + clip(v - v_old, ±c), but without the rounding error of the subtraction,
  # which would mark some tokens within the range as clipped.
  near = jnp.clip(values, old_values - cliprange_value, old_values + cliprange_value)
  clipped = (near - returns) ** 2
  return ValueLoss(0.5 * jnp.maximum(plain, clipped), clipped > plain)
