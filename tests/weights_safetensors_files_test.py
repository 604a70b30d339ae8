"""Files of weights: sharded and whole, the same bits, and every kind of damage named in one line."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from weights_layout_test import assert_same_bits, random_params

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights.hf_config import read_spec, write_config
from jaxrl_llm.weights.safetensors_files import SHARD_BYTES, load_params, save_params
from jaxrl_llm.weights.tables import entries


def small_model(directory, *, dtype='float32', shard_bytes=SHARD_BYTES, **fields):
  spec = tiny('llama', 50, num_hidden_layers=2, **fields)
  params = random_params(spec)
  save_params(directory, params, spec, dtype=dtype, shard_bytes=shard_bytes)
  write_config(directory, spec, dtype=dtype)
  return spec, params


def test_shards_hold_everything_once_and_no_more_than_told(tmp_path):
  spec, params = small_model(tmp_path, shard_bytes=70_000)
  index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
  sizes, seen = [], {}
  for path in sorted(tmp_path.glob('model-*.safetensors')):
    tensors = load_file(path)
    sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
    seen |= dict.fromkeys(tensors, path.name)
    assert safe_open(path, 'np').metadata() == {'format': 'pt'}
  # Parameters: embedding 50·64, per layer q and o 2·128·64, k and v 2·64·64, mlp 3·128·64, norms 2·64; 64.
  parameters = 50 * 64 + 2 * (2 * 128 * 64 + 2 * 64 * 64 + 3 * 128 * 64 + 2 * 64) + 64
  assert sum(sizes) == index['metadata']['total_size'] == 4 * parameters
  assert len(sizes) > 5 and max(sizes) <= 70_000
  assert index['weight_map'] == seen and set(seen) == {entry.hf for entry in entries(spec)}
  assert_same_bits(load_params(tmp_path, spec), params)


def test_newer_weights_leave_nothing_of_older_ones(tmp_path):
  small_model(tmp_path, shard_bytes=70_000)
  (tmp_path / 'notes.txt').write_text('mine')
  _, params = small_model(tmp_path, intermediate_size=64)
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    'config.json',
    'model.safetensors',
    'notes.txt',
  ]
  assert_same_bits(load_params(tmp_path, read_spec(tmp_path)), params)
  small_model(tmp_path, shard_bytes=70_000)
  assert not (tmp_path / 'model.safetensors').exists()


def test_arrays_with_other_strides_are_saved_as_what_they_are(tmp_path):
  spec = tiny('llama', 50, num_hidden_layers=2)
  params = random_params(spec)
  kernel = params['layers']['0']['mlp']['up']['kernel']
  params['layers']['0']['mlp']['up']['kernel'] = np.asfortranarray(kernel)
  save_params(tmp_path, params, spec)
  saved = load_file(tmp_path / 'model.safetensors')['model.layers.0.mlp.up_proj.weight']
  np.testing.assert_array_equal(saved, kernel)


def test_leaves_are_placed_as_they_are_read(tmp_path):
  spec, params = small_model(tmp_path)
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
  placed = {}

  def place(path, array):
    placed[path] = array
    return jax.device_put(array, sharding)

  tree = load_params(tmp_path, spec, scan_layers=True, place=place)
  assert_same_bits(placed, flatten(stack_layers(params)))
  assert {leaf.sharding for leaf in jax.tree.leaves(tree)} == {sharding}


def test_tied_unembedding_in_a_file_is_ignored(tmp_path):
  spec, params = small_model(tmp_path)
  tensors = load_file(tmp_path / 'model.safetensors')
  assert 'lm_head.weight' not in tensors
  save_file(tensors | {'lm_head.weight': tensors['model.embed_tokens.weight'] + 1}, tmp_path / 'model.safetensors')
  assert_same_bits(load_params(tmp_path, spec), params)


def refusal(call, *args, kind=UserError, **kwargs):
  with pytest.raises(kind) as caught:
    call(*args, **kwargs)
  assert '\n' not in str(caught.value)
  return str(caught.value)


def test_damaged_files_are_named(tmp_path):
  spec, _ = small_model(tmp_path)
  path = tmp_path / 'model.safetensors'
  whole = path.read_bytes()
  pointer = b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n'
  for damaged in (whole[:-1], whole[:100], b'', whole + b'\0', pointer, whole[:8] + b'x' + whole[9:]):
    path.write_bytes(damaged)
    assert refusal(load_params, tmp_path, spec).startswith(f'{path}: truncated or corrupt safetensors file')


def test_incomplete_shards_are_named(tmp_path):
  spec, _ = small_model(tmp_path, shard_bytes=70_000)
  index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
  name = index['weight_map']['model.norm.weight']
  tensors = load_file(tmp_path / name)
  save_file({'model.norm.weight': np.ones(63, np.float32)}, tmp_path / name)
  assert 'model.norm.weight has (63,), wanted (64,)' in refusal(load_params, tmp_path, spec)
  first = index['weight_map']['model.embed_tokens.weight']
  save_file(tensors | load_file(tmp_path / first), tmp_path / first)
  save_file(tensors, tmp_path / name)
  assert 'twice: ' in refusal(load_params, tmp_path, spec)
  (tmp_path / name).unlink()
  assert refusal(load_params, tmp_path, spec).startswith(f'{tmp_path / name}: no such file')


def test_misfits_are_found_before_a_tensor_is_read(tmp_path):
  spec, _ = small_model(tmp_path)
  tensors = load_file(tmp_path / 'model.safetensors')
  last = tensors.pop('model.norm.weight')
  save_file(tensors | {'model.final_norm.weight': last}, tmp_path / 'model.safetensors')
  placed = []
  error = refusal(load_params, tmp_path, spec, place=lambda path, array: placed.append(path))
  assert 'no such parameter: model.final_norm.weight (nearest: model.norm.weight)' in error
  assert 'missing: model.norm.weight' in error and not placed


def test_quantized_and_absent_weights_are_refused(tmp_path):
  spec, _ = small_model(tmp_path)
  tensors = load_file(tmp_path / 'model.safetensors')
  save_file(tensors | {'model.norm.weight': np.ones(64, np.int8)}, tmp_path / 'model.safetensors')
  assert 'model.norm.weight is I8, wanted one of F32' in refusal(load_params, tmp_path, spec)
  (tmp_path / 'model.safetensors').rename(tmp_path / 'pytorch_model.bin')
  assert 'found pytorch_model.bin, convert it to safetensors' in refusal(load_params, tmp_path, spec)
  (tmp_path / 'model.safetensors.index.json').write_text('{"weight_map": {}}')
  assert 'has no weight_map' in refusal(load_params, tmp_path, spec)


def test_a_full_disk_is_one_line(tmp_path):
  # A limit on the size of files fails the write as a full disk does, after part of it.
  program = f"""
import resource, numpy, sys
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights.layout import from_hf
from jaxrl_llm.weights.safetensors_files import save_params
from jaxrl_llm.weights.tables import entries
spec = tiny('llama', 50)
params = from_hf(((e.hf, numpy.ones(e.shape, 'float32')) for e in entries(spec)), spec, scan_layers=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
  save_params({str(tmp_path)!r}, params, spec)
except RunError as error:
  print(error)
  sys.exit(error.exit_code)
"""
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  ran = subprocess.run([sys.executable, '-c', program], env=environment, capture_output=True, text=True, timeout=120)
  assert ran.returncode == RunError.exit_code, ran.stderr
  assert ran.stdout.startswith(f'{tmp_path}: weights cannot be written (') and ran.stdout.count('\n') == 1
  assert not list(tmp_path.glob('*.safetensors'))
