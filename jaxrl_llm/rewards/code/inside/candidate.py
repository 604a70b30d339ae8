"""The untrusted program's process: runs the program, then does what the process of its tests asks.

Nothing here is relied upon: the program can change all of it. What it can reach is its own process, a socket that only
carries answers, and two pipes for its output.
"""

from __future__ import annotations

import linecache
import sys
import traceback
import types
from typing import Any

from .channel import Channel, Closed
from .exchange import Message, Peer

FILE = '<program>'


def run_program(source: str, name: str) -> dict[str, Any]:
  """The program's namespace after its top level ran; raises what it raises."""
  namespace = {'__name__': name, '__builtins__': __builtins__}
  module = types.ModuleType(name)
  module.__dict__.update(namespace)
  sys.modules[name] = module  # As dataclasses and pickle look a class's module up there.
  linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
  exec(compile(source, FILE, 'exec', dont_inherit=True), module.__dict__)  # Without this module's __future__.
  return module.__dict__


def lines_of(error: BaseException) -> str:
  """The end of a traceback, without the frames that are not the program's."""
  shown = traceback.TracebackException.from_exception(error, limit=-4)
  shown.stack = traceback.StackSummary.from_list([frame for frame in shown.stack if frame.filename == FILE])
  return ''.join(shown.format(chain=False))[-1000:]


def _describe(thing: Any) -> dict[str, Any]:
  told: dict[str, Any] = {'class': type(thing).__name__}
  if isinstance(thing, types.ModuleType):
    told['module'] = thing.__name__
  elif isinstance(thing, type) and issubclass(thing, BaseException):
    told['raises'] = [kind.__name__ for kind in thing.__mro__]
  return told


def _mutable(values: list[Any]) -> list[int]:
  return [i for i, value in enumerate(values) if isinstance(value, (list, dict, set, bytearray))]


class Candidate:
  """Serves the program's namespace."""

  def __init__(self, channel: Channel, namespace: dict[str, Any]):
    self._namespace = namespace
    self._peer = Peer(channel, self._answer, self._callback)
    self._callbacks: dict[int, Any] = {}

  def serve(self) -> None:
    self._peer.serve()

  def _answer(self, request: Message) -> Message:
    try:
      return self._do(request)
    except Closed:
      raise
    except BaseException as error:
      kinds = [kind.__name__ for kind in type(error).__mro__]
      return {'raised': kinds, 'text': str(error)[:500], 'lines': lines_of(error)}

  def _do(self, request: Message) -> Message:
    match request:
      case {'do': 'names', 'names': names}:
        return {'value': {name: self._pack(self._namespace[name]) for name in names if name in self._namespace}}
      case {'do': 'call', 'of': number, 'args': args, 'kwargs': kwargs}:
        return self._call(self._peer.lent(number), args, kwargs)
      case {'do': 'method', 'of': number, 'name': name, 'args': args}:
        thing = self._peer.lent(number)
        method = getattr(type(thing), name, None)
        if method is None:
          return {'absent': True}
        return self._called(method(thing, *[self._peer.unpack(arg) for arg in args]))
      case {'do': 'get', 'of': number, 'name': name}:
        return {'value': self._pack(getattr(self._peer.lent(number), name))}
      case {'do': 'set', 'of': number, 'name': name, 'to': value}:
        setattr(self._peer.lent(number), name, self._peer.unpack(value))
        return {'value': None}
      case {'do': 'is', 'of': number, 'thing': thing}:
        return {'value': isinstance(self._peer.unpack(thing), self._peer.lent(number))}
    raise ValueError(f'unknown request {request}')

  def _call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Message:
    sent = [*args, *kwargs.values()]
    given = [self._peer.unpack(arg) for arg in sent]
    kept = _mutable(given)
    reply = self._called(function(*given[: len(args)], **dict(zip(kwargs, given[len(args) :]))))
    changed = {i: packed for i in kept if (packed := self._pack(given[i])) != sent[i]}
    return {**reply, 'changed': changed} if changed else reply

  def _called(self, value: Any) -> Message:
    return {'absent': True} if value is NotImplemented else {'value': self._pack(value)}

  def _pack(self, value: Any) -> Any:
    return self._peer.pack(value, _describe)

  def _callback(self, message: Message) -> Any:
    """A function of the tests', which the program may call; or an iterator."""
    if 'iter' in message:
      return iter(self._peer.unpack(message['iter']))
    number = message['ref']
    if number not in self._callbacks:

      def callback(*args: Any) -> Any:
        reply = self._peer.ask({'do': 'call', 'of': number, 'args': [self._pack(arg) for arg in args]})
        if 'value' not in reply:
          raise RuntimeError(reply['text'])
        return self._peer.unpack(reply['value'])

      self._callbacks[number] = callback
      self._peer.borrow(number, callback)
    return self._callbacks[number]
