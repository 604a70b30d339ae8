"""Static streams: every epoch has every row once, in an order of its own, and a resumed stream goes
on exactly.
"""

import json

import numpy as np
import pytest

from jaxrl_llm.core.records.sample import Sample, Source, encode
from jaxrl_llm.data.streams import RowStream, all_rows
from jaxrl_llm.replay.segments import write_segment

COUNT = 7
SOURCE = 'data/sft.arrayrecord'


def demonstration(i: int, preference=None) -> Sample:
  """i + 2 tokens, of which the first i % 3 + 1 are the prompt."""
  length, prompt_len = i + 2, i % 3 + 1
  trained = np.arange(length) >= prompt_len
  return Sample(
    uid=f'sft/{i}',
    task_id=f't:{i}',
    visit=0,
    sample_index=0,
    group_id=f'sft/{i}',
    trajectory_id=f'sft/{i}',
    taskset='t',
    domain='general',
    source=Source.EXPERT,
    tokens=np.arange(length, dtype=np.int32),
    prompt_len=prompt_len,
    role=trained.astype(np.uint8),
    loss_mask=trained & (np.arange(length) > 0),
    sampled=np.zeros(length, bool),
    behaviour_logprobs=np.zeros(length, np.float32),
    preference=preference,
  )


PAIRS = 3


def answer(i: int) -> Sample:
  return demonstration(i, {'pair_id': f'q{i // 2}', 'label': ('chosen', 'rejected')[i % 2]})


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  path = tmp_path_factory.mktemp('run')
  (path / 'data').mkdir()
  write_segment(path / 'data', 'sft.arrayrecord', [encode(demonstration(i)) for i in range(COUNT)])
  write_segment(path / 'data', 'pairs.arrayrecord', [encode(answer(i)) for i in range(2 * PAIRS)])
  return path


def stream(workdir, *, rows=3, seed=5):
  return RowStream(workdir, SOURCE, rows=rows, seed=seed)


def drawn(rows_stream, batches):
  return [row.index for _ in range(batches) for row in rows_stream.next()]


def test_a_row_says_what_its_record_holds(workdir):
  rows = {row.index: row for batch in range(3) for row in stream(workdir, rows=COUNT).next()}
  assert sorted(rows) == list(range(COUNT))
  for i, row in rows.items():
    assert (row.uid, row.source, row.length, row.prompt_len) == (
      f'sft/{i}',
      SOURCE,
      i + 2,
      i % 3 + 1,
    )
    assert row.is_expert
    assert row.reward is None
    assert (row.pair, row.label) == (None, None)


@pytest.mark.parametrize('rows', [1, 3, 4, COUNT])
def test_each_epoch_is_a_permutation_and_batches_cross_epochs_without_losing_a_row(workdir, rows):
  order = drawn(stream(workdir, rows=rows), 4 * COUNT // rows + 1)
  epochs = [tuple(order[i * COUNT : (i + 1) * COUNT]) for i in range(4)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(COUNT))
  assert len(set(epochs)) == 4  # shuffled anew: of 7! orders
  assert tuple(range(COUNT)) not in epochs


def test_the_order_is_a_function_of_the_seed_and_not_of_the_batch_size(workdir):
  order = drawn(stream(workdir, rows=1), 12)
  assert drawn(stream(workdir, rows=3), 4) == order
  assert drawn(stream(workdir, rows=3), 4) == order
  assert drawn(stream(workdir, rows=1, seed=6), 12) != order


@pytest.mark.parametrize('before', [0, 1, 2, 3, 7, 10])
def test_a_resumed_stream_goes_on_exactly_in_and_across_epochs(workdir, before):
  first = stream(workdir)
  drawn(first, before)
  state = json.dumps(first.state())
  after = [first.next() for _ in range(8)]  # three epochs and more
  resumed = stream(workdir)
  resumed.restore(json.loads(state))
  assert [resumed.next() for _ in range(8)] == after


def test_a_state_stays_what_it_was_while_the_stream_goes_on(workdir):
  first = stream(workdir)
  drawn(first, 2)
  state = first.state()
  after = drawn(first, 3)
  first.restore(state)
  assert drawn(first, 3) == after
  first.restore(state)
  assert drawn(first, 3) == after


def pair_stream(workdir, pairs):
  return RowStream(workdir, 'data/pairs.arrayrecord', rows=2 * pairs, seed=5, unit=2)


def test_pairs_are_drawn_whole_with_their_labels(workdir):
  rows = pair_stream(workdir, PAIRS).next()
  assert sorted(row.index for row in rows) == list(range(2 * PAIRS))
  for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
    assert chosen.index + 1 == rejected.index and chosen.index % 2 == 0
    assert (chosen.label, rejected.label) == (1, -1)
    assert chosen.pair == rejected.pair and not chosen.is_expert
  assert len({row.pair for row in rows}) == PAIRS


def test_a_pair_drawn_twice_in_one_batch_is_two_pairs(workdir):
  """A batch larger than the file repeats pairs; were they one, each would have four members and no
  loss.
  """
  rows = pair_stream(workdir, 2 * PAIRS + 1).next()
  assert len(rows) == 2 * (2 * PAIRS + 1)
  members = [
    [row.label for row in rows if row.pair == pair]
    for pair in dict.fromkeys(row.pair for row in rows)
  ]
  assert members == [[1, -1]] * (2 * PAIRS + 1)


def test_a_resumed_stream_of_pairs_goes_on_exactly(workdir):
  first = pair_stream(workdir, 2)
  first.next()
  state = json.dumps(first.state())
  after = [first.next() for _ in range(4)]
  resumed = pair_stream(workdir, 2)
  resumed.restore(json.loads(state))
  assert [resumed.next() for _ in range(4)] == after


def test_all_rows_are_those_of_the_file_in_its_order(workdir):
  rows = all_rows(workdir, 'data/pairs.arrayrecord')
  assert [row.index for row in rows] == list(range(2 * PAIRS))
  assert [row.pair for row in rows] == ['q0', 'q0', 'q1', 'q1', 'q2', 'q2']
  assert [row.label for row in rows] == [1, -1] * PAIRS
