"""The MLP's gate, silu(gate) · up, with a backward pass that needs only `gate` and `up`.

Invariant: the only residuals are the arguments. Automatic differentiation would also save one more
array of the MLP's width per layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def swiglu(gate: Float[Array, '*shape'], up: Float[Array, '*shape']) -> Float[Array, '*shape']:
  """Returns silu(gate) · up."""
  return jax.nn.silu(gate) * up


def _forward(gate, up):
  return swiglu(gate, up), (gate, up)


def _backward(kept, dy):
  """Returns the gradients of `gate` and `up`, computed in at least float32.

  With s = sigmoid(gate), d gate = dy · up · s · (1 + gate · (1 - s)) and d up = dy · gate · s.
  """
  gate, up, wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (*kept, dy))
  s = jax.nn.sigmoid(gate)
  by_gate, by_up = wide * up * s * (1 + gate * (1 - s)), wide * gate * s
  return by_gate.astype(dy.dtype), by_up.astype(dy.dtype)


swiglu.defvjp(_forward, _backward)
