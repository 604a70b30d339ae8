"""Arrays that are assembled on one device have the bits of those that are copied to the host."""

import jax
import numpy as np
import pytest
from parameters import random_params

from jaxrl_llm.learner.state import place_params
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import LoraConfig, ModelOptions
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.parallel.rules import sharding
from jaxrl_llm.rollout.api import joined
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.whole_arrays import WholeArrays


def assert_same_as_on_the_host(gatherer, params):
  """In another order, and on another device than the first."""
  host = dict(joined(gatherer.leaves(params)))
  device = gatherer.mesh.devices.flat[-1]
  names = list(host)[::-1]
  assembled = list(WholeArrays(gatherer).of(params)(names, device))
  assert [name for name, _ in assembled] == names
  for name, bits in assembled:
    assert bits.ndim == 1 and bits.devices() == {device}, name
    np.testing.assert_array_equal(bits, host[name].reshape(-1).view(bits.dtype), err_msg=name)


@pytest.mark.parametrize(
  ('axes', 'scan_layers', 'part_bytes'),
  [
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, True, 1),
    pytest.param({'fsdp': 8}, False, 1 << 20, marks=pytest.mark.full),
    pytest.param({}, True, 2_000, marks=pytest.mark.full),
  ],
  ids=str,
)
def test_parameters_have_the_same_bits(axes, scan_layers, part_bytes):
  """The embedding has a prime number of rows in each group: its last parts overlap."""
  spec = tiny('qwen2', 52, num_hidden_layers=3, tie_word_embeddings=False)
  mesh = build_mesh(MeshConfig(**axes), None if axes else jax.devices()[:1])
  model = build_model(spec, ModelOptions(scan_layers=scan_layers), mesh)
  host = random_params(spec)
  awkward = [np.nan, -np.inf, -0.0, 1e-40, 3.39e38, 1 + 2**-8, 1 + 3 * 2**-8]
  host['embed']['kernel'][51, :7] = host['layers']['2']['mlp']['up']['kernel'][5, :7] = awkward
  params = place_params(model, mesh, stack_layers(host) if scan_layers else host)
  gatherer = Gatherer(mesh, dtype='bfloat16', part_bytes=part_bytes)
  if part_bytes < 1 << 20:
    assert len(list(gatherer.parts(params, ['embed/kernel']))) > 1
  assert_same_as_on_the_host(gatherer, params)


def test_kernels_with_merged_adapters_have_the_same_bits():
  """Each part is the product of the same compiled program."""
  mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  random, lora = np.random.default_rng(0), LoraConfig(rank=2, alpha=6)
  shapes = {'kernel': (4, 16, 8), 'lora_a': (4, 2, 8), 'lora_b': (4, 16, 2)}
  axes = {'kernel': ('mlp', 'embed'), 'lora_a': (None, 'embed'), 'lora_b': ('mlp', None)}
  placed = {
    name: jax.device_put(
      random.normal(size=shape).astype(np.float32), sharding(mesh, (None, *axes[name]), shape)
    )
    for name, shape in shapes.items()
  }
  for dtype in (None, 'bfloat16'):
    gatherer = Gatherer(mesh, lora, dtype=dtype, part_bytes=1)
    assert_same_as_on_the_host(gatherer, {'layers': {'up': placed}})
