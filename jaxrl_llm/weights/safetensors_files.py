"""Reads and writes the safetensors files of a model directory.

Invariant: the names and shapes of the tensors in all files are checked before the first parameter
is read. Besides the arrays that the caller keeps, reading needs host memory for one block
(`_BLOCK`) and for the requested part of one array. Writing needs host memory for a few arrays
(`weights.tensor_files`) besides those that the caller keeps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.files import check_regular
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.weights.hf_config import read_json, write_json
from jaxrl_llm.weights.layout import StoredArray, dtype_of, fill, hf_parts, to_hf
from jaxrl_llm.weights.tables import Inventory, TensorEntry, entries, zeros
from jaxrl_llm.weights.tensor_files import FileLayout, TensorWriter

SHARD_BYTES = 5_000_000_000
"""Default maximum size of a weights file in bytes. Larger weights are split into several files. The
size is a compromise, because both many small files and a few very large files are awkward to copy.
"""

_SINGLE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_WEIGHT_FILE = re.compile(r'model(-\d{5}-of-\d{5})?\.safetensors')
_PLAIN_NAME = re.compile(r'[^/\\\0]+\.safetensors')
_READABLE = ('F32', 'BF16', 'F16', 'F64')
"""Data types of tensors that can be read, as safetensors files name them."""
_BLOCK = 1 << 22
"""Number of elements that are read, converted and checked for finite values at a time. It limits
the memory needed.
"""


def keep(path: str, stored: StoredArray) -> Shaped[np.ndarray, '...']:
  """Reads the whole array into host memory. This is the default of `place` in `load_params`."""
  del path
  return stored[...]


def load_params(
  directory: str | Path,
  spec: ModelSpec,
  *,
  scan_layers: bool = False,
  dtype: str = 'float32',
  place: Callable[[str, StoredArray], Any] = keep,
) -> Params:
  """Reads the parameters in a model directory, one array of the tree at a time. `place` determines
  which parts of an array are read.

  Args:
    directory: directory with model.safetensors, or with model.safetensors.index.json and the files
      that this index lists.
    spec: spec of the model, as returned by `read_spec`.
    scan_layers: whether to stack the layers.
    dtype: data type of the returned parameters. The files may have another one.
    place: maps (name in the tree, stored array) to the leaf of the tree, for example a sharded
      device array. Only the parts that `place` indexes are read and checked for finite values.
      `place` may keep references to them, because they are not modified afterwards.

  Returns:
    The parameter tree. If the embeddings are tied and the files have an `lm_head.weight`, its
    values are ignored and the embedding is used.

  Raises:
    UserError: the files belong to another model or are damaged, or a value is not finite after
      conversion to `dtype`.
  """
  to = dtype_of(dtype)
  with contextlib.ExitStack() as stack:
    files = {path: stack.enter_context(_open(path)) for path in _weight_files(Path(directory))}
    where = _check_files(Path(directory), files, spec)

    def read(entry: TensorEntry, part: tuple[slice, ...], out: Shaped[np.ndarray, '...']) -> None:
      path = where[entry.hf]
      _read_part(path, files[path], entry.hf, part, out)

    params = fill(read, spec, scan_layers=scan_layers, dtype=to, place=place)
  logging.info(
    'read from %d tensors in %d files of %s as %s', len(where), len(files), directory, dtype
  )
  return params


def _open(path: Path) -> safe_open:
  try:
    check_regular(path)
    return safe_open(path, 'np')
  except FileNotFoundError:
    raise UserError(f'{path}: no such file, though {_INDEX} lists it; fetch it again') from None
  except (SafetensorError, OSError, ValueError) as error:
    reason = one_line(error)
    raise UserError(
      f'{path}: truncated or corrupt safetensors file ({reason}); fetch it again'
    ) from None


def _read(path: Path, file: safe_open, name: str) -> np.ndarray:
  try:
    return file.get_tensor(name)
  except SafetensorError as error:
    raise UserError(f'{path}: {name} cannot be read ({error}); fetch the file again') from None


def _read_part(
  path: Path, file: safe_open, name: str, part: tuple[slice, ...], out: Shaped[np.ndarray, '...']
) -> None:
  """Reads the part of a tensor that `part` selects into `out`, converting it to the data type of
  `out`.

  Args:
    part: a slice with bounds for each axis.
  """
  stored = file.get_slice(name)
  first, rest = part[0], part[1:]
  rows = max(1, _BLOCK // max(1, math.prod(out.shape[1:])))
  for start in range(first.start, first.stop, rows):
    stop = min(start + rows, first.stop)
    target = out[start - first.start : stop - first.start]
    try:
      block = stored[(slice(start, stop), *rest)]
    except SafetensorError as error:
      raise UserError(f'{path}: {name} cannot be read ({error}); fetch the file again') from None
    with np.errstate(over='ignore'):  # The check that follows rejects values that overflow.
      np.copyto(target, block, casting='unsafe')
    _require_finite(path, name, target, (start, *(axis.start for axis in rest)))


def _require_finite(
  path: Path, name: str, block: Shaped[np.ndarray, '...'], offset: tuple[int, ...]
) -> None:
  """Raises UserError if an element is not finite. `offset` is the position in the tensor of the
  block's first element.
  """
  finite = np.isfinite(block)
  if not finite.all():
    at = np.unravel_index(int(np.argmin(finite)), block.shape)
    place = ', '.join(str(start + i) for start, i in zip(offset, at, strict=True))
    raise UserError(
      f'{path}: {name}[{place}] is {float(block[at])} as {block.dtype}, wanted finite weights; '
      'fetch the file again, or take a checkpoint from before the training diverged'
    )


def _weight_files(directory: Path) -> list[Path]:
  if (directory / _SINGLE).exists():
    return [directory / _SINGLE]
  if (directory / _INDEX).exists():
    return [directory / name for name in sorted(set(_weight_map(directory).values()))]
  other = next(
    (
      path.name
      for pattern in ('*.bin', '*.pth', '*.gguf')
      for path in sorted(directory.glob(pattern))
    ),
    None,
  )
  reason = f'found {other}, convert it to safetensors' if other else 'no weights here'
  raise UserError(f'{directory}: holds neither {_SINGLE} nor {_INDEX}: {reason}')


def _weight_map(directory: Path) -> Mapping[str, str]:
  values = read_json(directory / _INDEX).get('weight_map')
  if (
    not isinstance(values, dict)
    or not values
    or not all(isinstance(name, str) for name in values.values())
  ):
    raise UserError(f'{directory / _INDEX}: has no weight_map of tensor names to file names')
  for tensor, name in values.items():
    if not _PLAIN_NAME.fullmatch(name):
      raise UserError(
        f'{directory / _INDEX}: weight_map has {one_line(tensor, 100)} in '
        f'{one_line(repr(name), 200)}, wanted the name of a .safetensors file in the same '
        'directory; move the file there and correct the index'
      )
  return values


def _check_files(directory: Path, files: Mapping[Path, Any], spec: ModelSpec) -> dict[str, Path]:
  """Checks the names, shapes and data types of all tensors, and that tensors which must be 0 are 0.

  Returns the path of the file that contains each tensor of the model, keyed by the tensor's name.
  """
  inventory, where = Inventory(spec, str(directory)), {}
  for path, file in files.items():
    for name in file.keys():  # noqa: SIM118 (not a dict)
      header = file.get_slice(name)
      entry = inventory.see(name, header.get_shape(), functools.partial(_read, path, file, name))
      if entry is None:
        continue
      if header.get_dtype() not in _READABLE:
        raise UserError(
          f'{path}: {name} is {header.get_dtype()}, wanted one of {", ".join(_READABLE)}: '
          'only unquantized weights are read'
        )
      where[name] = path
  inventory.finish()
  return where


def save_params(
  directory: str | Path,
  params: Params | Iterable[tuple[str, Shaped[np.ndarray, '...']]],
  spec: ModelSpec,
  *,
  dtype: str = 'float32',
  shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
  """Writes the weights to one file, model.safetensors. If they exceed `shard_bytes`, writes several
  files (shards) and an index instead.

  A file gets its final name only when all files are complete. Weights that are already in the
  directory are then replaced.

  Args:
    directory: output directory, created if missing.
    params: scanned or unrolled tree of NumPy arrays or addressable JAX arrays; or a stream of (name
      in the tree, array) as for `layout.hf_parts`, so that only a few arrays need be in memory at a
      time.
    spec: spec of the model.
    dtype: data type of the tensors in the files.
    shard_bytes: maximum size of the tensors in a file, in bytes. A larger tensor gets a separate
      file.

  Returns:
    Paths of the weights files.

  Raises:
    UserError: the parameters do not match the model.
    RunError: the files cannot be written.
  """
  directory, to = Path(directory), dtype_of(dtype)
  shards = _plan_shards(spec, to.itemsize, shard_bytes)
  parts = _tensors(params, spec)
  names = [
    _SINGLE if len(shards) == 1 else f'model-{number:05d}-of-{len(shards):05d}.safetensors'
    for number in range(1, len(shards) + 1)
  ]
  unfinished = {name: directory / f'{name}{_UNFINISHED}' for name in names}
  with writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    try:
      with contextlib.ExitStack() as stack:
        writer = stack.enter_context(TensorWriter(dtype))
        for name, shard in zip(names, shards, strict=True):
          file = stack.enter_context(unfinished[name].open('wb', buffering=0))
          layout = FileLayout({e.hf: e.shape for e in sorted(shard, key=lambda e: e.hf)}, dtype)
          writer.open(file, layout)
        for entry, rows in parts:
          writer.add(entry.hf, rows, whole=rows.shape == entry.shape)
        writer.finish()
    except BaseException:
      for path in unfinished.values():
        path.unlink(missing_ok=True)
      raise
    # Delete the old index first, so that old and new shards cannot be loaded together as a model if
    # this process is interrupted.
    (directory / _INDEX).unlink(missing_ok=True)
    for name, path in unfinished.items():
      # Other users must be able to read the file, as they can read the other files.
      path.chmod(0o644)
      path.replace(directory / name)
    for path in directory.iterdir():
      weights = _WEIGHT_FILE.fullmatch(path.name.removesuffix(_UNFINISHED))
      if weights and path.name not in names:
        path.unlink()
    if len(shards) > 1:
      total = sum(_bytes(entry, to.itemsize) for shard in shards for entry in shard)
      written = {e.hf: name for name, shard in zip(names, shards, strict=True) for e in shard}
      write_json(
        directory / _INDEX,
        {'metadata': {'total_size': total}, 'weight_map': dict(sorted(written.items()))},
      )
  count = sum(map(len, shards))
  logging.info('wrote %d tensors to %d files in %s as %s', count, len(names), directory, dtype)
  return [directory / name for name in names]


_UNFINISHED = '.unfinished'
"""Suffix of the names of files that are still being written."""


def _tensors(
  params: Params | Iterable[tuple[str, Shaped[np.ndarray, '...']]], spec: ModelSpec
) -> Iterator[tuple[TensorEntry, Shaped[np.ndarray, '...']]]:
  """Returns the tensors of a model's files, including the tensors of `tables.zeros`. A tensor may
  come in parts.
  """
  if isinstance(params, Mapping):
    by_name = {entry.hf: entry for entry in (*entries(spec), *zeros(spec))}
    return ((by_name[name], tensor) for name, tensor in to_hf(params, spec))
  more = ((entry, np.zeros(entry.shape, np.float32)) for entry in zeros(spec))
  return itertools.chain(hf_parts(params, spec), more)


def _bytes(entry: TensorEntry, itemsize: int) -> int:
  return int(np.prod(entry.shape)) * itemsize


def _plan_shards(spec: ModelSpec, itemsize: int, shard_bytes: int) -> list[list[TensorEntry]]:
  if shard_bytes <= 0:
    raise UserError(f'shard_bytes is {shard_bytes}, wanted a positive number of bytes')
  shards: list[list[TensorEntry]] = [[]]
  size = 0
  for entry in (*entries(spec), *zeros(spec)):
    size += _bytes(entry, itemsize)
    if shards[-1] and size > shard_bytes:
      shards.append([])
      size = _bytes(entry, itemsize)
    shards[-1].append(entry)
  return shards


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
  """Converts a write error in the block to a RunError whose one-line message names the directory. A
  full disk, for example, causes such an error.
  """
  try:
    yield
  except (OSError, SafetensorError) as error:
    reason = ' '.join(str(error).split())
    raise RunError(
      f'{directory}: weights cannot be written ({reason}); free space there, or name another '
      'directory'
    ) from None
