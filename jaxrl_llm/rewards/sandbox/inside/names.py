"""Classifies the names in tests: which of them belong to the program, and which of those are
classes.

Invariant: the classification depends only on the source of the tests. The program must not affect
it, because it decides how far each object of the program is trusted.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import re
import sys
from collections.abc import Iterable

_BUILTINS = frozenset(dir(builtins))
_FOREIGN = frozenset({'np', 'numpy', 'pd', 'pandas', 'pytest', 'scipy', 'tf', 'torch'})
"""Names that mean a library in tests, even if the sandbox lacks the library."""
_COMPARING = {'isclose': 'math', 'fabs': 'math', 'deepcopy': 'copy'}
_CONTAINERS = {'Counter': 'collections', 'OrderedDict': 'collections', 'deque': 'collections'}
"""Modules of standard classes, keyed by class name. Tests convert results to these classes before
they compare them.
"""
_CLASS_NAME = re.compile(r'_*[A-Z][A-Za-z0-9]*')


@dataclasses.dataclass(frozen=True)
class Names:
  """Names that the tests use and that the program may have to provide.

  Attributes:
    wanted: names that the program may define. A built-in name is among them only if it is the entry
      point.
    ambiguous: names of built-in functions that the tests call and that the program may have
      redefined. It is empty if the tests use any other name that the program could define.
    modules: attributes of standard modules that the tests use, keyed by module name.
    standard: module of each standard function or class that the tests use to compare results, keyed
      by the name of the function or class: {'Counter': 'collections'}.
    functions: names of functions (not classes) whose results the tests compare with plain values.
    called: names that the tests call. A name such as `Shapes` also counts if all its uses have a
      capitalised attribute (`Shapes.Circle`), because it then names a class or a namespace.
  """

  wanted: frozenset[str]
  ambiguous: frozenset[str]
  modules: dict[str, frozenset[str]]
  standard: dict[str, str]
  functions: frozenset[str]
  called: frozenset[str]

  def is_class(self, name: str) -> bool:
    """Returns whether the tests use a name as the name of a class.

    The name must be capitalised, and the tests must not use it as a function. A name that consists
    entirely of capital letters counts as a constant, unless the tests call it.
    """
    written = _CLASS_NAME.fullmatch(name) is not None and (
      name in self.called or not name.isupper()
    )
    return written and name not in self.functions


def read_names(tests: Iterable[str], entry_point: str | None) -> Names:
  """Reads the names in the tests. A test that cannot be parsed adds no names and fails when it is
  run.
  """
  trees = []
  for test in tests:
    try:
      trees.append(ast.parse(test))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
      continue
  nodes = [node for tree in trees for node in ast.walk(tree)]
  used = {node.id for node in nodes if isinstance(node, ast.Name) and not node.id.startswith('__')}
  bound = _bound(nodes)
  wanted = (used - _BUILTINS - _FOREIGN) | ({entry_point} if entry_point else set())
  modules: dict[str, set[str]] = {}
  for node in nodes:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      name = node.value.id
      # The name of a standard module refers to that module, even if the tests import it only later.
      if name in sys.stdlib_module_names and name != entry_point:
        modules.setdefault(name, set()).add(node.attr)
  # If the tests use any name that only the program can define, built-in names refer to Python's own
  # functions.
  free = wanted - bound - modules.keys()
  of_program = {entry_point} if entry_point else free
  ambiguous = set() if of_program else {name for tree in trees for name in _called_builtin(tree)}
  comparing = {name: module for name, module in _COMPARING.items() if of_program - {name}}
  comparing |= {name: _CONTAINERS[name] for name in _around_calls(nodes) & _CONTAINERS.keys()}
  return Names(
    wanted=frozenset(wanted),
    ambiguous=frozenset(ambiguous),
    modules={name: frozenset(attributes) for name, attributes in modules.items()},
    standard={name: module for name, module in comparing.items() if name != entry_point},
    functions=_functions(nodes),
    called=_called(nodes),
  )


def _bound(nodes: list[ast.AST]) -> set[str]:
  """Returns the names that the tests themselves assign, import or define anywhere."""
  bound = set()
  for node in nodes:
    match node:
      case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
        bound.add(name)
      case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
        bound.add(name)
      case ast.ExceptHandler(name=str(name)):
        bound.add(name)
      case ast.alias():
        bound.add((node.asname or node.name).partition('.')[0])
  return bound


def _called_builtin(test: ast.AST) -> list[str]:
  """Finds the first call of a built-in function whose arguments contain no other such call.

  Returns a list with the function's name; the list is empty if there is no such call.
  """

  def calls(node: ast.AST) -> list[ast.Call]:
    return [
      part
      for part in ast.walk(node)
      if isinstance(part, ast.Call)
      and isinstance(part.func, ast.Name)
      and part.func.id in _BUILTINS
    ]

  inner = [
    call for call in calls(test) if not any(calls(part) for part in (*call.args, *call.keywords))
  ]
  return [
    call.func.id for call in sorted(inner, key=lambda call: (call.lineno, call.col_offset))[:1]
  ]


def _around_calls(nodes: list[ast.AST]) -> set[str]:
  """Returns the names of functions that the tests call with an argument that contains another call:
  `Counter` for `Counter(solve(3))`.

  Calls of built-in functions in an argument do not count.
  """
  names = set()
  for node in nodes:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      parts = [part for argument in (*node.args, *node.keywords) for part in ast.walk(argument)]
      called = {
        part.func.id if isinstance(part.func, ast.Name) else ''
        for part in parts
        if isinstance(part, ast.Call)
      }
      if called - _BUILTINS - {node.func.id}:
        names.add(node.func.id)
  return names


def _called(nodes: list[ast.AST]) -> frozenset[str]:
  functions = [node.func for node in nodes if isinstance(node, ast.Call)]
  called = {function.id for function in functions if isinstance(function, ast.Name)}
  called |= {function.attr for function in functions if isinstance(function, ast.Attribute)}
  spaces = [
    node.value.id
    for node in nodes
    if isinstance(node, ast.Attribute)
    and isinstance(node.value, ast.Name)
    and node.attr[:1].isupper()
  ]
  used = collections.Counter(node.id for node in nodes if isinstance(node, ast.Name))
  return frozenset(
    called | {name for name, count in collections.Counter(spaces).items() if count == used[name]}
  )


_DISPLAYS = ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.ListComp | ast.JoinedStr


def _functions(nodes: list[ast.AST]) -> frozenset[str]:
  """Returns the names of functions and methods whose results the tests compare with constants or
  containers.

  In comparisons with `in`, only a container of constants counts, since tests may also search a
  container of objects for an object.
  """
  names = set()
  for node in nodes:
    if isinstance(node, ast.Compare):
      for left, operator, right in zip(
        [node.left, *node.comparators], node.ops, node.comparators, strict=False
      ):
        among = isinstance(operator, ast.In | ast.NotIn)
        for called, other in [(left, right)] if among else [(left, right), (right, left)]:
          if (
            not isinstance(called, ast.Call)
            or not _is_plain(other)
            or (among and not _has_constants(other))
          ):
            continue
          if isinstance(called.func, ast.Name | ast.Attribute):
            names.add(called.func.id if isinstance(called.func, ast.Name) else called.func.attr)
  return frozenset(names | _passed_as(names, nodes))


def _passed_as(others: set[str], nodes: list[ast.AST]) -> set[str]:
  """Returns the names that the tests also use under another name.

  An assignment such as `candidate = Extract` gives `Extract` the name `candidate`. A call
  `check(Extract)` of a test function `def check(candidate)` has the same effect. If `candidate` is
  in `others`, the result contains `Extract`.

  Args:
    others: names to look for on the left side of assignments and among parameters.
    nodes: syntax tree nodes of the tests.
  """
  functions = {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef)}
  pairs = []
  for node in nodes:
    match node:
      case ast.Call(func=ast.Name(id=name), args=args) if name in functions:
        pairs += zip((parameter.arg for parameter in functions[name].args), args, strict=False)
      case ast.Assign(targets=[ast.Name(id=name)], value=value):
        pairs.append((name, value))
  return {value.id for name, value in pairs if name in others and isinstance(value, ast.Name)}


def _is_plain(node: ast.AST) -> bool:
  if isinstance(node, ast.UnaryOp):
    return isinstance(node.operand, ast.Constant)
  return isinstance(node, _DISPLAYS) and not (isinstance(node, ast.Constant) and node.value is None)


def _has_constants(display: ast.AST) -> bool:
  """Returns whether a display (the source of a list, tuple, set or dict, such as `[1, x]`) contains
  constants, at any depth. In a dict, only the keys count.
  """
  nodes = [display]
  while nodes:
    match nodes.pop():
      case ast.Constant(value=value) if value is not None:
        return True
      case ast.Dict(keys=keys):
        nodes += filter(None, keys)
      case node if not isinstance(node, ast.Call):  # A call's arguments are not elements.
        nodes += ast.iter_child_nodes(node)
  return False


def _is_identity(node: ast.AST) -> bool:
  """Returns whether the node is `left is right` or `left is not right`, and neither side is a
  constant.
  """
  return (
    isinstance(node, ast.Compare)
    and len(node.ops) == 1
    and isinstance(node.ops[0], ast.Is | ast.IsNot)
    and not any(isinstance(side, ast.Constant) for side in (node.left, *node.comparators))
  )


def with_identity(test: str, function: str) -> ast.Module:
  """Parses the test and replaces `left is right` with a call of `function`.

  The call is necessary because one object of the program may have two proxies. Raises the same
  errors as `compile`.
  """
  tree = ast.parse(test)
  identities = [node for node in ast.walk(tree) if _is_identity(node)]
  for node in identities:
    name = ast.copy_location(ast.Name(id=function, ctx=ast.Load()), node)
    call = ast.copy_location(
      ast.Call(func=name, args=[node.left, *node.comparators], keywords=[]), node
    )
    # The comparison becomes `True is f(left, right)`. Comparisons with constants are left
    # unchanged.
    node.left, node.comparators = ast.copy_location(ast.Constant(value=True), node), [call]
  return tree


def raises_by_itself(test: str, line: int) -> bool:
  """Returns whether an exception at `line` cannot come from the program.

  This is the case for a `raise` statement, and for an expression that contains no names except
  names of built-ins.
  """
  statements = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.stmt)]
  covering = [
    node for node in statements if node.lineno <= line <= (node.end_lineno or node.lineno)
  ]
  inner = max(covering, key=lambda node: (node.lineno, node.col_offset), default=None)
  if isinstance(inner, ast.Raise):
    return True
  names = (
    {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)}
    if isinstance(inner, ast.Expr)
    else None
  )
  return names is not None and names <= _BUILTINS
