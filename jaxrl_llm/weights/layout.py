"""Conversion between parameter trees and streams of Hugging Face tensors.

A scanned tree has one array per parameter, in which all layers are stacked. An unrolled tree has
one array per parameter and layer.

Invariant: scanned and unrolled trees are converted to the same stream, and can be built from the
same stream. `to_hf` changes neither the values nor the data type of the tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

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
  """Yields a tree's tensors under their Hugging Face names, one at a time. Raises UserError if the
  tree does not match the spec.

  Args:
    params: scanned or unrolled tree of NumPy arrays or addressable JAX arrays.
    spec: spec of the model.

  Yields:
    (name, array) of each tensor. The layers of a parameter come one after the other, and the
    tensors of `tables.zeros` come last. Where possible, the array is a view of the parameter's
    memory. Copy an array that is needed after the parameter has been donated.
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


def hf_parts(
  leaves: Iterable[tuple[str, Shaped[np.ndarray, '...']]],
  spec: ModelSpec,
  only: Collection[str] | None = None,
) -> Iterator[tuple[TensorEntry, Shaped[np.ndarray, '...']]]:
  """Converts a stream of parameters, or parts of them, to Hugging Face tensors as they arrive.

  Args:
    leaves: (name in the tree, array) of each parameter of the model, once and in any order. Layers
      may be stacked or separate. An array that does not stack layers may come in several
      consecutive parts along its first axis.
    spec: spec of the model.
    only: Hugging Face names of the tensors that `leaves` has; None for all tensors of the model.

  Yields:
    (entry, rows) for each tensor or part of one. The parts of a tensor come in order. Each array is
    a view of the input where possible.

  Raises:
    UserError: the parameters do not match the model.
  """
  wanted_entries = [e for e in entries(spec) if only is None or e.hf in only]
  by_name: dict[str, list[TensorEntry]] = {}
  for entry in wanted_entries:
    for name in {entry.path, entry.unrolled}:
      by_name.setdefault(name, []).append(entry)
  missing = {entry.hf for entry in wanted_entries}
  for name, parts in groupby(leaves, key=lambda leaf: leaf[0]):
    targets = by_name.get(name)
    if targets is None:
      raise UserError(f'{name}: not a parameter of the {spec.family} model; {_ANOTHER}')
    stacked = targets[0].layer is not None and name == targets[0].path
    wanted = (len(targets), *targets[0].shape) if stacked else targets[0].shape
    rows = 0
    for _, array in parts:
      rows += array.shape[0] if array.ndim else 0
      shape = (rows, *array.shape[1:])
      if shape[1:] != wanted[1:] or not array.ndim or rows > wanted[0]:
        _refuse_shape(name, shape if array.ndim else (), wanted)
      if not stacked:
        yield targets[0], array
      else:
        if array.shape != wanted:
          _refuse_shape(name, array.shape, wanted)
        for entry in targets:
          yield entry, array[entry.layer]
    if rows != wanted[0]:
      _refuse_shape(name, shape, wanted)
    missing -= {entry.hf for entry in targets}
  if missing:
    named = [entry.hf for entry in wanted_entries if entry.hf in missing]
    raise UserError(
      f'parameters lack {named[:4]} ({len(named)} of {len(wanted_entries)} tensors); {_ANOTHER}'
    )


_ANOTHER = 'do they belong to a model other than the one at the start?'


def _refuse_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> NoReturn:
  raise UserError(f'{name}: parameters have shape {shape}, the model has {wanted}; {_ANOTHER}')


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
  and its values are ignored. Raises UserError if the tensors do not match the spec.

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


class StoredArray:
  """One array of a parameter tree whose elements are still in a model's files. Indexing reads only
  the indexed elements.
  """

  def __init__(
    self,
    members: Sequence[TensorEntry],
    read: Callable[[TensorEntry, tuple[slice, ...], np.ndarray], None],
    *,
    stacked: bool,
    dtype: np.dtype,
  ):
    """
    Args:
      members: entries of the tensors that make up the array: one per layer if the array stacks the
        layers, otherwise a single entry.
      read: function of (entry, slices, array) that fills the array with the elements that the
        slices select from the entry's tensor. Each axis of the tensor has one slice with bounds.
      stacked: whether the array has a leading layer axis.
      dtype: data type of the arrays that indexing returns.
    """
    self._members, self._read, self._stacked = members, read, stacked
    self.dtype = dtype
    shape = members[0].shape
    self.shape: tuple[int, ...] = (len(members), *shape) if stacked else shape

  def __getitem__(self, index: Any) -> Shaped[np.ndarray, '...']:
    """Reads elements into a new array. `index` is `...`, or one slice with step 1 for each axis."""
    slices = (slice(None),) * len(self.shape) if index is Ellipsis else index
    bounds = tuple(
      slice(*part.indices(length)) for part, length in zip(slices, self.shape, strict=True)
    )
    out = np.empty([part.stop - part.start for part in bounds], self.dtype)
    if not self._stacked:
      self._read(self._members[0], bounds, out)
      return out
    for layer, of_layer in zip(range(bounds[0].start, bounds[0].stop), out, strict=True):
      self._read(self._members[layer], bounds[1:], of_layer)
    return out


def fill(
  read: Callable[[TensorEntry, tuple[slice, ...], np.ndarray], None],
  spec: ModelSpec,
  *,
  scan_layers: bool,
  dtype: np.dtype,
  place: Callable[[str, StoredArray], Any],
) -> Params:
  """Builds a tree array by array. `place` reads the parts of an array that it needs before the next
  array is begun. Besides what `place` keeps, host memory contains parts of only one array at a
  time.

  Args:
    read: reads a part of a tensor; see `StoredArray`.
    spec: spec of the model.
    scan_layers: whether to stack the layers.
    dtype: data type of the arrays that are read.
    place: maps (name in the tree, stored array) to the leaf of the tree.
  """
  flat = {}
  for path, group in groupby(entries(spec), key=lambda entry: entry.path):
    members = list(group)
    if scan_layers and members[0].layer is not None:
      flat[path] = place(path, StoredArray(members, read, stacked=True, dtype=dtype))
      continue
    for entry in members:
      stored = StoredArray([entry], read, stacked=False, dtype=dtype)
      flat[entry.unrolled] = place(entry.unrolled, stored)
  return unflatten(flat)
