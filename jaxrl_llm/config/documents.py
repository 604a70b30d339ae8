"""Docstrings of a dataclass's fields: the string literals below them in its source."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap


def body_documents(node: ast.ClassDef) -> dict[str, str]:
  """Docstrings of the fields that a class declares, keyed by name."""
  documents = {}
  for field, literal in zip(node.body, node.body[1:]):
    match field, literal:
      case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
        documents[name] = inspect.cleandoc(text)
  return documents


def field_documents(cls: type) -> dict[str, str]:
  """Docstrings of a dataclass's fields, inherited ones too, keyed by name."""
  documents = {}
  for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
    documents |= body_documents(ast.parse(textwrap.dedent(inspect.getsource(base))).body[0])
  return documents
