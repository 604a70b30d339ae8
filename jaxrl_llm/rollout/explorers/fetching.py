"""Fetches the completions of the engine's errands from the fronts of servers, in an explorer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Client, RemoteError
from jaxrl_llm.rollout.explorers.wire import Delivery, Row
from jaxrl_llm.rollout.signed_answer import MAX_FRAME_BYTES, SILENCE_S, Frame, read_frames

_EVERY_S = 1.0
"""Minimum seconds between two deliveries of the same answer, except for the last one. Parts that
arrive meanwhile are delivered together, because each delivery costs the master's time. If a server
is lost, the explorer still delivers all parts that it has received.
"""


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
    self, errand: Row, frames: list[Frame], deliver: Callable[[Delivery], Awaitable[bool]]
  ) -> None:
    """Runs an errand (`wire.errand_row`): delivers the parts of the signed answer as they arrive,
    and then, if the answer is not complete, the reason. Ends early if nobody waits for the answer
    any more.

    Args:
      frames: list to which the frames of the answer are added.
      deliver: delivers frames, and returns whether more are wanted.
    """
    nonce, news, sent = errand['nonce'], asyncio.Event(), 0
    receiving = asyncio.create_task(self._receive(errand, frames, news))
    try:
      while True:
        # Wait 'errand': bounded: a front that is silent for `SILENCE_S` seconds is lost.
        await news.wait()
        news.clear()
        new, has_ended = tuple(frames[sent:]), receiving.done()
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

  async def _receive(self, errand: Row, frames: list[Frame], news: asyncio.Event) -> str:
    """Adds the frames of an answer to `frames`, and sets `news` after each and at the end. Returns
    the reason why the answer is not complete, or an empty text.
    """
    receiving = asyncio.current_task()
    assert receiving is not None
    receiving.add_done_callback(lambda _: news.set())
    try:
      async for frame in self.received(errand):
        frames.append(frame)
        news.set()
    except (RemoteError, UserError, ValueError) as error:
      return f'{type(error).__name__}: {error}'
    return ''

  async def received(self, errand: Row) -> AsyncGenerator[Frame, None]:
    """Yields the frames of an errand's answer as they arrive from the front.

    Raises:
      RemoteError, UserError: the front cannot be reached, refuses the request, or is lost.
      ValueError: the response does not consist of frames.
    """
    address = errand['address']
    if address not in self._clients:
      self._clients[address] = Client(
        address, key=None, ca_file=self._ca_file, where='server', max_bytes=MAX_FRAME_BYTES
      )
    async with self._clients[address].request(
      'POST',
      errand['path'],
      errand['body'],
      label=address,
      deadline_s=errand['deadline_s'],
      silence_s=SILENCE_S,
      headers={'Authorization': errand['authorization']},
    ) as response:
      async for frame in read_frames(response.chunks()):
        yield frame
