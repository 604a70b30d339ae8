"""Errands: orders of the engine to an explorer to fetch completions directly from servers, and to
deliver them to the master.

Invariant: for each errand, at most one completion is accepted: the first that is delivered under
the errand's lease, if the server's front has signed it for this errand.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
from absl import logging

from jaxrl_llm.rollout.api import Completion, Errand, Forged, Undelivered
from jaxrl_llm.rollout.explorers.wire import Delivery, completion_row, errand_row, reference_row

_WARN_S = 60
"""Minimum seconds between two warnings about completions that were not delivered."""


class BadDelivery(Exception):
  """Raised for a delivery that a correct explorer never sends."""


class _State(enum.Enum):
  """State of an errand."""

  OPEN = 'open'
  DELIVERED = 'delivered'
  CLOSED = 'closed'
  """The engine no longer waits for the completion."""


class _Open(NamedTuple):
  """An errand whose completion the engine waits for."""

  errand: Errand
  completion: asyncio.Future[Completion]


class Errands:
  """The errands of one lease.

  Attributes:
    counts: counters, keyed by name. `direct_delivered` counts the delivered completions, and
      `direct_undelivered` those that the engine must fetch itself. `direct_repeated` and
      `direct_late` count repeated and late deliveries. Bad deliveries lack a signature
      (`direct_unsigned`), have a wrong one (`direct_forged`), or name an errand that was not given
      under this lease (`direct_unknown`).
  """

  def __init__(self, counts: collections.Counter[str]):
    self.counts = counts
    self._states: dict[str, _State] = {}
    """State of each errand, keyed by nonce."""
    self._open: dict[str, _Open] = {}

  async def deliver(self, delivery: Delivery) -> None:
    """Accepts a completion, or the reason why the explorer has none. Ignores repeated and late
    deliveries, which correct explorers send, too. Raises BadDelivery for a delivery that a correct
    explorer never sends.
    """
    nonce, state = delivery.nonce, self._states.get(delivery.nonce)
    if state is None:
      self._refuse('unknown', f'a completion for {nonce!r}, for which nobody has asked')
    if state != _State.OPEN:
      self.counts['direct_repeated' if state == _State.DELIVERED else 'direct_late'] += 1
      return
    errand, completion = self._open[nonce]
    if delivery.problem:
      self._leave(nonce, completion, f'the explorer could not fetch it: {delivery.problem}')
      return
    if not delivery.signature:
      self._refuse('unsigned', f'the completion for {nonce} has no signature')
    self._states[nonce] = _State.DELIVERED
    # If the explorer's connection breaks, this call is cancelled. The completion is accepted
    # nevertheless, because the explorer's next delivery will be ignored.
    accepting = asyncio.create_task(self._accept(errand, completion, delivery))
    # Without this, asyncio would log an exception that nobody awaits.
    accepting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.shield(accepting)

  async def _accept(
    self, errand: Errand, completion: asyncio.Future[Completion], delivery: Delivery
  ) -> None:
    """Passes a delivered completion on to the engine. Raises BadDelivery if its signature is
    wrong.
    """
    try:
      result = await errand.read(delivery.signature, delivery.answer)
    except Forged as error:
      if not completion.done():
        self._leave(delivery.nonce, completion, 'the explorer has delivered a forged one')
      self._refuse('forged', f'the completion for {delivery.nonce} is forged: {error}')
    except Exception as error:  # The front has signed the answer, so the server is at fault.
      if not completion.done():
        completion.set_exception(error)
      return
    if not completion.done():
      self.counts['direct_delivered'] += 1
      completion.set_result(result)

  def _refuse(self, how: str, why: str) -> NoReturn:
    self.counts[f'direct_{how}'] += 1
    raise BadDelivery(why)

  def _leave(self, nonce: str, completion: asyncio.Future[Completion], why: str) -> None:
    """Closes an errand, so that the engine fetches the completion itself."""
    self._states[nonce] = _State.CLOSED
    self.counts['direct_undelivered'] += 1
    logging.log_every_n_seconds(
      logging.WARNING, 'explorers: the engine fetches a completion itself: %s', _WARN_S, why
    )
    completion.set_exception(Undelivered(why))

  async def run(self, courier: RequestCourier, errand: Errand) -> Completion:
    """Has the explorer run an errand; see `Courier.fetch`."""
    completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    nonce = errand.nonce
    self._states[nonce], self._open[nonce] = _State.OPEN, _Open(errand, completion)
    courier.nonces.add(nonce)
    courier.send(errand_row(errand))
    try:
      # Wait 'completion': bounded by the errand's deadline.
      await asyncio.wait([completion], timeout=errand.deadline_s)
      if not completion.done():
        why = f'the explorer has not delivered it within {errand.deadline_s:g} s'
        self._leave(nonce, completion, why)
      return completion.result()
    finally:
      completion.cancel()  # This has no effect if the completion has arrived.
      del self._open[nonce]
      if self._states[nonce] == _State.OPEN:  # The engine's call was cancelled.
        self._states[nonce] = _State.CLOSED

  def close(self, courier: RequestCourier) -> None:
    """Closes the open errands of a request, because the explorer no longer waits for the request.
    The engine then fetches the completions itself.
    """
    for nonce in courier.nonces & self._open.keys():
      if not (completion := self._open[nonce].completion).done():
        self._leave(nonce, completion, 'the explorer no longer asks for it')


class RequestCourier:
  """Courier for the completions of one request of an explorer (`rollout.api.Courier`). The errands
  are sent to the explorer in the response to this request.

  Attributes:
    nonces: nonces of the request's errands.
  """

  def __init__(self, errands: Errands):
    self._errands, self._closed = errands, False
    self._frames: asyncio.Queue[Any] = asyncio.Queue()
    self._fetched: dict[str, np.ndarray] = {}
    """Tokens of the completions that the explorer has delivered, keyed by nonce."""
    self.nonces: set[str] = set()

  async def fetch(self, errand: Errand) -> Completion:
    if self._closed:
      raise Undelivered('the explorer no longer asks for it')
    completion = await self._errands.run(self, errand)
    self._fetched[errand.nonce] = completion.tokens
    return completion

  def send(self, frame: Any) -> None:
    """Sends a value to the explorer."""
    self._frames.put_nowait(frame)

  async def frames(self, completions: AsyncIterator[tuple[int, Completion]]) -> AsyncIterator[Any]:
    """Yields the values of the response to the explorer's request: its errands, and the completions
    of the engine with their indices. Completions that the explorer has delivered are sent without
    their arrays.
    """
    reading = asyncio.create_task(self._read(completions))
    try:
      while True:
        # Wait 'completion': bounded: the engine ends the completions, or raises an error.
        frame = await self._frames.get()
        if frame is None:
          reading.result()
          return
        yield frame
    finally:
      self._closed = True
      self._errands.close(self)
      reading.cancel()
      await asyncio.gather(reading, return_exceptions=True)

  async def _read(self, completions: AsyncIterator[tuple[int, Completion]]) -> None:
    try:
      async with contextlib.aclosing(completions):
        async for index, completion in completions:
          self.send([index, self._row(completion)])
    finally:
      self.send(None)

  def _row(self, completion: Completion) -> dict[str, Any]:
    for nonce, tokens in self._fetched.items():
      if tokens is completion.tokens:
        return reference_row(nonce, completion)
    return completion_row(completion)
