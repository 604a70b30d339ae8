"""Answers of a server that its front signs, for explorers that fetch completions directly. The
fleet's client issues the tickets and checks the signatures (`rollout.vllm.ticket_office`).

A front passes a request with a ticket on to its server, and signs the answer in parts while it
arrives: the tokens with logprobs and, at the end, the labels of the weights. The answer belongs to
the front, not to the connection of the explorer: if the connection breaks, the fleet collects the
same answer, and nothing is sampled again.

Invariant: a front has the server answer the request of a ticket at most once, and never after the
ticket was withdrawn. An answer has one sequence of signed parts, whoever receives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import web

from jaxrl_llm.core import background
from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.net.client import Client, Lost, Malformed, Refused
from jaxrl_llm.core.net.front import MAX_BODY, Handler
from jaxrl_llm.core.net.server import SERVER, Refusal, begin_upload, parse_object, write
from jaxrl_llm.core.net.tickets import Chain, Ticket, TicketKeys
from jaxrl_llm.core.net.token_server import TicketHandler
from jaxrl_llm.rollout.signed_answer import BEAT_S, KEEP_S, SignedPart, empty_part, encode_frame
from jaxrl_llm.rollout.vllm.answer import (
  GENERATE_PATH,
  REQUEST_PREFIX,
  signed_answer,
  signed_events,
)

FRONT_PATH, SIGNED_PATH = '/direct/front', '/direct/generate'
"""Paths of a front: for its number, which it chooses at random, and for requests for samples that
have a ticket.
"""
COLLECT_PATH, WITHDRAW_PATH = '/direct/collect', '/direct/withdraw'
"""Paths of a front for requests with its token: to receive the answer to a ticket, from any part
on, and to withdraw tickets.
"""
MALFORMED = 'malformed'
"""Value of `SignedPart.finish` if the server's answer does not have vLLM's format. None of its
tokens are used.
"""
_MAX_ANSWER_BYTES = 1 << 28
_READ_S = 60.0
"""Seconds after which a client that does not read its response is disconnected."""
_MAX_IDLE_BYTES = 1 << 28
"""Maximum size in bytes of all complete answers that nobody is reading."""
_MAX_MESSAGE = 1 << 20
"""Maximum size in bytes of a request to collect an answer or to withdraw tickets."""
_REMEMBERED = 1 << 16
"""Number of used tickets after which a front forgets them and takes another number, so that none of
them is good again. Unused tickets for the earlier number are then refused, too.
"""
_END = b'\n\n'
"""End of an event of a streamed response."""


class _Answer:
  """Answer to the request of one ticket.

  Attributes:
    frames: encoded frames, each with a signed part.
    refusal: reason why the answer is missing or has no end; None while there is no such reason.
    is_complete: whether no more frames will follow.
    readers: number of requests to which the answer is being sent.
  """

  def __init__(self, chain: Chain):
    self.frames: list[bytes] = []
    self.size = 0
    """Size of the frames in bytes."""
    self.refusal: Refusal | None = None
    self.is_complete, self.readers = False, 0
    self.work: asyncio.Task | None = None
    """Task that adds the frames."""
    self._expiry: asyncio.TimerHandle | None = None
    """Timer of the call that forgets the answer; None while it is being read."""
    self._chain, self._news = chain, asyncio.Event()  # `_news` is set at the next change.
    self._began = time.monotonic()

  def add(self, part: SignedPart) -> None:
    """Signs a part, and adds it to the frames."""
    data = dataclasses.replace(part, age_s=time.monotonic() - self._began).encode()
    self.frames.append(encode_frame((self._chain.sign(data), data)))
    self.size += len(self.frames[-1])
    self._tell()

  def complete(self, refusal: Refusal | None = None) -> None:
    """Records that no more frames will follow. Has no effect if that was recorded before."""
    if not self.is_complete:
      self.is_complete, self.refusal = True, refusal
      self._tell()

  def expire(self, forget: Callable[[], None]) -> None:
    """Calls `forget` in `KEEP_S` seconds, unless `renew` is called first."""
    self._expiry = asyncio.get_running_loop().call_later(KEEP_S, forget)

  def renew(self) -> None:
    """Cancels the timer of `expire`. The timer would also keep the answer in memory."""
    if self._expiry is not None:
      self._expiry.cancel()
      self._expiry = None

  def _tell(self) -> None:
    self._news.set()
    self._news = asyncio.Event()

  async def sent_from(self, first: int) -> AsyncIterator[bytes]:
    """Yields the frames from number `first` on, as they are added, several at a time."""
    while True:
      if first < len(self.frames):
        frames = self.frames[first:]
        first += len(frames)
        yield b''.join(frames)
      elif self.is_complete:
        return
      else:
        # Wait 'upstream': bounded: `SigningFront._work` adds a part at least every `BEAT_S`.
        await self._news.wait()


class SigningFront:
  """Handlers of a front for requests with tickets, and for the fleet that has issued them."""

  def __init__(self, upstream: str, token: str):
    """
    Args:
      upstream: address of the server behind the front.
      token: token of the front.
    """
    self._id, self._keys = secrets.token_hex(16), TicketKeys(token)
    self._client = Client(
      upstream, key=None, ca_file=None, where='front', max_bytes=_MAX_ANSWER_BYTES
    )
    self._used: set[str] = set()
    """Nonces of the used and withdrawn tickets for the current number."""
    self._uploading: set[str] = set()
    """Nonces of the tickets whose request is being received."""
    self._answers: dict[str, _Answer] = {}
    """Answers that are running, being sent, or kept, keyed by nonce."""
    self._idle: dict[str, int] = {}
    """Size in bytes of each complete answer that nobody reads, keyed by nonce, oldest first."""
    self._idle_bytes = 0
    """Sum of the sizes in `_idle`."""

  @property
  def handlers(self) -> Mapping[tuple[str, str], Handler]:
    """Handlers of the requests with the front's token, keyed by (method, path)."""
    return {
      ('GET', FRONT_PATH): self._identify,
      ('POST', COLLECT_PATH): self._collect,
      ('POST', WITHDRAW_PATH): self._withdraw,
    }

  @property
  def ticketed(self) -> Mapping[tuple[str, str], TicketHandler]:
    """Handlers of the requests with a ticket, keyed by (method, path)."""
    return {('POST', SIGNED_PATH): self._generate}

  async def close(self) -> None:
    works = [answer.work for answer in self._answers.values() if answer.work is not None]
    for nonce in [*self._answers]:
      self._drop(nonce)
    await asyncio.gather(*works, return_exceptions=True)
    await self._client.close()

  async def _identify(self, request: web.BaseRequest) -> web.Response:
    return web.json_response({'front': self._id}, headers=SERVER)

  async def _generate(self, request: web.BaseRequest, ticket: Ticket) -> web.StreamResponse:
    """Passes the request on to the server, and responds with the signed parts of its answer."""
    body = await self._redeem(request, ticket)
    answer = self._answers[ticket.nonce] = _Answer(self._keys.chain(ticket))
    answer.work = asyncio.create_task(self._work(ticket.nonce, answer, body))
    return await self._send(request, ticket.nonce, 0)

  async def _collect(self, request: web.BaseRequest) -> web.StreamResponse:
    """Responds with the signed parts of the answer to a ticket. A ticket that nobody has used is
    withdrawn, so that its request is answered only once.
    """
    body = await _message(request)
    nonce, first = body.get('nonce'), body.get('first')
    if not isinstance(nonce, str) or type(first) is not int or first < 0:
      raise Refusal(400, 'wanted {"nonce": text, "first": integer of at least 0}')
    if nonce not in self._answers:
      self._use(nonce)
      raise Refusal(404, 'there is no answer to this ticket')
    return await self._send(request, nonce, first)

  async def _withdraw(self, request: web.BaseRequest) -> web.Response:
    """Withdraws tickets, and ends the requests that were made with them."""
    nonces = (await _message(request)).get('nonces')
    if not isinstance(nonces, list) or not all(isinstance(nonce, str) for nonce in nonces):
      raise Refusal(400, 'wanted {"nonces": [text, …]}')
    for nonce in nonces:
      self._use(nonce)
      self._drop(nonce)
    return web.json_response({}, headers=SERVER)

  async def _redeem(self, request: web.BaseRequest, ticket: Ticket) -> bytes:
    """Returns the body of a request, and marks its ticket as used. Raises Refusal if the ticket
    does not permit this request, or if it was used or withdrawn before.

    The ticket admits no larger body than its own and, while one body is being received, no other.
    Otherwise, one ticket would admit any number of large bodies at the same time. If the body is
    incomplete or is not that of the ticket, the ticket stays unused.
    """
    self._check(ticket)
    self._uploading.add(ticket.nonce)
    try:
      body = await (await begin_upload(request, min(ticket.body_bytes, MAX_BODY))).read()
      if not await background.by_length(len(body) >> 8, ticket.permits, body):
        raise Refusal(403, 'the ticket is for a request with another body')
    finally:
      self._uploading.discard(ticket.nonce)
    self._check(ticket)  # It may have been withdrawn meanwhile.
    self._use(ticket.nonce)
    return body

  def _check(self, ticket: Ticket) -> None:
    """Raises Refusal if the ticket is not good, or if its request is already being received."""
    if ticket.front != self._id:
      raise Refusal(403, 'the ticket is for another front, or from before this one started')
    if ticket.nonce in self._used or ticket.nonce in self._uploading:
      raise Refusal(403, 'the ticket has been used')

  def _use(self, nonce: str) -> None:
    """Records that a ticket is not good any more."""
    self._used.add(nonce)
    if len(self._used) >= _REMEMBERED:
      self._id = secrets.token_hex(16)
      self._used.clear()

  async def _send(self, request: web.BaseRequest, nonce: str, first: int) -> web.StreamResponse:
    """Responds with the parts of an answer from number `first` on. If the answer is incomplete, the
    connection is closed without an end.
    """
    answer = self._answers[nonce]
    answer.readers += 1
    answer.renew()
    self._forget_idle(nonce)
    response = web.StreamResponse(headers=SERVER)
    response.content_type = 'application/octet-stream'
    try:
      async with contextlib.aclosing(answer.sent_from(first)) as frames:
        async for data in frames:
          if not response.prepared:
            await response.prepare(request)
          if not await write(request, response, data, read_s=_READ_S):
            break
    finally:
      answer.readers -= 1
      if not answer.readers and self._answers.get(nonce) is answer:
        self._let_go(nonce, answer)
    if answer.refusal is None:
      if not response.prepared:  # The reader has all parts.
        await response.prepare(request)
      return response
    if not response.prepared:
      raise answer.refusal
    if request.transport is not None:
      request.transport.abort()
    return response

  def _let_go(self, nonce: str, answer: _Answer) -> None:
    """Keeps an answer that nobody is reading any more, for `KEEP_S` seconds."""
    answer.expire(lambda: self._drop(nonce))
    if answer.is_complete:
      self._count_idle(nonce, answer)

  def _count_idle(self, nonce: str, answer: _Answer) -> None:
    """Counts a complete answer that nobody is reading, and drops the oldest beyond the limit."""
    self._idle[nonce] = answer.size
    self._idle_bytes += answer.size
    while self._idle_bytes > _MAX_IDLE_BYTES:
      self._drop(next(iter(self._idle)))

  def _forget_idle(self, nonce: str) -> None:
    """Records that an answer is being read, or is no longer kept."""
    self._idle_bytes -= self._idle.pop(nonce, 0)

  def _drop(self, nonce: str) -> None:
    """Forgets an answer, and ends its request to the server."""
    self._forget_idle(nonce)
    answer = self._answers.pop(nonce, None)
    if answer is not None:
      answer.renew()
      answer.complete(Refusal(410, 'the ticket has been withdrawn'))
      if answer.work is not None:
        answer.work.cancel()

  async def _work(self, nonce: str, answer: _Answer, body: bytes) -> None:
    """Has the server answer a request, and adds the signed parts to `answer`."""
    refusal: Refusal | None = Refusal(502, 'the front failed')
    try:
      async with (
        contextlib.aclosing(self._parts(body)) as parts,
        contextlib.aclosing(_beating(parts)) as beating,
      ):
        async for part in beating:
          answer.add(part)
      refusal = None
    except Refused as refused:
      refusal = Refusal(refused.status or 400, str(refused))
    except (Malformed, ValueError, KeyError, TypeError) as error:
      refusal = None
      answer.add(empty_part(finish=MALFORMED, broken=one_line(error)))
    except Lost as lost:
      refusal = None
      answer.add(empty_part(broken=one_line(lost)))
    finally:
      answer.complete(refusal)
      if not answer.readers and self._answers.get(nonce) is answer:
        self._count_idle(nonce, answer)

  async def _parts(self, body: bytes) -> AsyncGenerator[SignedPart, None]:
    """Yields the parts of the server's answer; the last one has its end.

    Raises:
      Refused, Lost: the server has refused the request, or was lost.
      ValueError, KeyError, TypeError: the answer does not have vLLM's format.
    """
    sample = json.loads(body)
    # Wait 'upstream': bounded by the fleet, which withdraws the ticket.
    async with self._client.request(
      'POST',
      GENERATE_PATH,
      body,
      label='the server behind this front',
      deadline_s=None,
      headers={'Content-Type': 'application/json'},
    ) as response:
      if not sample.get('stream'):
        # A thread is used, because parsing a long answer would block the event loop.
        yield await asyncio.to_thread(signed_answer, await response.read())
        return
      # On this part, the fleet checks at once whether the server is still the process that it has
      # given weights to. If the answer breaks off, only tokens of such a process are kept.
      yield empty_part()
      name, rest, size = f'{REQUEST_PREFIX}{sample["request_id"]}', b'', 0
      async for chunk in response.chunks():
        size += len(chunk)
        if size > _MAX_ANSWER_BYTES:
          raise ValueError(f'more than {_MAX_ANSWER_BYTES} bytes')
        events, end, rest = (rest + chunk).rpartition(_END)
        if not end:
          continue
        # About 160 bytes per token.
        part = await background.by_length(len(events) // 160, signed_events, events + end, name)
        if part.is_last or len(part.tokens):
          yield part
        if part.is_last:
          return
    yield empty_part(broken='the server broke off its answer')


async def _beating(parts: AsyncGenerator[SignedPart, None]) -> AsyncGenerator[SignedPart, None]:
  """Yields the parts, and an empty part after each `BEAT_S` seconds without one."""
  pending, is_waiting = asyncio.ensure_future(anext(parts)), True
  try:
    while True:
      if not (await asyncio.wait({pending}, timeout=BEAT_S))[0]:
        yield empty_part(is_waiting=is_waiting)
        continue
      try:
        part = pending.result()
      except StopAsyncIteration:
        return
      yield part
      pending, is_waiting = asyncio.ensure_future(anext(parts)), False
  finally:
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)


async def _message(request: web.BaseRequest) -> dict[str, Any]:
  return parse_object(await (await begin_upload(request, _MAX_MESSAGE)).read())
