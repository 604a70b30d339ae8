"""Rows named by a plan reach the devices where the packing says, and nothing else does."""

import asyncio
import contextlib
import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from jaxrl_llm.batching.plan import Row, StepPlan, plan_shape
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Sample, Segment, Source, encode
from jaxrl_llm.core.types import Version
from jaxrl_llm.data.load import RowLoader, unpack
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh, data_parallel_ranks
from jaxrl_llm.replay.segments import write_segment

LENGTHS = (3, 9, 4, 2, 7, 5, 8, 6, 3, 3, 10)
ADVANTAGES = np.linspace(-1.0, 1.0, len(LENGTHS))
IN_LOSS = np.array([i != 4 for i in range(len(LENGTHS))])
SOURCE = 'segments/000000.arrayrecord'


def rollout(i: int) -> Sample:
  """Tokens 100 i, 100 i + 1, ...; logprob of token t is -(t + i / 100); temperature 1 + i / 10; one
  prompt token.
  """
  length = LENGTHS[i]
  sampled = np.arange(length) > 0
  return Sample(
    uid=f'grpo/{i}',
    task_id=f't:{i}',
    visit=0,
    sample_index=0,
    group_id=f'g{i // 2}',
    trajectory_id=f'grpo/{i}',
    taskset='t',
    domain='general',
    source=Source.ROLLOUT,
    tokens=np.arange(100 * i, 100 * i + length, dtype=np.int32),
    prompt_len=1,
    role=sampled.astype(np.uint8),
    loss_mask=sampled,
    sampled=sampled,
    behaviour_logprobs=np.where(sampled, -(np.arange(length) + i / 100), 0).astype(np.float32),
    segments=(
      Segment(start=1, end=length, version=Version(0, 0), engine='embedded', finish='stop'),
    ),
    temperature=1 + i / 10,
  )


def row(i: int, **changes) -> Row:
  planned = Row(
    uid=f'grpo/{i}',
    source=SOURCE,
    index=i,
    length=LENGTHS[i],
    prompt_len=1,
    group=f'g{i // 2}',
    reward=1.0,
    is_expert=i == 2,
    truncated=False,
    version_step=0,
  )
  return dataclasses.replace(planned, **changes)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  path = tmp_path_factory.mktemp('run')
  (path / 'segments').mkdir()
  write_segment(
    path / 'segments', '000000.arrayrecord', [encode(rollout(i)) for i in range(len(LENGTHS))]
  )
  return path


def load(
  workdir, mesh, *, order, number=0, rows=None, advantages=ADVANTAGES, chunks=2, unit=1, **columns
):
  rows = tuple(row(i) for i in range(len(LENGTHS))) if rows is None else rows
  plan = StepPlan(step=0, stage='grpo', rows=rows, optimizer_steps=order)
  ranks = data_parallel_ranks(mesh)
  shape = plan_shape(rows=max(map(len, order)), ranks=ranks, chunks=chunks, chunk_len=12, unit=unit)
  loader = RowLoader(workdir, mesh)
  step = [*loader.steps(plan, shape)][number]
  return loader.fill(step, {'advantages': advantages} | columns, IN_LOSS[: len(rows)])


def mesh_of(data, fsdp, tensor):
  return build_mesh(
    MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor]
  )


ORDER = ((0, 5, 10, 2, 7, 4), (9, 1, 3, 6, 8))


@pytest.mark.parametrize('number', [0, 1])
@pytest.mark.parametrize('shape', [(1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 4, 1), (1, 8, 1)])
def test_each_row_is_there_once_and_whole_and_the_rest_is_padding(workdir, shape, number):
  step = load(workdir, mesh_of(*shape), order=ORDER, number=number)
  chunks = jax.tree.map(np.asarray, step.chunks)
  assert step.rows == ORDER[number]
  found = {}
  micro_batches, columns, _ = chunks.tokens.shape
  for place in np.ndindex(micro_batches, columns):
    segments = chunks.segment_ids[place]
    for segment in range(1, segments.max() + 1):
      (at,) = np.nonzero(segments == segment)
      assert (np.diff(at) == 1).all()  # in one piece
      i = int(chunks.tokens[place][at[0]]) // 100
      wanted, in_loss = rollout(i), IN_LOSS[i]
      np.testing.assert_array_equal(chunks.tokens[place][at], wanted.tokens)
      np.testing.assert_array_equal(chunks.positions[place][at], np.arange(LENGTHS[i]))
      np.testing.assert_array_equal(chunks.behaviour_logprobs[place][at], wanted.behaviour_logprobs)
      np.testing.assert_array_equal(chunks.loss_mask[place][at], wanted.loss_mask & in_loss)
      np.testing.assert_array_equal(
        chunks.advantages[place][at],
        np.where(wanted.loss_mask & in_loss, np.float32(ADVANTAGES[i]), 0),
      )
      np.testing.assert_array_equal(chunks.is_expert[place][at], i == 2)
      assert chunks.temperature[place][segment - 1] == np.float32(wanted.temperature)
      assert i not in found
      found[i] = place
    padding = segments == 0
    for name in (
      'tokens',
      'positions',
      'loss_mask',
      'behaviour_logprobs',
      'advantages',
      'is_expert',
    ):
      assert not getattr(chunks, name)[place][padding].any(), name
  assert sorted(found) == sorted(ORDER[number])
  # micro-batches that are not in use are empty
  assert not chunks.segment_ids[int(step.used) :].any()
  assert chunks.segment_ids[int(step.used) - 1].any()
  assert (chunks.temperature > 0).all()  # padding is divided by, too


def test_shapes_depend_on_the_plan_of_shapes_alone(workdir):
  mesh = mesh_of(1, 2, 1)
  shapes = {
    tuple(x.shape for x in jax.tree.leaves(load(workdir, mesh, order=order, number=n).chunks))
    for order in (ORDER, ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10)))
    for n in (0, 1)
  }
  assert len(shapes) == 1


def test_a_rank_without_rows_gets_padding(workdir):
  step = load(
    workdir,
    mesh_of(1, 8, 1),
    order=((3,),),
    rows=tuple(row(i) for i in range(4)),
    advantages=ADVANTAGES[:4],
  )
  segments = np.asarray(step.chunks.segment_ids)
  assert (segments > 0).sum() == LENGTHS[3]


def test_unpack_gives_each_row_its_own_values_back(workdir):
  step = load(workdir, mesh_of(1, 2, 1), order=ORDER)
  values = np.asarray(step.chunks.tokens).astype(np.float32)
  rows = unpack(values, step)
  assert list(rows) == list(step.rows)
  for i, got in rows.items():
    np.testing.assert_array_equal(got, rollout(i).tokens)


@pytest.mark.parametrize('wrong', [{'uid': 'grpo/9'}, {'length': 4}, {'index': 1}])
def test_a_record_that_is_not_the_planned_one_is_one_line(workdir, wrong):
  rows = (row(0, **wrong),)
  with pytest.raises(RunError, match=r'^[^\n]*segments/000000\.arrayrecord[^\n]*$'):
    load(workdir, mesh_of(1, 1, 1), order=((0,),), rows=rows, advantages=ADVANTAGES[:1])


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_what_is_not_finite_does_not_reach_the_device(workdir, value):
  with pytest.raises(RunError, match='advantages is not finite'):
    load(
      workdir,
      mesh_of(1, 1, 1),
      order=ORDER,
      advantages=np.where(np.arange(len(LENGTHS)) == 5, value, ADVANTAGES),
    )


def test_loading_again_never_changes_what_was_handed_over(workdir):
  mesh = mesh_of(1, 1, 1)
  loader = RowLoader(workdir, mesh)
  plan = StepPlan(
    step=0, stage='grpo', rows=tuple(row(i) for i in range(len(LENGTHS))), optimizer_steps=ORDER
  )
  shape = plan_shape(rows=6, ranks=1, chunks=2, chunk_len=12)
  first = loader.fill(next(loader.steps(plan, shape)), {'advantages': ADVANTAGES}, IN_LOSS)
  before = jax.tree.map(np.array, first.chunks)
  loader.fill([*loader.steps(plan, shape)][1], {'advantages': -ADVANTAGES}, ~IN_LOSS)
  loader.fill(first, {'advantages': -ADVANTAGES, 'values': -ADVANTAGES}, IN_LOSS)
  for a, b in zip(jax.tree.leaves(first.chunks), jax.tree.leaves(before)):
    np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.parametrize('shape', [(1, 1, 1), (1, 2, 1), (2, 4, 1)])
def test_columns_per_token_lie_under_their_tokens_and_are_0_where_nothing_is_trained(
  workdir, shape
):
  """Column `values` of token t of row i is i + t / 100, and not a number where the row is not
  trained.
  """
  trained = [rollout(i).loss_mask for i in range(len(LENGTHS))]
  values = [
    np.where(mask, i + np.arange(len(mask)) / 100, np.nan) for i, mask in enumerate(trained)
  ]
  narrow = [column.astype(np.float32) for column in values]
  step = load(
    workdir,
    mesh_of(*shape),
    order=ORDER,
    values=values,
    returns=narrow,
    advantages=[2.0] * len(LENGTHS),
  )
  chunks = jax.tree.map(np.asarray, step.chunks)
  for name, filled in (
    ('values', values),
    ('returns', narrow),
    ('advantages', [np.full(n, 2.0) for n in LENGTHS]),
  ):
    for i, found in unpack(getattr(chunks, name), step).items():
      wanted = np.where(trained[i] & IN_LOSS[i], filled[i], 0.0).astype(np.float32)
      np.testing.assert_array_equal(found, wanted, err_msg=f'{name} of row {i}')
    assert not getattr(chunks, name)[~chunks.loss_mask].any()
  # what nobody gave
  assert not chunks.proximal_logprobs.any() and not chunks.reference_logprobs.any()


def test_filling_again_takes_more_rows_out_and_keeps_the_other_columns(workdir):
  loader = RowLoader(workdir, mesh_of(1, 1, 1))
  plan = StepPlan(
    step=0, stage='grpo', rows=tuple(row(i) for i in range(len(LENGTHS))), optimizer_steps=ORDER
  )
  loaded = next(loader.steps(plan, plan_shape(rows=6, ranks=1, chunks=2, chunk_len=12)))
  everything = np.ones(len(LENGTHS), bool)
  first = loader.fill(loaded, {'advantages': ADVANTAGES}, everything)
  second = loader.fill(
    first, {'values': ADVANTAGES}, everything & (np.arange(len(LENGTHS)) != ORDER[0][1])
  )
  np.testing.assert_array_equal(second.chunks.advantages, first.chunks.advantages)
  gone = np.asarray(first.chunks.loss_mask) & ~np.asarray(second.chunks.loss_mask)
  assert gone.sum() == LENGTHS[ORDER[0][1]] - 1  # all of its tokens but the prompt's
  np.testing.assert_array_equal(second.loss_mask, second.chunks.loss_mask)
  assert not np.asarray(second.chunks.values)[gone].any()


PAIRS = tuple(row(i, pair=f'p{i // 2}', label=1 if i % 2 else -1) for i in range(10))
"""Five pairs of neighbouring rows; the chosen one is the later."""


@pytest.mark.parametrize('shape', [(1, 1, 1), (1, 2, 1), (2, 4, 1)])
def test_pair_numbers_start_again_in_each_micro_batch_and_name_two_rows(workdir, shape):
  order = ((4, 1, 8, 7, 0, 5, 6, 9, 2, 3),)
  step = load(workdir, mesh_of(*shape), order=order, rows=PAIRS, advantages=ADVANTAGES[:10], unit=2)
  chunks = jax.tree.map(np.asarray, step.chunks)
  assert shape != (1, 1, 1) or int(step.used) > 1  # there is a second micro-batch that starts again
  met = 0
  for micro_batch in range(int(step.used)):
    members: dict[int, dict[float, int]] = {}
    for column, segment in np.argwhere(chunks.pair[micro_batch] > 0):
      (at,) = np.nonzero(chunks.segment_ids[micro_batch, column] == segment + 1)
      i = int(chunks.tokens[micro_batch, column, at[0]]) // 100
      members.setdefault(int(chunks.pair[micro_batch, column, segment]), {})[
        float(chunks.label[micro_batch, column, segment])
      ] = i
    assert sorted(members) == list(range(1, len(members) + 1))
    for sides in members.values():
      assert sides.keys() == {1.0, -1.0} and sides[1.0] == sides[-1.0] + 1 and sides[-1.0] % 2 == 0
    met += len(members)
  assert met == 5
  # Segments that are not there, and rows of no pair, have number and label 0.
  assert (chunks.pair > 0).sum() == (chunks.label != 0).sum() == 10


def test_rows_of_no_pair_have_no_number(workdir):
  chunks = load(workdir, mesh_of(1, 1, 1), order=ORDER).chunks
  assert not np.asarray(chunks.pair).any() and not np.asarray(chunks.label).any()


def _both(workdir):
  plan = StepPlan(
    step=0, stage='grpo', rows=tuple(row(i) for i in range(len(LENGTHS))), optimizer_steps=ORDER
  )
  return plan, plan_shape(rows=6, ranks=1, chunks=2, chunk_len=12)


def _ahead(loader, plan, shape, between=lambda packed: None):
  async def collect():
    steps = []
    async with contextlib.aclosing(loader.ahead(plan, shape)) as loaded:
      async for packed in loaded:
        between(packed)
        steps.append(packed)
    return steps

  return asyncio.run(collect())


def _wait_until_threads_end(before):
  """The pipeline tells its threads to end, and does not wait until they have."""
  deadline = time.monotonic() + 30
  while threading.active_count() > before:
    assert time.monotonic() < deadline, threading.enumerate()
    time.sleep(0.01)


def _assert_equal(chunks, wanted):
  for a, b in zip(jax.tree.leaves(chunks), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_next_optimizer_step_is_read_while_the_previous_one_is_computed(workdir):
  loader, later = RowLoader(workdir, mesh_of(1, 1, 1)), threading.Event()
  read, rows = loader._reader.read, []

  def reading(refs):
    rows.extend(index for _, index in refs)
    if set(rows) >= set(ORDER[1]):
      later.set()
    return read(refs)

  loader._reader.read = reading
  (first, second) = _ahead(loader, *_both(workdir), between=lambda _: later.wait(60) or 1 / 0)
  assert (first.rows, second.rows) == ORDER
  assert sorted(rows) == list(range(len(LENGTHS)))


def test_slow_and_shuffled_reads_change_no_bit(workdir):
  loader = RowLoader(workdir, mesh_of(1, 1, 1))
  plan, shape = _both(workdir)
  wanted = [*loader.steps(plan, shape)]
  read = loader._reader.read

  def delayed(refs):
    time.sleep(0.02 * (1 - refs[0][1] / len(LENGTHS)))  # Later rows come first.
    return read(refs)

  loader._reader.read = delayed
  for a, b in zip(_ahead(loader, plan, shape), wanted, strict=True):
    _assert_equal(a.chunks, b.chunks)


def test_a_damaged_row_of_a_later_step_is_one_line_and_ends_the_threads(workdir):
  plan, shape = _both(workdir)
  rows = list(plan.rows)
  rows[ORDER[1][0]] = dataclasses.replace(rows[ORDER[1][0]], uid='grpo/other')
  damaged = dataclasses.replace(plan, rows=tuple(rows))
  before = threading.active_count()
  with pytest.raises(RunError, match=r'holds grpo/9 \(3 tokens\), but the plan has grpo/other'):
    _ahead(RowLoader(workdir, mesh_of(1, 1, 1)), damaged, shape)
  _wait_until_threads_end(before)


def test_a_pipeline_that_is_given_up_ends_its_threads(workdir):
  async def first():
    async with contextlib.aclosing(loader.ahead(*_both(workdir))) as loaded:
      return await anext(loaded)

  loader, before = RowLoader(workdir, mesh_of(1, 1, 1)), threading.active_count()
  assert asyncio.run(first()).rows == ORDER[0]
  _wait_until_threads_end(before)


def test_the_pipeline_continues_at_its_state(workdir):
  loader = RowLoader(workdir, mesh_of(1, 1, 1))
  steps = loader.steps(*_both(workdir))
  next(steps)
  state, wanted = steps.get_state(), next(steps)
  again = loader.steps(*_both(workdir))
  again.set_state(state)
  packed = next(again)
  assert packed.rows == wanted.rows == ORDER[1]
  _assert_equal(packed.chunks, wanted.chunks)
