"""Prints the test files that a change may affect, by what they import, start as processes and read.

  python tests/tools/affected.py [--since=COMMIT]

A change is anything uncommitted, or committed since COMMIT: by default since the branch left
origin/main or main. The graph is static: imports (also those inside functions), and the modules,
scripts, configurations and data folders that string constants name. It errs on the side of too many
tests. A change to a file of EVERYTHING selects all tests; a change to a document selects only the
tests that name it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ('jaxrl_llm', 'tests', 'launch', 'benchmarks', 'configs', 'docs', '.ci', 'README.md')
"""What is in the graph: a file, and the files of folders."""
CONFTEST = 'tests/conftest.py'
HELPERS = ('tests/support/', 'tests/support/fixtures/', 'tests/tools/')
"""Folders whose modules and data tests refer to by name."""
FOLDER_NAMES = 'tests/support/paths.py'
"""Names the folders of the tests, and reads no file in them."""
EVERYTHING = (CONFTEST, 'pyproject.toml', 'constraints/', 'launch/environment.sh')
"""Files that every test depends on."""
UNREAD = ('LICENSE', '.gitignore')
"""Files that no test reads."""

_PATH = re.compile(r'[\w.-]+(?:/[\w.-]+)+|[\w-]+\.(?:py|sh|txt|json|jsonl|toml|md)')
_MODULE = re.compile(r'[A-Za-z_]\w*(?:\.\w+)+')


def is_test(path: str) -> bool:
  return path.startswith('tests/') and path.endswith('_test.py')


class Graph:
  """Which file needs which, for the `paths` (relative to `root`) of a repository; deleted files may
  be among them.
  """

  def __init__(self, root: pathlib.Path, paths: Iterable[str]):
    self._root = root
    self._paths = frozenset(path for path in paths if path.split('/')[0] in FOLDERS)
    self._folders = collections.defaultdict(set)
    for path in self._paths:
      for folder in pathlib.PurePosixPath(path).parents:
        self._folders[str(folder)].add(path)
    self._fixtures = self._fixtures_of(CONFTEST)
    self.needs = {path: self._needs_of(path) - {path} for path in self._paths}

  def reachable(self, path: str) -> set[str]:
    """`path` and all files that it needs, directly or through others."""
    reached, waiting = {path}, [path]
    while waiting:
      new = self.needs.get(waiting.pop(), set()) - reached
      reached |= new
      waiting.extend(new)
    return reached

  def affected(self, changed: Iterable[str]) -> list[str]:
    """The test files that the changed files may affect, in order."""
    changed = set(changed)
    tests = sorted(path for path in self._paths if is_test(path) and (self._root / path).exists())
    needed = {test: self.reachable(test) for test in tests}
    referenced = set(tests).union(*self.needs.values())
    for path in changed:
      # Any test may read a data file that no string names.
      unknown = path not in referenced and not path.endswith(('.py', '.md')) and path not in UNREAD
      if path.startswith(EVERYTHING) or unknown:
        return tests
    return [test for test in tests if needed[test] & changed]

  def _tree(self, path: str) -> ast.Module | None:
    try:
      return ast.parse((self._root / path).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
      return None  # Deleted or broken: the files that need it still do.

  def _needs_of(self, path: str) -> set[str]:
    if path == CONFTEST:
      return set()  # The tests that use its fixtures need what these need.
    if path.endswith('.sh'):
      return (
        self._named((self._root / path).read_text(), path)
        if (self._root / path).exists()
        else set()
      )
    tree = self._tree(path) if path.endswith('.py') else None
    if tree is None:
      return set()
    needs = self._needs_of_code(tree, path)
    if path.startswith('tests/'):
      named = set()
      for node in ast.walk(tree):
        if isinstance(node, ast.arg):
          named.add(node.arg)
        elif isinstance(node, ast.Constant):  # As for usefixtures.
          named.add(node.value)
      for name in self._fixtures.keys() & named:
        needs |= self._fixtures[name]
    return needs

  def _fixtures_of(self, path: str) -> dict[str, set[str]]:
    """For each fixture of `path`, by name, the files that its body needs."""
    tree = self._tree(path) if path in self._paths else None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)] if tree else []
    fixtures = [
      node
      for node in functions
      if any('fixture' in ast.unparse(mark) for mark in node.decorator_list)
    ]
    return {node.name: self._needs_of_code(node, path) for node in fixtures}

  def _needs_of_code(self, tree: ast.AST, path: str) -> set[str]:
    needs = set()
    for node in _walk(tree):
      match node:
        case ast.Import(names=names):
          for name in names:
            needs |= self._modules(name.name, path)
        case ast.ImportFrom(module=module, names=names, level=level):
          start = _package(path, level) + ([module] if module else [])
          for name in names:
            needs |= self._modules('.'.join([*start, name.name]), path)
        case ast.BinOp(op=ast.Div()) if path != FOLDER_NAMES:
          needs |= self._joined(node, path)
        case ast.Constant(value=str(text)):
          needs |= self._named(text, path)
    return needs

  def _modules(self, name: str, path: str) -> set[str]:
    """The files of the module `name`, or of the module that defines it, and of its packages, as
    `path` imports it.
    """
    parts = name.split('.')
    for folder in _folders(path):
      files = set()
      for length in range(1, len(parts) + 1):
        stem = folder + '/'.join(parts[:length])
        files |= {file for file in (f'{stem}/__init__.py', f'{stem}.py') if file in self._paths}
      if files:
        return files
    return set()

  def _named(self, text: str, path: str) -> set[str]:
    """Files that a string names: paths from the root or beside `path`, and modules of the
    package.
    """
    files = set()
    for token in _PATH.findall(text):
      files |= self._at(token, path, folders=False)
    for token in _MODULE.findall(text):
      if token.startswith('jaxrl_llm.'):
        files |= self._modules(token, path)
    return files

  def _joined(self, node: ast.BinOp, path: str) -> set[str]:
    """Files that `ROOT / 'launch' / name` may name: all of the folder where a part is no
    constant.
    """
    parts: list[str | None] = []
    left: ast.expr = node
    while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
      right = left.right
      parts.insert(
        0, right.value if isinstance(right, ast.Constant) and isinstance(right.value, str) else None
      )
      left = left.left
    of_this_tree = '__file__' in ast.unparse(left) or (
      isinstance(left, ast.Name) and left.id.isupper()
    )
    known = parts[: parts.index(None)] if None in parts else parts
    return self._at('/'.join(known), path, folders=of_this_tree) if known else set()

  def _at(self, name: str, path: str, folders: bool) -> set[str]:
    for folder in _folders(path):
      if folder + name in self._paths:
        return {folder + name}
      if folders and folder + name in self._folders and folder + name not in ('tests', '.'):
        return set(self._folders[folder + name])
    return set()


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
  """Every node except docstrings and imports for type checkers alone."""
  waiting = [tree]
  while waiting:
    for node in ast.iter_child_nodes(waiting.pop()):
      if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        continue
      if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test):
        continue
      yield node
      waiting.append(node)


def _folders(path: str) -> tuple[str, ...]:
  """Returns the folders, with a slash, in which the file `path` finds modules and data files."""
  return (
    '',
    f'{pathlib.PurePosixPath(path).parent}/',
    *(HELPERS if path.startswith('tests/') else ()),
  )


def _package(path: str, level: int) -> list[str]:
  """The package that an import with `level` dots in `path` starts from."""
  return list(pathlib.PurePosixPath(path).parts[:-level]) if level else []


def git(root: pathlib.Path, *arguments: str) -> list[str] | None:
  """The items that a git command lists, separated by newlines or NUL; None where it fails."""
  ran = subprocess.run(['git', *arguments], cwd=root, capture_output=True, text=True)
  if ran.returncode:
    return None
  return [line for line in re.split('[\0\n]', ran.stdout) if line]


def changed_files(root: pathlib.Path, since: str | None) -> list[str]:
  """Files that differ from commit `since` (by default, where the branch left main), and untracked
  files.
  """
  if since is None:
    for main in ('origin/main', 'main'):
      base = git(root, 'merge-base', 'HEAD', main)
      if base:
        break
    since = base[0] if base else 'HEAD'
  differing = git(root, 'diff', '--name-only', '--no-renames', '-z', since, '--')
  if differing is None:
    raise SystemExit(f'affected: git does not know the commit {since}')
  return sorted(
    {*differing, *(git(root, 'ls-files', '-z', '--others', '--exclude-standard') or [])}
  )


def main(arguments: list[str], root: pathlib.Path = ROOT) -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
  parser.add_argument('--since')
  since = parser.parse_args(arguments).since
  changed = changed_files(root, since)
  files = git(root, 'ls-files', '-z', '--cached', '--others', '--exclude-standard') or []
  for test in Graph(root, {*files, *changed}).affected(changed):
    print(test)


if __name__ == '__main__':
  main(sys.argv[1:])
