"""Tickets for completions that explorers fetch from a server, and the answers. The server's front
signs an answer in parts (`rollout.vllm.direct`). The fleet treats an answer with the right
signatures like one that it has fetched itself.

Invariant: a completion consists of parts of the answer to exactly the fleet's request, signed by
the front of the server that the fleet chose, in order. A ticket names that front and the digest of
the request's body. It therefore determines the prompt, the sampling parameters and the seed.
Whoever holds a ticket can withhold parts, but then the fleet collects the same answer from
the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Awaitable, Callable

from jaxrl_llm.core import background
from jaxrl_llm.core.net.client import Client, Lost, Malformed, Refused, RemoteError
from jaxrl_llm.core.net.tickets import Chain, TicketKeys
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.api import Completion, Courier, Errand, Forged, Undelivered
from jaxrl_llm.rollout.signed_answer import (
  SILENCE_S,
  SignedPart,
  empty_part,
  joined_parts,
  read_frames,
)
from jaxrl_llm.rollout.vllm.answer import Begun
from jaxrl_llm.rollout.vllm.direct import COLLECT_PATH, FRONT_PATH, SIGNED_PATH, WITHDRAW_PATH
from jaxrl_llm.rollout.vllm.stream import Broken

_NUMBER = re.compile('[0-9a-f]{32}')
_LEAST_S = 10.0
"""Minimum time limit in seconds for collecting an answer, even after its request's deadline."""
_WITHDRAW_S = 10.0
"""Time limit in seconds of a request that withdraws tickets."""
_MOST_WITHDRAWN = 1024
"""Maximum number of tickets that are withdrawn with one request."""

Read = Callable[[SignedPart, int, float], Completion | Begun]
"""Function of (joined parts, number of tokens that arrived while the weights were known, event loop
time at which the server's answer began to arrive) that returns the completion, or its beginning if
the answer broke off. It raises Malformed or UserError if the answer does not match the request.
"""

Call = Callable[..., Awaitable[Json]]


class SignedParts:
  """The parts of one answer that have been delivered so far.

  Attributes:
    count: number of parts.
    age_s: seconds from the use of the ticket until the newest part was signed.
    outcome: the completion, or the error that ended the answer; None while parts are missing.
  """

  def __init__(
    self,
    chain: Chain,
    *,
    read: Read,
    is_known: Callable[[], bool],
    arrived: Callable[[float], None],
    name: str,
  ):
    """
    Args:
      chain: signatures of the answer.
      is_known: returns whether the server's weights were known when the request was sent, and no
        update of the server has begun since.
      arrived: called after each part that the server has begun to answer, with the event loop time
        at which the answer began to arrive.
      name: name of the server, for messages.
    """
    self._chain, self._read, self._is_known, self._arrived = chain, read, is_known, arrived
    self._name = name
    self._parts: list[SignedPart] = []
    self._tokens = self._known = 0
    """Number of tokens, and number of tokens that had arrived when `is_known` was last true."""
    self._begun = math.inf
    self.count, self.age_s = 0, 0.0
    self.outcome: Completion | Exception | None = None

  async def add(self, signature: bytes, part: bytes) -> Completion | None:
    """Adds the next part. Returns the completion if this is the last part, and None otherwise.

    Raises:
      Forged: the part is not the next one that the front has signed. It is ignored.
      Broken: the part says that the answer has broken off.
      Malformed, UserError: the answer does not match the request.
    """
    if self.outcome is not None:
      raise Forged(f'a part after the end of the answer of {self._name}')
    # A thread would cost more than the signature of a part with fewer than 32 thousand tokens.
    if not await background.by_length(len(part) >> 8, self._chain.accepts, part, signature):
      raise Forged(f'{len(part)} bytes without the signature of {self._name} for part {self.count}')
    try:
      return await self._accept(part)
    except Exception as error:
      self.outcome = error
      raise

  async def _accept(self, data: bytes) -> Completion | None:
    arrival = asyncio.get_running_loop().time()
    self.count += 1
    try:
      part = SignedPart.decode(data)
    except (ValueError, KeyError, TypeError) as error:
      raise Malformed(f'{self._name}: signed {type(error).__name__}: {error}') from None
    if not part.is_waiting:
      self._begun = min(self._begun, arrival)
    self.age_s = part.age_s
    self._tokens += len(part.tokens)
    if self._is_known():
      self._known = self._tokens
    if len(part.tokens) or part.is_last or not self._parts:
      self._parts.append(part)
    if not part.is_last:
      # Before the server answers, its process may still be replaced by another one.
      if not part.is_waiting:
        self._arrived(self._begun)
      return None
    answer = await self._result()
    if isinstance(answer, Begun):
      raise self._broken(answer, f'broke off: {answer.reason or "the server gave no reason"}')
    self.outcome = answer
    return answer

  async def given_up(self, why: object) -> Completion:
    """Ends an answer whose further parts are lost. Returns the completion if there are none.

    Raises:
      Broken: parts are missing. The error contains the tokens that may be kept.
      Malformed, UserError: the answer does not match the request.
    """
    answer = await self._result()
    if isinstance(answer, Begun):
      raise self._broken(answer, str(why))
    return answer

  def _broken(self, begun: Begun, why: str) -> Broken:
    count = len(begun.tokens) + begun.lost
    return Broken(f'{self._name}: {why} (after {count} tokens)', begun)

  async def _result(self) -> Completion | Begun:
    return await background.by_length(
      self._tokens,
      self._read,
      joined_parts(self._parts or [empty_part()]),
      self._known,
      self._begun,
    )


class TicketOffice:
  """Issues tickets for the front of one server, and obtains the answers."""

  def __init__(self, address: str, key: str | None, *, name: str, call: Call, answers: Client):
    """
    Args:
      address: address of the front.
      key: token of the front; None if the server has no front.
      name: name of the server, for messages.
      call: `VllmClient.call`.
      answers: client of the front for answers, which are received in the event loop for responses.
    """
    self._address, self._key, self._name = address, key, name
    self._call, self._answers = call, answers
    self._front: str | None = None
    """Number of the front. None before the first request for it, and after an errand has failed."""
    self._withdrawn: list[str] = []
    """Nonces of the tickets that are still to be withdrawn."""
    self._withdrawing: asyncio.Task | None = None

  async def close(self) -> None:
    if self._withdrawing is not None:
      self._withdrawing.cancel()
      await asyncio.gather(self._withdrawing, return_exceptions=True)

  async def front(self) -> str:
    """Returns the number of the front.

    Raises:
      Refused: the server has no front that signs.
      Lost: the front does not answer.
    """
    if self._key is None or self._address.startswith('unix:'):
      raise Refused(f'{self._address} has no front')
    if self._front is None:
      answer = await self._call('GET', FRONT_PATH)
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
    read: Read,
    is_known: Callable[[], bool],
    arrived: Callable[[float], None],
  ) -> tuple[Errand, SignedParts]:
    """Returns an errand for a request, with a new ticket, and the errand's `parts`. For `read`,
    `is_known` and `arrived`, see `SignedParts`.

    Args:
      front: number of the front.
      body: body of the request.
      deadline_s: seconds within which the completion must be delivered.
    """
    assert self._key is not None, '`front` has raised an error'
    keys = TicketKeys(self._key)
    ticket = keys.issue(front, body)
    parts = SignedParts(
      keys.chain(ticket), read=read, is_known=is_known, arrived=arrived, name=self._name
    )
    errand = Errand(
      nonce=ticket.nonce,
      address=self._address,
      path=SIGNED_PATH,
      authorization=keys.header(ticket),
      body=body,
      deadline_s=deadline_s,
      parts=parts,
    )
    return errand, parts

  async def completion(self, courier: Courier, errand: Errand, parts: SignedParts) -> Completion:
    """Returns the completion of an errand with these parts. What the courier does not deliver is
    collected from the front. If this call is cancelled, or the server is lost, the ticket is
    withdrawn.

    Raises:
      Undelivered: the courier has not delivered the completion, and nobody has used the ticket.
      Broken: the server was lost.
      Malformed, UserError: the answer does not match the request.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + errand.deadline_s
    try:
      try:
        return await courier.fetch(errand)
      except Undelivered as undelivered:
        if isinstance(parts.outcome, Completion):
          return parts.outcome
        if parts.outcome is not None:
          raise parts.outcome from None
        why = undelivered
      left_s = max(_LEAST_S, deadline - loop.time())
      try:
        # Wait 'completion': bounded by `left_s`.
        return await background.responses().run(self._collect(errand.nonce, parts, left_s))
      except Refused as refused:
        self._front = None  # The front may have been restarted.
        if not parts.count:
          raise why from None
        return await parts.given_up(refused)
      except (Broken, Malformed):
        raise
      except Lost as lost:
        # The front may still be at work on the answer, and has no deadline.
        self._withdraw(errand.nonce)
        return await parts.given_up(lost)
    except asyncio.CancelledError:
      self._withdraw(errand.nonce)
      raise

  async def _collect(self, nonce: str, parts: SignedParts, deadline_s: float) -> Completion:
    """Receives the other parts of an answer. Called in the event loop for responses.

    Raises:
      Refused: nobody has used the ticket, or the front no longer has the answer.
    """
    label = f'{self._name}: {COLLECT_PATH}'
    async with self._answers.request(
      'POST',
      COLLECT_PATH,
      {'nonce': nonce, 'first': parts.count},
      label=label,
      deadline_s=deadline_s,
      silence_s=SILENCE_S,
    ) as response:
      try:
        async for signature, part in read_frames(response.chunks()):
          if (completion := await parts.add(signature, part)) is not None:
            return completion
      except (Forged, ValueError) as error:
        raise Malformed(f'{label}: {type(error).__name__}: {error}') from None
    raise Lost(f'{label}: ended early')

  def _withdraw(self, nonce: str) -> None:
    """Withdraws a ticket, in the background. The front then ends the ticket's request."""
    self._withdrawn.append(nonce)
    if self._withdrawing is None or self._withdrawing.done():
      self._withdrawing = asyncio.create_task(self._send_withdrawals())

  async def _send_withdrawals(self) -> None:
    while self._withdrawn:
      nonces, self._withdrawn = (
        self._withdrawn[:_MOST_WITHDRAWN],
        self._withdrawn[_MOST_WITHDRAWN:],
      )
      with contextlib.suppress(RemoteError):  # If the front is lost, so are the requests.
        await self._call('POST', WITHDRAW_PATH, {'nonces': nonces}, deadline_s=_WITHDRAW_S)
