"""Deltas: positions and bits of the elements that changed between two versions."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.weights.deltas import BITS, GAPS, Image, apply, decode_gaps, encode_gaps
from jaxrl_llm.weights.tensor_files import FileLayout, TensorWriter

DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16, 'float16': np.float16}


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40, unique=True), st.data())
def test_positions_survive_their_encoding_in_any_parts(positions, data):
  positions = sorted(positions)
  cut = data.draw(st.integers(0, len(positions)))
  parts, before = [], -1
  for part in (positions[:cut], positions[cut:]):
    if part:
      parts.append(encode_gaps(np.array(part), before))
      before = part[-1]
  encoded = np.concatenate(parts)
  # An independent encoder: for each gap, 255 as often as it fits, then the rest.
  wanted = []
  for last, position in itertools.pairwise([-1, *positions]):
    gap = position - last - 1
    wanted += [255] * (gap // 255) + [gap % 255]
  assert encoded.tolist() == wanted
  assert decode_gaps(encoded).tolist() == positions


def test_gaps_around_the_escape_byte():
  # Gaps 0, 253, 254, 255, 509 and 510 before the positions, by hand.
  encoded = [0, 253, 254, 255, 0, 255, 254, 255, 255, 0]
  positions = [0, 254, 509, 765, 1275, 1786]
  assert encode_gaps(np.array(positions)).tolist() == encoded
  assert decode_gaps(np.array(encoded, np.uint8)).tolist() == positions


@pytest.mark.parametrize('gaps', [[], [255], [3, 255, 255]])
def test_a_gap_without_an_end_is_refused(gaps):
  with pytest.raises(ValueError, match='its last gap has no end'):
    decode_gaps(np.array(gaps, np.uint8))


SHAPES = {'embed': (700, 900), 'norm': (5,), 'same': (3, 4)}


def versions_of(dtype, *, share):
  """Two versions, with special values whose bits alone tell them apart."""
  random = np.random.default_rng(0)
  before = {n: random.standard_normal(s).astype(DTYPES[dtype]) for n, s in SHAPES.items()}
  after = {name: tensor.copy() for name, tensor in before.items()}
  embed = after['embed'].reshape(-1)
  changed = random.random(embed.size) < share
  embed[changed] = (embed[changed].astype(np.float32) * 2).astype(DTYPES[dtype])
  before['norm'][:3] = [0.0, np.nan, 1.0]
  after['norm'][:3] = [-0.0, -np.nan, 1.0]
  return before, after


def put(image, tensors, dtype, *, compare):
  image.begin(compare=compare, collect=compare)
  with TensorWriter(dtype) as writer:
    writer.pass_to(image, FileLayout(SHAPES, dtype))
    for name, tensor in tensors.items():
      half = len(tensor) // 2  # In two parts.
      for rows in (tensor[:half], tensor[half:]):
        writer.add(name, rows, whole=False)
    writer.finish()


def bits_of(tensors):
  return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize('dtype', DTYPES)
def test_applied_changes_give_the_version_after_bit_by_bit(dtype):
  before, after = versions_of(dtype, share=0.01)
  itemsize = np.dtype(DTYPES[dtype]).itemsize
  image = Image(FileLayout(SHAPES, dtype), itemsize)
  put(image, before, dtype, compare=False)
  assert image.changed == 0
  put(image, after, dtype, compare=True)
  different = {
    name: np.flatnonzero(
      before[name].reshape(-1).view(f'i{itemsize}') != after[name].reshape(-1).view(f'i{itemsize}')
    )
    for name in SHAPES
  }
  assert image.changed == sum(map(len, different.values())) > 5000
  assert image.is_smaller
  delta = dict(image.arrays())
  assert set(delta) == {f'{name}{end}' for name in ('embed', 'norm') for end in (GAPS, BITS)}
  assert sum(array.nbytes for array in delta.values()) == image.nbytes
  assert decode_gaps(delta['embed' + GAPS]).tolist() == different['embed'].tolist()
  assert decode_gaps(delta['norm' + GAPS]).tolist() == [0, 1], 'zeros and NaNs differ in their sign'
  apply(before, delta)
  assert bits_of(before) == bits_of(after)
  assert image.bytes.tobytes() == FileLayout(SHAPES, dtype).header + b''.join(
    after[name].tobytes() for name in SHAPES
  )


def test_a_delta_that_is_no_smaller_says_so_and_the_image_is_complete():
  before, after = versions_of('bfloat16', share=1.0)
  image = Image(FileLayout(SHAPES, 'bfloat16'), 2)
  put(image, before, 'bfloat16', compare=False)
  put(image, after, 'bfloat16', compare=True)
  assert not image.is_smaller  # Three bytes for each element of two.
  assert image.bytes.tobytes().endswith(b''.join(after[name].tobytes() for name in SHAPES))


def spoiled(name):
  gaps, bits = np.array([2, 255, 0], np.uint8), np.array([1, 2], np.int16)
  good = {'a' + GAPS: gaps, 'a' + BITS: bits}
  return {
    'another tensor': {'b' + GAPS: gaps, 'b' + BITS: bits},
    'a name without a suffix': {**good, 'a': bits},
    'gaps without bits': {'a' + GAPS: gaps},
    'bits without gaps': {'a' + BITS: bits},
    'a position after the end': {**good, 'a' + GAPS: np.array([2, 255, 42], np.uint8)},
    'one bit too few': {**good, 'a' + BITS: bits[:1]},
    'one bit too many': {**good, 'a' + BITS: np.array([1, 2, 3], np.int16)},
    'bits of another size': {**good, 'a' + BITS: bits.astype(np.int32)},
    'gaps of another size': {**good, 'a' + GAPS: gaps.astype(np.int16)},
    'gaps in two rows': {**good, 'a' + GAPS: gaps[None]},
    'no gaps': {'a' + GAPS: gaps[:0], 'a' + BITS: bits[:0]},
    'a gap without an end': {**good, 'a' + GAPS: np.array([2, 255], np.uint8)},
  }[name]


SPOILED = [
  *('another tensor', 'a name without a suffix', 'gaps without bits', 'bits without gaps'),
  *('a position after the end', 'one bit too few', 'one bit too many', 'bits of another size'),
  *('gaps of another size', 'gaps in two rows', 'no gaps', 'a gap without an end'),
]


@pytest.mark.parametrize('kind', SPOILED)
def test_a_delta_that_does_not_fit_is_refused_and_nothing_is_written(kind):
  tensors = {'a': np.zeros((20, 15), ml_dtypes.bfloat16), 'c': np.zeros(4, ml_dtypes.bfloat16)}
  delta = {**spoiled(kind), 'c' + GAPS: np.array([0], np.uint8), 'c' + BITS: np.array([7], 'i2')}
  with pytest.raises(ValueError, match=r'^delta refused: [^\n]*$'):
    apply(tensors, delta)
  assert not any(tensor.view(np.int16).any() for tensor in tensors.values())


def test_the_last_element_can_change():
  tensors = {'a': np.zeros((20, 15), ml_dtypes.bfloat16)}
  gaps = encode_gaps(np.array([299]))
  apply(tensors, {'a' + GAPS: gaps, 'a' + BITS: np.array([-1], np.int16)})
  assert np.flatnonzero(tensors['a'].view(np.int16)).tolist() == [299]
