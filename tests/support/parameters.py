"""Parameter trees for tests, and a comparison of them to the bit."""

import numpy as np

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.weights.tables import entries


def random_params(spec, seed=0, dtype=np.float32):
  """Returns an unrolled tree of random numbers, so that a mix-up of tensors is always detected.
  Numbers of norms are near 1.
  """
  rng = np.random.default_rng(seed)
  return unflatten(
    {
      e.unrolled: rng.normal(float('norm' in e.path), 0.2, e.shape).astype(dtype)
      for e in entries(spec)
    }
  )


def assert_same_bits(first, second):
  first, second = flatten(first), flatten(second)
  assert set(first) == set(second)
  for name, array in first.items():
    a, b = np.asarray(array), np.asarray(second[name])
    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name
