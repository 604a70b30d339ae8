"""Writes a configuration as a readable Python file: with public names, and only those values that
differ from the defaults.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jaxrl_llm
from jaxrl_llm.app.schema import Config

_WIDTH = 100
Comments = Mapping[tuple[str, str], str]
"""Comments for fields, keyed by (class name, field name). A comment is written at the end of the
line that sets the field.
"""


def source_text(config: Config, *, title: str, command: str, comments: Comments) -> str:
  """Returns the text of a configuration file.

  Args:
    title: first line of the file's docstring.
    command: command line to show in the docstring.
    comments: see `Comments`.
  """
  names = sorted({type(record).__name__ for record in _records(config)} | {'Config'})
  public = f'from {jaxrl_llm.__name__}.api import'
  imports = f'{public} {", ".join(names)}'
  if len(imports) > _WIDTH:
    imports = '\n'.join([f'{public} (', *(f'  {name},' for name in names), ')'])
  body = _written(config, 2, len('  return '), comments)
  return (
    f'"""{_plain(title)}\n\nCommand:   {_plain(command)}\n"""\n\n{imports}\n\n\n'
    f'def get_config() -> Config:\n  return {body}\n'
  )


def changed(record: Any) -> dict[str, Any]:
  """Returns the values of those fields of a dataclass that have no default or differ from it, keyed
  by field.
  """
  fields = {}
  for field in dataclasses.fields(record):
    value = getattr(record, field.name)
    default = (
      field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )
    if field.init and (default is dataclasses.MISSING or value != default):
      fields[field.name] = value
  return fields


def _records(value: Any) -> Iterator[Any]:
  """Yields the dataclass instances that appear in the source text of a value."""
  if dataclasses.is_dataclass(value):
    yield value
    for field in changed(value).values():
      yield from _records(field)
  elif isinstance(value, tuple):
    for item in value:
      yield from _records(item)


def _written(value: Any, indent: int, column: int, comments: Comments) -> str:
  """Returns the source text of a value.

  Args:
    indent: indentation of the line on which the value begins.
    column: number of characters on this line before the value.
  """
  if dataclasses.is_dataclass(value):
    name = type(value).__name__
    parts = [
      (f'{field}=', held, comments.get((name, field))) for field, held in changed(value).items()
    ]
    return _bracketed(f'{name}(', parts, ')', indent, column, comments)
  if isinstance(value, Mapping):
    parts = [(f'{key!r}: ', item, None) for key, item in value.items()]
    return _bracketed('{', parts, '}', indent, column, comments)
  if isinstance(value, tuple | list):
    opening, closing = '()' if isinstance(value, tuple) else '[]'
    parts = [('', item, None) for item in value]
    return _bracketed(opening, parts, closing, indent, column, comments)
  if isinstance(value, float):
    text = repr(value)
    return f"float('{text}')" if 'inf' in text else re.sub(r'e([+-])0(\d)', r'e\1\2', text)
  return repr(value)


def _bracketed(
  opening: str,
  parts: Sequence[tuple[str, Any, str | None]],
  closing: str,
  indent: int,
  column: int,
  comments: Comments,
) -> str:
  """Returns the source text of (label, value, comment) parts between brackets: on one line if they
  fit and have no comments, otherwise one per line.
  """
  flat = ', '.join(
    label + _written(value, indent, -sys.maxsize, comments) for label, value, _ in parts
  )
  comma = ',' if opening == '(' and len(parts) == 1 else ''
  line = f'{opening}{flat}{comma}{closing}'
  # Leave room for a comma at the end of the line.
  if column + len(line) + 1 <= _WIDTH and '\n' not in line and not any(note for *_, note in parts):
    return line
  margin = ' ' * (indent + 2)
  lines = [opening]
  for label, value, note in parts:
    text = _written(value, indent + 2, len(margin) + len(label), comments)
    lines.append(f'{margin}{label}{text},{f"  # {note}" if note else ""}')
  return '\n'.join([*lines, f'{" " * indent}{closing}'])


def _plain(text: str) -> str:
  """Makes a text safe inside a docstring: replaces double quotes with single quotes, and
  backslashes, control characters and non-ASCII characters with `?`.
  """
  return re.sub(r'[^ -\[\]-~]', '?', text).replace('"', "'")
