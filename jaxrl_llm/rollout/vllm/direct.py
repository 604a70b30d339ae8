"""Completions that explorers fetch from servers directly. A server's front signs the answers
(`SigningFront`). The fleet's client issues tickets and checks signatures (`TicketOffice`).

For the ticket of a request, a front signs its server's answer: the tokens with logprobs, and the
labels of the weights. The fleet treats a completion with the right signature like one that it has
fetched itself: the labels must be those of versions that the server was proven to have loaded.

Invariant: a completion is accepted only if it is the answer to exactly the fleet's request, given
by the front of the server that the fleet chose. A ticket names that front and the digest of the
request's body. It therefore determines the prompt, the sampling parameters and the seed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from jaxrl_llm.core import background
from jaxrl_llm.core.net.client import Client, Lost, Malformed, Refused
from jaxrl_llm.core.net.front import MAX_BODY, Handler
from jaxrl_llm.core.net.server import SERVER, Refusal, begin_upload
from jaxrl_llm.core.net.tickets import Ticket, TicketKeys
from jaxrl_llm.core.net.token_server import TicketHandler
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.api import Completion, Errand, Forged
from jaxrl_llm.rollout.vllm.answer import signed_answer

FRONT_PATH, SIGNED_PATH = '/direct/front', '/direct/generate'
"""Paths of a front: for its number, which it chooses at random, and for requests for samples that
have a ticket.
"""
_UPSTREAM_PATH = '/inference/v1/generate'
_MAX_ANSWER_BYTES = 1 << 28
_REMEMBERED = 1 << 16
"""Number of used tickets after which a front forgets them and takes another number, so that none of
them is good again. Unused tickets for the earlier number are then refused, too.
"""
_NUMBER = re.compile('[0-9a-f]{32}')


class SigningFront:
  """Handlers of a front for requests with tickets."""

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
    """Nonces of the used tickets for the current number."""

  @property
  def handlers(self) -> Mapping[tuple[str, str], Handler]:
    return {('GET', FRONT_PATH): self._identify}

  @property
  def ticketed(self) -> Mapping[tuple[str, str], TicketHandler]:
    return {('POST', SIGNED_PATH): self._generate}

  async def close(self) -> None:
    await self._client.close()

  async def _identify(self, request: web.BaseRequest) -> web.Response:
    return web.json_response({'front': self._id}, headers=SERVER)

  async def _generate(self, request: web.BaseRequest, ticket: Ticket) -> web.Response:
    """Passes the request on to the server. Responds with the signature, followed by the server's
    answer in signed form.
    """
    body = await self._redeem(request, ticket)
    try:
      # Wait 'upstream': bounded by the client, which cancels the request by hanging up.
      async with self._client.request(
        'POST',
        _UPSTREAM_PATH,
        body,
        label='the server behind this front',
        deadline_s=None,
        headers={'Content-Type': 'application/json'},
      ) as response:
        data = await response.read()
      # A thread is used, because parsing a long answer would block the event loop.
      answer = await asyncio.to_thread(signed_answer, data)
    except Refused as refused:
      raise Refusal(refused.status or 400, str(refused)) from None
    except (Lost, ValueError, KeyError, TypeError) as error:
      raise Refusal(502, f'no completion: {" ".join(str(error).split())[:300]}') from None
    signature = self._keys.sign(ticket, answer)
    return web.Response(
      body=signature + answer, content_type='application/octet-stream', headers=SERVER
    )

  async def _redeem(self, request: web.BaseRequest, ticket: Ticket) -> bytes:
    """Returns the body of a request, and marks its ticket as used. Raises Refusal if the ticket
    does not permit this request, or if it was used before.

    The ticket is marked before the body is read, because otherwise one ticket would admit any
    number of large bodies at the same time. It stays good if the body breaks off or is another one.
    """
    if ticket.front != self._id:
      raise Refusal(403, 'the ticket is for another front, or from before this one started')
    if ticket.nonce in self._used:
      raise Refusal(403, 'the ticket has been used')
    self._used.add(ticket.nonce)
    try:
      body = await (await begin_upload(request, MAX_BODY)).read()
      if not await background.by_length(len(body) >> 8, ticket.permits, body):
        raise Refusal(403, 'the ticket is for a request with another body')
    except BaseException:
      self._used.discard(ticket.nonce)
      raise
    if len(self._used) >= _REMEMBERED:
      self._id = secrets.token_hex(16)
      self._used.clear()
    return body


class TicketOffice:
  """Issues tickets for the front of one server, and checks the answers that are delivered."""

  def __init__(self, address: str, key: str | None):
    """
    Args:
      address: address of the front.
      key: token of the front; None if the server has no front.
    """
    self._address, self._key = address, key
    self._front: str | None = None
    """Number of the front. None before the first request for it, and after an errand has failed."""

  async def front(self, call: Callable[..., Awaitable[Json]]) -> str:
    """Returns the number of the front.

    Args:
      call: `VllmClient.call`.

    Raises:
      Refused: the server has no front that signs.
      Lost: the front does not answer.
    """
    if self._key is None or self._address.startswith('unix:'):
      raise Refused(f'{self._address} has no front')
    if self._front is None:
      answer = await call('GET', FRONT_PATH)
      front = answer.get('front') if isinstance(answer, dict) else None
      if not (isinstance(front, str) and _NUMBER.fullmatch(front)):
        raise Malformed(f'{self._address}: {FRONT_PATH}: answered {str(answer)[:80]}')
      self._front = front
    return self._front

  def errand(
    self,
    front: str,
    body: bytes,
    deadline_s: float,
    *,
    tokens: int,
    parse: Callable[[bytes], Completion],
  ) -> Errand:
    """Returns an errand for a request, with a new ticket.

    Args:
      front: number of the front.
      body: body of the request.
      deadline_s: seconds within which the completion must be delivered.
      tokens: maximum number of tokens of the completion.
      parse: function that parses a signed answer. It runs in a thread if `tokens` is large.
    """
    assert self._key is not None, '`front` has raised an error'
    keys = TicketKeys(self._key)
    ticket = keys.issue(front, body)

    def read_checked(signature: bytes, answer: bytes) -> Completion:
      if not keys.is_signed(ticket, answer, signature):
        raise Forged(f'{len(answer)} bytes without the signature of {self._address}')
      return parse(answer)

    async def read(signature: bytes, answer: bytes) -> Completion:
      # An explorer may deliver a longer answer than the engine has requested. Each token takes 8
      # bytes.
      count = max(tokens, len(answer) // 8)
      return await background.by_length(count, read_checked, signature, answer)

    return Errand(
      nonce=ticket.nonce,
      address=self._address,
      path=SIGNED_PATH,
      authorization=keys.header(ticket),
      body=body,
      deadline_s=deadline_s,
      read=read,
    )

  def forget(self) -> None:
    """Forgets the number of the front, because the front may have been restarted."""
    self._front = None
