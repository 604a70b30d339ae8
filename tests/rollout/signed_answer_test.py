"""Frames of signed answers, as they arrive from a front."""

import asyncio

import msgpack
import pytest

from jaxrl_llm.rollout.signed_answer import encode_frame, read_frames

FRAMES = [(b'signature', b'part'), (b'', b''), (b's', bytes(1000))]


def received(chunks):
  async def arriving():
    for chunk in chunks:
      yield chunk

  async def read():
    return [frame async for frame in read_frames(arriving())]

  return asyncio.run(read())


@pytest.mark.parametrize('size', [1, 7, 10_000])
def test_frames_arrive_however_the_network_cuts_them(size):
  data = b''.join(map(encode_frame, FRAMES))
  assert received([data[i : i + size] for i in range(0, len(data), size)]) == FRAMES


@pytest.mark.parametrize(
  'value',
  [5, 'ab', b'ab', None, [], [b'a'], ['a', b'b'], [b'a', 1], [b'a', b'b', b'c'], {'a': b'b'}],
)
def test_other_values_are_no_frames(value):
  """The master evicts an explorer that delivers what is no frame."""
  with pytest.raises(ValueError, match='frame'):
    received([encode_frame(FRAMES[0]), msgpack.packb(value)])


@pytest.mark.parametrize('data', [b'\xc1', b'\x91' * 2000 + b'\x01'])
def test_a_body_that_is_not_msgpack_is_refused(data):
  with pytest.raises(ValueError, match='not msgpack'):
    received([data])
