"""Parameter trees to and from streams of Hugging Face tensors.

Invariant: a tensor passes through as it is (a view where memory allows, the same bits in the same dtype); scanned and
unrolled trees give the same stream and are filled from the same stream.
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
from jaxrl_llm.weights.tables import Entry, Inventory, entries, zeros

DTYPES = {
  'float32': np.dtype(np.float32),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float16': np.dtype(np.float16),
  'float64': np.dtype(np.float64),
}
"""The dtypes that weights may have, by the names that Hugging Face gives them."""


def dtype_of(name: str) -> np.dtype:
  if name not in DTYPES:
    raise UserError(f'weights dtype {name!r}: unknown; there are {", ".join(DTYPES)}')
  return DTYPES[name]


def to_hf(params: Params, spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors of a tree under their Hugging Face names, one at a time.

  Args:
    params: scanned or unrolled tree of NumPy arrays or addressable JAX arrays.
    spec: the model they belong to.

  Yields:
    Names and arrays. Layers of a scanned tree are views of it, and so is anything that already lies in this host's
    memory: copy what must outlive a donation. All layers of one parameter follow each other, and `tables.zeros` them.
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
  problems = [f'{name} {tuple(flat[name].shape)} has no row in the table' for name in flat if name not in wanted]
  for name, shape in wanted.items():
    if name not in flat:
      problems.append(f'{name} {shape} is missing')
    elif tuple(flat[name].shape) != shape:
      problems.append(f'{name} has {tuple(flat[name].shape)}, wanted {shape}')
  if problems:
    rest = f' and {len(problems) - 6} more' if len(problems) > 6 else ''
    raise UserError(f'parameters do not fit their {spec.family} spec: {"; ".join(problems[:6])}{rest}')


def from_hf(
  tensors: Iterable[tuple[str, np.ndarray]], spec: ModelSpec, *, scan_layers: bool, dtype: str = 'float32'
) -> Params:
  """A tree of NumPy arrays from tensors in any order; the inverse of `to_hf`.

  Arrays that need neither stacking nor another dtype are passed on, not copied. A tied model's `lm_head.weight` is the
  embedding once more: it is ignored if its shape is the embedding's, whatever its values.
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
  read: Callable[[Entry], np.ndarray],
  spec: ModelSpec,
  *,
  scan_layers: bool,
  dtype: np.dtype,
  place: Callable[[str, np.ndarray], Any],
) -> Params:
  """A tree whose arrays are read one after the other, each placed and let go before the next is read.

  Args:
    read: the tensor of an entry, with the entry's shape.
    spec: the model.
    scan_layers: whether to stack the layers.
    dtype: of the tree's arrays.
    place: (name in the tree, array) to what the tree holds; it may keep the array, which is never written again.
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
