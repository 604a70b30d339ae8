"""Parameters as data: names, counts, axes, stacking, initial values, dtypes, heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import build_model, count_params, is_stacked, stack_layers, unstack_layers
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.models.heads import outputs
from jaxrl_llm.models.spec import ModelOptions

SMALL = {'hidden_size': 24, 'intermediate_size': 40, 'head_dim': 16, 'num_hidden_layers': 3}
ALL_BIASES = {'qkv_bias': True, 'qk_norm': True, 'o_bias': True, 'mlp_bias': True}
SPECS = [
  *(tiny(family, 19, **SMALL) for family in FAMILIES),
  tiny('llama', 19, tie_word_embeddings=False, **SMALL),
  tiny('qwen3', 19, head='value', **{**SMALL, **ALL_BIASES}),
]
NAMES = [f'{s.family}-{s.head}-{"tied" if s.tie_word_embeddings else "untied"}' for s in SPECS]


def shapes(spec, **options):
  return jax.eval_shape(build_model(spec, ModelOptions(**options)).init, jax.random.key(0))


def noise(spec, **options):
  leaves, tree = jax.tree.flatten(shapes(spec, **options))
  return jax.tree.unflatten(
    tree, [np.random.default_rng(n).normal(0, 0.3, x.shape) for n, x in enumerate(leaves)]
  )


@functools.cache
def init(spec, seed=0, **options):
  return jax.jit(build_model(spec, ModelOptions(**options)).init)(jax.random.key(seed))


def test_a_count_by_hand():
  # qwen2, width 24, 4 heads of 16 over 2 key-value heads, MLP 40, vocabulary 19, tied: query 64*24
  # + 64, key and value 2 * (32*24 + 32), output 24*64, MLP 3 * 40*24, norms 2*24 -> 7664 a layer; 3
  # * 7664 + embedding 19*24 + final norm 24 = 23472.
  assert count_params(SPECS[0]) == 23472


@pytest.mark.parametrize('spec', SPECS, ids=NAMES)
def test_counts_agree_with_the_arrays(spec):
  for scan_layers in (False, True):
    assert sum(
      x.size for x in jax.tree.leaves(shapes(spec, scan_layers=scan_layers))
    ) == count_params(spec)


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('spec', SPECS, ids=NAMES)
def test_axes_name_every_dimension(spec, scan_layers):
  model = build_model(spec, ModelOptions(scan_layers=scan_layers))
  arrays = flatten(shapes(spec, scan_layers=scan_layers))
  axes = flatten(model.axes())
  assert axes.keys() == arrays.keys()
  size = {
    'layers': {spec.num_hidden_layers},
    'vocab': {spec.vocab_size, 1},
    'embed': {spec.hidden_size},
    'heads': {spec.num_attention_heads * spec.head_dim},
    'kv_heads': {spec.num_key_value_heads * spec.head_dim},
    'mlp': {spec.intermediate_size},
    'norm': {spec.hidden_size, spec.head_dim},
  }
  for path, names in axes.items():
    assert len(names) == len(arrays[path].shape), path
    assert all(n in size[name] for name, n in zip(names, arrays[path].shape)), (
      path,
      names,
      arrays[path].shape,
    )


def test_names_of_the_unrolled_tree():
  layer = (
    'attention_norm/scale attention/query/kernel attention/query/bias attention/key/kernel '
    'attention/key/bias '
  )
  layer += (
    'attention/value/kernel attention/value/bias attention/output/kernel mlp_norm/scale '
    'mlp/gate/kernel '
  )
  layer += 'mlp/up/kernel mlp/down/kernel'
  wanted = {f'layers/{i}/{name}' for i in range(3) for name in layer.split()} | {
    'embed/kernel',
    'norm/scale',
  }
  assert set(flatten(shapes(SPECS[0]))) == wanted
  assert 'layers/2/attention/key_norm/scale' in flatten(shapes(SPECS[1]))
  assert shapes(SPECS[-2])['head']['kernel'].shape == (19, 24)
  assert shapes(SPECS[-1])['head']['kernel'].shape == (1, 24)


def test_stacking_round_trips_bit_exactly_and_keeps_the_order_of_eleven_layers():
  unrolled = noise(
    tiny('qwen3', 7, hidden_size=8, intermediate_size=8, head_dim=4, num_hidden_layers=11)
  )
  stacked = stack_layers(unrolled)
  assert is_stacked(stacked) and not is_stacked(unrolled)
  up = stacked['layers']['mlp']['up']['kernel']
  for i in range(11):
    np.testing.assert_array_equal(up[i], unrolled['layers'][str(i)]['mlp']['up']['kernel'])
  back = flatten(unstack_layers(stacked))
  assert back.keys() == flatten(unrolled).keys()
  for path, value in flatten(unrolled).items():
    np.testing.assert_array_equal(back[path], value)


def test_unstacking_numpy_copies_nothing():
  stacked = noise(SPECS[0], scan_layers=True)
  part = unstack_layers(stacked)['layers']['1']['mlp']['up']['kernel']
  assert np.shares_memory(part, stacked['layers']['mlp']['up']['kernel'])


@pytest.mark.full
def test_one_key_draws_the_same_numbers_scanned_or_not():
  scanned, unrolled = (
    flatten(unstack_layers(init(SPECS[1], scan_layers=True))),
    flatten(init(SPECS[1])),
  )
  assert scanned.keys() == unrolled.keys()
  for path, value in unrolled.items():
    np.testing.assert_array_equal(scanned[path], value)
  assert not np.array_equal(
    unrolled['embed/kernel'], flatten(init(SPECS[1], seed=1))['embed/kernel']
  )


def test_initial_values():
  spec = tiny('qwen2', 300, initializer_range=0.05, tie_word_embeddings=False, head='value')
  for path, value in flatten(init(spec)).items():
    leaf = path.split('/')[-1]
    if leaf == 'kernel':
      # A normal's sample deviation from n draws has a standard error of std / sqrt(2 n); n >= 64
      # here.
      assert abs(float(value.std()) / 0.05 - 1) < 5 / (2 * value.size) ** 0.5, path
      assert abs(float(value.mean())) < 5 * 0.05 / value.size**0.5, path
    else:
      np.testing.assert_array_equal(value, 1.0 if leaf == 'scale' else 0.0)
  first, second = (init(spec)['layers'][i]['mlp']['up']['kernel'] for i in '01')
  assert not np.array_equal(first, second)


def test_dtypes_of_parameters_and_of_computation_are_apart():
  model = build_model(SPECS[1], ModelOptions(dtype='bfloat16', param_dtype='float32'))
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), noise(SPECS[1]))
  assert {x.dtype for x in jax.tree.leaves(shapes(SPECS[1]))} == {jnp.dtype('float32')}
  assert {x.dtype for x in jax.tree.leaves(shapes(SPECS[1], param_dtype='bfloat16'))} == {
    jnp.dtype('bfloat16')
  }
  tokens = jnp.arange(12)[None] % 19
  hidden = jax.jit(model.apply)(params, tokens, jnp.arange(12)[None], jnp.ones((1, 12), jnp.int32))
  assert hidden.dtype == jnp.bfloat16
  assert model.init_cache(1, 4)[0]['k'].dtype == jnp.bfloat16
  exact = jax.jit(build_model(SPECS[1]).apply)(
    params, tokens, jnp.arange(12)[None], jnp.ones((1, 12), jnp.int32)
  )
  # bfloat16 keeps 8 bits: a few thousandths for each of the three layers, not equal and not far.
  error = float(jnp.abs(hidden.astype(jnp.float32) - exact).max() / jnp.abs(exact).max())
  assert 1e-5 < error < 0.03
  assert outputs(hidden, model.head_kernel(params)).dtype == jnp.float32


def test_tied_head_is_the_embedding_and_untied_is_not():
  tied, untied = SPECS[2], SPECS[-2]
  assert (
    build_model(tied).head_kernel(params := jax.tree.map(jnp.asarray, noise(tied)))
    is params['embed']['kernel']
  )
  assert (
    build_model(untied).head_kernel(params := jax.tree.map(jnp.asarray, noise(untied)))
    is params['head']['kernel']
  )
  # Logits are rows of the kernel against the hidden state: (1, 2) with rows (3, 4) and (5, 6) -> 11
  # and 17.
  np.testing.assert_array_equal(
    outputs(jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0], [5.0, 6.0]])), [[11.0, 17.0]]
  )


def test_a_value_head_is_never_tied():
  spec = tiny('qwen2', 19, head='value', tie_word_embeddings=True, **SMALL)
  assert build_model(spec).head_kernel(jax.tree.map(jnp.asarray, noise(spec))).shape == (1, 24)
