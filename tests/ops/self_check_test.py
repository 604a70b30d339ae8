"""The chain of attention implementations: each is checked on the device, and the first that is
correct is taken. The candidates are real functions with real faults.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models import attention as module
from jaxrl_llm.models.attention import proven
from jaxrl_llm.ops.attention import attention, masked
from jaxrl_llm.ops.places import visible
from jaxrl_llm.ops.self_check import Trial, _problem, _trees, first_correct, why_wrong

TRIAL = Trial(heads=2, kv_heads=1, head_dim=16, dtype='float32')


def by(implementation, **rule):
  return lambda query, key, value, places: attention(
    query, key, value, places, places, implementation=implementation, **rule
  )


def with_places(change):
  """Masked attention with other places of the tokens."""

  def compute(query, key, value, places):
    return masked(query, key, value, change(places), change(places))

  return compute


def sees_the_next_token(query, key, value, places):
  later = places._replace(positions=places.positions + 1)
  return masked(query, key, value, later, places)


def sees_other_segments(places):
  return places._replace(
    segment_ids=jnp.minimum(places.segment_ids, 1),
    positions=jnp.broadcast_to(jnp.arange(places.positions.shape[1]), places.positions.shape),
  )


def joins_the_last_two_segments(places):
  """A fault at a single boundary: in the third row, the last segment also sees the one before."""
  ids = places.segment_ids
  return places._replace(segment_ids=jnp.where(ids == 5, 4, ids))


@jax.custom_vjp
def without_a_gradient_of_the_keys(query, key, value, places):
  return masked(query, key, value, places, places)


def _forward(*inputs):
  return jax.vjp(lambda *x: masked(*x, inputs[3], inputs[3]), *inputs[:3])


without_a_gradient_of_the_keys.defvjp(
  _forward, lambda vjp, dout: (vjp(dout)[0], jnp.zeros_like(vjp(dout)[1]), vjp(dout)[2], None)
)


def not_finite_at_padding(query, key, value, places):
  out = masked(query, key, value, places, places)
  return jnp.where(places.segment_ids[:, :, None, None] > 0, out, jnp.nan)


def not_there(query, key, value, places):
  import a_library_of_kernels_that_is_not_installed as library

  return library.attention(query, key, value, places)


def of_wrong_shape(query, key, value, places):
  return masked(query, key, value, places, places)[:, :, :1]


def unscaled(query, key, value, places):
  return masked(query * 4, key, value, places, places)


FAULTS = {
  'sees the next token': (sees_the_next_token, 'is wrong: the output differs by'),
  'sees other segments': (with_places(sees_other_segments), 'is wrong: the output differs by'),
  'joins two segments': (with_places(joins_the_last_two_segments), 'is wrong: the output differs'),
  'no gradient': (without_a_gradient_of_the_keys, 'the gradient of the keys differs by 1 of'),
  'not finite': (not_finite_at_padding, 'the output is not finite'),
  'unscaled': (unscaled, 'is wrong: the output differs by'),
  'wrong shape': (of_wrong_shape, 'has a wrong shape of the output: (4, 300, 1, 16), wanted'),
  'not there': (not_there, 'fails: '),
  'a kernel of another platform': (by('pallas_gpu'), 'fails: '),
  'cuDNN without a GPU': (by('cudnn'), 'fails: '),
  'a library that is not installed': (by('tokamax'), 'tokamax is not installed'),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_is_seen_and_named(fault):
  compute, message = FAULTS[fault]
  reason = why_wrong(compute, TRIAL)
  assert message in reason and '\n' not in reason


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_correct_implementations_pass(dtype):
  trial = TRIAL._replace(dtype=dtype, heads=4, kv_heads=2)
  assert why_wrong(by('masked'), trial) is None
  assert why_wrong(by('blockwise', block=128), trial) is None


def test_shared_prefixes_are_checked_where_wanted():
  """Against a real fault: the branches of a tree do not see what they share."""

  def sees_no_prefix(query, key, value, places):
    apart = places._replace(seen_until=None)
    return masked(query, key, value, apart, apart)

  assert why_wrong(sees_no_prefix, TRIAL) is None
  reason = why_wrong(sees_no_prefix, TRIAL, shared=True)
  assert reason.startswith('with shared prefixes, is wrong: the output differs by')
  assert why_wrong(by('blockwise', block=128), TRIAL, shared=True) is None
  chain = {'apart': sees_no_prefix, 'shared': by('blockwise')}
  assert first_correct(chain, TRIAL).name == 'apart'
  assert first_correct(chain, TRIAL, shared=('shared',)).name == 'apart'
  assert first_correct(chain, TRIAL, shared=('apart', 'shared')).name == 'shared'


def test_the_trees_of_the_check_are_trees():
  """By the paths of the third row, written by hand: tokens of segment and position."""
  places = _trees(_problem(TRIAL)[-1])
  seen = np.asarray(visible(places, places))[2]
  ids, positions = np.asarray(places.segment_ids)[2], np.asarray(places.positions)[2]
  path = {(2, 0), *((3, p) for p in range(1, 17)), *((5, p) for p in range(17, 81))}
  last = int(np.flatnonzero(ids == 5)[-1])
  assert {(int(ids[s]), int(positions[s])) for s in np.flatnonzero(seen[last])} == path
  assert not np.triu(seen, 1).any()


@pytest.mark.full
def test_a_kernel_passes_in_interpreter_mode():
  assert why_wrong(by('pallas_gpu', interpret=True), TRIAL) is None


def test_the_window_and_softcap_of_the_trial_count():
  trial = TRIAL._replace(window=9, softcap=2.0)
  assert why_wrong(by('blockwise', window=9, softcap=2.0), trial) is None
  assert 'is wrong' in why_wrong(by('masked', window=10, softcap=2.0), trial)
  assert 'is wrong' in why_wrong(by('masked', window=9), trial)


def test_the_first_correct_one_is_taken_and_no_later_one_is_tried():
  tried = []

  def noted(name, compute, *arguments):
    tried.append(name)
    return compute(*arguments)

  chain = {
    'absent': not_there,
    'wrong': sees_the_next_token,
    'right': by('blockwise'),
    'late': by('masked'),
  }
  chain = {name: functools.partial(noted, name, compute) for name, compute in chain.items()}
  found = first_correct(chain, TRIAL)
  assert found.name == 'right' and list(found.rejected) == ['absent', 'wrong'] == tried[:2]
  assert 'late' not in tried
  assert first_correct({'wrong': sees_the_next_token}, TRIAL).name is None


def proved(asked, **given):
  fields = dict(platform='gpu', time=512, shards=1) | given
  return proven(asked, TRIAL._replace(dtype='bfloat16'), **fields)


def test_without_a_gpu_its_whole_chain_is_rejected_and_plain_jax_remains():
  found = proved('auto')
  assert found.implementation == 'blockwise'
  assert found.reason.startswith('correct on cpu; ') and '\n' not in found.reason
  for name in ('cudnn: fails: ', 'tokamax: tokamax is not installed', 'pallas_gpu: fails: '):
    assert name in found.reason


@pytest.mark.parametrize('saved', [0.0, 0.4, 0.6])
def test_a_kernel_that_shares_no_prefixes_comes_last_where_they_save_much(saved, monkeypatch):
  """No kernel works here, so that the last one is asked only if blockwise attention is, too."""
  tried = []

  def noted(candidates, trial, *, shared):
    tried.extend(candidates)
    assert bool(shared) == (saved > 0)
    return first_correct(candidates, trial, shared=shared)

  monkeypatch.setattr(module, 'first_correct', noted)
  assert proved('auto', saved=saved).implementation == 'blockwise'
  last = ['blockwise', 'pallas_gpu'] if saved == 0.6 else ['pallas_gpu', 'blockwise']
  assert tried == ['cudnn', *last]


def test_what_cannot_do_the_lengths_or_shards_is_not_tried():
  found = proved('auto', time=16_384, shards=2)
  reason = found.reason
  assert found.implementation == 'blockwise'
  assert 'cudnn needs a mask of 16384' in reason and 'pallas_gpu numbers tokens' in reason


def test_with_a_sharded_time_axis_queries_of_a_part_are_checked(monkeypatch):
  """A real fault of that path alone: the parts' queries are placed as if they began the row."""

  def faulty(query, key, value, of_queries, of_keys, **rule):
    if of_queries is not of_keys:
      of_queries = jax.tree.map(lambda x, y: x[:, : y.shape[1]], of_keys, of_queries)
    return attention(query, key, value, of_queries, of_keys, **rule)

  monkeypatch.setattr(module, 'attention', faulty)
  assert proved('auto').implementation == 'blockwise'
  with pytest.raises(UserError, match=r'^policy.attention: .*blockwise: is wrong: the output'):
    proved('auto', shards=2)


def test_a_kernel_that_is_asked_for_and_wrong_is_refused_in_one_line():
  with pytest.raises(UserError, match=r'^policy.attention: pallas_gpu: fails: .*; choose auto$'):
    proved('pallas_gpu')


@pytest.mark.parametrize(
  'given',
  [dict(platform='cpu'), dict(platform='tpu'), dict(asked='blockwise'), dict(asked='masked')],
)
def test_nothing_is_checked_on_other_platforms_or_of_plain_jax(given):
  assert proved(**(dict(asked='auto') | given)) is None
