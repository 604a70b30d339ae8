"""Rows named by a plan reach the devices where the packing says, and nothing else does."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm.batching.plan import Row, StepPlan, plan_shape
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.types import Version
from jaxrl_llm.data.load import RowLoader, unpack
from jaxrl_llm.experience.sample import Sample, Segment, Source, encode
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh, data_parallel_ranks
from jaxrl_llm.replay.segments import write_segment

LENGTHS = (3, 9, 4, 2, 7, 5, 8, 6, 3, 3, 10)
ADVANTAGES = np.linspace(-1.0, 1.0, len(LENGTHS))
IN_LOSS = np.array([i != 4 for i in range(len(LENGTHS))])
SOURCE = 'segments/000000.arrayrecord'


def rollout(i: int) -> Sample:
  """Tokens 100 i, 100 i + 1, ...; logprob of token t is -(t + i / 100); temperature 1 + i / 10; one prompt token."""
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
    segments=(Segment(start=1, end=length, version=Version(0, 0), engine='embedded', finish='stop'),),
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
  write_segment(path / 'segments', '000000.arrayrecord', [encode(rollout(i)) for i in range(len(LENGTHS))])
  return path


def load(workdir, mesh, *, order, number=0, rows=None, advantages=ADVANTAGES, chunks=2):
  rows = tuple(row(i) for i in range(len(LENGTHS))) if rows is None else rows
  plan = StepPlan(step=0, stage='grpo', rows=rows, optimizer_steps=order)
  ranks = data_parallel_ranks(mesh)
  shape = plan_shape(rows=max(map(len, order)), ranks=ranks, chunks=chunks, chunk_len=12)
  return RowLoader(workdir, mesh).load(plan, number, shape, advantages=advantages, in_loss=IN_LOSS[: len(rows)])


def mesh_of(data, fsdp, tensor):
  return build_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])


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
        chunks.advantages[place][at], np.where(wanted.loss_mask & in_loss, np.float32(ADVANTAGES[i]), 0)
      )
      np.testing.assert_array_equal(chunks.is_expert[place][at], i == 2)
      assert chunks.temperature[place][segment - 1] == np.float32(wanted.temperature)
      assert i not in found
      found[i] = place
    padding = segments == 0
    for name in ('tokens', 'positions', 'loss_mask', 'behaviour_logprobs', 'advantages', 'is_expert'):
      assert not getattr(chunks, name)[place][padding].any(), name
  assert sorted(found) == sorted(ORDER[number])
  assert not chunks.segment_ids[int(step.used) :].any()  # micro-batches that are not in use are empty
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
  step = load(workdir, mesh_of(1, 8, 1), order=((3,),), rows=tuple(row(i) for i in range(4)), advantages=ADVANTAGES[:4])
  segments = np.asarray(step.chunks.segment_ids)
  assert (segments > 0).sum() == LENGTHS[3]


def test_unpack_gives_each_row_its_own_values_back(workdir):
  step = load(workdir, mesh_of(1, 2, 1), order=ORDER)
  values = np.asarray(step.chunks.tokens).astype(np.float32)
  rows = unpack(values, step, [LENGTHS[i] for i in step.rows])
  for i, got in zip(step.rows, rows, strict=True):
    np.testing.assert_array_equal(got, rollout(i).tokens)


@pytest.mark.parametrize('wrong', [{'uid': 'grpo/9'}, {'length': 4}, {'index': 1}])
def test_a_record_that_is_not_the_planned_one_is_one_line(workdir, wrong):
  rows = (row(0, **wrong),)
  with pytest.raises(RunError, match=r'^[^\n]*segments/000000\.arrayrecord[^\n]*$'):
    load(workdir, mesh_of(1, 1, 1), order=((0,),), rows=rows, advantages=ADVANTAGES[:1])


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_what_is_not_finite_does_not_reach_the_device(workdir, value):
  with pytest.raises(RunError, match='advantages is not finite'):
    load(workdir, mesh_of(1, 1, 1), order=ORDER, advantages=np.where(np.arange(len(LENGTHS)) == 5, value, ADVANTAGES))


def test_loading_again_never_changes_what_was_handed_over(workdir):
  mesh = mesh_of(1, 1, 1)
  loader = RowLoader(workdir, mesh)
  plan = StepPlan(step=0, stage='grpo', rows=tuple(row(i) for i in range(len(LENGTHS))), optimizer_steps=ORDER)
  shape = plan_shape(rows=6, ranks=1, chunks=2, chunk_len=12)
  first = loader.load(plan, 0, shape, advantages=ADVANTAGES, in_loss=IN_LOSS)
  before = jax.tree.map(np.array, first.chunks)
  loader.load(plan, 1, shape, advantages=-ADVANTAGES, in_loss=~IN_LOSS)
  for a, b in zip(jax.tree.leaves(first.chunks), jax.tree.leaves(before)):
    np.testing.assert_array_equal(np.asarray(a), b)
