"""Proxies for the program's objects in the tests' process. An operation on a proxy is executed in
the program's process.

Invariant: the program cannot pass a test with an object that imitates the expected value. An object
that the tests got as a result (`Origin.RESULT`) accepts no operands and has no methods of standard
values, and this process decides whether it equals another object. The program therefore sees the
tests' plain values only as arguments of calls. Only an object of a class that the tests themselves
name and instantiate (`Origin.MADE`) behaves as its class defines.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from .exchange import OPERATIONS, Message
from .values import STANDARD_TYPES


class Origin(enum.Enum):
  """Way in which the tests obtained an object of the program. It decides which operations on the
  object are permitted.
  """

  NAMED = enum.auto()
  """Class that the tests name, or an attribute of such a class."""
  MADE = enum.auto()
  """Instance that the tests made by calling a class that they name, or the result of an operator on
  such instances. If an operand is a plain value or COMPUTED, the result is COMPUTED instead.
  """
  COMPUTED = enum.auto()
  """Result of an operator if one of its operands was a plain value of the tests or was itself
  COMPUTED. The program has seen that plain value.
  """
  RESULT = enum.auto()
  """Result of a call, or an object that the tests obtained as an attribute or item of another
  object or by iterating over it.
  """
  FIELD = enum.auto()
  """Object in a field of a namedtuple that the program returned."""


_TRUSTED = (Origin.NAMED, Origin.MADE)
_STANDARD_NAMES = frozenset(
  name
  for kind in STANDARD_TYPES.values()
  if kind not in (object, type, super, property, classmethod, staticmethod)
  and not issubclass(kind, BaseException)
  for name in dir(kind)
  if not name.startswith('_') and callable(getattr(kind, name))
) - {
  *(
    'add',
    'append',
    'appendleft',
    'clear',
    'discard',
    'extend',
    'extendleft',
    'insert',
    'remove',
    'reverse',
    'rotate',
  ),
  *('sort', 'update', 'difference_update', 'intersection_update', 'symmetric_difference_update'),
}
"""Names of methods with which an object could imitate a built-in value. Methods that return None
are harmless and therefore left out.
"""
_COMPARISONS = frozenset({
  *('equal', 'equals', 'eq', 'same', 'sameas', 'matches',
    'compare', 'compareto', 'identical', 'equivalent'),
  *('isclose', 'allclose', 'approx', 'almostequal',
    'approximately', 'contains', 'has', 'includes', 'all', 'any'),
})  # fmt: skip
"""Names of comparison methods, in lower case and without underscores. A prefix `is` and a suffix
`to` or `with` are ignored.
"""


def is_suspect(name: str) -> bool:
  """Returns whether a method of this name could imitate a built-in value (`_STANDARD_NAMES`) or a
  comparison (`_COMPARISONS`).
  """
  bare = name.lower().replace('_', '')
  short = bare.removesuffix('to').removesuffix('with')
  forms = {form.removeprefix(prefix) for form in (bare, short) for prefix in ('', 'is')}
  return name in _STANDARD_NAMES or not _COMPARISONS.isdisjoint(forms)


class ProgramConnection(Protocol):
  """Connection from a proxy to the program's process."""

  changes: int
  """Number of requests so far that may have changed objects of the program."""

  def call(self, remote: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

  def value(self, request: Message, origin: Origin = Origin.RESULT, name: str = '') -> Any: ...

  def pack(self, value: Any) -> Any: ...

  def is_of_named_class(self, remote: Remote) -> bool:
    """Returns whether the source of the tests mentions the class of the object `remote` by its
    name.
    """
    ...

  def compares(self, left: Remote, right: Remote) -> bool:
    """Returns whether the program's own operators, such as `==`, may compare two of its objects.
    This requires that the source of the tests mentions the classes of both objects, and that the
    tests have created at least one of the two.
    """
    ...

  def suppressible(self, error: BaseException) -> bool:
    """Returns whether `__exit__` may suppress this exception, which left a `with` block of the
    tests.
    """
    ...


class OperationRefused(TypeError):
  """Raised if the tests use an object of the program in a way that only plain values permit."""


class Remote:
  # This class has no docstring, since `__doc__` must return the docstring of the program's object.
  __slots__ = (
    *(
      '_remote_base',
      '_remote_class',
      '_remote_name',
      '_remote_number',
      '_remote_program',
      '_remote_origin',
    ),
    *('_remote_count', '_remote_stands'),
  )

  def __init__(
    self,
    program: ProgramConnection,
    number: int,
    kind: str,
    origin: Origin,
    name: str,
    stands: type | None,
  ):
    self._remote_program, self._remote_number, self._remote_class = program, number, kind
    self._remote_origin, self._remote_name, self._remote_stands = origin, name, stands
    self._remote_count: tuple[int, int] | None = None
    """(number of items, `ProgramConnection.changes`) at the last len() or complete iteration; None
    before the first one.
    """
    self._remote_base: type | None = None
    """Built-in type from which the object's class derives. None if there is no such type, or if the
    object's origin is neither MADE nor NAMED (see `Origin`).
    """

  def __getattr__(self, name: str) -> Any:
    origin = Origin.NAMED if self._remote_origin is Origin.NAMED else Origin.RESULT
    suspect = self._remote_origin not in _TRUSTED and is_suspect(name)
    if suspect and self._remote_origin is Origin.COMPUTED:
      raise AttributeError(
        f'{name} of a {self._remote_class!r} object that was computed with a value of the tests'
      )
    whole = {'whole': True} if origin is Origin.NAMED else {}
    value = self._remote_program.value(
      {'do': 'get', 'of': self._remote_number, 'name': name, **whole}, origin, name
    )
    # `callable` also covers exception classes, which are not proxies.
    if suspect and (_is_remote(value) or callable(value)):
      raise AttributeError(
        f'{name} of a {self._remote_class!r} object, which was returned in place of a plain value'
      )
    return value

  def __setattr__(self, name: str, value: Any) -> None:
    if name in Remote.__slots__:
      object.__setattr__(self, name, value)
    else:
      packed = self._remote_program.pack(value)
      self._remote_program.value(
        {'do': 'set', 'of': self._remote_number, 'name': name, 'to': packed}
      )

  def __delattr__(self, name: str) -> None:
    self._remote_program.value({'do': 'delete', 'of': self._remote_number, 'name': name})

  @property
  def __doc__(self) -> Any:
    return self.__getattr__('__doc__')

  @property
  def __class__(self) -> Any:
    return (
      types.GeneratorType if self._remote_class == 'generator' else self._remote_base or type(self)
    )

  def __reduce_ex__(self, protocol: Any) -> Any:
    raise OperationRefused(f'a {self._remote_class!r} object stays with the program')

  def __hash__(self) -> int:
    if self._remote_base is not None and self._remote_base.__hash__ is not None:
      return hash(_plain(self))
    number = (
      _ask(self, 'hash') if self._remote_program.is_of_named_class(self) else self._remote_number
    )
    if number is NotImplemented:
      raise TypeError(f'unhashable type: {self._remote_class!r}')
    return hash(('remote', number))

  def __eq__(self, other: Any) -> Any:
    if type(other) is type:
      return (
        self.__name__ == other.__name__
        if issubclass(other, Remote)
        else other is self._remote_stands
      )
    if self._remote_base is not None:
      return _plain(self) == _plain(other)
    if not _is_remote(other):
      return NotImplemented
    if other._remote_number == self._remote_number:
      return True
    return _ask(self, 'eq', other) if self._remote_program.compares(self, other) else NotImplemented

  def __bool__(self) -> bool:
    _refuse_if(self._remote_origin is Origin.COMPUTED, self, 'truth')
    value = _ask(self, 'bool')
    if value is NotImplemented:
      value = _ask(self, 'len')
      _agree(self, value)
    return value is NotImplemented or bool(value)

  def __instancecheck__(self, thing: Any) -> bool:
    """Returns whether `thing` is an instance of this class.

    A plain value is not an instance of any of the program's own classes.
    """
    if self._remote_stands is not None:
      return isinstance(thing, self._remote_stands)
    return _is_remote(thing) and self._related('instance', thing)

  def __subclasscheck__(self, thing: Any) -> bool:
    return _is_remote(thing) and self._related('subclass', thing)

  def _related(self, how: str, thing: Any) -> bool:
    packed = self._remote_program.pack(thing)
    return (
      self._remote_program.value({'do': how, 'of': self._remote_number, 'thing': packed}) is True
    )


def _is_remote(thing: Any) -> bool:
  return issubclass(type(thing), Remote)


def is_same(left: Any, right: Any) -> bool:
  """Returns whether two proxies represent the same object of the program.

  For values that are not proxies, returns `left is right`.
  """
  if _is_remote(left) and _is_remote(right):
    return left._remote_number == right._remote_number
  if type(left) is type and _is_remote(right):
    left, right = right, left
  # `right` may be the class of a proxy, or a built-in type to which `left` refers.
  return left is right or bool(_is_remote(left) and type(right) is type and left == right)


def _plain(thing: Any) -> Any:
  """Returns the plain value of an object whose class derives from a built-in type.

  Anything else is returned unchanged.
  """
  if not _is_remote(thing) or thing._remote_base is None:
    return thing
  return thing._remote_program.value({'do': 'plain', 'of': thing._remote_number})


def _inheriting(name: str) -> Callable[..., Any]:
  def method(self: Remote, *args: Any) -> Any:
    return getattr(_plain(self), f'__{name}__')(*map(_plain, args))

  return method


def _refuse_if(bad: bool, remote: Remote, what: str) -> None:
  if bad:
    raise OperationRefused(
      f'{what} of a {remote._remote_class!r} object, which was returned in place of a plain value'
    )


def _ask(remote: Remote, name: str, *args: Any, origin: Origin = Origin.RESULT) -> Any:
  program = remote._remote_program
  packed = [program.pack(arg) for arg in args]
  request = {'do': 'method', 'of': remote._remote_number, 'name': f'__{name}__', 'args': packed}
  return program.value(request, origin)


def _agree(remote: Remote, count: Any) -> None:
  """Raises OperationRefused if an object reports a different number of items than before, although
  no request can have changed it.

  Without this check, an object could report three items but yield none, and so pass a test that
  checks each item.
  """
  if remote._remote_origin in _TRUSTED or not isinstance(count, int):
    return
  now = (count, remote._remote_program.changes)
  before = remote._remote_count or now
  _refuse_if(before[1] == now[1] and before != now, remote, f'{before[0]} and {count} items')
  remote._remote_count = now


def _counted(remote: Remote, items: Iterator[Any]) -> Iterator[Any]:
  for count in itertools.count():
    try:
      # A `for` loop would require that the iterator has `__iter__`.
      item = next(items)
    except StopIteration:
      return _agree(remote, count)
    yield item


def _telling(name: str) -> Callable[..., Any]:
  """Returns a special method other than a comparison or binary operator, such as `__len__`.

  Only MADE and NAMED objects (see `Origin`) accept arguments, as in `x[0]` or `round(x, 2)`.
  """
  number = name in (
    'abs',
    'int',
    'float',
    'complex',
    'index',
    'neg',
    'pos',
    'invert',
    'round',
    'format',
  )

  def method(self: Remote, *args: Any) -> Any:
    has_operand = bool(args) and not (name == 'format' and args == ('',))
    _refuse_if(has_operand and self._remote_origin not in _TRUSTED, self, name)
    value = _ask(self, name, *args, origin=self._remote_origin if number else Origin.RESULT)
    _refuse_if(
      number and self._remote_origin is Origin.COMPUTED and not _is_remote(value), self, name
    )
    if value is NotImplemented:
      raise TypeError(f'{self._remote_class!r} object has no {name}')
    if name == 'len':
      _agree(self, value)
    used_up = hasattr(type(self), '__next__') and not hasattr(type(self), '__len__')
    if name in ('iter', 'reversed') and self._remote_origin not in _TRUSTED and not used_up:
      return _counted(self, value)
    return value

  return method


def _ordering(name: str) -> Callable[[Remote, Any], Any]:
  def method(self: Remote, other: Any) -> Any:
    if not _is_remote(other) or not self._remote_program.compares(self, other):
      return NotImplemented
    return _ask(self, name, other)

  return method


def _computing(name: str) -> Callable[[Remote, Any], Any]:
  """Returns the special method of a binary operator.

  If an operand is a plain value, the result must be an object, not a plain value. Otherwise, the
  program could return the number with which the test compares `V(2) - 3`.
  """

  def method(self: Remote, other: Any) -> Any:
    remotes = [thing for thing in (self, other) if _is_remote(thing)]
    origins = {remote._remote_origin for remote in remotes}
    if Origin.FIELD in origins or (
      self._remote_origin is Origin.RESULT and Origin.MADE not in origins
    ):
      return NotImplemented
    with_plain = len(remotes) < 2 or Origin.COMPUTED in origins
    value = _ask(self, name, other, origin=Origin.COMPUTED if with_plain else Origin.MADE)
    return NotImplemented if with_plain and not _is_remote(value) else value

  return method


def _containing(self: Remote, item: Any) -> bool:
  if (
    self._remote_origin in _TRUSTED
    and (answer := _ask(self, 'contains', item)) is not NotImplemented
  ):
    return answer is True
  return any(item is value or item == value for value in self)


def _calling(self: Remote, *args: Any, **kwargs: Any) -> Any:
  _refuse_if(self._remote_origin is Origin.FIELD, self, 'call')
  return self._remote_program.call(self, args, kwargs)


def _leaving(self: Remote, kind: type | None, error: BaseException | None, traceback: Any) -> bool:
  """Calls `__exit__` with the exception that leaves the block.

  The program cannot suppress an exception that makes a test fail.
  """
  suppressible = error is not None and self._remote_program.suppressible(error)
  raised = None if kind is None else kind.__name__
  text = str(error) if suppressible else ''
  request = {'do': 'exit', 'of': self._remote_number, 'raised': raised, 'text': text}
  return self._remote_program.value(request) is True and suppressible


def _awaiting(request: str) -> Callable[..., Any]:
  async def method(self: Remote, *args: Any) -> Any:
    return self._remote_program.value({'do': request, 'of': self._remote_number})

  return method


async def _leaving_later(
  self: Remote, kind: type | None, error: BaseException | None, traceback: Any
) -> bool:
  return _leaving(self, kind, error, traceback)


_SPECIAL = {
  'call': _calling,
  'contains': _containing,
  'exit': _leaving,
  'await': lambda self: _awaiting('await')(self).__await__(),
  'aiter': lambda self: self,
  'anext': _awaiting('anext'),
  'aenter': _awaiting('aenter'),
  'aexit': _leaving_later,
}
_ORDER = ('lt', 'le', 'gt', 'ge')
_IMPLICIT = ('eq', 'bool')
"""Operations that `Remote` itself defines, since every object supports them."""
_OPERATORS = OPERATIONS[OPERATIONS.index('add') :]


def _operation(name: str) -> Callable[..., Any]:
  if name in _SPECIAL:
    return _SPECIAL[name]
  return (_ordering if name in _ORDER else _computing if name in _OPERATORS else _telling)(name)


@functools.lru_cache(maxsize=1024)
def _remote_class(kind: str, can: frozenset[str], inherited: frozenset[str]) -> type[Remote]:
  """Returns a proxy class.

  The class has only the special methods in `can`, because `callable` and `isinstance` check which
  special methods a class has.
  """
  local = inherited - {'setitem', 'delitem', 'call'}
  methods = {
    f'__{name}__': (_inheriting if name in local else _operation)(name)
    for name in OPERATIONS
    if name in can and name not in _IMPLICIT
  }
  return type(kind, (Remote,), {'__slots__': (), '__doc__': Remote.__dict__['__doc__'], **methods})


def remote_class(kind: str, can: Iterable[Any], inherited: Iterable[Any] = ()) -> type[Remote]:
  """Returns the proxy class for the program's class `kind`.

  Args:
    can: special methods of the class; unknown names are ignored.
    inherited: special methods that the class inherits from a built-in type.
  """
  known, local = (
    frozenset(name for name in names if isinstance(name, str) and name in OPERATIONS)
    for names in (can, inherited)
  )
  return _remote_class(
    kind, known | {'contains'} if known & {'iter', 'contains'} else known, local & known
  )
