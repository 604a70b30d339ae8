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
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from jaxrl_llm.weights.shares import share_of
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
  plan = plan_files(spec, dtype=dtype, shard_bytes=shard_bytes)
  write_files(directory, plan, params)
  return reveal_files(directory, plan)


class FilePlan(NamedTuple):
  """Distribution of a model's tensors over weights files, and of the files over the processes that
  write them.
  """

  spec: ModelSpec
  dtype: str
  """Hugging Face name of the data type of the tensors in the files."""
  writers: tuple[Mapping[str, tuple[TensorEntry, ...]], ...]
  """For each process, the tensors of the files that it writes, keyed by file name."""

  @property
  def files(self) -> dict[str, tuple[TensorEntry, ...]]:
    """The tensors of all files, keyed by file name."""
    return {name: tensors for files in self.writers for name, tensors in files.items()}


def plan_files(
  spec: ModelSpec, *, dtype: str, shard_bytes: int = SHARD_BYTES, writers: int = 1
) -> FilePlan:
  """Plans the weights files of a model, which `writers` processes will write. For `shard_bytes`,
  see `save_params`.
  """
  if shard_bytes <= 0:
    raise UserError(f'shard_bytes is {shard_bytes}, wanted a positive number of bytes')
  itemsize = dtype_of(dtype).itemsize
  shares = [[*entries(spec), *zeros(spec)]]
  if writers > 1:
    names = [share_of(spec, number, writers) for number in range(writers)]
    shares = [[entry for entry in entries(spec) if entry.hf in share] for share in names]
    shares[0] += zeros(spec)
  shards = [_divide(share, itemsize, shard_bytes) for share in shares]
  count, number = sum(map(len, shards)), 0
  files: list[dict[str, tuple[TensorEntry, ...]]] = []
  for of_writer in shards:
    files.append({})
    for shard in of_writer:
      number += 1
      name = _SINGLE if count == 1 else f'model-{number:05d}-of-{count:05d}.safetensors'
      files[-1][name] = tuple(shard)
  return FilePlan(spec, dtype, tuple(files))


def write_files(
  directory: str | Path,
  plan: FilePlan,
  params: Params | Iterable[tuple[str, Shaped[np.ndarray, '...']]],
  number: int = 0,
) -> dict[str, str]:
  """Writes the files of process `number` under unfinished names, and flushes them to disk.

  Args:
    directory: output directory, created if missing.
    params: see `save_params`. If several processes write, this is the stream of the parameters of
      the process's share.

  Returns:
    xxh3-128 digest of each written tensor, keyed by its name in the files.

  Raises:
    UserError: the parameters do not match the model.
    RunError: the files cannot be written.
  """
  directory, files = Path(directory), plan.writers[number]
  share = {entry.hf for tensors in files.values() for entry in tensors}
  unfinished = {name: unfinished_file(directory, name) for name in files}
  with writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    try:
      with contextlib.ExitStack() as stack:
        writer, opened = stack.enter_context(TensorWriter(plan.dtype)), []
        for name, tensors in files.items():
          opened.append(stack.enter_context(unfinished[name].open('wb', buffering=0)))
          shapes = {e.hf: e.shape for e in sorted(tensors, key=lambda e: e.hf)}
          writer.open(opened[-1], FileLayout(shapes, plan.dtype))
        for entry, rows in _tensors(params, plan.spec, share):
          writer.add(entry.hf, rows, whole=rows.shape == entry.shape)
        digests = writer.finish()
        for file in opened:
          os.fsync(file.fileno())
    except BaseException:
      _discard(unfinished.values())
      raise
  return digests


def reveal_files(directory: str | Path, plan: FilePlan) -> list[Path]:
  """Gives the files of all processes their final names, writes the index if there are several
  files, and removes other weights files. Returns the paths of the weights files.

  Raises RunError if this fails.
  """
  directory, files = Path(directory), plan.files
  with writing(directory):
    # Delete the old index first, so that old and new shards cannot be loaded together as a model if
    # this process is interrupted.
    (directory / _INDEX).unlink(missing_ok=True)
    for name in files:
      # Other users must be able to read the file, as they can read the other files.
      unfinished_file(directory, name).chmod(0o644)
      unfinished_file(directory, name).replace(directory / name)
    for path in directory.iterdir():
      weights = _WEIGHT_FILE.fullmatch(path.name.removesuffix(_UNFINISHED))
      if weights and path.name not in files:
        path.unlink()
    if len(files) > 1:
      itemsize = dtype_of(plan.dtype).itemsize
      total = sum(_bytes(entry, itemsize) for tensors in files.values() for entry in tensors)
      written = {entry.hf: name for name, tensors in files.items() for entry in tensors}
      write_json(
        directory / _INDEX,
        {'metadata': {'total_size': total}, 'weight_map': dict(sorted(written.items()))},
      )
  count = sum(map(len, files.values()))
  logging.info('wrote %d tensors to %d files in %s as %s', count, len(files), directory, plan.dtype)
  return [directory / name for name in files]


def discard_files(directory: str | Path, plan: FilePlan) -> None:
  """Removes the unfinished files of all processes, as far as possible."""
  _discard(unfinished_file(Path(directory), name) for name in plan.files)


def _discard(paths: Iterable[Path]) -> None:
  for path in paths:
    with contextlib.suppress(OSError):
      path.unlink(missing_ok=True)


_UNFINISHED = '.unfinished'
"""Suffix of the names of files that are still being written."""


def unfinished_file(directory: Path, name: str) -> Path:
  """Returns the path of a weights file until `reveal_files` gives it its final name."""
  return directory / f'{name}{_UNFINISHED}'


def _tensors(
  params: Params | Iterable[tuple[str, Shaped[np.ndarray, '...']]],
  spec: ModelSpec,
  share: Collection[str],
) -> Iterator[tuple[TensorEntry, Shaped[np.ndarray, '...']]]:
  """Returns the tensors of a share of a model, including the tensors of `tables.zeros`. A tensor
  may be returned in several parts.

  Args:
    params: tree with all parameters of the model, or stream of the parameters of the share.
    share: names of the share's tensors in the files.
  """
  if isinstance(params, Mapping):
    by_name = {entry.hf: entry for entry in (*entries(spec), *zeros(spec))}
    return ((by_name[name], array) for name, array in to_hf(params, spec) if name in share)
  more = ((entry, np.zeros(entry.shape, np.float32)) for entry in zeros(spec) if entry.hf in share)
  return itertools.chain(hf_parts(params, spec, share), more)


def _bytes(entry: TensorEntry, itemsize: int) -> int:
  return int(np.prod(entry.shape)) * itemsize


def _divide(
  tensors: Iterable[TensorEntry], itemsize: int, shard_bytes: int
) -> list[list[TensorEntry]]:
  """Divides tensors into files of at most `shard_bytes`. A larger tensor gets a separate file."""
  shards: list[list[TensorEntry]] = []
  size = 0
  for entry in tensors:
    size += _bytes(entry, itemsize)
    if not shards or size > shard_bytes:
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
