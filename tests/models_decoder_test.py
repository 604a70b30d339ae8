"""The decoder's invariances: arrangement of layers, remat, packing, padding, causality, and decoding with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import build_model, stack_layers, unstack_layers
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.models.spec import ModelOptions, RopeScaling

VOCAB = 23
SMALL = {'hidden_size': 24, 'intermediate_size': 40, 'head_dim': 16, 'num_hidden_layers': 2, 'initializer_range': 0.3}
LLAMA3 = RopeScaling(kind='llama3', factor=8.0, original_max_position_embeddings=8)
SPECS = {
  family: tiny(family, VOCAB, rope_scaling=LLAMA3 if family == 'llama' else None, **SMALL) for family in FAMILIES
}


def draw_tokens(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, shape), jnp.int32)


def params_of(spec):
  """Unrolled parameters whose biases and norms differ from 0 and 1 too."""
  params = jax.jit(build_model(spec).init)(jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)

  def noise(n, x):
    return x + 0.1 * np.random.default_rng(n).normal(size=x.shape).astype(np.float32)

  return jax.tree.unflatten(tree, [noise(n, x) for n, x in enumerate(leaves)])


def packed(*lengths, padding=0):
  """Positions and segment ids of one row that holds sequences of these lengths, then padding."""
  positions = [p for n in lengths for p in range(n)] + [0] * padding
  segments = [i + 1 for i, n in enumerate(lengths) for _ in range(n)] + [0] * padding
  return jnp.array([positions], jnp.int32), jnp.array([segments], jnp.int32)


def loss_and_gradient(spec, params, dtype='float32', **options):
  """A loss over a packed row with padding, and its gradient in unrolled form."""
  model = build_model(spec, ModelOptions(dtype=dtype, **options))
  tokens, (positions, segments) = draw_tokens(1, 1, 12), packed(5, 4, padding=3)
  weight = (
    jnp.asarray(np.random.default_rng(2).normal(size=(1, 12, spec.hidden_size)), dtype) * (segments > 0)[..., None]
  )

  def loss(params):
    return (model.apply(params, tokens, positions, segments) * weight).sum()

  params = stack_layers(params) if options.get('scan_layers') else params
  value, gradient = jax.jit(jax.value_and_grad(loss))(params)
  return value, flatten(unstack_layers(gradient))


def assert_same(first, second, tolerance):
  """The contract's measure: per tensor, norm of the difference over the norm."""
  (loss, gradient), (other_loss, other_gradient) = first, second
  assert abs(loss - other_loss) <= tolerance / 10 * max(1.0, abs(loss))
  assert gradient.keys() == other_gradient.keys()
  for path, g in gradient.items():
    norm = np.linalg.norm(g)
    assert norm > 0 and np.linalg.norm(g - other_gradient[path]) <= tolerance * norm, path


@pytest.mark.parametrize('family', FAMILIES)
def test_scanned_layers_and_remat_change_nothing(family):
  spec, params = SPECS[family], params_of(SPECS[family])
  wanted = loss_and_gradient(spec, params)
  for options in ({'scan_layers': True}, {'remat': 'full'}, {'scan_layers': True, 'remat': 'full'}):
    assert_same(wanted, loss_and_gradient(spec, params, **options), 1e-5)


def test_scanned_layers_and_remat_change_nothing_in_float64():
  with jax.enable_x64(True):
    spec = SPECS['qwen2']
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params_of(spec))
    wanted = loss_and_gradient(spec, params, dtype='float64')
    assert wanted[0].dtype == jnp.float64
    assert_same(wanted, loss_and_gradient(spec, params, dtype='float64', scan_layers=True, remat='full'), 1e-12)


def test_remat_keeps_less():
  spec = tiny('qwen2', VOCAB, num_hidden_layers=6)
  params = jax.eval_shape(build_model(spec).init, jax.random.key(0))
  tokens, (positions, segments) = jnp.zeros((1, 256), jnp.int32), packed(256)

  def temporaries(remat):
    model = build_model(spec, ModelOptions(remat=remat))
    gradient = jax.grad(lambda p: model.apply(p, tokens, positions, segments).sum())
    return jax.jit(gradient).lower(params).compile().memory_analysis().temp_size_in_bytes

  assert temporaries('full') < 0.6 * temporaries('none')


@pytest.mark.parametrize('family', FAMILIES)
def test_packing_changes_nothing(family):
  spec, params = SPECS[family], params_of(SPECS[family])
  apply = jax.jit(build_model(spec).apply)
  first, second = draw_tokens(1, 1, 11), draw_tokens(2, 1, 6)
  apart = [apply(params, t, *packed(t.shape[1])) for t in (first, second)]
  together = apply(params, jnp.concatenate([first, second], 1), *packed(11, 6))
  np.testing.assert_allclose(together, np.concatenate(apart, 1), atol=1e-5)
  swapped = apply(params, jnp.concatenate([second, first], 1), *packed(6, 11))
  np.testing.assert_allclose(swapped, np.concatenate(apart[::-1], 1), atol=1e-5)


def test_padding_is_never_seen_and_makes_no_nan():
  spec, params = SPECS['qwen3'], params_of(SPECS['qwen3'])
  apply = jax.jit(build_model(spec).apply)
  tokens = draw_tokens(1, 1, 9)
  bare = apply(params, tokens[:, :6], *packed(6))
  padded = apply(params, tokens, *packed(6, padding=3))
  np.testing.assert_allclose(padded[:, :6], bare, atol=1e-5)
  other = apply(params, tokens.at[:, 6:].set(0), *packed(6, padding=3))
  np.testing.assert_array_equal(other[:, :6], padded[:, :6])
  assert np.isfinite(padded).all()
  # A row of nothing but padding: finite forward and backward.
  model = build_model(spec)

  def loss(p):
    return (model.apply(p, tokens, jnp.zeros((1, 9), jnp.int32), jnp.zeros((1, 9), jnp.int32)) ** 2).sum()

  assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_later_tokens_change_nothing_before_and_something_after():
  spec, params = SPECS['llama'], params_of(SPECS['llama'])
  apply = jax.jit(build_model(spec).apply)
  tokens, layout = draw_tokens(1, 1, 10), packed(10)
  base = apply(params, tokens, *layout)
  changed = apply(params, tokens.at[0, 6].set((tokens[0, 6] + 1) % VOCAB), *layout)
  np.testing.assert_array_equal(changed[:, :6], base[:, :6])
  assert (np.abs(changed[:, 6:] - base[:, 6:]).max(-1) > 1e-4).all()


def test_positions_matter():
  spec, params = SPECS['qwen2'], params_of(SPECS['qwen2'])
  apply = jax.jit(build_model(spec).apply)
  tokens, (positions, segments) = draw_tokens(1, 1, 8), packed(8)
  base = apply(params, tokens, positions, segments)
  np.testing.assert_allclose(apply(params, tokens, positions + 100, segments), base, atol=1e-4)
  assert np.abs(apply(params, tokens, positions * 2, segments) - base).max() > 1e-2


@pytest.mark.parametrize(
  ('family', 'scan_layers'), [('qwen2', False), ('qwen3', False), ('llama', False), ('llama', True)]
)
def test_prefill_and_decode_equal_the_full_forward(family, scan_layers):
  # Prompts of 3, 7 and 5 tokens, right-padded with junk to a bucket of 8, then one token a step at each row's position.
  spec, params = SPECS[family], params_of(SPECS[family])
  model = build_model(spec, ModelOptions(scan_layers=scan_layers))
  rows, total, bucket, lengths = 3, 16, 8, jnp.array([3, 7, 5])
  tokens = draw_tokens(4, rows, total)
  positions = jnp.tile(jnp.arange(total), (rows, 1))
  wanted = jax.jit(build_model(spec).apply)(params, tokens, positions, jnp.ones_like(tokens))
  # The cache starts full of another occupant's numbers.
  cache = jax.tree.map(lambda x: x + 7.0, model.init_cache(rows, total))
  prompt = jnp.where(positions < lengths[:, None], tokens, 1)[:, :bucket]
  decode = jax.jit(model.decode)
  hidden, cache = decode(params, prompt, positions[:, :bucket], cache)
  for row in range(rows):
    np.testing.assert_allclose(hidden[row, : lengths[row]], wanted[row, : lengths[row]], atol=1e-5)
  for step in range(total - 7):
    at = (lengths + step)[:, None]
    hidden, cache = decode(params, jnp.take_along_axis(tokens, at, 1), at, cache)
    np.testing.assert_allclose(hidden[:, 0], wanted[jnp.arange(rows), at[:, 0]], atol=1e-5)


def test_decode_writes_each_token_at_its_position_and_none_past_the_end():
  spec, params = SPECS['qwen2'], params_of(SPECS['qwen2'])
  model = build_model(spec)
  _, cache = model.decode(params, draw_tokens(0, 3, 1), jnp.array([[0], [2], [4]]), model.init_cache(3, 4))
  for layer in cache:
    for buffer in layer.values():
      written = np.abs(np.asarray(buffer)).sum((2, 3)) > 0
      np.testing.assert_array_equal(written, [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])


def test_a_donated_cache_is_updated_in_place_inside_a_loop():
  spec, rows, length = tiny('qwen2', VOCAB), 16, 512
  model = build_model(spec)

  def generate(params, cache, token):
    def step(state):
      at, token, cache = state
      hidden, cache = model.decode(params, token, jnp.full((rows, 1), at), cache)
      return at + 1, jnp.argmax(hidden[..., :VOCAB], -1).astype(jnp.int32), cache

    return jax.lax.while_loop(lambda state: state[0] < length, step, (0, token, cache))

  shapes = jax.eval_shape(lambda: (model.init(jax.random.key(0)), model.init_cache(rows, length)))
  token = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
  memory = jax.jit(generate, donate_argnums=1).lower(*shapes, token).compile().memory_analysis()
  cache_bytes = sum(x.size * 4 for x in jax.tree.leaves(shapes[1]))
  assert memory.alias_size_in_bytes >= cache_bytes
  # One layer's keys and values may be laid out anew for the products; a second cache would be all layers'.
  assert memory.temp_size_in_bytes < cache_bytes
