import collections
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.batching.packing import pack
from jaxrl_llm.batching.plan import Row, StepPlan, deal_rows, pack_step, plan_shape, units_of
from jaxrl_llm.core.errors import UserError


def rows_of(lengths, **fields) -> tuple[Row, ...]:
  common = {
    'source': 'a.arrayrecord',
    'prompt_len': 1,
    'group': 'g',
    'reward': 0.0,
    'is_expert': False,
  }
  common |= {'truncated': False, 'version_step': 3, **fields}
  return tuple(
    Row(uid=f's/{i}', index=i, length=length, **common) for i, length in enumerate(lengths)
  )


def test_a_plan_survives_json():
  rows = (
    *rows_of(
      [4, 7], reward=0.1, correct=True, turn_rewards=(0.5, 0.25), trajectory='t', step_index=1
    ),
    *rows_of([2], reward=None, version_step=None, is_expert=True),
    *rows_of([3], reward=None, version_step=None, pair='p', label=-1),
  )
  plan = StepPlan(
    step=12,
    stage='grpo',
    rows=rows,
    optimizer_steps=((0, 2), (1,)),
    proximal=True,
    proximal_reason='2 optimizer steps on one batch',
    held_out=rows[1:],
    evaluate=True,
    commit=True,
    commit_by_clock=True,
    counts={'dropped_stale': 2},
  )
  assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
  leave = StepPlan(step=3, stage='sft', stop=15)
  assert StepPlan.from_json(json.loads(json.dumps(leave.to_json()))) == leave


def test_files_keep_their_values_for_what_is_absent():
  """Plans and recorded groups of earlier versions hold them, and are still read."""
  (row,) = rows_of([3], version_step=None)
  written = row.to_json()
  assert [written[name] for name in ('version_step', 'trajectory', 'pair', 'label')] == [
    -1,
    '',
    '',
    0,
  ]
  (first,) = rows_of([3], version_step=0, trajectory='t', pair='p', label=-1)
  written = first.to_json()
  assert [written[name] for name in ('version_step', 'trajectory', 'pair', 'label')] == [
    0,
    't',
    'p',
    -1,
  ]
  assert Row.from_json(row.to_json()) == row and Row.from_json(written) == first


def test_a_plan_sends_its_numbers_bit_for_bit():
  reward = float(np.nextafter(0.1, 1.0))
  plan = StepPlan(step=0, stage='x', rows=rows_of([3], reward=reward), optimizer_steps=((0,),))
  assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))).rows[0].reward == reward


def test_hand_worked_shape():
  # 10 rows over 4 ranks: at most 3 on a rank; 2 chunks a micro-batch: 2 micro-batches. A chunk of
  # 16 holds at most 3.
  shape = plan_shape(rows=10, ranks=4, chunks=2, chunk_len=16)
  assert (shape.ranks, shape.chunks, shape.chunk_len) == (4, 2, 16)
  assert (shape.micro_batches, shape.segments) == (2, 3)
  # Sequences have at least one token: two in a chunk of two, though five would be on the rank.
  assert plan_shape(rows=5, ranks=1, chunks=1, chunk_len=2).segments == 2


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.integers(1, 24))
def test_the_planned_shape_holds_any_rows(data, ranks, chunks, chunk_len):
  lengths = data.draw(st.lists(st.integers(1, chunk_len), min_size=1, max_size=40))
  more = data.draw(st.integers(0, 3))  # a step may be smaller than planned for
  shape = plan_shape(rows=len(lengths) + more, ranks=ranks, chunks=chunks, chunk_len=chunk_len)
  packing = pack(lengths, ranks=ranks, chunks=chunks, chunk_len=chunk_len)
  assert packing.micro_batches <= shape.micro_batches
  assert packing.segment.max() <= shape.segments


def test_the_bound_is_reached():
  # Rows as long as a chunk: 7 rows on 2 ranks of 2 chunks need 2 micro-batches, as planned.
  shape = plan_shape(rows=7, ranks=2, chunks=2, chunk_len=8)
  assert pack([8] * 7, ranks=2, chunks=2, chunk_len=8).micro_batches == shape.micro_batches == 2
  # Rows of one token all share a chunk.
  assert pack([1] * 8, ranks=2, chunks=2, chunk_len=8).segment.max() == 4
  assert plan_shape(rows=8, ranks=2, chunks=2, chunk_len=8).segments == 4


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**40))
def test_every_epoch_takes_every_row_once(count, minibatches, epochs, seed):
  minibatches = min(minibatches, count)
  dealt = deal_rows(rows_of([5] * count), minibatches=minibatches, epochs=epochs, seed=seed)
  assert len(dealt) == minibatches * epochs
  for epoch in range(epochs):
    steps = dealt[epoch * minibatches : (epoch + 1) * minibatches]
    assert sorted(i for step in steps for i in step) == list(range(count))
    assert max(map(len, steps)) - min(map(len, steps)) <= 1
  assert dealt == deal_rows(rows_of([9] * count), minibatches=minibatches, epochs=epochs, seed=seed)


def test_epochs_seeds_and_steps_are_dealt_differently():
  rows = rows_of([5] * 12)
  deals = [deal_rows(rows, minibatches=3, epochs=2, seed=seed) for seed in range(50)]
  # The planner's seeds follow each other: no epoch of one step may repeat an epoch of the next.
  epochs = [epoch for dealt in deals for epoch in (dealt[:3], dealt[3:])]
  assert len(set(epochs)) == 100


def test_no_row_has_a_favourite_minibatch():
  # 4 rows in 2 minibatches: row 0 is in the first with probability 1/2; of 400 seeds 200 ± 5 sigma,
  # sigma = 10.
  rows = rows_of([5] * 4)
  firsts = collections.Counter(
    0 in deal_rows(rows, minibatches=2, epochs=1, seed=seed)[0] for seed in range(400)
  )
  assert 150 < firsts[True] < 250


def test_a_step_packs_its_own_rows_in_its_own_numbering():
  # Step 1 holds rows 3 and 0 of the plan, lengths 6 and 2: sorted, 6 opens the chunk and 2 fits
  # behind it.
  plan = StepPlan(step=0, stage='x', rows=rows_of([2, 8, 8, 6]), optimizer_steps=((1, 2), (3, 0)))
  shape = plan_shape(rows=2, ranks=1, chunks=1, chunk_len=8)
  packing = pack_step(plan, 1, shape)
  assert packing.length.tolist() == [6, 2]
  assert packing.offset.tolist() == [0, 6]
  assert packing.micro_batch.tolist() == [0, 0]
  assert pack_step(plan, 0, shape).micro_batch.tolist() == [0, 1]


def paired(lengths) -> tuple[Row, ...]:
  """Neighbours are pairs."""
  rows = rows_of(lengths, reward=None)
  return tuple(
    dataclasses.replace(row, pair=f'p{i // 2}', label=1 - 2 * (i % 2)) for i, row in enumerate(rows)
  )


def test_units_are_pairs_and_single_rows():
  rows = (*rows_of([1]), *paired([2, 3]), *rows_of([4]))
  # A single row is no pair's member, whatever its number.
  named = (dataclasses.replace(rows[1], pair='0'), dataclasses.replace(rows[2], pair='0'))
  assert sorted(units_of((rows[0], *named, rows[3]))) == [[0], [1, 2], [3]]
  apart = (rows[1], rows[0], rows[2])
  assert sorted(units_of(apart)) == [[0, 2], [1]]


@settings(max_examples=100, deadline=None)
@given(
  st.integers(1, 20), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**40), st.randoms()
)
def test_a_deal_keeps_pairs_together(count, minibatches, epochs, seed, random):
  minibatches, rows = min(minibatches, count), [*paired([5] * (2 * count))]
  random.shuffle(rows)
  dealt = deal_rows(rows, minibatches=minibatches, epochs=epochs, seed=seed)
  for step in dealt:
    members = collections.Counter(rows[i].pair for i in step)
    assert set(members.values()) == {2}
  for epoch in range(epochs):
    steps = dealt[epoch * minibatches : (epoch + 1) * minibatches]
    assert sorted(i for step in steps for i in step) == list(range(2 * count))
    assert max(map(len, steps)) - min(map(len, steps)) <= 2


@settings(max_examples=100, deadline=None)
@given(
  st.integers(0, 20), st.integers(0, 20), st.integers(1, 5), st.integers(0, 2**40), st.randoms()
)
def test_experts_are_dealt_evenly(usual, experts, minibatches, seed, random):
  rows = [*rows_of([5] * usual), *rows_of([5] * experts, is_expert=True)]
  random.shuffle(rows)
  minibatches = min([minibatches, *(n for n in (usual, experts) if n)])
  if not rows:
    return
  dealt = deal_rows(rows, minibatches=minibatches, epochs=2, seed=seed)
  assert len(dealt) == 2 * minibatches
  for steps in (dealt[:minibatches], dealt[minibatches:]):
    assert sorted(i for step in steps for i in step) == list(range(len(rows)))
    for kind in (False, True):
      shares = [sum(rows[i].is_expert is kind for i in step) for step in steps]
      assert max(shares) - min(shares) <= 1


def test_pairs_too_many_for_their_chunks_are_refused_in_one_line():
  with pytest.raises(
    UserError, match=r'^learner\.chunks_per_rank: 1 chunks [^\n]* wanted at least 2$'
  ):
    plan_shape(rows=4, ranks=1, chunks=1, chunk_len=8, unit=2)


def test_hand_worked_shape_of_pairs():
  # 5 pairs over 2 ranks: at most 3 on one; 3 chunks hold one pair in the worst case: 3
  # micro-batches. All 6 rows of a rank may share a chunk.
  shape = plan_shape(rows=10, ranks=2, chunks=3, chunk_len=16, unit=2)
  assert (shape.micro_batches, shape.segments) == (3, 6)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(2, 5), st.integers(1, 24))
def test_the_planned_shape_holds_any_pairs(data, ranks, chunks, chunk_len):
  count = data.draw(st.integers(1, 20))
  rows = paired(
    data.draw(st.lists(st.integers(1, chunk_len), min_size=2 * count, max_size=2 * count))
  )
  shape = plan_shape(rows=2 * count, ranks=ranks, chunks=chunks, chunk_len=chunk_len, unit=2)
  plan = StepPlan(step=0, stage='x', rows=rows, optimizer_steps=(tuple(range(2 * count)),))
  packing = pack_step(plan, 0, shape)
  assert packing.micro_batches <= shape.micro_batches
  assert packing.segment.max() <= shape.segments
  for first, second in units_of(rows):
    assert packing.micro_batch[first] == packing.micro_batch[second]
    assert packing.chunk[first] // chunks == packing.chunk[second] // chunks


def lognormal_lengths(count: int, seed: int) -> list[int]:
  """Mean about 139, longest 512."""
  return (
    np.clip(np.random.default_rng(seed).lognormal(4.70, 0.7, count), 1, 512).astype(int).tolist()
  )


KNOWN = lognormal_lengths(5000, seed=0)


def utilisations(rows, ranks, chunks):
  return [
    pack(lognormal_lengths(rows, seed), ranks=ranks, chunks=chunks, chunk_len=512).utilisation
    for seed in range(1, 11)
  ]


_FULL = [pytest.param(*cut, marks=pytest.mark.full) for cut in ((1, 16), (2, 8))]


@pytest.mark.parametrize(('ranks', 'chunks'), [(1, 4), (1, 8), *_FULL])
def test_planned_micro_batches_are_full(ranks, chunks):
  shape = plan_shape(rows=512, ranks=ranks, chunks=chunks, chunk_len=512, lengths=KNOWN)
  assert 1 < shape.chunks <= chunks, (
    'narrow micro-batches are always full, and give a device little to do'
  )
  assert min(utilisations(512, ranks, shape.chunks)) >= 0.95


def test_without_the_plan_they_are_not():
  assert min(utilisations(512, 1, 16)) < 0.95


@pytest.mark.full
def test_many_ranks_lose_no_more_than_their_chunks_do():
  # 8 ranks of 512 tokens each are 6 % of such a step: what is lost to that, no plan brings back.
  shape = plan_shape(rows=512, ranks=8, chunks=8, chunk_len=512, lengths=KNOWN)
  assert np.mean(utilisations(512, 8, shape.chunks)) >= 0.97 * np.mean(utilisations(512, 8, 1))


@pytest.mark.parametrize('ranks', [1, 4])
def test_a_split_remainder_keeps_wide_micro_batches_full(ranks):
  """With whole micro-batches of eight chunks, four ranks are 0.80 full."""
  shares = [
    pack(
      lognormal_lengths(512, seed), ranks=ranks, chunks=8, chunk_len=512, splits_remainder=True
    ).utilisation
    for seed in range(1, 21)
  ]
  assert min(shares) >= 0.95
  assert min(utilisations(512, ranks, 8)) < 0.95
  shape = plan_shape(
    rows=512, ranks=ranks, chunks=8, chunk_len=512, lengths=KNOWN, splits_remainder=True
  )
  assert (shape.chunks, shape.splits_remainder) == (8, True)


def test_only_single_rows_in_several_chunks_have_a_remainder_to_split():
  shapes = [
    plan_shape(rows=8, ranks=1, chunks=chunks, chunk_len=512, unit=unit, splits_remainder=True)
    for chunks, unit in ((4, 1), (1, 1), (4, 2))
  ]
  assert [shape.splits_remainder for shape in shapes] == [True, False, False]
  with pytest.raises(ValueError, match='the rows of a unit could be separated'):
    pack([8, 8], units=[[0, 1]], ranks=1, chunks=2, chunk_len=8, splits_remainder=True)


@pytest.mark.full
def test_a_large_step_keeps_wide_micro_batches():
  assert plan_shape(rows=4096, ranks=1, chunks=8, chunk_len=512, lengths=KNOWN).chunks == 8


def test_a_plan_from_lengths_holds_any_rows_all_the_same():
  shape = plan_shape(rows=64, ranks=2, chunks=8, chunk_len=512, lengths=KNOWN)
  packing = pack([512] * 64, ranks=2, chunks=shape.chunks, chunk_len=512)
  assert packing.micro_batches <= shape.micro_batches


def test_planned_micro_batches_hold_a_pair():
  shape = plan_shape(rows=8, ranks=1, chunks=6, chunk_len=512, unit=2, lengths=KNOWN)
  assert 2 <= shape.chunks <= 6
  longest = plan_shape(rows=40, ranks=1, chunks=6, chunk_len=512, unit=2, lengths=[512] * 40)
  # A row to a chunk: 20 pairs are 7 micro-batches of 3 pairs, where 2 of 42 chunks are empty, or 10
  # of 2. Five chunks hold two pairs and an empty chunk.
  assert longest.chunks == 4


def test_the_plan_is_a_function_of_its_input():
  shapes = {plan_shape(rows=100, ranks=2, chunks=8, chunk_len=512, lengths=KNOWN) for _ in range(2)}
  assert len(shapes) == 1
