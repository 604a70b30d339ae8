"""Converts between nested dicts and flat dicts whose names are paths such as 'a/b/c'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Flattens a nested dict: {'a': {'b': x}} -> {'a/b': x}, in the order of the tree."""
  flat = {}
  for key, value in tree.items():
    name = f'{prefix}{key}'
    if isinstance(value, Mapping):
      flat.update(flatten(value, f'{name}/'))
    else:
      flat[name] = value
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Inverts `flatten`: {'a/b': x} -> {'a': {'b': x}}.

  Raises ValueError if one name is a parent of another.
  """
  tree: dict[str, Any] = {}
  for name, value in flat.items():
    *parents, leaf = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
      if not isinstance(node, dict):
        raise ValueError(f'{name}: {parent} is already a leaf')
    if leaf in node:
      raise ValueError(f'{name}: other names lie below it')
    node[leaf] = value
  return tree
