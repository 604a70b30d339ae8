"""Calls between two processes that do not trust each other. During a call, the called process may
itself call the other one.

Invariant: a request can make a process do only what its function `answer` implements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .channel import Channel
from .values import Undecodable, decode, encode

Message = Mapping[str, Any]
OPERATIONS = (
  *(
    'call',
    'iter',
    'next',
    'len',
    'str',
    'repr',
    'int',
    'float',
    'complex',
    'index',
    'abs',
    'neg',
    'pos',
    'invert',
  ),
  *(
    'round',
    'format',
    'bool',
    'reversed',
    'getitem',
    'setitem',
    'delitem',
    'contains',
    'enter',
    'exit',
  ),
  *('await', 'aiter', 'anext', 'aenter', 'aexit', 'eq', 'lt', 'le', 'gt', 'ge'),
  *(
    f'{side}{name}'
    for name in (
      'add',
      'sub',
      'mul',
      'truediv',
      'floordiv',
      'mod',
      'divmod',
      'pow',
      'matmul',
      'and',
      'or',
      'xor',
    )
    for side in ('', 'r')
  ),
  *('lshift', 'rshift', 'rlshift', 'rrshift'),
)
"""Special methods (without underscores) that one end may call on objects of the other end."""


class Peer:
  """One end of the exchange. A peer lends objects to the other end, which gets their numbers
  instead of copies. It also remembers the numbers of the objects that it has borrowed from the
  other end.

  Args:
    channel: channel to the other end.
    answer: executes a request and returns the reply.
    proxy: creates the local proxy for an object of the other end, `{'ref': number, …}`.
  """

  def __init__(
    self, channel: Channel, answer: Callable[[Message], Message], proxy: Callable[[Message], Any]
  ):
    self._channel, self._answer, self._proxy = channel, answer, proxy
    self._lent: list[Any] = []
    self._numbers: dict[int, int] = {}
    self._borrowed: dict[int, int] = {}

  def ask(self, request: Message) -> Message:
    """Sends a request and returns its reply. Answers requests of the other end while it waits."""
    self._channel.send(request)
    while True:
      message = self._channel.receive()
      if not isinstance(message, dict):
        raise Undecodable('a message is not an object')
      if 'do' not in message:
        return message
      self._channel.send(self._answer(message))

  def serve(self) -> None:
    """Answers requests. Raises ChannelClosed when the other end closes the channel."""
    while True:
      self._channel.send(self._answer(self._channel.receive()))

  def pack(self, value: Any, describe: Callable[[Any], Message]) -> Any:
    """Encodes the value as a message. Objects that cannot be sent are lent: a number and the
    description that `describe` returns are sent instead.
    """
    return encode(value, lambda thing: self.lend(thing, describe))

  def lend(self, thing: Any, describe: Callable[[Any], Message]) -> dict[str, Any]:
    """Returns a message that refers to an object by its number. Unless `thing` is a proxy for an
    object of the other end, the message also has the description that `describe` returns.
    """
    if id(thing) in self._borrowed:
      return {'yours': self._borrowed[id(thing)]}
    if id(thing) not in self._numbers:
      self._numbers[id(thing)] = len(self._lent)
      self._lent.append(thing)  # Kept alive, so that its id is not reused.
    return {'ref': self._numbers[id(thing)], **describe(thing)}

  def unpack(self, message: Any) -> Any:
    return decode(message, self._resolve)

  def lent(self, number: int) -> Any:
    if not isinstance(number, int) or not 0 <= number < len(self._lent):
      raise Undecodable(f'no object {number!r}')
    return self._lent[number]

  def borrow(self, number: int, proxy: Any) -> None:
    """Records that `proxy` represents object `number` of the other end. The caller must keep the
    proxy alive.
    """
    self._borrowed[id(proxy)] = number

  def _resolve(self, message: Message) -> Any:
    if 'yours' in message:
      return self.lent(message['yours'])
    return self._proxy(message)
