"""Metrics of the package's layout: packages, modules, import edges, long signatures, lines.

.venv/bin/python benchmarks/layout.py [--tree=DIRECTORY]     # another checkout; by default this one
"""

from __future__ import annotations

import ast
import itertools
import pathlib
import statistics
from collections.abc import Iterator

from absl import flags

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError

_TREE = flags.DEFINE_string('tree', str(pathlib.Path(__file__).parents[1]), 'Root of a checkout.')
_LONG = 5
"""Number of arguments above which a signature is long."""
_ARRAYS = ('Array', 'jax.Array', 'np.ndarray')
"""Annotations without a shape."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
  return (
    node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
  )


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
  """Returns the arguments of a function, without `self` and `cls`."""
  every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
  return [argument for argument in every if argument.arg not in ('self', 'cls')]


def imports(tree: ast.AST) -> set[str]:
  """Returns the dotted names of this project that a module imports."""
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module:
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
    elif isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
  return {name for name in names if name.startswith('jaxrl_llm.')}


def measure(root: pathlib.Path) -> list[tuple[str, object]]:
  """Returns the rows of the table: a metric's name and its value."""
  package = root / 'jaxrl_llm'
  sources = {path: path.read_text() for path in package.rglob('*.py') if path.name != '__init__.py'}
  trees = {path: ast.parse(source) for path, source in sources.items()}
  homes = {path: path.relative_to(package).parts[0] for path in sources}
  folders = {path.parent.relative_to(package) for path in sources} - {pathlib.Path()}
  per_folder = [sum(path.parent == package / folder for path in sources) for folder in folders]
  edges = {
    (homes[path], name.split('.')[1])
    for path, tree in trees.items()
    for name in imports(tree)
    if len(path.relative_to(package).parts) > 1 and name.split('.')[1] != homes[path]
  }
  lengths = [source.count('\n') for source in sources.values()]
  signatures = [arguments(function) for tree in trees.values() for function in functions(tree)]
  bare = [
    argument
    for argument in itertools.chain.from_iterable(signatures)
    if argument.annotation is not None and ast.unparse(argument.annotation) in _ARRAYS
  ]
  largest = max(sources, key=lambda path: sources[path].count('\n'))
  return [
    ('top-level packages', len({home for path, home in homes.items() if path.parent != package})),
    ('packages, nested ones included', len(folders)),
    ('modules', len(sources)),
    ('modules of a package: median, most', f'{statistics.median(per_folder):g}, {max(per_folder)}'),
    (
      'lines of a module: median, most',
      f'{statistics.median(lengths):g}, {max(lengths)} ({largest.name})',
    ),
    ('import edges between top-level packages', len(edges)),
    ('pairs of packages that import each other', sum((b, a) in edges for a, b in edges) // 2),
    (
      f'functions with more than {_LONG} arguments',
      sum(len(signature) > _LONG for signature in signatures),
    ),
    ('arguments annotated as an array without a shape', len(bare)),
    ('lines', sum(lengths)),
    ('characters', sum(map(len, sources.values()))),
    ('longest line', max(len(line) for source in sources.values() for line in source.splitlines())),
  ]


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(
      f'argument {argv[1]!r} is not a flag; usage: benchmarks/layout.py [--tree=DIRECTORY]'
    )
  root = pathlib.Path(_TREE.value)
  if not (root / 'jaxrl_llm').is_dir():
    raise UserError(f'--tree={root}: no package jaxrl_llm there; wanted the root of a checkout')
  print('| figure | value |\n|---|---|')
  for name, value in measure(root):
    print(f'| {name} | {value} |')


if __name__ == '__main__':
  script.run(main)
