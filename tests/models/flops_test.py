import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models.api import build_model, count_params
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.flops import causal_pairs, matmul_params, model_flops, recomputed_flops
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelOptions

SPEC = tiny(
  'qwen2',
  10,
  hidden_size=4,
  intermediate_size=6,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
)


def test_hand_worked_parameters():
  # A layer: query and output 4 × 16 each, key and value 4 × 8 each, three MLP kernels of 4 × 6: 128
  # + 64 + 72 = 264. Two of them and the tied head of 10 × 4.
  assert matmul_params(SPEC) == 2 * 264 + 40
  # An untied embedding is looked up, which is no product.
  assert matmul_params(dataclasses.replace(SPEC, tie_word_embeddings=False)) == 2 * 264 + 40
  assert matmul_params(with_head(SPEC, 'value')) == 2 * 264 + 4


def test_hand_worked_operations():
  # Rows of 3 and 2 tokens: 6 + 3 pairs. Forward: 2 · 568 · 5 = 5680, and 4 · 2 layers · 2 heads · 8
  # · 9 = 1152.
  pairs = causal_pairs([3, 2])
  assert pairs == 9
  assert model_flops(SPEC, 5, pairs=pairs, backward=False) == 5680 + 1152
  assert model_flops(SPEC, 5, pairs=pairs) == 3 * (5680 + 1152)


@pytest.mark.parametrize(
  ('remat', 'layers'),
  [('none', 0), ('dots', 1152), ('full', 5280 + 1152), ('offload', 5280 + 1152)],
)
def test_hand_worked_recomputation(remat, layers):
  # The same rows. The head has 2 · 40 · 5 = 400 of the 5680 operations.
  options = ModelOptions(remat=remat)
  for once, head in ((True, 0), (False, 400)):
    assert recomputed_flops(SPEC, options, 5, pairs=9, once=once) == layers + head


def test_parameters_are_those_of_the_model_but_for_norms_and_biases():
  biases = SPEC.num_hidden_layers * (16 + 8 + 8)
  norms = (2 * SPEC.num_hidden_layers + 1) * SPEC.hidden_size
  assert matmul_params(SPEC) == count_params(SPEC) - biases - norms


@pytest.mark.parametrize('time', [8, 32])
def test_the_compiler_counts_about_as_many(time):
  """It counts all scores, masked ones too, and what is not a product; here products are nearly
  everything.
  """
  spec = tiny('llama', 512, hidden_size=128, intermediate_size=512)
  model = build_model(spec, ModelOptions())

  def forward(params, tokens):
    hidden = model.apply(params, tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens))
    return hidden @ model.head_kernel(params).T

  shapes = jax.eval_shape(model.init, jax.random.key(0))
  compiled = jax.jit(forward).lower(shapes, jax.ShapeDtypeStruct((4, time), jnp.int32)).compile()
  expected = model_flops(spec, 4 * time, pairs=4 * time * time, backward=False)
  assert compiled.cost_analysis()['flops'] == pytest.approx(expected, rel=0.05)
