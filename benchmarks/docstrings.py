"""Draws docstrings and comments of the package at random, for a reader to judge.

.venv/bin/python benchmarks/docstrings.py --seed=7 [--count=100] [--tree=DIRECTORY]

Every docstring has the same probability, whether it documents a module, a class, a function or a
field, and so has every comment. Comments that only address a linter or a formatter are left out.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import pathlib
import random
import textwrap
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from absl import flags

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError

_TREE = flags.DEFINE_string('tree', str(pathlib.Path(__file__).parents[1]), 'Root of a checkout.')
_SEED = flags.DEFINE_integer('seed', None, 'Seed of the draw.', required=True)
_COUNT = flags.DEFINE_integer('count', 100, 'Number of texts to draw.', lower_bound=1)
_DIRECTIVES = ('noqa', 'fmt:', 'type:', 'ruff:', '!')
"""Beginnings of comments that address a tool."""
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
"""Kinds of syntax nodes that can have a docstring."""
_CODE = 160
"""Maximum number of characters of the code that a text belongs to."""


class Text(NamedTuple):
  """A docstring, or a comment of one or more lines."""

  line: int
  """Line number of its beginning, counted from 1."""
  code: str
  """Code that the text describes, shortened."""
  text: str


def docstrings(tree: ast.AST) -> Iterator[Text]:
  """Yields the docstrings of a module's definitions and of its assignments."""
  for node in ast.walk(tree):
    documented = isinstance(node, _DOCUMENTED)
    if documented and (text := ast.get_docstring(node)):
      yield Text(node.body[0].lineno, _signature(node), text)
    body = getattr(node, 'body', None)
    for statement, following in itertools.pairwise(body if isinstance(body, list) else []):
      match statement, following:
        case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
          yield Text(following.lineno, ast.unparse(statement), inspect.cleandoc(text))


def _signature(node: ast.AST) -> str:
  match node:
    case ast.FunctionDef() | ast.AsyncFunctionDef():
      returned = f' -> {ast.unparse(node.returns)}' if node.returns else ''
      return f'def {node.name}({ast.unparse(node.args)}){returned}'
    case ast.ClassDef():
      return f'class {node.name}'
    case _:
      return 'module'


def comments(source: str) -> Iterator[Text]:
  """Yields the comments of a module. Adjacent lines that have only a comment are one text."""
  lines = source.splitlines()
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  block: list[str] = []
  for token in (token for token in tokens if token.type == tokenize.COMMENT):
    number, text = token.start[0], token.string.lstrip('# ')
    code = lines[number - 1][: token.start[1]].strip()
    block.append(text)
    following = lines[number].strip() if number < len(lines) else ''
    if not code and following.startswith('#'):
      continue
    if not block[0].startswith(_DIRECTIVES):
      yield Text(number - len(block) + 1, code or following, '\n'.join(block))
    block = []


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise UserError(f'argument {argv[1]!r} is not a flag; see benchmarks/docstrings.py --help')
  root = pathlib.Path(_TREE.value)
  texts: list[tuple[pathlib.Path, Text]] = []
  for path in sorted((root / 'jaxrl_llm').rglob('*.py')):
    source = path.read_text()
    for text in sorted({*docstrings(ast.parse(source)), *comments(source)}):
      texts.append((path.relative_to(root), text))
  if not texts:
    raise UserError(f'{root} has no package jaxrl_llm; set --tree to the root of a checkout')
  drawn = random.Random(_SEED.value).sample(texts, min(_COUNT.value, len(texts)))
  print(f'{len(drawn)} of {len(texts):,} texts, seed {_SEED.value}')
  for number, (path, text) in enumerate(drawn, start=1):
    code = textwrap.shorten(text.code, _CODE, placeholder=' …')
    print(f'\n{number}. {path}:{text.line}\n  {code}\n{textwrap.indent(text.text, "    ")}')


if __name__ == '__main__':
  script.run(main)
