"""Trees of rows with common prefixes: every row keeps its tokens and sees its own path alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.batching.packing import pack
from jaxrl_llm.batching.trees import Branch, pack_trees, seen_until, sorted_prefixes

SIZES = dict(ranks=2, chunks=2, chunk_len=24)


def families_of(tokens, prompts, groups):
  """Families as a plan derives them, each row sharing at most its prompt but one token."""
  families = []
  for group in sorted(set(groups)):
    members = [i for i, of in enumerate(groups) if of == group]
    prefixes = sorted_prefixes([tokens[i] for i in members])
    families.append(
      [Branch(members[i], min(common, prompts[members[i]] - 1)) for i, common in prefixes]
    )
  return families


def seen_tokens(packing, tokens, row):
  """The tokens that the last token of the row sees, and their positions, by the chunk's arrays."""
  last = seen_until(packing)
  seen = {}
  for other in range(len(tokens)):
    same = packing.chunk[other] == packing.chunk[row]
    if same and packing.micro_batch[other] == packing.micro_batch[row]:
      for k, until in enumerate(last[other]):
        if packing.segment[other] <= packing.segment[row] <= until:
          position = int(packing.first[other]) + k
          assert position not in seen
          seen[position] = int(tokens[other][position])
  return [seen[position] for position in sorted(seen)], sorted(seen)


@st.composite
def batches(draw):
  """Rows of few different tokens, so that they have many prefixes in common."""
  rows = draw(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=24)
  )
  tokens = [np.array(row, np.int32) for row in rows]
  prompts = [draw(st.integers(1, len(row))) for row in rows]
  return tokens, prompts, [draw(st.integers(0, 2)) for _ in rows]


@settings(deadline=None)
@given(batches())
def test_every_row_sees_exactly_its_own_tokens(batch):
  tokens, prompts, _ = batch
  lengths, units = [len(row) for row in tokens], [[i] for i in range(len(tokens))]
  packing = pack_trees(lengths, families_of(*batch), units=units, **SIZES)
  assert packing.micro_batches <= pack(lengths, units=units, **SIZES).micro_batches
  assert packing.tokens + packing.shared_tokens == sum(lengths)
  grid = np.zeros((packing.micro_batches, 4, 24), int)
  for row in range(len(tokens)):
    seen, positions = seen_tokens(packing, tokens, row)
    assert positions == [*range(lengths[row])]
    assert seen == tokens[row].tolist()
    # The token before the first trained one is the row's own.
    assert packing.first[row] < prompts[row]
    start = packing.offset[row]
    grid[packing.micro_batch[row], packing.chunk[row], start : start + packing.length[row]] += 1
  assert grid.max() == 1 and grid.sum() == packing.tokens


def test_a_group_is_one_tree_if_it_fits():
  # A prompt of 10 and four answers of 3: 13 + 3 · 4 = 25 tokens, where each branch repeats the
  # prompt's last token.
  tokens = [np.array([*range(10), 20 + i, 30, 40], np.int32) for i in range(4)]
  units = [[i] for i in range(4)]
  families = families_of(tokens, [10] * 4, [0] * 4)
  one = pack_trees([13] * 4, families, units=units, ranks=1, chunks=1, chunk_len=25)
  assert (one.micro_batches, one.tokens, one.first.tolist()) == (1, 25, [0, 9, 9, 9])
  assert one.segment.tolist() == [1, 2, 3, 4] and one.offset.tolist() == [0, 13, 17, 21]
  # The prompt but its last token is seen by all, the rest of each row by itself.
  assert seen_until(one)[0].tolist() == [4] * 9 + [1] * 4
  assert [last.tolist() for last in seen_until(one)[1:]] == [[2] * 4, [3] * 4, [4] * 4]
  # A chunk of 17 fits two of the rows, so that the prompt is computed twice.
  two = pack_trees([13] * 4, families, units=units, ranks=1, chunks=2, chunk_len=17)
  assert (two.micro_batches, two.tokens, sorted(two.first)) == (1, 34, [0, 0, 9, 9])
  # A chunk that fits one row: nothing is shared.
  apart = pack_trees([13] * 4, families, units=units, ranks=1, chunks=4, chunk_len=13)
  assert (apart.micro_batches, apart.shared_tokens) == (1, 0)


def test_trees_are_cut_where_ranks_would_wait():
  # One tree of 10 + 9 · 4 tokens would leave the other rank without work.
  tokens = [np.array([*range(10), 20 + i, 30, 40], np.int32) for i in range(8)]
  units = [[i] for i in range(8)]
  packing = pack_trees(
    [13] * 8,
    families_of(tokens, [10] * 8, [0] * 8),
    units=units,
    ranks=2,
    chunks=1,
    chunk_len=25,
  )
  assert packing.micro_batches == 1
  assert np.bincount(packing.chunk).tolist() == [4, 4]


def test_a_pair_stays_together():
  # The first pair shares 7 of 8 tokens, the second nothing.
  tokens = [np.array(row, np.int32) for row in ([1] * 8 + [2], [1] * 8 + [3], [4] * 9, [5] * 9)]
  families = families_of(tokens, [8, 8, 8, 8], [0, 0, 1, 1])
  packing = pack_trees([9] * 4, families, units=[[1, 0], [3, 2]], ranks=1, chunks=2, chunk_len=11)
  assert packing.first.tolist() == [0, 7, 0, 0]
  assert packing.micro_batch[0] == packing.micro_batch[1]
  assert packing.micro_batch[2] == packing.micro_batch[3]
