"""The decoder's invariances: arrangement of layers, remat, packing, padding, causality, and
decoding with a cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import build_model, stack_layers, unstack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions, RopeScaling

VOCAB, TIME = 23, 12
SMALL = {'hidden_size': 24, 'intermediate_size': 40, 'head_dim': 16, 'num_hidden_layers': 2}
LLAMA3 = RopeScaling(kind='llama3', factor=8.0, original_max_position_embeddings=8)
SPECS = {
  'plain': tiny('llama', VOCAB, **SMALL),
  # All that any family has, in one: no family adds code, so what holds here and for the plain one
  # holds for each.
  'everything': tiny(
    'qwen3',
    VOCAB,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    rope_scaling=LLAMA3,
    tie_word_embeddings=False,
    **SMALL,
  ),
}


def draw_tokens(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, shape), jnp.int32)


@functools.cache
def params_of(spec):
  """Unrolled parameters whose biases and norms differ from 0 and 1 too."""
  shapes, tree = jax.tree.flatten(jax.eval_shape(build_model(spec).init, jax.random.key(0)))
  noise = [
    0.3 * np.random.default_rng(n).normal(size=x.shape) + (x.ndim == 1)
    for n, x in enumerate(shapes)
  ]
  return jax.tree.unflatten(tree, [jnp.asarray(x, jnp.float32) for x in noise])


@functools.cache
def apply_of(spec):
  """The compiled forward pass; tests call it with rows of TIME tokens, so that it compiles once for
  each family.
  """
  return functools.partial(jax.jit(build_model(spec).apply), params_of(spec))


def pad(tokens, to=TIME):
  return jnp.pad(tokens, ((0, 0), (0, to - tokens.shape[1])))


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
    jnp.asarray(np.random.default_rng(2).normal(size=(1, 12, spec.hidden_size)), dtype)
    * (segments > 0)[..., None]
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
    # The head takes no part in hidden states; all else must have moved them.
    assert norm > 0 or path == 'head/kernel', path
    assert np.linalg.norm(g - other_gradient[path]) <= tolerance * norm, path


@pytest.mark.full
def test_scanned_layers_and_remat_change_nothing():
  spec, params = SPECS['everything'], params_of(SPECS['everything'])
  wanted = loss_and_gradient(spec, params)
  remat = [{'scan_layers': True, 'remat': name} for name in ('full', 'dots', 'offload')]
  for options in ({'scan_layers': True}, {'remat': 'full'}, *remat):
    assert_same(wanted, loss_and_gradient(spec, params, **options), 1e-5)


def test_scanned_layers_and_remat_change_nothing_in_float64():
  with jax.enable_x64(True):
    spec = SPECS['plain']
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params_of(spec))
    wanted = loss_and_gradient(spec, params, dtype='float64')
    assert wanted[0].dtype == jnp.float64
    assert_same(
      wanted,
      loss_and_gradient(spec, params, dtype='float64', scan_layers=True, remat='full'),
      1e-12,
    )


@pytest.mark.full
def test_remat_keeps_less():
  # Scanned, because XLA:CPU merges what an unrolled remat computes again with what was computed
  # first.
  spec = tiny('qwen2', VOCAB, num_hidden_layers=6)
  params = jax.eval_shape(build_model(spec, ModelOptions(scan_layers=True)).init, jax.random.key(0))
  tokens, (positions, segments) = jnp.zeros((1, 256), jnp.int32), packed(256)

  def temporaries(remat):
    model = build_model(spec, ModelOptions(remat=remat, scan_layers=True))
    gradient = jax.grad(lambda p: model.apply(p, tokens, positions, segments).sum())
    return jax.jit(gradient).lower(params).compile().memory_analysis().temp_size_in_bytes

  assert temporaries('full') < 0.6 * temporaries('none')
  assert temporaries('full') < 0.8 * temporaries('dots') < 0.64 * temporaries('none')


@pytest.mark.parametrize('name', SPECS)
def test_packing_changes_nothing(name):
  apply = apply_of(SPECS[name])
  first, second = draw_tokens(1, 1, 7), draw_tokens(2, 1, 5)
  apart = [apply(pad(t), *packed(n, padding=TIME - n))[:, :n] for t, n in ((first, 7), (second, 5))]
  together = apply(jnp.concatenate([first, second], 1), *packed(7, 5))
  np.testing.assert_allclose(together, np.concatenate(apart, 1), atol=1e-5)
  swapped = apply(jnp.concatenate([second, first], 1), *packed(5, 7))
  np.testing.assert_allclose(swapped, np.concatenate(apart[::-1], 1), atol=1e-5)


def test_padding_is_never_seen_and_makes_no_nan():
  apply, tokens = apply_of(SPECS['everything']), draw_tokens(1, 1, TIME)
  padded = apply(tokens, *packed(6, padding=TIME - 6))
  np.testing.assert_allclose(padded[:, :6], apply(tokens[:, :6], *packed(6)), atol=1e-5)
  other = apply(tokens.at[:, 6:].set(0), *packed(6, padding=TIME - 6))
  np.testing.assert_array_equal(other[:, :6], padded[:, :6])
  assert np.isfinite(padded).all()


def test_a_row_of_nothing_but_padding_has_finite_gradients():
  model, params = build_model(SPECS['everything']), params_of(SPECS['everything'])
  tokens, layout = draw_tokens(1, 1, TIME), packed(padding=TIME)
  gradient = jax.jit(jax.grad(lambda p: (model.apply(p, tokens, *layout) ** 2).sum()))(params)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_later_tokens_change_nothing_before_and_something_after():
  apply, tokens, layout = apply_of(SPECS['plain']), draw_tokens(1, 1, TIME), packed(TIME)
  base = apply(tokens, *layout)
  changed = apply(tokens.at[0, 6].set((tokens[0, 6] + 1) % VOCAB), *layout)
  np.testing.assert_array_equal(changed[:, :6], base[:, :6])
  assert (np.abs(changed[:, 6:] - base[:, 6:]).max(-1) > 1e-4).all()


def test_positions_count_by_their_differences():
  apply, tokens, (positions, segments) = (
    apply_of(SPECS['plain']),
    draw_tokens(1, 1, TIME),
    packed(TIME),
  )
  base = apply(tokens, positions, segments)
  np.testing.assert_allclose(apply(tokens, positions + 100, segments), base, atol=1e-4)
  assert np.abs(apply(tokens, positions * 2, segments) - base).max() > 1e-2


@pytest.mark.parametrize(('name', 'scan_layers'), [('plain', True), ('everything', False)])
def test_prefill_and_decode_equal_the_full_forward(name, scan_layers):
  # Prompts of 3, 7 and 5 tokens, right-padded with junk to a bucket of 8, then one token a step at
  # each row's position.
  spec, params = SPECS[name], params_of(SPECS[name])
  model = build_model(spec, ModelOptions(scan_layers=scan_layers))
  rows, bucket, lengths = 3, 8, jnp.array([3, 7, 5])
  tokens, positions = draw_tokens(4, rows, TIME), jnp.tile(jnp.arange(TIME), (rows, 1))
  wanted = jnp.concatenate(
    [apply_of(spec)(tokens[row : row + 1], *packed(TIME)) for row in range(rows)]
  )
  # The cache starts full of another occupant's numbers.
  cache = jax.tree.map(lambda x: x + 7.0, model.init_cache(rows, TIME))
  prompt = jnp.where(positions < lengths[:, None], tokens, 1)[:, :bucket]
  decode = jax.jit(model.decode)
  hidden, cache = decode(params, prompt, positions[:, :bucket], cache)
  for row in range(rows):
    np.testing.assert_allclose(hidden[row, : lengths[row]], wanted[row, : lengths[row]], atol=1e-5)
  for step in range(TIME - 7):
    at = (lengths + step)[:, None]
    hidden, cache = decode(params, jnp.take_along_axis(tokens, at, 1), at, cache)
    np.testing.assert_allclose(hidden[:, 0], wanted[jnp.arange(rows), at[:, 0]], atol=1e-5)


def test_decode_writes_each_token_at_its_position_and_none_past_the_end():
  spec, params = SPECS['plain'], params_of(SPECS['plain'])
  model = build_model(spec)
  _, cache = jax.jit(model.decode)(
    params, draw_tokens(0, 3, 1), jnp.array([[0], [2], [4]]), model.init_cache(3, 4)
  )
  for layer in cache:
    for buffer in layer.values():
      written = np.abs(np.asarray(buffer)).sum((1, 3)) > 0
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
  # No layer's keys or values are laid out anew for the products.
  assert memory.temp_size_in_bytes < cache_bytes / len(jax.tree.leaves(shapes[1]))
