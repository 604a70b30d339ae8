"""Heads: what a spec under another head is, fresh kernels, and trees that get one."""

import jax
import numpy as np
import pytest

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.heads import fresh_head, has_head, head_kernel, replace_head, with_head
from jaxrl_llm.models.spec import ModelOptions

TIED = tiny('qwen3', 50, tie_word_embeddings=True)
UNTIED = tiny('qwen3', 50, tie_word_embeddings=False)


@pytest.mark.parametrize('head', ['value', 'scalar'])
def test_a_head_of_one_output_is_not_tied(head):
  assert with_head(TIED, head) == with_head(UNTIED, head)
  assert (with_head(TIED, head).head, with_head(TIED, head).tie_word_embeddings) == (head, False)
  assert with_head(with_head(TIED, head), 'lm') == UNTIED, (
    'a kernel of its own is all that can replace the output'
  )


def test_the_same_head_is_the_same_spec():
  assert (with_head(TIED, 'lm'), with_head(UNTIED, 'lm')) == (TIED, UNTIED)


@pytest.mark.parametrize('head', ['lm', 'value', 'scalar'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_fresh_kernels_are_what_init_would_draw(head, dtype):
  spec = with_head(
    tiny('llama', 50, hidden_size=4096, initializer_range=0.3, tie_word_embeddings=False), head
  )
  kernel = fresh_head(spec, jax.random.key(3), dtype=dtype)
  shape = jax.eval_shape(
    build_model(spec, ModelOptions(param_dtype=dtype)).init, jax.random.key(0)
  )['head']['kernel']
  assert (kernel.shape, kernel.dtype) == (shape.shape, shape.dtype)
  # 4096 draws: the deviation's own standard error is 0.3 / sqrt(2 * 4096) = 0.0033, the mean's 0.3
  # / 64 = 0.0047.
  values = np.asarray(kernel, np.float32)
  assert abs(values.std() - 0.3) < 0.015 and abs(values.mean()) < 0.02
  np.testing.assert_array_equal(
    values, np.asarray(fresh_head(spec, jax.random.key(3), dtype=dtype), np.float32)
  )
  assert (values != np.asarray(fresh_head(spec, jax.random.key(4), dtype=dtype), np.float32)).any()


def shapes_of(spec, *, scan_layers):
  return jax.eval_shape(
    build_model(spec, ModelOptions(scan_layers=scan_layers)).init, jax.random.key(0)
  )


def zero_params(spec, *, scan_layers=False):
  return jax.tree.map(
    lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes_of(spec, scan_layers=scan_layers)
  )


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize(
  'before', [TIED, UNTIED, with_head(TIED, 'scalar')], ids=['tied', 'untied', 'scalar']
)
@pytest.mark.parametrize('after', ['lm', 'value', 'scalar'])
def test_a_replaced_head_makes_the_tree_of_the_other_model(scan_layers, before, after):
  spec = with_head(with_head(before, 'value'), after)
  params = zero_params(before, scan_layers=scan_layers)
  kept = flatten(params)
  kernel = fresh_head(spec, jax.random.key(1))
  found = replace_head(params, spec, kernel)

  def shape(leaf):
    return (leaf.shape, leaf.dtype)

  assert jax.tree.map(shape, found) == jax.tree.map(shape, shapes_of(spec, scan_layers=scan_layers))
  assert head_kernel(found, spec) is kernel
  after_it = flatten(found)
  assert all(after_it[name] is leaf for name, leaf in kept.items() if name != 'head/kernel'), (
    'shared, not copied'
  )
  assert flatten(params).keys() == kept.keys() and all(
    flatten(params)[name] is leaf for name, leaf in kept.items()
  )


def test_host_arrays_stay_on_the_host():
  spec = with_head(UNTIED, 'value')
  found = replace_head(zero_params(UNTIED), spec, np.asarray(fresh_head(spec, jax.random.key(1))))
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))


def test_kernels_that_do_not_fit_are_refused():
  params = zero_params(TIED)
  with pytest.raises(ValueError, match=r'kernel of a value head: got \(50, 64\), wanted \(1, 64\)'):
    replace_head(params, with_head(TIED, 'value'), params['embed']['kernel'])
  with pytest.raises(ValueError, match='tied embeddings has no separate head'):
    replace_head(params, TIED, params['embed']['kernel'])


def test_a_tree_has_the_head_of_one_spec():
  specs = {'tied': TIED, 'untied': UNTIED, 'scalar': with_head(TIED, 'scalar')}
  for name, spec in specs.items():
    params = zero_params(spec)
    assert [other for other, spec in specs.items() if has_head(params, spec)] == [name]
