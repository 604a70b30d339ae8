import itertools

import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.weights.checksums import RunningChecksum, Slice, checksums

MASK = (1 << 64) - 1


def odd(n):
  """SplitMix64's output n with seed 0, in Python's integers."""
  z = (n + 1) * 0x9E3779B97F4A7C15 & MASK
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
  return (z ^ (z >> 31)) | 1


def by_hand(matrix, start_line=0, start_column=0):
  words = matrix.view(f'u{min(matrix.itemsize, 4)}')
  each = max(1, matrix.itemsize // 4)
  total = 0
  for (line, column), value in np.ndenumerate(words):
    word = int(value)
    word = word ^ (word >> 16) if words.itemsize == 4 else word
    column += start_column * each
    total += word * odd(start_line + line) * odd((1 << 62) + column)
  return f'{total & MASK:016x}'


def random(rng, shape, dtype):
  return rng.normal(size=shape).astype(dtype)


def whole(array):
  return checksums(array)[None]


def test_the_generator_is_splitmix64():
  # First outputs with seed 0 of the reference implementation, prng.di.unimi.it/splitmix64.c.
  assert [odd(0), odd(1)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1]


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'float64', ml_dtypes.bfloat16])
def test_checksums_are_the_sum_of_the_definition(dtype):
  rng = np.random.default_rng(0)
  array = random(rng, (5, 7), dtype)
  cuts = [Slice(0, 1, 3), Slice(1, 2, 4), Slice(0, 5, 0)]
  values = checksums(array, cuts)
  assert values == {
    None: by_hand(array),
    cuts[0]: by_hand(array[1:4].copy(), 1),
    cuts[1]: by_hand(array[:, 2:6].copy(), 0, 2),
    cuts[2]: '0' * 16,
  }
  assert whole(array[:, 0].copy()) == by_hand(array[:, :1].copy())
  cube = random(rng, (2, 3, 4), dtype)
  assert whole(cube) == by_hand(cube.reshape(6, 4))


def test_checksums_add_up_over_parts_however_a_tensor_is_cut_and_whatever_blocks_arrive():
  rng = np.random.default_rng(1)
  for case in range(40):
    shape = tuple(rng.integers(1, 9, rng.integers(1, 4)))
    array = random(rng, shape, ['float32', ml_dtypes.bfloat16, 'float64'][case % 3])
    for axis, length in enumerate(shape):
      edges = sorted({0, length, *map(int, rng.integers(0, length + 1, 2))})
      cuts = [Slice(axis, a, b - a) for a, b in itertools.pairwise(edges)]
      running = RunningChecksum(cuts)
      for start in range(0, shape[0], 2):
        running.add(array[start : start + 2], start)
      values = running.values()
      assert values == checksums(array, cuts)
      parts = sum(int(values[cut], 16) for cut in cuts)
      assert f'{parts & MASK:016x}' == values[None], (shape, axis)


@pytest.mark.parametrize('dtype', ['float32', ml_dtypes.bfloat16, 'float16'])
def test_swapped_moved_and_single_flipped_elements_change_the_checksum(dtype):
  """Random cases; pairs of opposite sign, whose bits differ in the highest one alone, included."""
  rng = np.random.default_rng(2)
  array = random(rng, (24, 40), dtype)
  array[3] = -array[2]
  array[:, 5] = -array[:, 4]
  before, bits = whole(array), array.view(f'u{array.itemsize}')
  for _ in range(200):
    changed = bits.copy()
    at = tuple(rng.integers(0, array.shape))
    changed[at] ^= changed.dtype.type(1 << int(rng.integers(0, 8 * array.itemsize)))
    assert whole(changed.view(array.dtype)) != before
    changed, other = bits.copy(), tuple(rng.integers(0, array.shape))
    changed[at], changed[other] = bits[other], bits[at]
    assert (whole(changed.view(array.dtype)) != before) == bool(bits[at] != bits[other])
  for axis in (0, 1):
    for shift in range(1, 5):
      assert whole(np.roll(array, shift, axis)) != before
  for a, b in ((2, 3), (0, 23)):
    rows = np.arange(24)
    rows[[a, b]] = b, a
    assert whole(array[rows]) != before
  for row in range(24):
    signs = array.copy()
    signs[row, [4, 5]] = signs[row, [5, 4]]
    assert whole(signs) != before
  assert whole(array.T.copy()) != before


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('shape', [(7, 5, 6), (9, 4), (11,), ()])
def test_replaced_elements_change_checksums_as_if_all_were_added_again(dtype, shape):
  random = np.random.default_rng(0)
  before = np.asarray(
    random.standard_normal(shape), ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype
  )
  positions = np.flatnonzero(random.random(before.size) < 0.4)
  after = before.copy()
  after.reshape(-1)[positions] *= -3
  slices = [Slice(axis, 1, 2) for axis in range(len(shape))]
  running = RunningChecksum(slices)
  running.add(before if shape else before.reshape(1), 0)
  old, new = before.reshape(-1)[positions], after.reshape(-1)[positions]
  running.replace(shape, positions, old, new)
  assert running.values() == checksums(after, slices)
  assert len(positions) == 0 or running.values()[None] != checksums(before)[None]
