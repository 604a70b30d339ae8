"""The tables: their names against lists written by hand, their paths against the model's own
tree.
"""

import jax
import numpy as np
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.weights.tables import Inventory, entries, zeros

LAYER = [
  'input_layernorm.weight',
  'self_attn.q_proj.weight',
  'self_attn.k_proj.weight',
  'self_attn.v_proj.weight',
  'self_attn.o_proj.weight',
  'post_attention_layernorm.weight',
  'mlp.gate_proj.weight',
  'mlp.up_proj.weight',
  'mlp.down_proj.weight',
]
QKV_BIAS = [f'self_attn.{p}_proj.bias' for p in 'qkv']
EXTRA = {'qwen2': QKV_BIAS, 'qwen3': ['self_attn.q_norm.weight', 'self_attn.k_norm.weight']}
OPTIONAL = {name: family.attention_bias == 'optional' for name, family in FAMILIES.items()}
BIASES = {
  name: {
    'mlp_bias': family.mlp_bias,
    **({'qkv_bias': True, 'o_bias': True} if OPTIONAL[name] else {}),
  }
  for name, family in FAMILIES.items()
}


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('tied', [True, False])
def test_names_are_hugging_faces(family, tied):
  spec = tiny(family, 11, num_hidden_layers=2, tie_word_embeddings=tied)
  wanted = {f'model.layers.{i}.{name}' for i in range(2) for name in LAYER + EXTRA.get(family, [])}
  wanted |= {'model.embed_tokens.weight', 'model.norm.weight'} | (
    set() if tied else {'lm_head.weight'}
  )
  assert {entry.hf for entry in entries(spec)} == wanted


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('scan_layers', [True, False])
@pytest.mark.parametrize(
  'fields',
  [{}, {'tie_word_embeddings': False}, {'head': 'value'}, {'head': 'scalar'}, 'biases'],
  ids=str,
)
def test_table_covers_the_models_tree_once(family, scan_layers, fields):
  fields = BIASES[family] if fields == 'biases' else fields
  spec = tiny(family, 13, hidden_size=96, num_hidden_layers=3, **fields)
  model = build_model(spec, ModelOptions(scan_layers=scan_layers))
  tree = {
    name: leaf.shape
    for name, leaf in flatten(jax.eval_shape(model.init, jax.random.key(0))).items()
  }
  table = entries(spec)
  assert (
    len({entry.hf for entry in table}) == len({entry.unrolled for entry in table}) == len(table)
  )
  if scan_layers:
    assert {e.path: e.shape if e.layer is None else (3, *e.shape) for e in table} == tree
  else:
    assert {e.unrolled: e.shape for e in table} == tree


def test_shapes_by_hand():
  # 3 heads of 32 are 96 queries, 1 key/value head is 32, in a model 64 wide.
  spec = tiny(
    'qwen3',
    7,
    hidden_size=64,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=80,
  )
  shapes = {
    entry.hf.replace('model.layers.0.', ''): entry.shape
    for entry in entries(spec)
    if entry.layer == 0
  }
  assert shapes['self_attn.q_proj.weight'] == (96, 64)
  assert shapes['self_attn.k_proj.weight'] == (32, 64)
  assert shapes['self_attn.o_proj.weight'] == (64, 96)
  assert shapes['self_attn.q_norm.weight'] == (32,)
  assert shapes['mlp.down_proj.weight'] == (64, 80)


def unread():
  raise AssertionError('read though no value of it matters')


def inventory_error(names_to_shapes, spec):
  inventory = Inventory(spec, 'here')
  for name, shape in names_to_shapes:
    inventory.see(name, shape, unread)
  with pytest.raises(UserError) as caught:
    inventory.finish()
  assert '\n' not in str(caught.value)
  return str(caught.value)


def test_all_findings_are_in_one_line():
  spec = tiny('llama', 7, num_hidden_layers=1)
  held = {entry.hf: entry.shape for entry in entries(spec)}
  del held['model.layers.0.mlp.up_proj.weight']
  held['model.layers.0.mlp.up_projj.weight'] = (128, 64)
  held['model.norm.weight'] = (65,)
  error = inventory_error([*held.items(), ('model.embed_tokens.weight', (7, 64))], spec)
  assert error.startswith('here: ')
  assert (
    'no such parameter: model.layers.0.mlp.up_projj.weight (nearest: '
    'model.layers.0.mlp.up_proj.weight)' in error
  )
  assert 'twice: model.embed_tokens.weight' in error
  assert 'missing: model.layers.0.mlp.up_proj.weight' in error
  assert 'wrong shape: model.norm.weight has (65,), wanted (64,)' in error
  assert 'expected the 11 tensors of llama (lm head, tie_word_embeddings; layers=1' in error


def test_tied_unembedding_and_old_buffers_are_tolerated_only_in_their_shape():
  spec = tiny('llama', 7, num_hidden_layers=1)
  held = [(entry.hf, entry.shape) for entry in entries(spec)]
  inventory = Inventory(spec, 'here')
  for name, shape in held:
    assert inventory.see(name, shape, unread).hf == name
  assert inventory.see('lm_head.weight', (7, 64), unread) is None
  assert inventory.see('model.layers.0.self_attn.rotary_emb.inv_freq', (16,), unread) is None
  inventory.finish()
  assert 'lm_head.weight has (8, 64), wanted (7, 64)' in inventory_error(
    [*held, ('lm_head.weight', (8, 64))], spec
  )


def test_untied_model_needs_its_unembedding():
  spec = tiny('llama', 7, num_hidden_layers=1, tie_word_embeddings=False)
  held = [(entry.hf, entry.shape) for entry in entries(spec) if entry.hf != 'lm_head.weight']
  assert 'missing: lm_head.weight' in inventory_error(held, spec)


@pytest.mark.parametrize('head', ['lm', 'scalar', 'value'])
def test_a_bias_of_the_output_must_be_zero(head):
  spec = tiny('llama', 7, num_hidden_layers=1, head=head)
  # Files of the class of a value per token have it; those of a score may, and no language model's.
  assert [(entry.hf, entry.shape) for entry in zeros(spec)] == (
    [('score.bias', (1,))] if head == 'value' else []
  )
  held = [(entry.hf, entry.shape) for entry in entries(spec)]
  if head == 'lm':
    assert 'no such parameter: score.bias' in inventory_error([*held, ('score.bias', (1,))], spec)
    return
  inventory = Inventory(spec, 'here')
  for name, shape in held:
    assert inventory.see(name, shape, unread).hf == name
  assert inventory.see('score.bias', (1,), lambda: np.zeros(1, np.float32)) is None
  inventory.finish()
  assert 'score.bias has (2,), wanted (1,)' in inventory_error([*held, ('score.bias', (2,))], spec)
  for value in (0.5, float('nan')):
    with pytest.raises(
      UserError, match=rf'^here: score\.bias is {value}, wanted 0: .* would shift all values'
    ):
      Inventory(spec, 'here').see(
        'score.bias', (1,), lambda value=value: np.array([value], np.float32)
      )
