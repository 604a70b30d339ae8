"""Code of the untrusted program's process: runs the program, then answers the tests' process.

No other process trusts this one, because the program can change everything in it. The program can
reach only its own process, a socket to the tests' process (which accepts only answers and calls of
the tests' functions), and two pipes for its output.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import io
import linecache
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import Any

from .channel import Channel, ChannelClosed
from .exchange import OPERATIONS, Message, Peer
from .values import STANDARD_TYPES, TYPE_NAMES, base_of, is_array

FILE = '<program>'
_REDIRECTING = {'stdout': contextlib.redirect_stdout, 'stderr': contextlib.redirect_stderr}


def run_program(source: str, name: str) -> dict[str, Any]:
  """Runs the program's top level and returns its namespace. The program's exceptions propagate."""
  namespace = {'__name__': name, '__builtins__': __builtins__, '__file__': FILE}
  sys.argv = [FILE]
  module = types.ModuleType(name)
  module.__dict__.update(namespace)
  sys.modules[name] = module  # Dataclasses and pickle look up a class's module there.
  linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
  # dont_inherit keeps this module's __future__ imports from applying to the program.
  exec(compile(source, FILE, 'exec', dont_inherit=True), module.__dict__)
  return module.__dict__


def lines_of(error: BaseException) -> str:
  """Returns the end of the error's traceback, without frames outside the program."""
  shown = traceback.TracebackException.from_exception(error, limit=-4)
  shown.stack = traceback.StackSummary.from_list(
    [frame for frame in shown.stack if frame.filename == FILE]
  )
  return ''.join(shown.format(chain=False))[-1000:]


@functools.lru_cache(maxsize=1024)
def _operations(kind: type) -> list[str]:
  defined = functools.reduce(lambda names, base: names | vars(base), reversed(kind.__mro__), {})
  can = [name for name in OPERATIONS if defined.get(f'__{name}__') is not None]
  return can if 'iter' in can or 'getitem' not in can else [*can, 'iter']


def _inherited(kind: type, base: type) -> list[str]:
  """Returns the special methods that a class inherits unchanged from `base`."""
  first = {
    name: next((k for k in kind.__mro__ if f'__{name}__' in vars(k)), None) for name in OPERATIONS
  }
  return [name for name, defining in first.items() if defining is base]


def _describe(thing: Any) -> dict[str, Any]:
  description: dict[str, Any] = {'class': type(thing).__name__, 'can': _operations(type(thing))}
  if base := base_of(type(thing)):
    description |= {'base': base.__name__, 'inherited': _inherited(type(thing), base)}
  if isinstance(thing, types.ModuleType):
    description['module'] = thing.__name__
  elif isinstance(thing, type) and issubclass(thing, BaseException):
    description['raises'] = [kind.__name__ for kind in thing.__mro__]
  elif isinstance(thing, type) and thing in TYPE_NAMES:
    description['type'] = TYPE_NAMES[thing]
  if isinstance(thing, (type, types.FunctionType, types.BuiltinFunctionType)):
    description['standard'] = str(thing.__module__).removeprefix('_')
  return description


def _mutable(values: list[Any]) -> list[int]:
  kinds = (list, dict, set, bytearray, collections.deque)
  return [i for i, value in enumerate(values) if isinstance(value, kinds) or is_array(value)]


def _exception_of(kinds: list[str], text: str) -> BaseException:
  """Returns an exception with the given text whose class is named `kinds[0]`.

  `kinds` lists class names in MRO order. The class is the built-in exception of that name, or else
  derives from the first built-in exception in `kinds`, or from RuntimeError if there is none.
  Returns a RuntimeError instead if the class cannot be constructed from a text.
  """
  builtin_classes = [getattr(builtins, kind, None) for kind in kinds]
  base = next(
    (kind for kind in builtin_classes if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
  )
  try:
    return (base if base.__name__ == kinds[0] else type(kinds[0], (base,), {}))(text)
  except TypeError:
    return RuntimeError(text)


class Candidate:
  """Serves the program's namespace to the tests' process."""

  def __init__(self, channel: Channel, namespace: dict[str, Any]):
    self._namespace = namespace
    self._peer = Peer(channel, self._answer, self._callback)
    self._callbacks: dict[int, Any] = {}
    self._turn = threading.RLock()
    """Lock held while a function of the tests runs, so that only one such call runs at a time."""
    self._theirs: list[tuple[BaseException, int]] = []
    """Exceptions raised by the tests' functions, each with its number in the tests' process."""
    self._loop: Any = None

  def serve(self) -> None:
    self._peer.serve()

  def _answer(self, request: Message) -> Message:
    capture = {name: io.StringIO() for name in request.get('capture', ())}
    given = io.StringIO(request['stdin']) if 'stdin' in request else None
    usual = sys.stdin
    with contextlib.ExitStack() as redirected:
      for name, stream in capture.items():
        redirected.enter_context(_REDIRECTING[name](stream))
      if given is not None:
        sys.stdin = given
      reply = self._reply(request)
    if given is not None:
      sys.stdin = usual
      reply = {**reply, 'read': given.tell()}
    return (
      {**reply, 'printed': {name: stream.getvalue() for name, stream in capture.items()}}
      if capture
      else reply
    )

  def _reply(self, request: Message) -> Message:
    try:
      return self._do(request)
    except ChannelClosed:
      raise
    except BaseException as error:
      kinds = [kind.__name__ for kind in type(error).__mro__]
      plain = all(isinstance(arg, (str, int, float, type(None))) for arg in error.args)
      args = {'args': list(error.args)} if plain else {}
      attributes = (
        {name: self._pack(value) for name, value in vars(error).items()} if vars(error) else {}
      )
      details = {'text': str(error)[:500], 'lines': lines_of(error), 'attributes': attributes}
      numbers = [number for theirs, number in self._theirs if theirs is error]
      return {'raised': kinds, **details, **args, **({'number': numbers[0]} if numbers else {})}

  def _do(self, request: Message) -> Message:
    match request:
      case {'do': 'names', 'names': names}:
        return {
          'value': {
            name: self._pack(self._namespace[name]) for name in names if name in self._namespace
          }
        }
      case {'do': 'call', 'of': number, 'args': args, 'kwargs': kwargs}:
        return self._call(self._peer.lent(number), args, kwargs, whole='whole' in request)
      case {'do': 'method', 'of': number, 'name': name, 'args': args}:
        thing = self._peer.lent(number)
        method = iter if name == '__iter__' else getattr(type(thing), name, None)
        if method is None:
          return {'absent': True}
        return self._called(method(thing, *[self._peer.unpack(arg) for arg in args]))
      case {'do': 'get', 'of': number, 'name': name}:
        return self._called(getattr(self._peer.lent(number), name), whole='whole' in request)
      case {'do': 'plain', 'of': number}:
        return {'value': self._pack(self._peer.lent(number))}
      case {'do': 'set', 'of': number, 'name': name, 'to': value}:
        setattr(self._peer.lent(number), name, self._peer.unpack(value))
        return {'value': None}
      case {'do': 'delete', 'of': number, 'name': name}:
        delattr(self._peer.lent(number), name)
        return {'value': None}
      case {'do': 'instance', 'of': number, 'thing': thing}:
        return {'value': isinstance(self._peer.unpack(thing), self._peer.lent(number))}
      case {'do': 'subclass', 'of': number, 'thing': thing}:
        return {'value': issubclass(self._peer.unpack(thing), self._peer.lent(number))}
      case {'do': 'exit', 'of': number, 'raised': name, 'text': text}:
        return {'value': self._leave(self._peer.lent(number), name, text)}
      case {'do': 'await' | 'anext' | 'aenter' as operation, 'of': number}:
        thing = self._peer.lent(number)
        return {
          'value': self._pack(
            self._awaited(thing if operation == 'await' else getattr(thing, f'__{operation}__')())
          )
        }
    raise ValueError(f'unknown request {request}')

  def _call(
    self, function: Any, args: list[Any], kwargs: dict[str, Any], *, whole: bool
  ) -> Message:
    sent = [*args, *kwargs.values()]
    given = [self._peer.unpack(arg) for arg in sent]
    kept = _mutable(given)
    value = function(*given[: len(args)], **dict(zip(kwargs, given[len(args) :])))
    reply = self._called(value, whole=whole)
    changed = {i: packed for i in kept if (packed := self._pack(given[i])) != sent[i]}
    return {**reply, 'changed': changed} if changed else reply

  def _called(self, value: Any, *, whole: bool = False) -> Message:
    """Builds the reply to a call.

    An object whose class derives from a built-in type is normally sent as a value of that type.
    With `whole`, a reference to the object is sent instead.
    """
    if value is NotImplemented:
      return {'absent': True}
    return {
      'value': self._peer.lend(value, _describe)
      if whole and base_of(type(value))
      else self._pack(value)
    }

  def _pack(self, value: Any) -> Any:
    return self._peer.pack(value, _describe)

  def _leave(self, thing: Any, name: str | None, text: str) -> bool:
    error = None if name is None else _exception_of([name], text)
    details = (None if error is None else type(error), error, None)
    if hasattr(type(thing), '__exit__'):
      return bool(thing.__exit__(*details))
    return bool(self._awaited(thing.__aexit__(*details)))

  def _awaited(self, awaitable: Any) -> Any:
    """Runs the awaitable in this process's only event loop and returns its result."""
    import asyncio  # Imported late, because few programs need it.

    async def wait() -> Any:
      return await awaitable

    if self._loop is None:
      self._loop = asyncio.new_event_loop()
    return self._loop.run_until_complete(wait())

  def _callback(self, message: Message) -> Any:
    """Returns the object to which the message refers: a function of the tests, an iterator of the
    tests, or a built-in type.
    """
    if 'iter' in message:
      return self._items(message['ref'])
    if 'type' in message:
      return STANDARD_TYPES[message['type']]
    function = self._function(message['ref'])
    function.__name__ = function.__qualname__ = message['name']
    function.__doc__ = message['doc']
    return function

  def _items(self, number: int) -> Iterator[Any]:
    while part := self._function(number)():
      yield from part

  def _function(self, number: int) -> Any:
    if number not in self._callbacks:

      def callback(*args: Any, **kwargs: Any) -> Any:
        with self._turn:
          packed = {name: self._pack(arg) for name, arg in kwargs.items()}
          request = {
            'do': 'call',
            'of': number,
            'args': [self._pack(arg) for arg in args],
            'kwargs': packed,
          }
          reply = self._peer.ask(request)
          if 'value' in reply:
            return self._peer.unpack(reply['value'])
          error = _exception_of(reply['raised'], reply['text'])
          if 'number' in reply:
            self._theirs.append((error, reply['number']))
          raise error

      self._callbacks[number] = callback
      self._peer.borrow(number, callback)
    return self._callbacks[number]
