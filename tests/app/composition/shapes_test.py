"""Whether the sequences of a stage share prefixes, by what attention can do."""

import json

import pytest

from jaxrl_llm.api import load_config
from jaxrl_llm.app.composition import shapes
from jaxrl_llm.app.composition.automatic import with_sized
from jaxrl_llm.app.composition.shapes import saved_by_sharing, stage_shape
from jaxrl_llm.app.composition.stages import policy_options
from jaxrl_llm.models import attention
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh


def rollout(prompt, response):
  return {
    'rollout.max_prompt_length': str(prompt),
    'rollout.max_response_length': str(response),
    'rollout.embedded.prefill_buckets': '[256]',
  }


@pytest.fixture
def shape_on_gpus(monkeypatch):
  """Shape of the quickstart's GRPO batches as on a GPU, by policy.attention and rollout lengths."""

  def shape(kernel, prompt, response):
    for module in (attention, shapes):
      monkeypatch.setattr(module, 'platform_of', lambda mesh: 'gpu')
    values = rollout(prompt, response)
    values |= {'policy.attention': kernel, 'policy.dtype': 'bfloat16', 'learner.chunk_len': 'null'}
    config = with_sized(load_config('quickstart', values), platform='cpu', spec=None)
    mesh = build_mesh(MeshConfig())
    return stage_shape(config.stages[1], config, mesh, (), options=policy_options(config))

  return shape


def test_kernels_that_take_a_mask_share_prefixes_in_chunks_whose_mask_is_small(shape_on_gpus):
  shape = shape_on_gpus('cudnn', 256, 64)
  assert shape.shares_prefixes and shape.chunk_len > 320  # Longer, for whole groups.
  assert shape == shape_on_gpus('blockwise', 256, 64)
  shape = shape_on_gpus('cudnn', 256, 4096)  # A whole group's row would have over 8,192 tokens.
  assert (shape.shares_prefixes, shape.chunk_len) == (True, 4352)
  assert shape_on_gpus('blockwise', 256, 4096).chunk_len > 8192


@pytest.mark.parametrize('kernel', ['pallas_gpu', 'auto'])
def test_with_another_kernel_and_before_the_choice_sequences_stay_separate(kernel, shape_on_gpus):
  shape = shape_on_gpus(kernel, 256, 64)
  assert (shape.shares_prefixes, shape.chunk_len) == (False, 320)


def test_the_share_of_tokens_that_sharing_saves():
  """Groups of eight: of 8 · (256 + 64) tokens, 7 · 256 are computed once for all."""
  config = load_config('quickstart', rollout(256, 64))
  assert config.stages[1].source.group_size == 8
  assert saved_by_sharing(config) == pytest.approx(7 * 256 / (8 * 320))
  without = load_config('quickstart', {'learner.share_prefixes': json.dumps(False)})
  assert saved_by_sharing(without) == 0
