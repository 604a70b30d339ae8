"""Files of weights: sharded and whole, the same bits, and every kind of damage named in one
line.
"""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from parameters import assert_same_bits, random_params
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights.hf import SpecialTokens, read_special_tokens
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
  # Parameters: embedding 50·64, per layer q and o 2·128·64, k and v 2·64·64, mlp 3·128·64, norms
  # 2·64; 64.
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

  def place(path, stored):
    placed[path] = stored[...]
    return jax.device_put(placed[path], sharding)

  tree = load_params(tmp_path, spec, scan_layers=True, place=place)
  assert_same_bits(placed, flatten(stack_layers(params)))
  assert {leaf.sharding for leaf in jax.tree.leaves(tree)} == {sharding}


def test_tied_unembedding_in_a_file_is_ignored(tmp_path):
  spec, params = small_model(tmp_path)
  tensors = load_file(tmp_path / 'model.safetensors')
  assert 'lm_head.weight' not in tensors
  save_file(
    tensors | {'lm_head.weight': tensors['model.embed_tokens.weight'] + 1},
    tmp_path / 'model.safetensors',
  )
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
  for damaged in (
    whole[:-1],
    whole[:100],
    b'',
    whole + b'\0',
    pointer,
    whole[:8] + b'x' + whole[9:],
  ):
    path.write_bytes(damaged)
    assert refusal(load_params, tmp_path, spec).startswith(
      f'{path}: truncated or corrupt safetensors file'
    )


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
  assert 'found pytorch_model.bin, convert it to safetensors' in refusal(
    load_params, tmp_path, spec
  )
  (tmp_path / 'model.safetensors.index.json').write_text('{"weight_map": {}}')
  assert 'has no weight_map' in refusal(load_params, tmp_path, spec)


def as_fifo(path):
  path.unlink(missing_ok=True)
  os.mkfifo(path)


def change_json(path, **changes):
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weight(path, value, dtype=np.float32):
  tensors = {name: tensor.astype(dtype) for name, tensor in load_file(path).items()}
  tensors['model.layers.1.mlp.up_proj.weight'][3, 5] = value
  save_file(tensors, path)


DEEP = '{"model_type": ' + '[' * 100_000 + ']' * 100_000 + '}'
HOSTILE_CONFIGS = {
  'nested far too deep': (lambda path: path.write_text(DEEP), 'nested more than 100 levels'),
  'nested too deep': (
    lambda path: change_json(path, x=json.loads('[' * 100 + ']' * 100)),
    'nested more than 100',
  ),
  'FIFO': (as_fifo, 'config.json is a FIFO, wanted a regular file'),
  'device': (lambda path: (path.unlink(), path.symlink_to('/dev/zero')), 'is a character device'),
  'large': (
    lambda path: os.truncate(path, (64 << 20) + 1),
    'has 67,108,865 bytes, wanted at most 67,108,864',
  ),
  'layers': (
    lambda path: change_json(path, num_hidden_layers=10**9),
    'layers: got 1e+09, wanted at most 1,000',
  ),
  'vocabulary': (
    lambda path: change_json(path, vocab_size=10**15),
    'vocab_size: got 1e+15, wanted at most',
  ),
  'infinite size': (
    lambda path: change_json(path, hidden_size=float('inf')),
    'hidden_size is Infinity, wanted a pos',
  ),
  'infinite epsilon': (
    lambda path: change_json(path, rms_norm_eps=float('inf')),
    'rms_norm_eps is Infinity, wanted',
  ),
  'large integer': (lambda path: change_json(path, rms_norm_eps=10**400), 'rms_norm_eps is 1000'),
  'family': (
    lambda path: change_json(path, model_type=['llama']),
    'model_type is ["llama"], wanted one of',
  ),
  'layer types': (lambda path: change_json(path, layer_types=3), 'layer_types is 3, wanted a list'),
  'mixed layer types': (
    lambda path: change_json(path, layer_types=[[], 3]),
    'wanted full attention in every layer',
  ),
  'rope type': (
    lambda path: change_json(path, rope_scaling={'rope_type': []}),
    'rope_type is [], wanted one of',
  ),
  'window': (
    lambda path: change_json(
      path,
      model_type='qwen2',
      architectures=None,
      sliding_window=3,
      use_sliding_window=True,
      max_window_layers='3',
    ),
    'max_window_layers is "3", wanted a number of layers',
  ),
}


@pytest.mark.parametrize('name', HOSTILE_CONFIGS)
def test_a_hostile_config_is_one_line(tmp_path, name):
  change, message = HOSTILE_CONFIGS[name]
  write_config(tmp_path, tiny('llama', 50), dtype='float32')
  change(tmp_path / 'config.json')
  said = refusal(read_spec, tmp_path)
  assert str(tmp_path / 'config.json') in said and message in said and len(said) < 1000


INDEX, SHARD = 'model.safetensors.index.json', 'model-00001-of-00002.safetensors'
HOSTILE_WEIGHTS = {
  'parent': (
    lambda d: change_json(d / INDEX, weight_map={'a': '../a.safetensors'}),
    'in the same directory; move',
  ),
  'below': (
    lambda d: change_json(d / INDEX, weight_map={'a': 'b/a.safetensors'}),
    'in the same directory; move',
  ),
  'absolute': (
    lambda d: change_json(d / INDEX, weight_map={'a': f'{d}/{SHARD}'}),
    'in the same directory; move',
  ),
  'nested index': (lambda d: (d / INDEX).write_text(DEEP), 'nested more than 100 levels'),
  'FIFO': (lambda d: as_fifo(d / SHARD), 'is a FIFO, wanted a regular file'),
  'NaN': (
    lambda d: change_weight(d / SHARD, np.nan),
    'model.layers.1.mlp.up_proj.weight[3, 5] is nan as float32, wanted finite weights',
  ),
  'infinity': (
    lambda d: change_weight(d / SHARD, -np.inf),
    '[3, 5] is -inf as float32, wanted finite weights',
  ),
  'overflow': (
    lambda d: change_weight(d / SHARD, 1e300, np.float64),
    '[3, 5] is inf as float32, wanted finite',
  ),
}


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('name', HOSTILE_WEIGHTS)
def test_hostile_weights_are_one_line(tmp_path, name, scan_layers):
  change, message = HOSTILE_WEIGHTS[name]
  spec, _ = small_model(tmp_path)
  (tmp_path / 'model.safetensors').rename(tmp_path / SHARD)
  names = [entry.hf for entry in entries(spec)]
  (tmp_path / INDEX).write_text(json.dumps({'weight_map': dict.fromkeys(names, SHARD)}))
  load_params(tmp_path, spec)
  change(tmp_path)
  said = refusal(load_params, tmp_path, spec, scan_layers=scan_layers)
  assert str(tmp_path) in said and message in said


def test_a_link_in_a_model_directory_is_followed(tmp_path):
  # As in the cache of huggingface_hub, whose snapshots are links to blobs beside them.
  spec, params = small_model(tmp_path / 'blobs')
  (tmp_path / 'snapshot').mkdir()
  for path in (tmp_path / 'blobs').iterdir():
    (tmp_path / 'snapshot' / path.name).symlink_to(path)
  assert read_spec(tmp_path / 'snapshot') == spec
  assert_same_bits(load_params(tmp_path / 'snapshot', spec), params)


@pytest.mark.parametrize(
  ('file', 'change', 'message'),
  [
    (
      'config.json',
      {'eos_token_id': 50},
      'eos_token_id has 50, wanted token ids below vocab_size 50',
    ),
    ('config.json', {'eos_token_id': [2, -3]}, 'eos_token_id has -3, wanted'),
    ('config.json', {'pad_token_id': 10**9}, 'pad_token_id has 1000000000, wanted'),
    ('generation_config.json', {'eos_token_id': [2, None]}, 'eos_token_id has None, wanted'),
    ('generation_config.json', {'bos_token_id': '1'}, 'bos_token_id has 1, wanted'),
    ('generation_config.json', {'eos_token_id': True}, 'eos_token_id has True, wanted'),
  ],
)
def test_special_tokens_outside_the_vocabulary_are_refused(tmp_path, file, change, message):
  write_config(tmp_path, tiny('llama', 50), dtype='float32', bos_id=1, eos_ids=[2, 49], pad_id=-1)
  (tmp_path / 'generation_config.json').write_text('{}')
  # -1 is how the first Llama models said that they have no padding.
  assert read_special_tokens(tmp_path) == SpecialTokens(bos_id=1, eos_ids=(2, 49), pad_id=None)
  change_json(tmp_path / file, **change)
  assert message in refusal(read_special_tokens, tmp_path)


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
params = from_hf(((e.hf, numpy.ones(e.shape, 'float32')) for e in entries(spec)), spec, \
scan_layers=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
  save_params({str(tmp_path)!r}, params, spec)
except RunError as error:
  print(error)
  sys.exit(error.exit_code)
"""
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  ran = subprocess.run(
    [sys.executable, '-c', program], env=environment, capture_output=True, text=True, timeout=120
  )
  assert ran.returncode == RunError.exit_code, ran.stderr
  assert (
    ran.stdout.startswith(f'{tmp_path}: weights cannot be written (')
    and ran.stdout.count('\n') == 1
  )
  assert not list(tmp_path.glob('*.safetensors'))
