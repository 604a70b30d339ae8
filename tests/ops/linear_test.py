"""The product with a kernel: its values and gradients, and the precision that gradients are summed
in.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.ops.linear import linear
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh


def draw(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize('out', [3, 5])
@pytest.mark.parametrize('tokens', [(6,), (2, 3)])
def test_values_and_gradients_are_those_of_the_plain_product(tokens, out):
  x, kernel, weight = draw(0, *tokens, 4), draw(1, out, 4), draw(2, *tokens, out)

  def loss(product):
    return lambda x, kernel: (product(x, kernel) * weight).sum()

  def plain(x, kernel):
    return jnp.einsum('...i,oi->...o', x, kernel)

  np.testing.assert_allclose(linear(x, kernel), plain(x, kernel), rtol=1e-6)
  for found, wanted in zip(
    jax.grad(loss(linear), (0, 1))(x, kernel), jax.grad(loss(plain), (0, 1))(x, kernel)
  ):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('of_x', 'of_kernel'), [('bfloat16', 'float32'), ('bfloat16', 'bfloat16')])
def test_the_result_has_the_activations_dtype_and_the_gradient_the_kernels(of_x, of_kernel):
  x, kernel = draw(0, 3, 4).astype(of_x), draw(1, 5, 4).astype(of_kernel)
  assert linear(x, kernel).dtype == of_x
  dx, dkernel = jax.grad(lambda x, kernel: linear(x, kernel).astype(jnp.float32).sum(), (0, 1))(
    x, kernel
  )
  assert (dx.dtype, dkernel.dtype) == (of_x, of_kernel)


def test_a_float32_kernels_gradient_is_summed_in_float32():
  # 4,096 tokens of 1 · 1 and one of 1 · 1/256: bfloat16 holds 8 bits, so that a sum in it would
  # lose the last.
  x = jnp.ones((4097, 1), jnp.bfloat16).at[-1].set(1 / 256)
  gradient = jax.grad(lambda kernel: linear(x, kernel).astype(jnp.float32).sum())(
    jnp.ones((1, 1), jnp.float32)
  )
  assert float(gradient[0, 0]) == 4096 + 1 / 256


def test_a_gradient_that_is_summed_in_bfloat16_is_rounded_once_per_device():
  # Within a device, 4,096 tokens of 1 are counted exactly: a sum in bfloat16 would end at 256.
  x = jnp.ones((4097, 1), jnp.bfloat16).at[-1].set(1 / 256)
  gradient = jax.grad(lambda kernel: linear(x, kernel, 'bfloat16').astype(jnp.float32).sum())(
    jnp.ones((1, 1), jnp.float32)
  )
  assert gradient.dtype == jnp.float32 and float(gradient[0, 0]) == 4096


@pytest.mark.parametrize('reduce_dtype', [None, 'bfloat16'])
def test_the_error_of_summing_over_eight_devices_in_bfloat16(reduce_dtype):
  mesh = build_mesh(MeshConfig(fsdp=8))
  x, kernel, weight = draw(0, 8, 64, 32), draw(1, 48, 32), draw(2, 8, 64, 48)

  def gradient(x, kernel):
    return jax.grad(lambda k: (linear(x, k, reduce_dtype).astype(jnp.float32) * weight).sum())(
      kernel
    )

  wanted = np.asarray(gradient(x.astype(jnp.bfloat16).astype(jnp.float32), kernel), np.float64)
  sharded = jax.jit(gradient, out_shardings=NamedSharding(mesh, PartitionSpec('fsdp')))
  batch = jax.device_put(x.astype(jnp.bfloat16), NamedSharding(mesh, PartitionSpec('fsdp')))
  weight = jax.device_put(weight, NamedSharding(mesh, PartitionSpec('fsdp')))
  error = np.linalg.norm(np.asarray(sharded(batch, kernel)) - wanted) / np.linalg.norm(wanted)
  # Both factors are rounded to bfloat16 in any case.
  print(f'{reduce_dtype}: relative error {error:.2e}')
  assert error < 2**-8
