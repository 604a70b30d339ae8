"""Span records: parts of a completion that is generated over several iterations.

`encode_span` and `decode_span` convert a record to and from msgpack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgpack
import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version

_SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Span:
  """The tokens that one iteration sampled for a completion, without the prompt and earlier spans.

  All arrays have the length of `tokens`. Segments count from the first token of the span.
  """

  tokens: Int32[np.ndarray, 'time']
  logprobs: Float32[np.ndarray, 'time']
  segments: tuple[Segment, ...]
  finish: Finish | None
  """Reason why the completion ended; None if it continues in a later span."""

  def __post_init__(self):
    if not len(self.tokens) or len(self.tokens) != len(self.logprobs):
      raise ValueError(
        f'Span: {len(self.tokens)} tokens and {len(self.logprobs)} logprobs, wanted the same '
        'number, above 0'
      )
    if not np.isfinite(self.logprobs).all():
      raise ValueError('Span: logprobs are not finite')
    bounds = [0, *(segment.end for segment in self.segments)]
    if bounds[:-1] != [s.start for s in self.segments] or bounds[-1] != len(self.tokens):
      raise ValueError(f'Span: segments {self.segments} do not cover {len(self.tokens)} tokens')
    if empty := [segment for segment in self.segments if segment.start >= segment.end]:
      raise ValueError(f'Span: segment {empty[0]} has no tokens')


def joined(spans: Sequence[Span]) -> Span:
  """Returns the spans of one completion, in order, as a single span."""
  starts = np.cumsum([0, *(len(span.tokens) for span in spans)]).tolist()
  return Span(
    tokens=np.concatenate([span.tokens for span in spans]),
    logprobs=np.concatenate([span.logprobs for span in spans]),
    segments=tuple(
      dataclasses.replace(segment, start=segment.start + start, end=segment.end + start)
      for start, span in zip(starts, spans)
      for segment in span.segments
    ),
    finish=spans[-1].finish,
  )


def encode_span(span: Span) -> bytes:
  """Encodes the span; `decode_span` restores it bit for bit."""
  return msgpack.packb(
    {
      'schema': _SCHEMA,
      'tokens': np.ascontiguousarray(span.tokens, '<i4').tobytes(),
      'logprobs': np.ascontiguousarray(span.logprobs, '<f4').tobytes(),
      'segments': [
        [s.start, s.end, s.version.attempt, s.version.step, s.engine, s.finish]
        for s in span.segments
      ],
      'finish': None if span.finish is None else str(span.finish),
    }
  )


def decode_span(data: bytes) -> Span:
  """Decodes a span. Raises ValueError if the data are not a span of a known schema."""
  try:
    row = msgpack.unpackb(data)
    if row['schema'] != _SCHEMA:
      raise ValueError(f'schema is {row["schema"]!r}, but this program reads {_SCHEMA}')
    return Span(
      tokens=np.frombuffer(row['tokens'], '<i4'),
      logprobs=np.frombuffer(row['logprobs'], '<f4'),
      segments=tuple(
        Segment(start=a, end=b, version=Version(attempt, step), engine=engine, finish=finish)
        for a, b, attempt, step, engine, finish in row['segments']
      ),
      finish=None if row['finish'] is None else Finish(row['finish']),
    )
  except (msgpack.exceptions.UnpackException, KeyError, TypeError, ValueError) as error:
    raise ValueError(f'Span record: {type(error).__name__}: {error}') from None
