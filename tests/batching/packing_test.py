import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.batching.packing import Packing, deal, pack
from jaxrl_llm.core.errors import UserError


def lognormal_lengths(count: int, seed: int = 0) -> list[int]:
  """Mean about 139, longest 512: exp(mu + sigma²/2) = exp(4.70 + 0.49 / 2) = 140 before the cut."""
  draws = np.random.default_rng(seed).lognormal(4.70, 0.7, count)
  return np.clip(draws, 1, 512).astype(int).tolist()


def fill(packing: Packing) -> np.ndarray:
  """An independent reading of the placements: writes each row's number over its places, refusing to
  overwrite.
  """
  grid = np.full((packing.micro_batches, packing.ranks * packing.chunks, packing.chunk_len), -1)
  for row, length in enumerate(packing.length):
    start = packing.offset[row]
    target = grid[packing.micro_batch[row], packing.chunk[row], start : start + length]
    assert len(target) == length, f'row {row} runs over the chunk'
    assert (target == -1).all(), f'row {row} overlaps'
    target[:] = row
  return grid


def test_hand_worked_packing():
  # Sorted: 6 (row 1), 5 (row 3), 4 (row 0), 3 (row 4), 2 (row 2). Two ranks, rounds of two, the
  # lightest rank first: 6 -> rank 0, 5 -> rank 1 | loads 6, 5: rank 1 takes 4, rank 0 takes 3 |
  # loads 9, 9: rank 0 takes 2. Rank 0, chunk of 8: 6 opens chunk 0; 3 opens chunk 1; 2 fits chunk 0
  # (2 free) better than chunk 1 (5 free). Rank 1: 5 opens chunk 0; 4 does not fit the 3 free, opens
  # chunk 1. One chunk per micro-batch: two micro-batches.
  packing = pack([4, 6, 2, 5, 3], ranks=2, chunks=1, chunk_len=8)
  assert packing.micro_batches == 2
  assert packing.micro_batch.tolist() == [1, 0, 0, 0, 1]
  assert packing.chunk.tolist() == [1, 0, 0, 1, 0]
  assert packing.offset.tolist() == [0, 0, 6, 0, 0]
  assert packing.segment.tolist() == [1, 1, 2, 1, 1]
  assert packing.utilisation == 20 / 32


def test_pairs_stay_together_where_single_rows_would_part():
  # Chunks of 10, one per micro-batch: the pairs (6, 4) and (5, 5) fill one each; the pair (6, 5)
  # fits none.
  packing = pack([6, 4, 5, 5], units=[[0, 1], [2, 3]], ranks=1, chunks=1, chunk_len=10)
  assert packing.micro_batch.tolist() == [0, 0, 1, 1]
  with pytest.raises(UserError, match=r'rows \[0, 2\] \(11 tokens'):
    pack([6, 4, 5, 5], units=[[0, 2], [1, 3]], ranks=1, chunks=1, chunk_len=10)


@st.composite
def problems(draw):
  chunk_len = draw(st.integers(8, 40))
  chunks = draw(st.integers(1, 4))
  unit_sizes = draw(st.lists(st.integers(1, chunks), max_size=24))
  rows = sum(unit_sizes)
  lengths = draw(st.lists(st.integers(1, chunk_len), min_size=rows, max_size=rows))
  order = draw(st.permutations(range(rows)))
  cuts = np.cumsum([0, *unit_sizes])
  units = [list(order[a:b]) for a, b in itertools.pairwise(cuts)]
  return lengths, units, draw(st.integers(1, 5)), chunks, chunk_len


@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_row_once_whole_and_with_its_unit(problem):
  lengths, units, ranks, chunks, chunk_len = problem
  packing = pack(lengths, units=units, ranks=ranks, chunks=chunks, chunk_len=chunk_len)
  grid = fill(packing)
  assert (grid >= 0).sum() == sum(lengths) == packing.tokens
  for unit in units:
    assert len({(packing.micro_batch[row], packing.chunk[row] // chunks) for row in unit}) == 1
  for rows in grid.reshape(-1, chunk_len):
    seen = list(dict.fromkeys(rows[rows >= 0].tolist()))
    assert [packing.segment[row] for row in seen] == list(range(1, len(seen) + 1))
    assert (rows[: sum(lengths[row] for row in seen)] >= 0).all(), 'a gap between rows'
  used = np.unique(packing.micro_batch)
  assert packing.micro_batches == max(1, len(used)), 'a micro-batch that is empty on all ranks'
  filled = (grid.reshape(packing.micro_batches, ranks, chunks, chunk_len) >= 0).any((1, 3))
  assert packing.filled == 1 + max(np.flatnonzero(filled.reshape(-1)), default=0)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_packing_is_a_function_of_its_input(problem):
  lengths, units, ranks, chunks, chunk_len = problem
  first, second = (
    pack(lengths, units=units, ranks=ranks, chunks=chunks, chunk_len=chunk_len) for _ in range(2)
  )
  for name in ('micro_batch', 'chunk', 'offset', 'segment'):
    assert np.array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize(('ranks', 'chunk_len'), [(1, 512), (8, 512), (8, 1024), (4, 2048)])
def test_chunks_are_nearly_full_on_a_long_tailed_batch(ranks, chunk_len):
  packing = pack(lognormal_lengths(2048), ranks=ranks, chunks=1, chunk_len=chunk_len)
  fill(packing)
  assert packing.utilisation >= 0.95


@pytest.mark.parametrize('ranks', [2, 8, 64])
@pytest.mark.parametrize('seed', range(5))
def test_ranks_get_the_same_number_of_tokens(ranks, seed):
  lengths = lognormal_lengths(32 * ranks, seed)
  packing = pack(lengths, ranks=ranks, chunks=2, chunk_len=512)
  tokens = np.bincount(packing.chunk // 2, packing.length, minlength=ranks)
  assert tokens.max() / tokens.mean() <= 1.03
  assert tokens.min() / tokens.mean() >= 0.97
  assert np.bincount(packing.chunk // 2).tolist() == [32] * ranks


def test_empty_batch_has_one_empty_micro_batch():
  packing = pack([], ranks=2, chunks=2, chunk_len=8)
  assert packing.micro_batches == 1
  assert packing.utilisation == 0


def test_bad_input_is_named():
  with pytest.raises(UserError, match='row 1 has 9 tokens, wanted 1 … 8'):
    pack([3, 9], ranks=1, chunks=1, chunk_len=8)
  with pytest.raises(UserError, match='row 0 has 0 tokens'):
    pack([0], ranks=1, chunks=1, chunk_len=8)
  with pytest.raises(UserError, match='chunks 0'):
    pack([3], ranks=1, chunks=0, chunk_len=8)
  with pytest.raises(ValueError, match='each of the 2 rows exactly once'):
    pack([3, 3], units=[[0, 0]], ranks=1, chunks=1, chunk_len=8)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 2**63))
def test_deal_gives_every_unit_to_one_step_and_equal_sizes(count, steps, seed):
  units = [[2 * u, 2 * u + 1] for u in range(count)]
  if steps > count:
    with pytest.raises(UserError, match='cannot fill'):
      deal(units, steps, seed=seed)
    return
  dealt = deal(units, steps, seed=seed)
  assert len(dealt) == steps
  assert sorted(u for step in dealt for u in step) == list(range(count))
  assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
  assert dealt == deal(units, steps, seed=seed)


def test_deal_shuffles_and_leaves_no_unit_a_favourite_step():
  # 4 units in 2 steps of 2: unit 0 is in step 0 with probability 1/2; of 400 seeds 200 ± 5 sigma,
  # sigma = 10.
  firsts = collections.Counter(
    0 in deal([[0], [1], [2], [3]], 2, seed=seed)[0] for seed in range(400)
  )
  assert 150 < firsts[True] < 250


def test_dealing_before_packing_keeps_steps_alike():
  """Units are dealt before lengths are sorted: mean lengths of the steps agree, those of a sorted
  cut do not.
  """
  lengths = lognormal_lengths(2048)
  means = [
    np.mean([lengths[u] for u in step]) for step in deal([[r] for r in range(2048)], 4, seed=3)
  ]
  assert max(means) / min(means) < 1.2
  cut = np.sort(lengths).reshape(4, 512).mean(1)
  assert cut.max() / cut.min() > 3
