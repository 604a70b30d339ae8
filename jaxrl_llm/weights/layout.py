"""Conversion between parameter trees and streams of Hugging Face tensors.

Invariant: tensors pass through unchanged (the same bits in the same dtype, as views where
possible); scanned and unrolled trees produce the same stream and are filled from the same stream.
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
    spec: spec of their model.

  Yields:
    (name, array). Arrays are views of host memory where possible, including layers of a scanned
      tree: copy an array that must outlive the donation of its parameter. All layers of a parameter
      are consecutive;
    `tables.zeros` come last.
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
  """Builds a tree of NumPy arrays from tensors in any order; the inverse of `to_hf`.

  Arrays that need neither stacking nor a dtype conversion are not copied. A tied model's
  `lm_head.weight` duplicates the embedding: it is ignored if it has the embedding's shape, whatever
  its values.
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
  """Builds a tree array by array; each array is placed and released before the next is read.

  Args:
    read: returns the tensor of an entry, with the entry's shape.
    spec: spec of the model.
    scan_layers: whether to stack the layers.
    dtype: data type of the tree's arrays.
    place: maps (name in the tree, array) to the tree's leaf. It may keep the array, which is never
      modified later.
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
