"""Names that nothing defines: those of our modules, wherever they are imported or used, and those
of a file itself.

They fail only when their line runs, and some lines run in the longest tests alone.
"""

import ast
import functools
import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
from paths import ROOT

FOLDERS = ('jaxrl_llm', 'launch', 'configs', 'benchmarks', 'tests', 'docs')
FILES = sorted(
  {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob('*.py')},
  key=str,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_module(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:  # Its parent is a module, not a package.
    return False


@functools.cache
def has(module: str, name: str) -> bool:
  try:
    return hasattr(importlib.import_module(module), name) or is_module(f'{module}.{name}')
  except ImportError:  # A replaced name: the module says by what.
    return True


def undefined(source: str) -> list[tuple[int, str]]:
  """Returns the line and the name of each use of a name that a module of jaxrl_llm lacks."""
  lacking: list[tuple[int, str]] = []

  def imports(node: ast.AST) -> dict[str, str]:
    """Names that an import statement binds to modules of ours. Adds missing names to `lacking`."""
    modules = {}
    if isinstance(node, ast.Import):
      for name in node.names:
        if name.asname and name.name.startswith('jaxrl_llm.'):
          modules[name.asname] = name.name
    elif isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'jaxrl_llm':
      for name in node.names:
        whole = f'{node.module}.{name.name}'
        if not has(node.module, name.name):
          lacking.append((node.lineno, whole))
        elif is_module(whole):
          modules[name.asname or name.name] = whole
    return modules

  def visit(node: ast.AST, modules: dict[str, str]) -> None:
    if isinstance(node, FUNCTIONS):
      inside = [*ast.walk(node)]
      bound = {arg.arg for arg in inside if isinstance(arg, ast.arg)}
      bound |= {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
      modules = {name: module for name, module in modules.items() if name not in bound}
      for statement in inside:
        modules |= imports(statement)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      module = modules.get(node.value.id)
      if module and not has(module, node.attr) and isinstance(node.ctx, ast.Load):
        lacking.append((node.lineno, f'{module}.{node.attr}'))
    for child in ast.iter_child_nodes(node):
      visit(child, modules)

  tree = ast.parse(source)
  top = {}
  for statement in tree.body:
    for node in ast.walk(statement) if not isinstance(statement, FUNCTIONS) else ():
      top |= imports(node)
  visit(tree, top)
  return sorted(set(lacking))


@pytest.mark.parametrize(
  'source, name',
  [
    ('from jaxrl_llm.core import errors\nprint(errors.NO)', 'jaxrl_llm.core.errors.NO'),
    ('import jaxrl_llm.core.errors as e\nprint(e.NO)', 'jaxrl_llm.core.errors.NO'),
    ('def f():\n  from jaxrl_llm.core.errors import NO', 'jaxrl_llm.core.errors.NO'),
    ('def f():\n  from jaxrl_llm import nothing', 'jaxrl_llm.nothing'),
    ('from jaxrl_llm.core import errors\nprint(errors.UserError)', None),
    ('from jaxrl_llm.core import errors\ndef f(errors):\n  return errors.NO', None),
  ],
)
def test_the_test_finds_what_is_missing(source, name):
  assert [missing for _, missing in undefined(source)] == ([name] if name else [])


def test_each_name_of_our_modules_exists():
  lacking = [
    f'{path.relative_to(ROOT)}:{line}: {name}'
    for path in FILES
    for line, name in undefined(path.read_text())
  ]
  assert not lacking


def _strings(path: pathlib.Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
  """Where the strings of a file are: line and column (from 1) of their beginning and their end."""
  return [
    ((node.lineno, node.col_offset + 1), (node.end_lineno, node.end_col_offset + 1))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  ]


def test_each_name_of_a_file_is_defined():
  """Except within strings: ruff takes shapes ('batch seq') for annotations."""
  command = [sys.executable, '-m', 'ruff', 'check', '--select=F821', '--output-format=json', '.']
  findings = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)
  assert findings, 'ruff found nothing, not even shapes'
  strings = functools.cache(_strings)
  undefined_names = []
  for finding in findings:
    path = pathlib.Path(finding['filename'])
    at = (finding['location']['row'], finding['location']['column'])
    if not any(begin <= at < end for begin, end in strings(path)):
      undefined_names.append(f'{path.relative_to(ROOT)}:{at[0]}: {finding["message"]}')
  assert not undefined_names
