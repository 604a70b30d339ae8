"""The form in which a front signs a server's answer, part by part, and sends it: as frames, each a
signature and the part that it signs. It is used for completions that explorers fetch
(`rollout.api.Errand`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgpack
import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core.files import parse_msgpack

BEAT_S = 5.0
"""Seconds without a part after which a front signs an empty part. It shows that the server is still
at work on the answer.
"""
KEEP_S = 120.0
"""Seconds for which a front keeps an answer that nobody is reading."""
SILENCE_S = 4 * BEAT_S
"""Seconds without data after which a front that sends an answer counts as lost."""
MAX_FRAME_BYTES = 1 << 28
"""Maximum size of a frame in bytes."""

Frame = tuple[bytes, bytes]
"""(signature of the front, encoded part of the answer)."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SignedPart:
  """Consecutive tokens of a server's answer to a request for one sample, in the form that its front
  signs. An empty part without an end is a sign of life, of the front alone if `is_waiting`.
  """

  tokens: Int32[np.ndarray, 'time']
  logprobs: Float32[np.ndarray, 'time']
  finish: str | None = None
  """Reason that the server gave for the end of the completion; None if it goes on, or if it has
  broken off.
  """
  spans: Sequence[tuple[str, int, int]] = ()
  """(label of the weights, start, end) of each range of tokens of the whole completion that one
  version sampled. Only the part with `finish` has them.
  """
  broken: str = ''
  """Reason why the server's answer has broken off after this part; empty if it has not."""
  is_waiting: bool = False
  """Whether the server had not begun to answer when the part was signed."""
  age_s: float = 0.0
  """Seconds from the use of the ticket until the part was signed. They show how long the part was
  on its way.
  """

  @property
  def is_last(self) -> bool:
    return self.finish is not None or bool(self.broken)

  def encode(self) -> bytes:
    return msgpack.packb(
      {
        'tokens': self.tokens.astype('<i4').tobytes(),
        'logprobs': self.logprobs.astype('<f4').tobytes(),
        'finish': self.finish,
        'spans': [list(span) for span in self.spans],
        'broken': self.broken,
        'is_waiting': self.is_waiting,
        'age_s': self.age_s,
      }
    )

  @classmethod
  def decode(cls, data: bytes) -> SignedPart:
    """Returns the part that `encode` has encoded. Raises ValueError, KeyError or TypeError if the
    data is not an encoded part.
    """
    row = parse_msgpack(data)
    tokens, logprobs = np.frombuffer(row['tokens'], '<i4'), np.frombuffer(row['logprobs'], '<f4')
    if len(tokens) != len(logprobs):
      raise ValueError(f'{len(logprobs)} logprobs for its {len(tokens)} tokens')
    return cls(
      tokens=tokens.astype(np.int32),
      logprobs=logprobs.astype(np.float32),
      finish=row['finish'],
      spans=[(str(label), int(start), int(end)) for label, start, end in row['spans']],
      broken=str(row['broken']),
      is_waiting=bool(row['is_waiting']),
      age_s=float(row['age_s']),
    )


def empty_part(
  *, finish: str | None = None, broken: str = '', is_waiting: bool = False
) -> SignedPart:
  """Returns a part without tokens."""
  none = np.zeros(0, np.int32), np.zeros(0, np.float32)
  return SignedPart(
    tokens=none[0], logprobs=none[1], finish=finish, broken=broken, is_waiting=is_waiting
  )


def joined_parts(parts: Sequence[SignedPart]) -> SignedPart:
  """Returns consecutive parts of an answer (at least one) as one part."""
  last = parts[-1]
  if len(parts) == 1:
    return last
  return dataclasses.replace(
    last,
    tokens=np.concatenate([part.tokens for part in parts]),
    logprobs=np.concatenate([part.logprobs for part in parts]),
  )


def encode_frame(frame: Frame) -> bytes:
  return msgpack.packb(frame)


async def read_frames(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Frame, None]:
  """Yields the frames in the body of a front's response, as they arrive. Raises ValueError if the
  body does not consist of frames.
  """
  unpacker = msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES)
  async for chunk in chunks:
    try:
      unpacker.feed(chunk)
      values = list(unpacker)
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError) as error:
      raise ValueError(f'not msgpack ({type(error).__name__}: {error})') from None
    for value in values:
      if type(value) is not list or [*map(type, value)] != [bytes, bytes]:
        raise ValueError('a frame that is not [signature, part], both bytes')
      signature, part = value
      yield signature, part
