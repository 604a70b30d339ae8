"""Conversion between parameter trees and streams of Hugging Face tensors.

A scanned tree has one array per parameter, in which all layers are stacked. An unrolled tree has
one array per parameter and layer.

Invariant: scanned and unrolled trees are converted to the same stream, and can be built from the
same stream. `to_hf` changes neither the values nor the data type of the tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.weights.tables import Inventory, TensorEntry, entries, zeros

DTYPES = {
  'float32': np.dtype(np.float32),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float16': np.dtype(np.float16),
  'float64': np.dtype(np.float64),
}
"""Supported data types of weights, keyed by Hugging Face name."""


def dtype_of(name: str) -> np.dtype:
  if name not in DTYPES:
    raise UserError(f'weights dtype {name!r}: unknown; wanted one of {", ".join(DTYPES)}')
  return DTYPES[name]


def to_hf(params: Params, spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
  """Yields a tree's tensors under their Hugging Face names, one at a time.

  Args:
    params: scanned or unrolled tree of NumPy arrays or addressable JAX arrays.
    spec: spec of the model.

  Yields:
    (name, array) of each tensor. The layers of a parameter come one after the other, and the
    tensors of `tables.zeros` come last. Where possible, the array is a view of the parameter's
    memory. If it is still needed after the parameter has been donated, copy it.
  """
  flat = flatten(params)
  scanned = any(name.startswith('layers/attention/') for name in flat)
  _check_tree(flat, spec, scanned=scanned)
  for path, group in groupby(entries(spec), key=lambda entry: entry.path):
    stack = np.asarray(flat[path]) if path in flat else None
    for entry in group:
      if stack is None:
        yield entry.hf, np.asarray(flat[entry.unrolled])
      else:
        yield entry.hf, stack if entry.layer is None else stack[entry.layer]
  for entry in zeros(spec):
    yield entry.hf, np.zeros(entry.shape, flat['head/kernel'].dtype)


def _check_tree(flat: dict[str, Any], spec: ModelSpec, *, scanned: bool) -> None:
  wanted: dict[str, tuple[int, ...]] = {}
  for entry in entries(spec):
    if scanned and entry.layer is not None:
      wanted[entry.path] = (spec.num_hidden_layers, *entry.shape)
    else:
      wanted[entry.unrolled] = entry.shape
  problems = [
    f'{name} {tuple(flat[name].shape)} has no row in the table'
    for name in flat
    if name not in wanted
  ]
  for name, shape in wanted.items():
    if name not in flat:
      problems.append(f'{name} {shape} is missing')
    elif tuple(flat[name].shape) != shape:
      problems.append(f'{name} has {tuple(flat[name].shape)}, wanted {shape}')
  if problems:
    rest = f' and {len(problems) - 6} more' if len(problems) > 6 else ''
    raise UserError(
      f'parameters do not fit their {spec.family} spec: {"; ".join(problems[:6])}{rest}'
    )


def from_hf(
  tensors: Iterable[tuple[str, np.ndarray]],
  spec: ModelSpec,
  *,
  scan_layers: bool,
  dtype: str = 'float32',
) -> Params:
  """Builds a tree of NumPy arrays from tensors in any order. This is the inverse of `to_hf`.

  An array is copied only if it must be stacked or converted to `dtype`. In a model with tied
  embeddings, `lm_head.weight` is a duplicate of the embedding. It must have the embedding's shape,
  and its values are ignored.

  Args:
    tensors: (Hugging Face name, array) of each tensor.
    spec: spec of the model.
    scan_layers: whether to stack the layers.
    dtype: data type of the tree's arrays.
  """
  inventory, flat, to = Inventory(spec, 'tensors'), {}, dtype_of(dtype)
  for name, tensor in tensors:
    entry = inventory.see(name, tensor.shape, functools.partial(np.asarray, tensor))
    if entry is None:
      continue
    if scan_layers and entry.layer is not None:
      if entry.path not in flat:
        flat[entry.path] = np.empty((spec.num_hidden_layers, *entry.shape), to)
      flat[entry.path][entry.layer] = tensor
    else:
      flat[entry.unrolled] = np.asarray(tensor).astype(to, copy=False)
  inventory.finish()
  return unflatten(flat)


def fill(
  read: Callable[[TensorEntry], np.ndarray],
  spec: ModelSpec,
  *,
  scan_layers: bool,
  dtype: np.dtype,
  place: Callable[[str, np.ndarray], Any],
) -> Params:
  """Builds a tree array by array. Each array is passed to `place` before the next is read, so that
  host memory is needed for only one array at a time.

  Args:
    read: returns the tensor of an entry, with the entry's shape.
    spec: spec of the model.
    scan_layers: whether to stack the layers.
    dtype: data type of the tree's arrays.
    place: maps (name in the tree, array) to the leaf of the tree. It may keep a reference to the
      array, since the array is not modified afterwards.
  """
  flat = {}
  for path, group in groupby(entries(spec), key=lambda entry: entry.path):
    members = list(group)
    if scan_layers and members[0].layer is not None:
      stack = np.empty((len(members), *members[0].shape), dtype)
      for entry in members:
        stack[entry.layer] = read(entry)
      flat[path] = place(path, stack)
      continue
    for entry in members:
      flat[entry.unrolled] = place(entry.unrolled, read(entry).astype(dtype, copy=False))
  return unflatten(flat)
