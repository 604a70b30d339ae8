"""Fetches the completions of the engine's errands from the fronts of servers, in an explorer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgpack

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Client, RemoteError
from jaxrl_llm.rollout.explorers.wire import Delivery, Row
from jaxrl_llm.rollout.signed_answer import BEAT_S

_MAX_BYTES = 1 << 28
"""Maximum size in bytes of a refusal, and of a signed part of an answer."""
_SILENCE_S = 4 * BEAT_S
"""Seconds without data after which a front that sends an answer counts as lost."""
_EVERY_S = 1.0
"""Minimum seconds between two deliveries of the same answer, except for the last one. Parts that
arrive meanwhile are delivered together, because each delivery costs the master's time. If a server
is lost, the explorer still delivers all parts that it has received.
"""

Part = tuple[bytes, bytes]
"""(signature of the front, part of the answer)."""


class Fetcher:
  """Runs errands: sends their requests to the servers' fronts."""

  def __init__(self, ca_file: str | None):
    """
    Args:
      ca_file: PEM file of the authority that signed the certificates of the fronts. If None, the
        system's authorities are used.
    """
    self._ca_file = ca_file
    self._clients: dict[str, Client] = {}
    """Clients of the fronts, keyed by address."""

  async def close(self) -> None:
    for client in self._clients.values():
      await client.close()

  async def fetch(
    self, errand: Row, parts: list[Part], deliver: Callable[[Delivery], Awaitable[bool]]
  ) -> None:
    """Runs an errand (`wire.errand_row`): delivers the parts of the signed answer as they arrive,
    and then, if the answer is not complete, the reason. Ends early if nobody waits for the answer
    any more.

    Args:
      parts: list to which the parts are added.
      deliver: delivers parts, and returns whether more are wanted.
    """
    nonce, news, sent = errand['nonce'], asyncio.Event(), 0
    receiving = asyncio.create_task(self._receive(errand, parts, news))
    try:
      while True:
        # Wait 'errand': bounded: a front that is silent for `_SILENCE_S` seconds is lost.
        await news.wait()
        news.clear()
        new, has_ended = tuple(parts[sent:]), receiving.done()
        problem = receiving.result() if has_ended else ''
        if new or problem:
          delivery = Delivery(nonce, sent, new, problem)
          if not await deliver(delivery):
            return
          sent += len(new)
        if has_ended:
          return
        # Wait 'errand': bounded by `_EVERY_S`.
        await asyncio.wait([receiving], timeout=_EVERY_S)
    finally:
      receiving.cancel()
      await asyncio.gather(receiving, return_exceptions=True)

  async def _receive(self, errand: Row, parts: list[Part], news: asyncio.Event) -> str:
    """Adds the parts of an answer to `parts`, and sets `news` after each and at the end. Returns
    the reason why the answer is not complete, or an empty text.
    """
    receiving = asyncio.current_task()
    assert receiving is not None
    receiving.add_done_callback(lambda _: news.set())
    try:
      async for part in self.received(errand):
        parts.append(part)
        news.set()
    except (RemoteError, UserError, ValueError, TypeError, msgpack.UnpackException) as error:
      return f'{type(error).__name__}: {error}'
    return ''

  async def received(self, errand: Row) -> AsyncGenerator[Part, None]:
    """Yields the signed parts of an errand's answer as they arrive from the front.

    Raises:
      RemoteError, UserError: the front cannot be reached, refuses the request, or is lost.
      ValueError, TypeError, UnpackException: the response does not consist of parts.
    """
    address = errand['address']
    if address not in self._clients:
      self._clients[address] = Client(
        address, key=None, ca_file=self._ca_file, where='server', max_bytes=_MAX_BYTES
      )
    frames = msgpack.Unpacker(max_buffer_size=_MAX_BYTES)
    async with self._clients[address].request(
      'POST',
      errand['path'],
      errand['body'],
      label=address,
      deadline_s=errand['deadline_s'],
      silence_s=_SILENCE_S,
      headers={'Authorization': errand['authorization']},
    ) as response:
      async for chunk in response.chunks():
        frames.feed(chunk)
        for signature, part in frames:
          yield signature, part
