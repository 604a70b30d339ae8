"""Streamed answers. If a server is lost, the tokens of its answers that have arrived are kept, and
other requests continue the answers.

A server names the versions that sampled an answer only in the answer's last event. If that event is
missing, a token is kept only if the weights that sampled it are known nevertheless. They are known
to be the weights that the server was proven to have loaded when the request was sent, under two
conditions. First, the token arrived before the next update of the server began. Second, the server
has proved meanwhile that it is not a new process with other weights (`Recognition`). Other tokens
are lost.

Invariant: the tokens of an answer match its request, even if several servers sampled them. Every
segment names the version and the server that sampled it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Container, Coroutine
from typing import Any

from jaxrl_llm.core import background
from jaxrl_llm.core.net.client import Lost, RemoteError
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.records.span import Span, joined
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import LOST, Completion, Request
from jaxrl_llm.rollout.vllm.answer import Begun

_LOOK_S = 1.0
"""Minimum seconds between two requests for the label of a server that is sending answers."""


class Arrivals:
  """The part of a streamed response that has arrived."""

  def __init__(self, interval: int, is_known: Callable[[], bool]):
    """
    Args:
      interval: number of tokens that the server samples between two events of the response.
      is_known: returns whether the server's weights were known when the request was sent, and no
        update of the server has begun since.
    """
    self.interval, self._is_known = interval, is_known
    self._parts: list[bytes] = []
    self.size = 0
    """Number of bytes that have arrived."""
    self.known = 0
    """Number of bytes that had arrived when `is_known` was last true."""

  def add(self, part: bytes) -> None:
    """Adds the bytes that have just arrived."""
    self._parts.append(part)
    self.size += len(part)
    if self._is_known():
      self.known = self.size

  def whole(self) -> bytes:
    return b''.join(self._parts)


class Recognition:
  """Checks, while a server sends answers, that the server is not a new process with other weights.
  Only a server whose weights this run has loaded has a label of this run.

  Attributes:
    recognised: event loop time of the start of the last request that returned a label of this run;
      minus infinity before the first. It can be compared with times of other event loops.
    looking: task of the request in progress; None if there is none.
  """

  def __init__(self, shown_label: Callable[[], Coroutine[Any, Any, str]], labels: Container[str]):
    """
    Args:
      shown_label: requests the server's label. Called in the event loop for responses. It may raise
        RemoteError.
      labels: labels of this run.
    """
    self._shown_label, self._labels = shown_label, labels
    self.recognised = self._looked = -math.inf
    self.looking: asyncio.Task | None = None

  def is_since(self, begun: float) -> bool:
    """Returns whether the server has been recognised since an answer began at time `begun`."""
    return self.recognised >= begun

  def look_soon(self, begun: float) -> None:
    """Calls `look` in the event loop for responses, if that is necessary."""
    if not self.is_since(begun):
      background.responses().call_soon(self.look, begun)

  def look(self, begun: float) -> None:
    """Starts a request for the server's label. Called in the event loop for responses.

    Does nothing if the server has been recognised since the answer began, if a request is in
    progress, or if the last request was less than `_LOOK_S` seconds ago.

    Args:
      begun: event loop time at which the answer began.
    """
    now = asyncio.get_running_loop().time()
    if self.is_since(begun) or self.looking is not None or now < self._looked + _LOOK_S:
      return
    self._looked = now
    self.looking = asyncio.create_task(self._look(now))

  async def _look(self, now: float) -> None:
    try:
      if await self._shown_label() in self._labels:
        self.recognised = now
    except RemoteError:
      pass  # The next part of an answer starts another request for the label.
    finally:
      self.looking = None


class Broken(Lost):
  """Raised when a streamed answer broke off.

  Attributes:
    begun: the beginning of the answer, sampled with the weights that the server had when the
      request was sent. It may be empty.
  """

  def __init__(self, message: str, begun: Begun):
    super().__init__(message)
    self.begun = begun


class Answer:
  """Answer to a request for one sample, to which several servers may contribute.

  Attributes:
    missing: request for the tokens that are missing. Once the answer has tokens, this request has
      another random seed than the original request, because the seed depends on the number of
      earlier tokens.
  """

  def __init__(self, request: Request):
    self.missing = request
    self._request = request
    self._spans: list[Span] = []

  def add(self, begun: Begun, version: Version, engine: str) -> None:
    """Appends the tokens of a server that was lost."""
    count = len(begun.tokens)
    segment = Segment(start=0, end=count, version=version, engine=engine, finish=LOST)
    self._spans.append(
      Span(tokens=begun.tokens, logprobs=begun.logprobs, segments=(segment,), finish=None)
    )
    missing = self.missing
    if missing.repetition_end(begun.tokens) == count:
      self._end(Finish.REPETITION)
    self.missing = dataclasses.replace(
      missing,
      prompt=(*missing.prompt, *begun.tokens.tolist()),
      begun=missing.begun + count,
      max_tokens=missing.max_tokens - count,
    )

  @property
  def whole(self) -> Completion | None:
    """The complete answer, if a repetition ended it before its server was lost. None if tokens are
    missing.
    """
    if not self._spans or self._spans[-1].finish is None:
      return None
    return _completion(self._spans)

  def complete(self, last: Completion) -> Completion:
    """Returns the answer with the tokens of `last`, which a server sampled for `missing`."""
    if not self._spans:
      return last
    end = Span(
      tokens=last.tokens, logprobs=last.logprobs, segments=last.segments, finish=last.finish
    )
    return _completion([*self._spans, end])

  def _end(self, finish: Finish) -> None:
    span = self._spans[-1]
    (segment,) = span.segments
    self._spans[-1] = dataclasses.replace(
      span, finish=finish, segments=(dataclasses.replace(segment, finish=str(finish)),)
    )


def _completion(spans: list[Span]) -> Completion:
  whole = joined(spans)
  assert whole.finish is not None, 'the last span ends the answer'
  return Completion(
    tokens=whole.tokens, logprobs=whole.logprobs, finish=whole.finish, segments=whole.segments
  )
