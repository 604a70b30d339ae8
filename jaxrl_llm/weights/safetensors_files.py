"""Reads and writes the safetensors files of a model directory.

Invariant: the names and shapes of the tensors in all files are checked before the first parameter
is read. Reading needs host memory for one array of the parameter tree, in addition to the arrays
that the caller keeps. Writing needs host memory for one shard (one of several weights files).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.files import check_regular
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.weights.hf_config import read_json, write_json
from jaxrl_llm.weights.layout import dtype_of, fill, to_hf
from jaxrl_llm.weights.tables import Inventory, TensorEntry, entries, zeros

SHARD_BYTES = 5_000_000_000
"""Default maximum size of a weights file in bytes. Larger weights are split into several files. The
size is a compromise, because both many small files and a few very large files are awkward to copy.
"""

_SINGLE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_WEIGHT_FILE = re.compile(r'model(-\d{5}-of-\d{5})?\.safetensors')
_PLAIN_NAME = re.compile(r'[^/\\\0]+\.safetensors')
_READABLE = ('F32', 'BF16', 'F16', 'F64')
"""Data types of tensors that can be read, as safetensors files name them."""
_CHECKED_ELEMENTS = 1 << 22
"""Number of elements that are checked at a time for finite values. It limits the memory needed."""


def keep(path: str, array: Shaped[np.ndarray, '*shape']) -> Shaped[np.ndarray, '*shape']:
  """Default for `place` of `load_params`: returns the array itself, which stays on the host."""
  del path
  return array


def load_params(
  directory: str | Path,
  spec: ModelSpec,
  *,
  scan_layers: bool = False,
  dtype: str = 'float32',
  place: Callable[[str, np.ndarray], Any] = keep,
) -> Params:
  """Reads the parameters in a model directory, one array of the tree at a time.

  Args:
    directory: directory with model.safetensors, or with model.safetensors.index.json and the files
      that this index lists.
    spec: spec of the model, as returned by `read_spec`.
    scan_layers: whether to stack the layers.
    dtype: data type of the returned parameters. The files may have another one.
    place: maps (name in the tree, host array) to the leaf of the tree, for example a sharded device
      array. It may keep the array or share its memory, since the array is not modified afterwards.

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

    def read(entry: TensorEntry) -> np.ndarray:
      path = where[entry.hf]
      with np.errstate(over='ignore'):  # The following check rejects values that overflow.
        tensor = _read(path, files[path], entry.hf).astype(to, copy=False)
      _require_finite(path, entry.hf, tensor)
      return tensor

    params = fill(read, spec, scan_layers=scan_layers, dtype=to, place=place)
  logging.info(
    'read %d tensors from %d files in %s as %s', len(where), len(files), directory, dtype
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


def _require_finite(path: Path, name: str, tensor: Shaped[np.ndarray, '...']) -> None:
  flat = tensor.reshape(-1)
  for start in range(0, flat.size, _CHECKED_ELEMENTS):
    finite = np.isfinite(flat[start : start + _CHECKED_ELEMENTS])
    if not finite.all():
      at = start + int(np.argmin(finite))
      place = ', '.join(map(str, np.unravel_index(at, tensor.shape)))
      raise UserError(
        f'{path}: {name}[{place}] is {float(flat[at])} as {tensor.dtype}, wanted finite weights; '
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

  Returns the file that has each tensor of the model, keyed by the tensor's name.
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
  params: Params,
  spec: ModelSpec,
  *,
  dtype: str = 'float32',
  shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
  """Writes the weights to one file, model.safetensors. If they exceed `shard_bytes`, writes several
  files (shards) and an index instead.

  A file appears under its name only when it is complete. Weights that are already in the directory
  are replaced.

  Args:
    directory: output directory, created if missing.
    params: scanned or unrolled tree of NumPy arrays or addressable JAX arrays.
    spec: spec of the model.
    dtype: data type of the tensors in the files.
    shard_bytes: maximum size of the tensors in a file, in bytes. A tensor that is larger gets a
      file of its own.

  Returns:
    Paths of the weights files.
  """
  directory, to = Path(directory), dtype_of(dtype)
  shards = _plan_shards(spec, to.itemsize, shard_bytes)
  tensors = to_hf(params, spec)
  written: dict[str, str] = {}
  with writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    # The old index is deleted first. If writing is interrupted, old and new shards then cannot be
    # loaded together as a model.
    (directory / _INDEX).unlink(missing_ok=True)
    for number, shard in enumerate(shards, start=1):
      name = _SINGLE if len(shards) == 1 else f'model-{number:05d}-of-{len(shards):05d}.safetensors'
      _write_shard(directory / name, shard, tensors, to)
      written |= dict.fromkeys((entry.hf for entry in shard), name)
    for path in directory.iterdir():
      if _WEIGHT_FILE.fullmatch(path.name) and path.name not in written.values():
        path.unlink()
    if len(shards) > 1:
      total = sum(_bytes(entry, to.itemsize) for shard in shards for entry in shard)
      write_json(
        directory / _INDEX,
        {'metadata': {'total_size': total}, 'weight_map': dict(sorted(written.items()))},
      )
  files = [directory / name for name in dict.fromkeys(written.values())]
  logging.info(
    'wrote %d tensors to %d files in %s as %s', len(written), len(files), directory, dtype
  )
  return files


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


def _write_shard(
  path: Path, shard: list[TensorEntry], tensors: Iterator[tuple[str, np.ndarray]], dtype: np.dtype
) -> None:
  # save_file ignores strides and writes the memory from the first element on. Without a contiguous
  # copy, a transposed view would be written with its elements in the wrong order.
  arrays = {}
  for _ in shard:
    name, tensor = next(tensors)
    arrays[name] = np.ascontiguousarray(tensor.astype(dtype, copy=False))
  save_file(arrays, path, metadata={'format': 'pt'})
  # save_file creates a file that only its owner can read. Other users must be able to read it, as
  # they can the directory's other files.
  path.chmod(0o644)


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
  """Context manager that replaces write errors, such as that of a full disk, by a RunError with a
  one-line message that names the directory.
  """
  try:
    yield
  except (OSError, SafetensorError) as error:
    reason = ' '.join(str(error).split())
    raise RunError(
      f'{directory}: weights cannot be written ({reason}); free space there, or name another '
      'directory'
    ) from None
