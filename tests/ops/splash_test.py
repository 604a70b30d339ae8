"""Splash attention: sizes of blocks, and which blocks are visited."""

import collections
import copy
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

from jaxrl_llm.ops.attention import choose
from jaxrl_llm.ops.splash import BLOCKS, run_splash, skipping_segments, splash_kernel
from jaxrl_llm.parallel.balance import pieces
from jaxrl_llm.parallel.topology import CHIPS

SEGMENTS = (100, 28, 300, 40, 300, 200)
"""Lengths of the segments of a row of 1,024 tokens, whose end is padding."""


def row_of_segments(time=1024):
  ids = [i + 1 for i, length in enumerate(SEGMENTS) for _ in range(length)]
  return jnp.array(ids + [0] * (time - len(ids)), jnp.int32)


def on_tpu(chip, time, shards=1):
  return choose(
    'auto', platform='tpu', time=time, keys=time, same_tokens=True, dtype='bfloat16',
    shards=shards, peak_flops=CHIPS[chip].peak_flops,
  )  # fmt: skip


@pytest.mark.parametrize(
  ('chip', 'blocks'),
  [
    ('v5e', {128: 128, 200: 256, 512: 512, 600: 256, 2048: 512, 8192: 1024, 32_768: 1024}),
    ('v5p', {128: 128, 200: 256, 512: 512, 600: 256, 2048: 1024, 8192: 1024, 32_768: 1024}),
  ],
)
def test_blocks_grow_with_the_length_and_with_the_speed_of_the_chip(chip, blocks):
  assert {time: on_tpu(chip, time).block for time in blocks} == blocks


@pytest.mark.parametrize('shards', [2, 3, 4, 8])
def test_pieces_of_balanced_shards_consist_of_whole_blocks(shards):
  for multiple in (1, 3, 4, 16, 40):
    time = 2 * shards * 128 * multiple
    choice = on_tpu('v5p', time, shards)
    assert choice.is_balanced and 128 * multiple % choice.block == 0
  ragged = on_tpu('v5p', 2 * shards * 128 + shards, shards)
  assert not ragged.is_balanced and 'are no multiple of' in ragged.reason
  assert ragged.block in BLOCKS


def visited(kernel):
  """Number of visited blocks of the forward pass, and of each kernel of the backward pass."""
  (forward, of_queries, of_keys), _ = kernel.tree_flatten()
  return [int((info.block_mask > 0).sum()) for info in (forward, of_queries, of_keys)]


@functools.cache
def seen_blocks(block=128):
  """Number of pairs of blocks in which some query sees some key, or padding sees padding."""
  ids = np.asarray(row_of_segments())
  seen = (ids[:, None] == ids) & (np.arange(1024)[:, None] >= np.arange(1024))
  return int(seen.reshape(8, block, 8, block).any((1, 3)).sum())


def test_blocks_of_other_segments_are_not_visited():
  ids = row_of_segments()
  kernel = splash_kernel(1024, block=128, window=None, softcap=None)
  assert visited(kernel) == [8 * 9 // 2] * 3
  kernel = skipping_segments(kernel, SegmentIds(ids, ids), 128)
  assert visited(kernel) == [seen_blocks()] * 3
  assert seen_blocks() < 8 * 9 // 4
  # Nor are they loaded: skipped steps have the block of a visited step in memory.
  (forward, of_queries, of_keys), _ = kernel.tree_flatten()
  for info, axis in ((forward, 1), (of_queries, 1), (of_keys, 0)):
    steps = (np.moveaxis(np.asarray(x[0]), axis, 1) for x in (info.data_next, info.block_mask))
    for loaded, is_visited in zip(*steps, strict=True):
      assert set(loaded) == set(loaded[is_visited > 0])


def test_a_kernel_of_other_fields_is_used_as_it_is_with_one_line(caplog):
  """Kernels of a newer JAX: a field is absent, an array has another shape, a kernel is absent."""
  ids = SegmentIds(row_of_segments(), row_of_segments())
  kernel = splash_kernel(1024, block=128, window=None, softcap=None)
  infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
  other = collections.namedtuple('Other', ['block_mask'])
  absent = [other(info.block_mask) for info in infos]
  flat = [
    info._replace(block_mask=info.block_mask[0], data_next=info.data_next[0]) for info in infos
  ]
  with caplog.at_level(logging.WARNING):
    for changed in (absent, flat, [infos[0], None, infos[2]]):
      newer = copy.copy(kernel)
      newer.fwd_mask_info, newer.dq_mask_info, newer.dkv_mask_info = changed
      assert skipping_segments(newer, ids, 128) is newer
    assert visited(skipping_segments(kernel, ids, 128)) == [seen_blocks()] * 3
    assert skipping_segments(kernel, ids, 256) is kernel, 'blocks of another size'
  (record,) = caplog.records
  assert 'blocks of other segments are computed' in record.getMessage()


@pytest.mark.parametrize('shards', [2, 4])
def test_balanced_shards_visit_equally_many_blocks_of_a_long_sequence(shards):
  """Consecutive shards do not."""

  def by_shard(order):
    kernel = splash_kernel(1024, block=128, window=None, softcap=None, shards=shards, order=order)
    (forward, _, _), _ = kernel.tree_flatten()
    return [int((part > 0).sum()) for part in np.split(np.asarray(forward.block_mask[0]), shards)]

  balanced, consecutive = by_shard(pieces(shards)), by_shard(None)
  assert balanced == [8 * 9 // 2 // shards] * shards
  assert sum(consecutive) == sum(balanced) and consecutive[-1] > 1.4 * balanced[-1]


@pytest.mark.full
def test_skipping_segments_changes_no_bit_of_values_or_gradients(monkeypatch):
  rng = np.random.default_rng(0)
  query, key, value, weight = (
    jnp.asarray(rng.normal(size=(2, 1024, heads, 64)), jnp.float32) for heads in (2, 1, 1, 2)
  )
  ids = jnp.stack([row_of_segments(), jnp.ones(1024, jnp.int32)])
  kernel = splash_kernel(1024, block=128, window=None, softcap=None, interpret=True)

  def results():
    """Gradients and values, and whether others are finite if the first block's values are NaN."""

    def loss(*inputs):
      mixed = run_splash(kernel, *inputs, ids, ids, block=128)
      return (mixed * weight).sum(), mixed

    compute = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    # The two segments of the first row's first block end there.
    _, behind_nan = compute(query, key, value.at[0, :128].set(jnp.nan))
    found = jax.device_get(compute(query, key, value))
    return found, bool(jnp.isfinite(behind_nan[0, 128:]).all())

  skipped, is_unread = results()
  monkeypatch.setattr('jaxrl_llm.ops.splash._SKIPS_FROM', 100)
  whole, is_unread_too = results()
  assert is_unread and not is_unread_too
  jax.tree.map(np.testing.assert_array_equal, skipped, whole)
