"""The MLP's gate: its values and gradients, and what it keeps for them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.swiglu import swiglu

GATE, UP, WEIGHT = (
  jnp.asarray(np.random.default_rng(seed).normal(size=(7, 5)) * 4) for seed in range(3)
)


def plain(gate, up):
  return gate / (1 + jnp.exp(-gate)) * up


def test_values_and_gradients_are_those_of_the_formula():
  with jax.enable_x64(True):
    args = [jnp.asarray(np.asarray(x, np.float64)) for x in (GATE, UP)]
    np.testing.assert_allclose(swiglu(*args), plain(*args), rtol=1e-12)

    def loss(f):
      return lambda gate, up: (f(gate, up) * np.asarray(WEIGHT, np.float64)).sum()

    for found, wanted in zip(
      jax.grad(loss(swiglu), (0, 1))(*args), jax.grad(loss(plain), (0, 1))(*args)
    ):
      np.testing.assert_allclose(found, wanted, rtol=1e-11)


def test_extremes_stay_finite():
  gate, ones = jnp.asarray([-1e4, -100.0, 0.0, 100.0, 1e4]), jnp.ones(5)
  by_gate, by_up = jax.grad(lambda gate, up: swiglu(gate, up).sum(), (0, 1))(gate, ones)
  np.testing.assert_allclose(by_gate, [0, 0, 0.5, 1, 1], atol=1e-6)
  np.testing.assert_allclose(by_up, [0, 0, 0, 100, 1e4], atol=1e-6)


def test_gradients_of_bfloat16_are_rounded_once():
  gate, up, weight = (x.astype(jnp.bfloat16) for x in (GATE, UP, WEIGHT))
  wide = [x.astype(jnp.float32) for x in (gate, up)]
  _, pull = jax.vjp(swiglu, gate, up)
  _, exact = jax.vjp(plain, *wide)
  for found, wanted in zip(pull(weight), exact(weight.astype(jnp.float32))):
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-6)


def test_the_two_factors_are_all_that_is_kept():
  _, pull = jax.vjp(swiglu, GATE, UP)
  assert sum(x.nbytes for x in jax.tree.leaves(pull)) == GATE.nbytes + UP.nbytes
