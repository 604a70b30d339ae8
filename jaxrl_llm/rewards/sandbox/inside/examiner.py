"""Code of the tests' process. It runs the tests of a program. The program itself runs in another
process and never sees the tests.

Invariant: the program cannot cheat. A verdict depends only on plain values that are rebuilt in this
process and on permitted uses of the program's objects (`inside.remote`). The program's messages can
name only those modules, classes and functions of this process that are listed here. The program
cannot end an iteration of the tests early, and cannot make a failure look like an exception that
the tests catch. A test fails if the program ends during the test or sends an invalid message.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .channel import Channel, ChannelClosed
from .exchange import Message, Peer
from .names import raises_by_itself, read_names, with_identity
from .remote import Origin, Remote, is_same, is_suspect, remote_class
from .values import STANDARD_TYPES, TYPE_NAMES, Undecodable, is_array

_ALIASED = frozenset({
  *('bisect', 'calendar', 'cmath', 'collections', 'copy',
    'datetime', 'decimal', 'fractions', 'functools', 'heapq'),
  *('itertools', 'json', 'math', 'operator', 'random', 're',
    'statistics', 'string', 'textwrap', 'time'),
})  # fmt: skip
"""Modules that only compute and are therefore harmless. Tests may use them under the names by which
the program imports them (`import datetime as dt`).
"""
_LIBRARIES = {
  'np': 'numpy', 'numpy': 'numpy', 'pd': 'pandas', 'pandas': 'pandas', 'sympy': 'sympy',
}  # fmt: skip
"""Libraries that may have been loaded before sandboxes were forked, keyed by the names under which
tests use them without an import.
"""
_GROUPS = {'ExceptionGroup', 'BaseExceptionGroup'}
"""Exception classes that cannot be constructed from a text. If the program raises one of them, the
tests get an exception of the next built-in class in its MRO instead, such as `Exception`.
"""
_UNICODE = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
"""Exception classes that cannot be constructed from a text, unless a subclass overrides
`__init__`.
"""
_ENDS = {'StopIteration', 'StopAsyncIteration'}
"""Exceptions that end an iteration silently. If the program's `f` could raise one in the tests,
`all(map(f, …))` would end early and be true.
"""
_EVERY = {'AssertionError', 'Exception', 'BaseException'}
"""Exception classes that would also catch the failure of a test. If a name of the program denotes
one of them (`Own = Exception`), the tests get a new class of the same name instead, so that
`except Own` in a test cannot catch the test's own failure.
"""

_READING = frozenset(
  {'__len__', '__iter__', '__next__', '__reversed__', '__bool__', '__str__', '__repr__', '__eq__'}
)
"""Special methods that do not change their object."""
_IS_SAME = '__is_same__'
"""Name of `is_same` in the tests' namespace. The program cannot replace it, since names with two
leading underscores are never requested from the program.
"""
_MOST_RAISED = 1000
"""Maximum number of exceptions of the tests' functions that are kept. The number is limited because
each exception keeps other objects alive.
"""
_SHOWN = '_shown'
"""Name of the attribute in which an exception stores its text, if its arguments do not determine
the text.
"""


class ProgramError(BaseException):
  """Stands for an exception of the program whose class has no built-in base class that tests may
  catch.

  It is a BaseException, so that `except Exception` in a test does not catch it.
  """


class Examiner:
  """Runs tests in one namespace, which contains the program's values for the names that the tests
  use.

  Args:
    channel: channel to the program's process.
    entry_point: name of the function passed to `check(candidate)`.
  """

  def __init__(self, channel: Channel, entry_point: str | None):
    self._peer = Peer(channel, self._answer, self._proxy)
    self._entry_point = entry_point
    self._remotes: dict[tuple[int, Origin, str], Any] = {}
    self._exceptions: dict[str, type[BaseException]] = {}
    self._classes: set[str] = set()
    """Names of the program's classes that the tests use."""
    self._names = read_names((), entry_point)
    self._tests: list[str] = []
    self._streams = {'stdout': sys.stdout, 'stderr': sys.stderr}
    self._turn = threading.RLock()
    self.changes = 0
    self._raised: list[Exception] = []
    """Exceptions that functions of the tests raised when the program called them. If the
    program does not catch such an exception, the tests get the same exception back.
    """
    self._failure: BaseException | None = None
    """Error that makes the current test fail, even if the test has caught it."""
    self.error: dict[str, Any] | None = None
    """Error of the first test that failed; None if no test has failed."""

  def run(self, tests: list[str]) -> Iterator[bool]:
    """Yields for each test, in order, whether it passed. A test that needs the program fails once
    the program has ended.
    """
    self._tests = tests
    self._names = read_names(tests, self._entry_point)
    namespace = {'__name__': 'tests', _IS_SAME: is_same}
    namespace |= {
      name: sys.modules[library] for name, library in _LIBRARIES.items() if library in sys.modules
    }
    try:
      namespace.update(self._named())
    except Exception as error:
      self._note(error)
      yield from [False] * len(tests)
      return
    for number, test in enumerate(tests):
      yield self._passes(number, test, namespace)

  def _passes(self, number: int, test: str, namespace: dict[str, Any]) -> bool:
    self._failure = None
    try:
      exec(
        compile(with_identity(test, _IS_SAME), _file(number), 'exec', dont_inherit=True), namespace
      )
    except BaseException as error:
      self._note(self._failure or error)
      return False
    if self._failure is not None:
      self._note(self._failure)
    return self._failure is None

  def _note(self, error: BaseException) -> None:
    gone = isinstance(error, (ChannelClosed, Undecodable))
    self.error = self.error or {
      'type': type(error).__name__[:100],
      'text': str(error)[:500],
      'gone': gone,
    }

  @contextlib.contextmanager
  def _fatal(self) -> Iterator[None]:
    """Makes the current test fail if the program ends or sends an invalid message within the block.

    The test fails even if it catches the error.
    """
    try:
      yield
    # All exceptions here fail the test, even a MemoryError from a huge reply.
    except Exception as error:
      self._failure = self._failure or error
      raise

  def _named(self) -> dict[str, Any]:
    """Returns the program's values for the names that occur in the tests.

    The name of a built-in function means Python's function, unless the tests expect the program to
    define it. The name of a standard module means Python's module, unless the tests use attributes
    that the module lacks.
    """
    values = self._ask_names(self._names.wanted)
    # If the tests call a name that the program defines, the name means the function to be tested,
    # even if the tests define it later. Built-in names then mean Python's own functions.
    if (
      self._names.ambiguous
      and not (values.keys() & self._names.called) - self._names.modules.keys()
    ):
      values |= self._ask_names(self._names.ambiguous)
    return {name: self._name(name, packed) for name, packed in values.items()}

  def _ask_names(self, names: frozenset[str]) -> dict[str, Any]:
    values = self._peer.ask({'do': 'names', 'names': sorted(names)}).get('value')
    if not isinstance(values, dict):
      raise Undecodable('no names')
    return {name: packed for name, packed in values.items() if name in names}

  def _name(self, name: str, packed: Any) -> Any:
    used = self._names.modules.get(name)
    if used is not None and name != self._entry_point:
      with contextlib.suppress(ImportError):  # Some modules exist only on other systems.
        module = importlib.import_module(name)
        if used <= set(dir(module)):
          return module
    if name in self._names.standard:
      return getattr(importlib.import_module(self._names.standard[name]), name)
    description = packed if isinstance(packed, dict) else {}
    if _is_harmless(description.get('module')) and 'ref' in description:
      return importlib.import_module(description['module'])
    if (
      _is_harmless(description.get('standard'))
      and 'ref' in description
      and name != self._entry_point
      and not name.startswith('_')
    ):
      module = importlib.import_module(description['standard'])
      if hasattr(module, name):
        return getattr(module, name)
    if not self._names.is_class(name):
      return self._rebuilt(packed)
    if 'ref' in description and 'raises' not in description:
      self._classes.add(name)
    return self._rebuilt(packed, Origin.NAMED, name)

  def is_of_named_class(self, remote: Remote) -> bool:
    return remote._remote_class in self._classes

  def compares(self, left: Remote, right: Remote) -> bool:
    """Returns whether the program's own operators, such as `==`, may compare two of its objects.
    The tests must name the classes of both objects and must have created at least one of the
    objects.
    """
    made = {Origin.MADE, Origin.COMPUTED, Origin.NAMED} & {
      left._remote_origin,
      right._remote_origin,
    }
    return bool(made) and self.is_of_named_class(left) and self.is_of_named_class(right)

  def suppressible(self, error: BaseException) -> bool:
    """Returns whether the tests raised the error on purpose, so that context managers may suppress
    it.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
      place = place.tb_next
    files = {_file(number): test for number, test in enumerate(self._tests)}
    if place is None or self._failure is not None or isinstance(error, AssertionError):
      return False
    test = files.get(place.tb_frame.f_code.co_filename)
    return (
      isinstance(error, Exception) and test is not None and raises_by_itself(test, place.tb_lineno)
    )

  def pack(self, value: Any) -> Any:
    if issubclass(type(value), Iterator) and not issubclass(type(value), Remote):
      return self._peer.lend(_in_parts(value), lambda parts: {'iter': True})
    return self._peer.pack(value, self._lend)

  def call(self, remote: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    constructs = remote._remote_origin is Origin.NAMED and self._names.is_class(remote._remote_name)
    request = {
      'do': 'call',
      'of': remote._remote_number,
      'args': [self.pack(arg) for arg in args],
      'kwargs': {name: self.pack(arg) for name, arg in kwargs.items()},
    }
    reply = self._ask({**request, 'whole': True} if constructs else request)
    value = self._value(reply, Origin.MADE if constructs else Origin.RESULT)
    changed = reply.get('changed')
    if isinstance(changed, dict):
      for i, arg in enumerate([*args, *kwargs.values()]):
        if str(i) in changed:
          _replace(arg, self._rebuilt(changed[str(i)]))
    return value

  def value(self, request: Message, origin: Origin = Origin.RESULT, name: str = '') -> Any:
    ends = request.get('name') == '__next__' or request['do'] == 'anext'
    return self._value(self._ask(request), origin, name, ends=ends)

  def _ask(self, request: Message) -> Message:
    """Sends a request to the program. If the tests have replaced standard streams, the program's
    input and output use the replacements.
    """
    capture = [
      name for name, stream in self._streams.items() if getattr(sys, name) not in (stream, None)
    ]
    given = sys.stdin if isinstance(sys.stdin, io.StringIO) else None
    if given is not None:
      request = {**request, 'stdin': given.getvalue()[given.tell() :]}
    if (
      request['do'] not in ('get', 'plain', 'instance', 'subclass')
      and request.get('name') not in _READING
    ):
      self.changes += 1
    with self._turn, self._fatal():
      reply = self._peer.ask({**request, 'capture': capture} if capture else request)
    if given is not None and isinstance(reply.get('read'), int):
      given.seek(given.tell() + max(0, reply['read']))
    printed = reply.get('printed')
    for name in capture:
      if isinstance(printed, dict) and isinstance(printed.get(name), str):
        getattr(sys, name).write(printed[name])
    return reply

  def _value(self, reply: Message, origin: Origin, name: str = '', *, ends: bool = False) -> Any:
    if 'raised' in reply:
      raise self._exception(reply, ends=ends)
    if 'absent' in reply:
      return NotImplemented
    with self._fatal():
      if 'value' not in reply:
        raise Undecodable('a reply without a value')
    return self._rebuilt(reply['value'], origin, name)

  def _rebuilt(self, message: Any, origin: Origin = Origin.RESULT, name: str = '') -> Any:
    """Rebuilds the value in a message. If the value is itself an object of the program, its proxy
    gets `origin`. The proxies of objects inside a list or another value get `Origin.RESULT`.
    """
    with self._fatal():
      if isinstance(message, dict) and 'ref' in message:
        return self._proxy(message, origin, name)
      return self._peer.unpack(message)

  def _exception(self, reply: Message, *, ends: bool) -> BaseException:
    kinds, text, args = reply['raised'], str(reply.get('text')), reply.get('args')
    with self._fatal():
      if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise Undecodable('an exception without a type')
    if _ENDS & set(kinds):
      stop = next(kind for kind in kinds if kind in _ENDS)
      return getattr(builtins, stop)() if ends else RuntimeError(f'the program raised {stop}')
    number = reply.get('number')
    if isinstance(number, int) and 0 <= number < len(self._raised):
      return self._raised[number]
    kind = self._exception_class(kinds)
    plain = isinstance(args, list) and all(
      isinstance(arg, (str, int, float, type(None))) for arg in args
    )
    theirs = kind.__module__ != 'builtins'
    error = None
    if plain and kinds and (theirs or kind.__name__ == kinds[0]):
      with contextlib.suppress(TypeError):
        error = kind(*args)
    error = kind(text) if error is None else error
    attributes = reply.get('attributes')
    if isinstance(attributes, dict) and theirs:
      vars(error).update(
        (name, self._rebuilt(value))
        for name, value in attributes.items()
        if not name.startswith('_')
      )
    if theirs and not str(error).startswith(text):  # The program's class has its own `__str__`.
      vars(error)[_SHOWN] = text
    return error

  def _exception_class(self, kinds: list[str]) -> type[BaseException]:
    """Returns the class that stands in, in this process, for an exception class of the program.

    It is a built-in class, `ProgramError`, or a new class of the same name that is derived from the
    known class that matches best.

    Args:
      kinds: names of the program's class and its bases, in MRO order.
    """
    if kinds and kinds[0] in self._exceptions:
      return self._exceptions[kinds[0]]
    builtin_classes = [
      getattr(builtins, kind, None) for kind in kinds if kind not in _GROUPS | _ENDS
    ]
    base = next(
      (
        kind
        for kind in builtin_classes
        if isinstance(kind, type) and issubclass(kind, BaseException)
      ),
      ProgramError,
    )
    if not issubclass(base, (Exception, SystemExit, KeyboardInterrupt)):
      return ProgramError
    if kinds and (base.__name__ != kinds[0] or base in _UNICODE):
      parents = [self._exceptions[kind] for kind in kinds[1:] if kind in self._exceptions]
      standard = _standard_exception(kinds)
      base = standard or (parents[0] if parents else base)
      show = base.__str__
      methods = {
        '__str__': lambda error: vars(error)[_SHOWN] if _SHOWN in vars(error) else show(error)
      }
      # The constructor of the base class might refuse a single text as its only argument.
      if standard or issubclass(base, _UNICODE):
        methods['__init__'] = Exception.__init__
      base = type(kinds[0], (base,), methods)
      self._exceptions[kinds[0]] = base
    return base

  def _caught_class(self, kinds: list[str]) -> type[BaseException]:
    """Returns the class that a test gets when it names an exception class of the program, as in
    `except Own`.
    """
    if kinds and kinds[0] in _EVERY and kinds[0] not in self._exceptions:
      self._exceptions[kinds[0]] = type(kinds[0], (Exception,), {})
    return self._exception_class(kinds)

  def _proxy(self, message: Message, origin: Origin = Origin.RESULT, name: str = '') -> Any:
    match message:
      case {'raises': [*_], 'field': field} if is_suspect(str(field)):
        raise Undecodable(
          f'a class in the field {field}, where a method of a standard value was wanted'
        )
      case {'raises': [*kinds]} if all(isinstance(kind, str) for kind in kinds):
        return self._caught_class(kinds)
      case {'ref': int(number), 'class': str(kind), 'can': [*can]}:
        origin = Origin.FIELD if 'field' in message else origin
        key = (number, origin, name if origin is Origin.NAMED else '')
        if key not in self._remotes:
          stands = STANDARD_TYPES.get(str(message.get('type')))
          if kind == 'coroutine':
            made = self._coroutine(number)
          else:
            base = STANDARD_TYPES.get(str(message.get('base')))
            inherited = message.get('inherited') if base is not None else ()
            made = remote_class(kind, can, inherited if isinstance(inherited, list) else ())(
              self, number, kind, *key[1:], stands
            )
            made._remote_base = base if origin in (Origin.MADE, Origin.NAMED) else None
          self._remotes[key] = made
          self._peer.borrow(number, made)
        return self._remotes[key]
    raise Undecodable('a reference to nothing')

  async def _coroutine(self, number: int) -> Any:
    return self.value({'do': 'await', 'of': number})

  def _lend(self, thing: Any) -> Message:
    if issubclass(type(thing), type) and thing in TYPE_NAMES:
      return {'type': TYPE_NAMES[thing]}
    if not callable(thing) or isinstance(thing, type):
      raise TypeError(f'a {type(thing).__name__} of the tests cannot be handed to the program')
    # The program gets the name and docstring of a function of the tests, because `functools.wraps`
    # copies them.
    name, doc = (getattr(thing, f'__{what}__', None) for what in ('name', 'doc'))
    return {
      'name': name if isinstance(name, str) else 'function',
      'doc': doc if isinstance(doc, str) else None,
    }

  def _answer(self, request: Message) -> Message:
    """Answers a request of the program. The program may only call functions and read iterators that
    the tests have passed to it.
    """
    try:
      function = self._peer.lent(request.get('of'))
      args, kwargs = request.get('args'), request.get('kwargs', {})
      args = [self._peer.unpack(arg) for arg in args]
      value = function(*args, **{str(name): self._peer.unpack(arg) for name, arg in kwargs.items()})
      return {'value': self.pack(value)}
    except BaseException as error:
      if isinstance(error, AssertionError):
        self._failure = self._failure or error
      raised = {'raised': [kind.__name__ for kind in type(error).__mro__], 'text': str(error)[:500]}
      ends = not isinstance(error, Exception) or _ENDS & set(raised['raised'])
      if ends or len(self._raised) == _MOST_RAISED:
        return raised
      self._raised.append(error)
      return {**raised, 'number': len(self._raised) - 1}


def _standard_exception(kinds: list[str]) -> type[Exception] | None:
  """Returns the standard-library exception class whose MRO has the names `kinds`. Tests may catch
  it as `module.Name`.

  Returns None if no module that is already loaded has such a class.
  """
  for name in sorted(_ALIASED | {'dataclasses', 'queue'}):
    kind = getattr(sys.modules.get(name), kinds[0], None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__name__ == kinds[0]:
      return kind if [base.__name__ for base in kind.__mro__] == kinds else None
  return None


def _is_harmless(module: Any) -> bool:
  """Returns whether the tests may use the module under the name by which the program imports it."""
  return module in _ALIASED or (
    isinstance(module, str)
    and module in sys.modules
    and module.partition('.')[0] in _LIBRARIES.values()
  )


def _in_parts(items: Iterator[Any]) -> Callable[[], list[Any]]:
  """Returns a function whose calls return the next items as lists, and an empty list at the end.

  The first lists have one item each, because the program may need only a few items.
  """
  sizes = itertools.chain(
    itertools.repeat(1, 64), (1 << n for n in range(12)), itertools.repeat(1 << 12)
  )
  return lambda: list(itertools.islice(items, next(sizes)))


def _file(number: int) -> str:
  return f'<tests {number}>'


def _replace(old: Any, new: Any) -> None:
  """Replaces the content of `old`, an argument that a test passed, with the content of `new`.

  The program has changed its copy of the argument, and `new` is the changed copy.
  """
  if type(old) is not type(new):
    return
  if isinstance(old, (list, bytearray)):
    old[:] = new
  elif isinstance(old, (dict, set)):
    old.clear()
    old.update(new)
  elif is_array(old):
    if (old.shape, old.dtype) == (new.shape, new.dtype):
      old[...] = new
  elif hasattr(old, 'extendleft'):
    old.clear()
    old.extend(new)
