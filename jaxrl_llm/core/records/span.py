"""Span records: parts of a sample that is generated over several iterations.

`encode_span` and `decode_span` convert a record to and from msgpack.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgpack
import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version

_SCHEMA = 2
_OLDEST_SCHEMA = 1
"""Oldest schema that `decode_span` can read. Records of this schema have no `Span.pieces`."""


class Piece(NamedTuple):
  """Part of a span that was sampled for one request."""

  request: str
  """Digest of the request. Requests for the same completion in different iterations have the same
  digest.
  """
  end: int
  """Number of the span's tokens up to the end of the piece."""
  finish: Finish | None
  """Reason why the request's completion ended; None if it continues in a later span."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Span:
  """The tokens that one iteration sampled for a sample. Prompts, observations and earlier spans are
  not included.

  All arrays have the length of `tokens`. The positions in `segments` are relative to the first
  token of the span.
  """

  tokens: Int32[np.ndarray, 'time']
  logprobs: Float32[np.ndarray, 'time']
  segments: tuple[Segment, ...]
  finish: Finish | None
  """Reason why the last completion of the span ended; None if the completion continues in a later
  span.
  """
  pieces: tuple[Piece, ...] = ()
  """Pieces of the span, in order; empty if the whole sample comes from a single request."""

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
    if self.pieces:
      ends = [piece.end for piece in self.pieces]
      is_rising = all(a < b for a, b in itertools.pairwise([0, *ends]))
      if not is_rising or ends[-1] != len(self.tokens) or not {*ends} <= {*bounds}:
        raise ValueError(f'Span: pieces {self.pieces}, wanted them to consist of segments')

  def by_request(self) -> Iterator[tuple[str, Span]]:
    """Yields (digest of the request, piece as a span) for each piece. A span without pieces yields
    one pair, with an empty digest and all of its tokens.
    """
    start = 0
    for request, end, finish in self.pieces or [('', len(self.tokens), self.finish)]:
      segments = [
        dataclasses.replace(segment, start=segment.start - start, end=segment.end - start)
        for segment in self.segments
        if start <= segment.start < end
      ]
      yield (
        request,
        Span(
          tokens=self.tokens[start:end],
          logprobs=self.logprobs[start:end],
          segments=tuple(segments),
          finish=finish,
        ),
      )
      start = end


def by_request(spans: Sequence[Span]) -> dict[str, Span]:
  """Joins the spans of a sample, given in order, into one span per completion. The result is keyed
  by the digest of the completion's request, in the order of the completions' first tokens. If a
  span has no pieces, the sample has a single completion, whose key is empty.
  """
  if not all(span.pieces for span in spans):
    return {'': joined(spans)}
  pieces: dict[str, list[Span]] = {}
  for span in spans:
    for request, piece in span.by_request():
      pieces.setdefault(request, []).append(piece)
  return {request: joined(parts) for request, parts in pieces.items()}


def joined(spans: Sequence[Span], pieces: Sequence[Piece] = ()) -> Span:
  """Joins consecutive spans into a single span, whose pieces are `pieces`."""
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
    pieces=tuple(pieces),
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
      'finish': _text(span.finish),
      'pieces': [[piece.request, piece.end, _text(piece.finish)] for piece in span.pieces],
    }
  )


def _text(finish: Finish | None) -> str | None:
  return None if finish is None else str(finish)


def decode_span(data: bytes) -> Span:
  """Decodes a span. Raises ValueError if the data are not a span of a known schema."""
  try:
    row = msgpack.unpackb(data)
    if row['schema'] not in (_OLDEST_SCHEMA, _SCHEMA):
      raise ValueError(
        f'schema is {row["schema"]!r}, but this program reads {_OLDEST_SCHEMA} to {_SCHEMA}'
      )

    def finish_of(text: str | None) -> Finish | None:
      return None if text is None else Finish(text)

    return Span(
      tokens=np.frombuffer(row['tokens'], '<i4'),
      logprobs=np.frombuffer(row['logprobs'], '<f4'),
      segments=tuple(
        Segment(start=a, end=b, version=Version(attempt, step), engine=engine, finish=finish)
        for a, b, attempt, step, engine, finish in row['segments']
      ),
      finish=finish_of(row['finish']),
      pieces=tuple(
        Piece(request, end, finish_of(text)) for request, end, text in row.get('pieces', ())
      ),
    )
  except (msgpack.exceptions.UnpackException, KeyError, TypeError, ValueError) as error:
    raise ValueError(f'Span record: {type(error).__name__}: {error}') from None
