"""Trees to tensors and back: the same bits, views where memory allows, every misfit an error."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from parameters import assert_same_bits, random_params

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.models.api import stack_layers, unstack_layers
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.weights.layout import fill, from_hf, to_hf
from jaxrl_llm.weights.tables import entries


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_scanned_and_unrolled_round_trip_to_the_bit(family, dtype):
  spec = tiny(family, 11, num_hidden_layers=3, tie_word_embeddings=family == 'llama')
  params = random_params(spec, dtype={'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}[dtype])
  scanned = stack_layers(params)
  assert_same_bits(dict(to_hf(params, spec)), dict(to_hf(scanned, spec)))
  assert_same_bits(from_hf(to_hf(scanned, spec), spec, scan_layers=False, dtype=dtype), params)
  backwards = reversed(list(to_hf(params, spec)))
  assert_same_bits(from_hf(backwards, spec, scan_layers=True, dtype=dtype), scanned)
  assert_same_bits(
    unstack_layers(from_hf(to_hf(params, spec), spec, scan_layers=True, dtype=dtype)), params
  )


def test_each_layer_lands_in_its_place():
  spec = tiny('qwen2', 11, num_hidden_layers=12)  # '10' sorts before '2'
  params = random_params(spec)
  scanned = from_hf(to_hf(params, spec), spec, scan_layers=True)
  for i in range(12):
    np.testing.assert_array_equal(
      scanned['layers']['attention']['key']['bias'][i],
      params['layers'][str(i)]['attention']['key']['bias'],
    )


def test_nothing_is_copied_on_the_way_out():
  spec = tiny('llama', 11, num_hidden_layers=2)
  scanned = stack_layers(random_params(spec))
  tensors = dict(to_hf(scanned, spec))
  query = scanned['layers']['attention']['query']['kernel']
  assert np.shares_memory(tensors['model.layers.1.self_attn.q_proj.weight'], query)
  assert np.shares_memory(tensors['model.embed_tokens.weight'], scanned['embed']['kernel'])
  assert all(tensor.flags.c_contiguous for tensor in tensors.values())


def test_jax_arrays_give_the_same_tensors():
  spec = tiny('qwen3', 11)
  params = random_params(spec)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ('x',))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  device = jax.tree.map(jnp.asarray, params)
  device['layers']['0']['mlp']['up']['kernel'] = jax.device_put(
    device['layers']['0']['mlp']['up']['kernel'], split
  )
  assert_same_bits(dict(to_hf(device, spec)), dict(to_hf(params, spec)))


def test_reading_casts_by_rounding_to_nearest_even():
  # 1 + 2⁻⁸ lies midway between the bfloat16 neighbours 1 and 1 + 2⁻⁷: to even is 1. 1 + 3·2⁻⁸ lies
  # midway between 1 + 2⁻⁷ and 1 + 2⁻⁶: to even is 1 + 2⁻⁶.
  spec = tiny('llama', 11, num_hidden_layers=1)
  params = flatten(random_params(spec))
  params['norm/scale'][:2] = 1 + 2.0**-8, 1 + 3 * 2.0**-8
  params['layers/0/mlp_norm/scale'][:2] = params['norm/scale'][:2]
  for scan_layers in (False, True):
    read = flatten(
      from_hf(to_hf(unflatten(params), spec), spec, scan_layers=scan_layers, dtype='bfloat16')
    )
    layer = read['layers/mlp_norm/scale'][0] if scan_layers else read['layers/0/mlp_norm/scale']
    assert read['norm/scale'].dtype == layer.dtype == ml_dtypes.bfloat16
    for scale in (read['norm/scale'], layer):
      assert [float(x) for x in scale[:2]] == [1.0, 1 + 2.0**-6]


def test_arrays_are_let_go_one_by_one():
  spec = tiny('llama', 11, num_hidden_layers=3)
  tensors = dict(to_hf(random_params(spec), spec))
  log = []

  def read(entry, part, out):
    log.append(('read', entry.path))
    out[...] = tensors[entry.hf][part]

  def place(path, stored):
    array = stored[...]
    log.append(('place', path))
    return array.sum()

  fill(read, spec, scan_layers=True, dtype=np.dtype(np.float32), place=place)
  paths = list(dict.fromkeys(entry.path for entry in entries(spec)))
  wanted = [
    event
    for path in paths
    for event in [*[('read', path)] * (3 if path.startswith('layers/') else 1), ('place', path)]
  ]
  assert log == wanted


@pytest.mark.parametrize('head', ['value', 'scalar'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_heads_of_one_output_round_trip_to_the_bit(head, dtype):
  spec = tiny('qwen2', 11, head=head)
  kind = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}[dtype]
  params = random_params(spec, dtype=kind)
  tensors = dict(to_hf(stack_layers(params), spec))
  assert tensors['score.weight'] is params['head']['kernel'] and 'lm_head.weight' not in tensors
  assert ('score.bias' in tensors) == (head == 'value')
  assert_same_bits(from_hf(tensors.items(), spec, scan_layers=False, dtype=dtype), params)
  tensors['score.bias'] = np.zeros(1, kind)
  assert_same_bits(
    from_hf(tensors.items(), spec, scan_layers=True, dtype=dtype), stack_layers(params)
  )
  tensors['score.bias'] = np.full(1, 0.5, kind)
  with pytest.raises(UserError, match=r'tensors: score\.bias is 0\.5, wanted 0'):
    from_hf(tensors.items(), spec, scan_layers=False, dtype=dtype)


def misfit(params, spec):
  with pytest.raises(UserError) as caught:
    list(to_hf(params, spec))
  assert '\n' not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_trees_that_do_not_fit_are_refused(scan_layers):
  spec = tiny('llama', 11, num_hidden_layers=2)
  lay = stack_layers if scan_layers else lambda params: params
  layer, stack = ('', '(2, ') if scan_layers else ('0/', '(')
  without = random_params(spec)
  for i in '01':
    del without['layers'][i]['mlp']['up']
  assert f'layers/{layer}mlp/up/kernel {stack}128, 64) is missing' in misfit(lay(without), spec)
  extra = random_params(spec) | {'head': {'kernel': np.zeros((11, 64), np.float32)}}
  assert 'head/kernel (11, 64) has no row in the table' in misfit(lay(extra), spec)
  wider = tiny('llama', 11, num_hidden_layers=2, intermediate_size=130)
  assert f'layers/{layer}mlp/gate/kernel has {stack}130, 64), wanted {stack}128, 64)' in misfit(
    lay(random_params(wider)), spec
  )


@pytest.mark.parametrize('count', [1, 3])
def test_another_number_of_layers_is_refused(count):
  spec = tiny('llama', 11, num_hidden_layers=2)
  params = random_params(tiny('llama', 11, num_hidden_layers=count))
  misfit(params, spec)
  misfit(stack_layers(params), spec)


def test_tensors_that_do_not_fit_are_refused():
  spec = tiny('llama', 11, num_hidden_layers=2)
  tensors = list(to_hf(random_params(spec), spec))
  with pytest.raises(UserError, match=r'missing: model\.norm\.weight'):
    from_hf((t for t in tensors if t[0] != 'model.norm.weight'), spec, scan_layers=True)
  with pytest.raises(UserError, match=r'twice: model\.norm\.weight'):
    from_hf([*tensors, ('model.norm.weight', np.ones(64))], spec, scan_layers=True)
  with pytest.raises(UserError, match=r'no such parameter: model\.layers\.2'):
    from_hf(
      [*tensors, ('model.layers.2.mlp.up_proj.weight', np.ones((128, 64)))], spec, scan_layers=True
    )


def test_unknown_dtype_is_refused():
  with pytest.raises(UserError, match=r"'int8': unknown; wanted one of float32, bfloat16"):
    from_hf([], tiny('llama', 11), scan_layers=False, dtype='int8')
