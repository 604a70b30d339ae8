"""Reads the docstrings of a dataclass's fields: the string literals below the fields in the
class.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap


def body_documents(node: ast.ClassDef) -> dict[str, str]:
  """Returns the docstrings of the fields that a class definition declares, keyed by field name."""
  documents = {}
  for field, literal in zip(node.body, node.body[1:]):
    match field, literal:
      case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
        documents[name] = inspect.cleandoc(text)
  return documents


def field_documents(cls: type) -> dict[str, str]:
  """Returns the docstrings of a dataclass's fields, including inherited fields, keyed by field
  name.
  """
  documents = {}
  for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
    documents |= body_documents(ast.parse(textwrap.dedent(inspect.getsource(base))).body[0])
  return documents
