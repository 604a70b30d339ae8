"""Adapters as data: what they add, what they are apart from, what they are merged into, how they
are exported.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import build_model, unstack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import PROJECTIONS, LoraConfig, ModelOptions
from jaxrl_llm.parallel.rules import RULES
from jaxrl_llm.weights.peft import export_adapter

SPEC = tiny('qwen3', 40, hidden_size=24, intermediate_size=40, head_dim=16, num_hidden_layers=2)
LORA = LoraConfig(rank=4, alpha=6)
# Compiling takes longer than running: LLVM may do less.
QUICKLY = {'xla_backend_optimization_level': 0}
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 9))


def model(spec=SPEC, config=LORA, **options):
  return build_model(spec, ModelOptions(lora=config, **options))


@functools.cache
def init(spec, options):
  return jax.jit(build_model(spec, options).init, compiler_options=QUICKLY)(jax.random.key(0))


def params(made):
  return init(made.spec, made.options)


def drawn(tree, made, scale=0.3):
  """With adapters that are away from the 0 that they begin with."""
  trained, base = lora.split(tree, made.spec, made.options)
  rng = np.random.default_rng(1)
  return lora.join(
    jax.tree.map(lambda x: x + scale * rng.normal(size=x.shape).astype(x.dtype), trained), base
  )


def logits(made, tree):
  def forward(tree):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return (
      made.apply(tree, jnp.asarray(TOKENS), positions, jnp.ones_like(TOKENS))
      @ made.head_kernel(tree).T
    )

  return np.asarray(jax.jit(forward, compiler_options=QUICKLY)(tree))


@pytest.mark.full
@pytest.mark.parametrize('scan', [False, True])
def test_new_adapters_change_no_bit_and_stand_on_the_same_numbers(scan):
  adapted, plain = model(scan_layers=scan), model(config=None, scan_layers=scan)
  tree = params(adapted)
  trained, base = lora.split(tree, SPEC, adapted.options)
  jax.tree.map(np.testing.assert_array_equal, base, params(plain))
  np.testing.assert_array_equal(logits(adapted, tree), logits(plain, base))
  # Without its adapters, a tree is the model below.
  np.testing.assert_array_equal(logits(adapted, base), logits(plain, base))
  assert np.abs(logits(adapted, drawn(tree, adapted)) - logits(plain, base)).max() > 0.1
  for name, array in flatten(trained).items():
    assert array.dtype == np.float32
    # As PEFT draws them: kaiming_uniform with a = √5, which is uniform in ±1/√in, and zeros.
    bound = 0.0 if name.endswith('lora_b') else array.shape[-1] ** -0.5
    assert 0.9 * bound <= np.abs(array).max() <= bound, name


@pytest.mark.full
def test_the_same_key_gives_the_same_adapters_scanned_or_not():
  unrolled, scanned = params(model()), unstack_layers(params(model(scan_layers=True)))
  jax.tree.map(np.testing.assert_array_equal, unrolled, scanned)
  one, two = unrolled['layers']['0'], unrolled['layers']['1']
  assert not np.array_equal(one['mlp']['up']['lora_a'], two['mlp']['up']['lora_a'])
  assert not np.array_equal(one['mlp']['up']['lora_a'], one['mlp']['gate']['lora_a'])


@pytest.mark.parametrize(
  'options',
  [
    {},
    *(pytest.param(o, marks=pytest.mark.full) for o in ({'scan_layers': True}, {'remat': 'full'})),
  ],
  ids=str,
)
def test_joined_and_merged_are_the_same_function(options):
  adapted = model(**options)
  tree = drawn(params(adapted), adapted)
  whole = lora.merge(tree, LORA)
  assert flatten(whole).keys() == flatten(params(model(config=None, **options))).keys()
  np.testing.assert_allclose(
    logits(adapted, tree), logits(model(config=None, **options), whole), rtol=0, atol=1e-5
  )


def test_only_targets_have_adapters():
  adapted = model(config=LoraConfig(rank=2, targets=('value', 'down')))
  trained, _ = lora.split(params(adapted), SPEC, adapted.options)
  assert {name.split('/')[3] for name in flatten(trained)} == {'value', 'down'}
  assert len(flatten(trained)) == 2 * 2 * 2


def test_merging_is_done_in_float32_whatever_is_merged():
  adapted = model(param_dtype='bfloat16')
  tree = drawn(params(adapted), adapted)
  before, after = flatten(tree), flatten(lora.merge(tree, LORA))
  for name in after:
    module = name.removesuffix('/kernel')
    if f'{module}/lora_a' not in before:
      assert after[name] is before[name]
      continue
    kernel, a, b = (
      np.asarray(before[f'{module}/{part}'], np.float64) for part in ('kernel', 'lora_a', 'lora_b')
    )
    assert before[f'{module}/lora_a'].dtype == after[name].dtype == np.float32
    np.testing.assert_allclose(after[name], kernel + 1.5 * b @ a, rtol=0, atol=1e-6)


@pytest.mark.parametrize('head', ['lm', 'scalar'])
def test_split_takes_apart_and_join_puts_together(head):
  spec = tiny('llama', 40, head=head, tie_word_embeddings=False)
  adapted = model(spec)
  tree = params(adapted)
  trained, base = lora.split(tree, spec, adapted.options)
  assert flatten(lora.join(trained, base)).keys() == flatten(tree).keys()
  assert not flatten(trained).keys() & flatten(base).keys()
  # A fresh output has to learn; a language model's own stays as it is.
  assert ('head' in trained) == (head == 'scalar')
  assert all(lora.is_adapter(name) or name == 'head/kernel' for name in flatten(trained))
  everything, nothing = lora.split(tree, spec, ModelOptions())
  assert everything is tree and nothing is None and lora.join(tree, None) is tree


def test_ranks_are_never_cut():
  axes = flatten(model(scan_layers=True).axes())
  assert axes['layers/attention/output/lora_a'] == ('layers', 'lora', 'heads')
  assert axes['layers/attention/output/lora_b'] == ('layers', 'embed', 'lora')
  assert RULES['lora'] == ()


@pytest.mark.parametrize(
  ('fields', 'words'),
  [({'rank': 0}, 'lora.rank'), ({'alpha': 0}, 'lora.alpha')]
  + [({'targets': targets}, 'lora.targets') for targets in ((), ('q_proj',), ('up', 'up'))],
)
def test_what_is_no_adapter_is_refused(fields, words):
  with pytest.raises(UserError, match=words):
    LoraConfig(**fields)


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('head', ['lm', 'scalar'])
def test_exported_names_and_shapes(tmp_path, scan, head):
  """That `peft` makes the same of them is shown in tests/peers/peft_test.py."""
  spec = tiny('llama', 40, head=head, tie_word_embeddings=False)
  targets = ('query', 'down')
  config = LoraConfig(rank=4, alpha=8, targets=targets)
  adapted = model(spec, config, scan_layers=scan)
  tree = drawn(params(adapted), adapted)
  trained, _ = lora.split(tree, spec, adapted.options)
  export_adapter(tmp_path, flatten(jax.device_get(trained)).items(), spec, config, base='org/base')
  written = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert (written['r'], written['lora_alpha']) == (4, 8)
  assert (
    written['target_modules'] == ['q_proj', 'down_proj']
    and written['base_model_name_or_path'] == 'org/base'
  )
  arrays, unrolled = (
    load_file(tmp_path / 'adapter_model.safetensors'),
    flatten(unstack_layers(tree)),
  )
  assert len(arrays) == 2 * len(targets) * spec.num_hidden_layers + (head == 'scalar')
  for name, theirs in (('attention/query', 'self_attn.q_proj'), ('mlp/down', 'mlp.down_proj')):
    for kind in ('A', 'B'):
      found = arrays[f'base_model.model.model.layers.1.{theirs}.lora_{kind}.weight']
      np.testing.assert_array_equal(found, unrolled[f'layers/1/{name}/lora_{kind.lower()}'])
  if head == 'scalar':
    np.testing.assert_array_equal(arrays['base_model.model.score.weight'], tree['head']['kernel'])


def test_every_projection_can_be_a_target():
  names = [name.split('/') for name in flatten(params(model(config=None)))]
  assert {name[3] for name in names if name[0] == 'layers' and name[-1] == 'kernel'} == set(
    PROJECTIONS
  )
