"""Parameters read onto a mesh: the bits of the files, each shard read once, and no more."""

import jax
import numpy as np
import pytest
from parameters import assert_same_bits, random_params

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.learner.loading import read_params
from jaxrl_llm.learner.state import param_shardings, place_params
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.weights import safetensors_files
from jaxrl_llm.weights.safetensors_files import load_params, save_params


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('axes', [{'fsdp': 8}, {'data': 2, 'fsdp': 2, 'tensor': 2}])
def test_shards_are_read_to_the_bit(tmp_path, monkeypatch, axes, scan_layers, dtype):
  spec, mesh = tiny('qwen2', 48, num_hidden_layers=3), build_mesh(MeshConfig(**axes))
  options = ModelOptions(scan_layers=scan_layers, param_dtype=dtype)
  model = build_model(spec, options, mesh)
  save_params(tmp_path, random_params(spec), spec)
  monkeypatch.setattr(safetensors_files, '_BLOCK', 1000)  # Tensors come in several blocks.
  counted, require = [], safetensors_files._require_finite

  def count(path, name, block, offset):
    counted.append(block.size)
    require(path, name, block, offset)

  monkeypatch.setattr(safetensors_files, '_require_finite', count)
  params = read_params(model, mesh, tmp_path, spec)
  # Every element once, although several devices hold it; where no axis divides, too.
  assert sum(counted) == sum(leaf.size for leaf in jax.tree.leaves(params))
  assert max(counted) <= 1000
  whole = load_params(tmp_path, spec, scan_layers=scan_layers, dtype=dtype)
  assert_same_bits(params, whole)
  assert_same_bits(place_params(model, mesh, whole), whole)
  wanted = flatten(param_shardings(model, mesh))
  for name, leaf in flatten(params).items():
    assert leaf.sharding == wanted[name] and leaf.dtype == dtype
    for shard in leaf.addressable_shards:
      np.testing.assert_array_equal(shard.data, np.asarray(leaf)[shard.index])


def test_a_shard_that_is_not_finite_is_named_by_its_place_in_the_tensor(tmp_path):
  spec, mesh = tiny('llama', 48, num_hidden_layers=2), build_mesh(MeshConfig(fsdp=8))
  model = build_model(spec, ModelOptions(scan_layers=True), mesh)
  params = random_params(spec)
  params['layers']['1']['mlp']['up']['kernel'][100, 61] = np.nan
  save_params(tmp_path, params, spec)
  with pytest.raises(
    UserError, match=r'layers\.1\.mlp\.up_proj\.weight\[100, 61\] is nan as float32'
  ):
    read_params(model, mesh, tmp_path, spec)


def test_a_head_that_is_replaced_is_not_read(tmp_path):
  spec, mesh = tiny('llama', 48, tie_word_embeddings=False), build_mesh(MeshConfig(fsdp=8))
  params = random_params(spec)
  params['head']['kernel'][:] = np.inf
  save_params(tmp_path, params, spec)
  model = build_model(with_head(spec, 'scalar'), ModelOptions(), mesh)
  read = read_params(model, mesh, tmp_path, spec, with_head=False)
  assert_same_bits(read, {name: part for name, part in params.items() if name != 'head'})
