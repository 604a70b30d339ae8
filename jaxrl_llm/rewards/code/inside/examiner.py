"""The tests' process: runs them against the program, which is another process that never sees them.

Invariant: of two values one of which is the program's own object (a `Remote`), the program never says whether they are
equal or which is less when the other is a plain value: an `__eq__` that always says True passes no test. Nor does one
that was computed with a plain value (`f(x) - 3.5`) say what number it is: `abs` of it might always be 0.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from .channel import Channel, Closed
from .exchange import Message, Peer
from .values import Unreadable

FILE = '<tests>'
_MANY_ARGUMENTS = {'UnicodeDecodeError', 'UnicodeEncodeError', 'UnicodeTranslateError'}
"""Exceptions that cannot be made of a text; the built-in class above them is raised."""


class ProgramError(Exception):
  """What the program raised, where that is no ordinary exception that tests could expect."""


class Remote:
  """An object of the program's; what is done to it is done there."""

  __slots__ = ('_class', '_examiner', '_number', '_told')

  def __init__(self, examiner: Examiner, number: int, kind: str):
    self._examiner, self._number, self._class = examiner, number, kind
    self._told = False
    """Whether it was made with a plain value of the tests, as `f(x) - 3.5`, which the program then knew."""

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._examiner.call(self, args, kwargs)

  def __getattr__(self, name: str) -> Any:
    if name in _QUESTIONS and not self._examiner.trusts(self):
      raise AttributeError(f'{name} of a {self._class!r} object: asked of plain values, or of classes that tests name')
    return self._examiner.value({'do': 'get', 'of': self._number, 'name': name})

  def __setattr__(self, name: str, value: Any) -> None:
    if name in Remote.__slots__:
      object.__setattr__(self, name, value)
    else:
      self._examiner.value({'do': 'set', 'of': self._number, 'name': name, 'to': self._examiner.pack(value)})

  def __instancecheck__(self, thing: Any) -> bool:
    return self._examiner.value({'do': 'is', 'of': self._number, 'thing': self._examiner.pack(thing)}) is True

  def __hash__(self) -> int:
    return hash(('remote', self._number))


_QUESTIONS = {
  name
  for kind in (str, list, dict, set)
  for name in dir(kind)
  if name.startswith(('is', 'start', 'end', 'count', 'index'))
} | {'find', 'rfind', 'rindex', 'get', 'keys', 'values', 'items'}
"""Methods of plain values that tell something of them: an object could answer them as the tests would like it."""
_CLASSES = {'type', 'ABCMeta', 'EnumMeta', 'EnumType'}
_NUMBERS = {f'__{name}__' for name in ('abs', 'int', 'float', 'index', 'neg', 'pos', 'invert', 'round', 'len')}


def _asking(name: str) -> Any:
  """An operation that tells the program nothing of the tests' values but an index."""

  def method(self: Remote, *args: Any) -> Any:
    value = self._examiner.method(self, name, args)
    if value is NotImplemented:
      raise TypeError(f'{self._class!r} object has no {name}')
    if self._told and name in _NUMBERS:
      if not isinstance(value, Remote):
        raise TypeError(f'{name} of a {self._class!r} object that was computed with a value of the tests')
      value._told = True
    return value

  return method


def _comparing(name: str) -> Any:
  def method(self: Remote, other: Any) -> Any:
    if not isinstance(other, Remote) or not self._examiner.trusts(self, other):
      return NotImplemented
    return self._examiner.method(self, name, (other,))

  return method


def _computing(name: str) -> Any:
  """An operator; with a plain value it has to give an object again: `f(x) - 3` must not be a number of its choice."""

  def method(self: Remote, other: Any) -> Any:
    if not self._examiner.trusts(self):
      return NotImplemented
    value = self._examiner.method(self, name, (other,))
    told = self._told or not isinstance(other, Remote) or other._told
    if isinstance(value, Remote):
      value._told = value._told or told
    return NotImplemented if told and not isinstance(value, Remote) else value

  return method


def _containing(self: Remote, item: Any) -> bool:
  if not self._examiner.trusts(self):
    return any(item is value or item == value for value in self)
  return self._examiner.method(self, '__contains__', (item,)) is True


_UNARY = ('iter', 'next', 'len', 'str', 'repr', 'int', 'float', 'index', 'abs', 'neg', 'pos', 'invert')
for _name in (*_UNARY, 'getitem', 'setitem', 'delitem', 'reversed', 'enter', 'exit', 'round', 'format'):
  setattr(Remote, f'__{_name}__', _asking(f'__{_name}__'))
for _name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
  setattr(Remote, f'__{_name}__', _comparing(f'__{_name}__'))
for _name in ('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow', 'and', 'or', 'xor', 'matmul'):
  setattr(Remote, f'__{_name}__', _computing(f'__{_name}__'))
  setattr(Remote, f'__r{_name}__', _computing(f'__r{_name}__'))
Remote.__contains__ = _containing


def _truth(self: Remote) -> bool:
  if self._told:
    raise TypeError(f'truth of a {self._class!r} object that was computed with a value of the tests')
  value = self._examiner.method(self, '__bool__', ())
  if value is NotImplemented:
    value = self._examiner.method(self, '__len__', ())
  return True if value is NotImplemented else bool(value)


Remote.__bool__ = _truth


class Examiner:
  """Runs tests, each in the same namespace, over the names of the program that they use.

  Args:
    channel: to the program's process.
    entry_point: the name that `check(candidate)` gets.
  """

  def __init__(self, channel: Channel, entry_point: str | None):
    self._peer = Peer(channel, self._answer, self._proxy)
    self._entry_point = entry_point
    self._remotes: dict[int, Any] = {}
    self._exceptions: dict[str, type[Exception]] = {}
    self._named: set[str] = set()
    self.error: dict[str, Any] | None = None
    """Of the first test that failed."""

  def run(self, tests: list[str]) -> Iterator[bool]:
    """Whether each test passed, in order; a program that ends passes none of the rest."""
    namespace = {'__name__': 'tests'}
    try:
      namespace.update(self._names(tests))
    except (Closed, Unreadable) as error:
      self._note(error)
      yield from [False] * len(tests)
      return
    for test in tests:
      yield self._passes(test, namespace)

  def _passes(self, test: str, namespace: dict[str, Any]) -> bool:
    try:
      exec(compile(test, FILE, 'exec', dont_inherit=True), namespace)
    except BaseException as error:
      self._note(error)
      return False
    return True

  def _note(self, error: BaseException) -> None:
    gone = isinstance(error, (Closed, Unreadable))
    self.error = self.error or {'type': type(error).__name__, 'text': str(error)[:500], 'gone': gone}

  def _names(self, tests: list[str]) -> dict[str, Any]:
    """The program's values of the names that occur in the tests.

    A built-in function and a standard module are the tests' own, unless that is what the program is to define.
    """
    nodes = []
    for test in tests:
      try:
        nodes += ast.walk(ast.parse(test))
      except (SyntaxError, ValueError, RecursionError):
        continue  # It fails when its turn comes.
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    wanted = (named - set(dir(builtins))) | ({self._entry_point} if self._entry_point else set())
    modules = {
      node.value.id
      for node in nodes
      if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
      if node.value.id in sys.stdlib_module_names
    } - {self._entry_point}
    reply = self._peer.ask({'do': 'names', 'names': sorted(wanted)})
    found = reply.get('value')
    if not isinstance(found, dict):
      raise Unreadable('no names')
    values = {name: self._peer.unpack(packed) for name, packed in found.items() if name in wanted}
    self._named = {name for name, value in values.items() if isinstance(value, Remote) and value._class in _CLASSES}
    return values | {name: importlib.import_module(name) for name in modules & set(values)}

  def trusts(self, *remotes: Remote) -> bool:
    """Whether the tests themselves name the objects' classes, so that comparing them is the program's to define."""
    return all(remote._class in self._named for remote in remotes)

  def pack(self, value: Any) -> Any:
    if isinstance(value, Iterator) and not isinstance(value, Remote):
      return {'iter': self.pack(list(value))}
    return self._peer.pack(value, self._lend)

  def call(self, remote: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = {
      'do': 'call',
      'of': remote._number,
      'args': [self.pack(arg) for arg in args],
      'kwargs': {name: self.pack(arg) for name, arg in kwargs.items()},
    }
    reply = self._peer.ask(request)
    value = self._value(reply)
    changed = reply.get('changed')
    if isinstance(changed, dict):
      for i, arg in enumerate([*args, *kwargs.values()]):
        if str(i) in changed:
          _replace(arg, self._peer.unpack(changed[str(i)]))
    return value

  def method(self, remote: Remote, name: str, args: tuple[Any, ...]) -> Any:
    packed = [self.pack(arg) for arg in args]
    return self.value({'do': 'method', 'of': remote._number, 'name': name, 'args': packed})

  def value(self, request: Message) -> Any:
    return self._value(self._peer.ask(request))

  def _value(self, reply: Message) -> Any:
    if 'raised' in reply:
      raise self._exception(reply)
    if 'absent' in reply:
      return NotImplemented
    if 'value' not in reply:
      raise Unreadable('a reply without a value')
    return self._peer.unpack(reply['value'])

  def _exception(self, reply: Message) -> Exception:
    kinds, text = reply['raised'], str(reply.get('text'))
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
      raise Unreadable('an exception without a type')
    return self._exception_class(kinds)(text)

  def _exception_class(self, kinds: list[str]) -> type[Exception]:
    """The built-in exception, or one made to look like the program's own."""
    if kinds and kinds[0] in self._exceptions:
      return self._exceptions[kinds[0]]
    known = [getattr(builtins, kind, None) for kind in kinds if kind not in _MANY_ARGUMENTS]
    base = next((kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)), ProgramError)
    if not issubclass(base, Exception):
      return ProgramError
    if kinds and base.__name__ != kinds[0]:
      parents = [kind for kind in kinds[1:] if kind in self._exceptions]
      base = type(kinds[0], (self._exceptions[parents[0]] if parents else base,), {})
      self._exceptions[kinds[0]] = base
    return base

  def _proxy(self, message: Message) -> Any:
    match message:
      case {'module': str(name)} if name.partition('.')[0] in sys.stdlib_module_names:
        return importlib.import_module(name)
      case {'raises': [*kinds]} if all(isinstance(kind, str) for kind in kinds):
        return self._exception_class(kinds)
      case {'ref': int(number), 'class': str(kind)}:
        if number not in self._remotes:
          self._remotes[number] = Remote(self, number, kind)
          self._peer.borrow(number, self._remotes[number])
        return self._remotes[number]
    raise Unreadable('a reference to nothing')

  def _lend(self, thing: Any) -> Message:
    if not callable(thing) or isinstance(thing, type):
      raise TypeError(f'a {type(thing).__name__} of the tests cannot be handed to the program')
    return {}

  def _answer(self, request: Message) -> Message:
    """The program may call functions that it was handed, and do nothing else."""
    try:
      function = self._peer.lent(request.get('of'))
      value = function(*[self._peer.unpack(arg) for arg in request.get('args')])
      return {'value': self.pack(value)}
    except Exception as error:
      return {'raised': [type(error).__name__], 'text': str(error)[:500]}


def _replace(old: Any, new: Any) -> None:
  """What the program did to an argument in place."""
  if type(old) is list and type(new) is list:
    old[:] = new
  elif type(old) is dict and type(new) is dict:
    old.clear()
    old.update(new)
  elif type(old) is set and type(new) is set:
    old.clear()
    old |= new
  elif type(old) is bytearray and type(new) is bytearray:
    old[:] = new
