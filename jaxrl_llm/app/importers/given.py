"""Parses keys and values of another library's configuration, from a command line or YAML.

Invariant: parsing takes time and memory proportional to the size of the text. YAML aliases are
rejected and tags are ignored, so nothing is expanded and no object of a tagged type is constructed.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.files import check_depth, read_bytes
from jaxrl_llm.core.types import Json

_LIMIT_BYTES = 1 << 20
_YAML_LIMIT_BYTES = 256 << 10
_LONGEST_SCALAR = 10_000
_WORDS = {
  **dict.fromkeys(('true', 'True', 'TRUE'), True),
  **dict.fromkeys(('false', 'False', 'FALSE'), False),
  **dict.fromkeys(('null', 'None', '~', ''), None),
}


@dataclasses.dataclass(frozen=True)
class Given:
  """A key and its value, as given in another library's configuration."""

  key: str
  value: Json
  where: str
  """Place of the key, for the report: a line of a script or program, or a YAML file."""
  missing: tuple[str, ...] = ()
  """Parts of the value that only running the script or program could determine, such as `$(date)`.
  """


def read_text(path: pathlib.Path) -> str:
  """Returns the text of a file. Raises UserError if the file cannot be read or exceeds 1 MiB."""
  try:
    return read_bytes(path, _LIMIT_BYTES).decode()
  except (OSError, ValueError) as error:
    raise UserError(f'{path}: cannot be read: {one_line(error)}') from None


def scalar(text: str) -> Json:
  """Parses a text as a number, boolean or null; returns the text itself if it is none of these."""
  if text in _WORDS:
    return _WORDS[text]
  if len(text) < 40:
    if re.fullmatch(r'[+-]?\d+', text):
      return int(text)
    if re.fullmatch(r'[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?', text):
      return float(text)
  return text


def value_of(text: str) -> Json:
  """Parses a value as written on a command line: a scalar, a list or a mapping."""
  if text[:1] in ('[', '{') and len(text) <= _LONGEST_SCALAR:
    try:
      return read_yaml(text)
    except UserError:
      return text
  if len(text) >= 2 and text[0] == text[-1] and text[0] in '\'"':
    return text[1:-1]
  return scalar(text)


class _Loader(yaml.BaseLoader):
  """YAML loader that returns all scalars as text, ignores tags, and rejects aliases and duplicate
  keys.
  """

  def compose_node(self, parent: Any, index: Any) -> yaml.Node:
    if self.check_event(yaml.events.AliasEvent):
      raise yaml.YAMLError('aliases (*name) are not supported; write the value out')
    return super().compose_node(parent, index)

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    if len(set(keys)) < len(node.value):
      raise yaml.YAMLError('a key is given twice, or is not text')
    return super().construct_mapping(node, deep=deep)


def read_yaml(text: str, name: str = 'value') -> Json:
  """Parses YAML text. Raises UserError if the text is invalid, has aliases or duplicate keys, or is
  too large or too deeply nested.

  Args:
    name: name of the text in error messages.
  """
  if len(text) > _YAML_LIMIT_BYTES:
    raise UserError(f'{name}: {len(text):,} characters, wanted at most {_YAML_LIMIT_BYTES:,}')
  try:
    value = yaml.load(text, _Loader)
    check_depth(value)
  except (yaml.YAMLError, ValueError, RecursionError) as error:
    raise UserError(f'{name}: not plain YAML: {one_line(error, 200)}') from None
  return _scalars(value)


def read_mapping(text: str, path: pathlib.Path) -> dict[str, Json]:
  """Parses a file's YAML text. Raises UserError if the text is not a mapping, or if `read_yaml`
  rejects the text.

  Args:
    path: path of the file, for error messages.
  """
  tree = read_yaml(text, str(path))
  if not isinstance(tree, dict):
    raise UserError(f'{path}: a {type(tree).__name__}, wanted keys and values')
  return tree


def _scalars(value: Any) -> Json:
  if isinstance(value, dict):
    return {str(key): _scalars(item) for key, item in value.items()}
  if isinstance(value, list):
    return [_scalars(item) for item in value]
  return scalar(value) if isinstance(value, str) else value


def leaves(value: Mapping[str, Json], prefix: str = '') -> Iterator[tuple[str, Json]]:
  """Yields (dotted key, value) for each value in nested mappings. An empty mapping counts as a
  value.
  """
  for key, item in value.items():
    name = f'{prefix}{key}'
    if isinstance(item, Mapping) and item:
      yield from leaves(item, f'{name}.')
    else:
      yield name, item
