"""Errands: orders of the engine to an explorer to fetch completions directly from servers, and to
deliver them to the master.

Invariants: for each errand, at most one completion is accepted: the one whose parts the server's
front has signed for this errand, in order, if they are delivered under the errand's lease. A lease
has a limited number of errands at a time, and an errand of which no part is delivered for some time
is closed, so that an explorer can keep a limited number of places at servers, for a limited time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import enum
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import numpy as np
from absl import logging

from jaxrl_llm.core import background
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


@dataclasses.dataclass(eq=False)
class _Open:
  """An errand whose completion the engine waits for."""

  errand: Errand
  completion: asyncio.Future[Completion]
  sent: float
  """Event loop time at which the errand was sent to the explorer."""
  lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
  """Held while a delivery is checked."""


class Errands:
  """The errands of one lease. All methods are called in one event loop, which receives the messages
  of explorers.

  Attributes:
    places: number of errands that may begin now, for use in the event loop of the engine.
    counts: counters, keyed by name. `direct_delivered` counts the delivered completions, and
      `direct_undelivered` those that the engine must fetch or collect itself; of these,
      `direct_expired` are those of which the explorer delivered no recent part.
      `direct_repeated` and `direct_late` count repeated and late deliveries. Bad deliveries lack a
      signature (`direct_unsigned`), have a wrong one (`direct_forged`), or name an errand that was
      not given under this lease (`direct_unknown`).
  """

  def __init__(
    self, counts: collections.Counter[str], *, tickets: int = 64, ticket_s: float = 30.0
  ):
    """
    Args:
      tickets: see `ExplorersConfig.tickets`.
      ticket_s: see `ExplorersConfig.ticket_s`.
    """
    self.counts, self.places = counts, asyncio.Semaphore(tickets)
    self._ticket_s = ticket_s
    self._states: dict[str, _State] = {}
    """State of each errand, keyed by nonce."""
    self._open: dict[str, _Open] = {}

  async def deliver(self, delivery: Delivery) -> bool:
    """Accepts parts of a completion, or the reason why the explorer has no more. Returns whether
    the engine waits for more parts. Ignores repeated and late deliveries, which correct explorers
    send, too. Raises BadDelivery for a delivery that a correct explorer never sends.
    """
    nonce = delivery.nonce
    if nonce not in self._states:
      self._refuse('unknown', f'a completion for {nonce!r}, for which nobody has asked')
    if self._is_open(nonce):
      await self._accept(self._open[nonce], delivery)
    else:
      self._ignore(nonce)
    return self._is_open(nonce)

  def _is_open(self, nonce: str) -> bool:
    return self._states[nonce] == _State.OPEN

  def _ignore(self, nonce: str) -> None:
    repeated = self._states[nonce] in (_State.OPEN, _State.DELIVERED)
    self.counts['direct_repeated' if repeated else 'direct_late'] += 1

  async def _accept(self, entry: _Open, delivery: Delivery) -> None:
    """Adds the delivered parts to those of the errand, and passes the completion on to the engine
    if it is whole. Raises BadDelivery if a signature is wrong.
    """
    nonce, parts = delivery.nonce, entry.errand.parts
    async with entry.lock:  # Parts are checked one after the other.
      if not self._is_open(nonce):
        self._ignore(nonce)
        return
      if delivery.first > parts.count:
        self._forged(entry, f'part {delivery.first} of {nonce} before part {parts.count}')
      new = delivery.parts[parts.count - delivery.first :]
      if not new and not delivery.problem:
        self._ignore(nonce)
      for signature, part in new:
        if not signature:
          self._leave(entry, 'the explorer has delivered a part without a signature')
          self._refuse('unsigned', f'a part of the completion for {nonce} has no signature')
        try:
          completion = await parts.add(signature, part)
        except Forged as error:
          self._forged(entry, f'the completion for {nonce} is forged: {error}')
        except Exception as error:  # The front has signed the answer, so the server is at fault.
          self._end(entry, error)
          return
        if completion is not None:
          self._end(entry, completion)
          return
      if delivery.problem:
        self._leave(entry, f'the explorer could not fetch it: {delivery.problem}')

  def _end(self, entry: _Open, result: Completion | Exception) -> None:
    """Passes a delivered completion, or the error of the server that was to sample it, on to the
    engine.
    """
    if entry.completion.done():
      return
    self._states[entry.errand.nonce] = _State.DELIVERED
    if isinstance(result, Exception):
      entry.completion.set_exception(result)
    else:
      self.counts['direct_delivered'] += 1
      entry.completion.set_result(result)

  def _forged(self, entry: _Open, why: str) -> NoReturn:
    self._leave(entry, 'the explorer has delivered a forged one')
    self._refuse('forged', why)

  def _refuse(self, how: str, why: str) -> NoReturn:
    self.counts[f'direct_{how}'] += 1
    raise BadDelivery(why)

  def _leave(self, entry: _Open, why: str) -> None:
    """Closes an errand, so that the engine obtains the completion itself."""
    if entry.completion.done():
      return
    self._states[entry.errand.nonce] = _State.CLOSED
    self.counts['direct_undelivered'] += 1
    logging.log_every_n_seconds(
      logging.WARNING, 'explorers: the engine fetches a completion itself: %s', _WARN_S, why
    )
    entry.completion.set_exception(Undelivered(why))

  async def run(self, courier: RequestCourier, errand: Errand) -> Completion:
    """Has the explorer run an errand; see `Courier.fetch`."""
    courier.check_open()
    loop = asyncio.get_running_loop()
    completion: asyncio.Future[Completion] = loop.create_future()
    nonce, deadline = errand.nonce, loop.time() + errand.deadline_s
    entry = self._open[nonce] = _Open(errand, completion, loop.time())
    self._states[nonce] = _State.OPEN
    courier.nonces.add(nonce)
    courier.send(errand_row(errand))
    try:
      while not completion.done():
        now = loop.time()
        # An explorer could deliver old parts one by one, to keep its place for as long as it likes.
        until = min(deadline, entry.sent + errand.parts.age_s + self._ticket_s)
        if now < until:
          # Wait 'errand': bounded by the errand's deadline and by `ticket_s`.
          await asyncio.wait([completion], timeout=until - now)
        elif now >= deadline:
          why = f'the explorer has not delivered it within {errand.deadline_s:g} s'
          self._leave(entry, why)
        else:
          self.counts['direct_expired'] += 1
          self._leave(entry, f'the explorer has delivered no part of the last {self._ticket_s:g} s')
    finally:
      completion.cancel()  # This has no effect if the completion has arrived.
      del self._open[nonce]
      if self._is_open(nonce):  # The engine's call was cancelled.
        self._states[nonce] = _State.CLOSED
      async with entry.lock:  # No delivery is being checked when the engine goes on.
        pass
    return completion.result()

  def close(self, courier: RequestCourier) -> None:
    """Closes the open errands of a request, because the explorer no longer waits for the request.
    The engine then obtains the completions itself.
    """
    for nonce in courier.nonces & self._open.keys():
      self._leave(self._open[nonce], 'the explorer no longer asks for it')


class RequestCourier:
  """Courier for the completions of one request of an explorer (`rollout.api.Courier`). The errands
  are sent to the explorer in the response to this request.

  Attributes:
    nonces: nonces of the request's errands, for use in the event loop of the errands.
  """

  def __init__(
    self, errands: Errands, send: Callable[[Any], None], loop: asyncio.AbstractEventLoop
  ):
    """
    Args:
      send: sends a value to the explorer. It may be called in any thread.
      loop: event loop in which the methods of `errands` are called.
    """
    self._errands, self._loop, self._is_closed = errands, loop, False
    self.send = send
    self._fetched: dict[str, np.ndarray] = {}
    """Tokens of the completions that the explorer has delivered, keyed by nonce."""
    self.nonces: set[str] = set()

  @contextlib.asynccontextmanager
  async def place(self) -> AsyncIterator[None]:
    # Wait 'errand': bounded by the time limits of the lease's other errands.
    async with self._errands.places:
      self.check_open()
      yield

  async def fetch(self, errand: Errand) -> Completion:
    # Wait 'errand': bounded by the errand's deadline and by `ticket_s`.
    completion = await background.run_in(self._loop, self._errands.run(self, errand))
    self._fetched[errand.nonce] = completion.tokens
    return completion

  def check_open(self) -> None:
    """Raises Undelivered if the explorer no longer waits for the request."""
    if self._is_closed:
      raise Undelivered('the explorer no longer asks for it')

  async def rows(self, completions: AsyncIterator[tuple[int, Completion]]) -> AsyncIterator[Any]:
    """Yields the completions of the engine with their indices, as values of the response to the
    explorer's request. Completions that the explorer has delivered are sent without their arrays.
    """
    async with contextlib.aclosing(completions):
      try:
        async for index, completion in completions:
          yield [index, self._row(completion)]
      finally:
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._errands.close, self)

  def _row(self, completion: Completion) -> dict[str, Any]:
    for nonce, tokens in self._fetched.items():
      if tokens is completion.tokens:
        return reference_row(nonce, completion)
    return completion_row(completion)
