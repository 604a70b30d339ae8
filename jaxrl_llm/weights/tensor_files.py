"""Writes safetensors files, or passes their bytes to another sink. Tensors are added one after the
other, in any order.

Invariant: each byte is converted, hashed and written once, block by block. Threads do this for
large arrays while the caller fetches the next array. Checksums, and digests of slices, are computed
from the same blocks, so nothing is read again.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np
import xxhash
from jaxtyping import Shaped, UInt8

from jaxrl_llm.weights.checksums import RunningChecksum, Slice
from jaxrl_llm.weights.layout import dtype_of
from jaxrl_llm.weights.mapped_files import MappedFiles

_CODES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16', 'float64': 'F64'}
"""Names of data types in the safetensors format, keyed by Hugging Face name."""
_BLOCK = 1 << 20
"""Number of bytes that are converted, hashed and written at a time. A block is small enough to stay
in a core's cache.
"""
_SMALL = 1 << 16
"""Size in bytes up to which the caller's thread writes a tensor itself, because passing the tensor
to another thread would take longer.
"""
_IN_FLIGHT = 64 << 20
"""Maximum number of bytes that wait for the threads. A single larger array may wait by itself."""
_THREADS = 4


class FileLayout:
  """Byte layout of one safetensors file."""

  def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str):
    """
    Args:
      shapes: shape of each tensor, keyed by its name in the file, in the order of the file.
      dtype: Hugging Face name of the data type of all tensors.
    """
    to = dtype_of(dtype)
    header: dict[str, object] = {'__metadata__': {'format': 'pt'}}
    offsets, end = {}, 0
    self.sizes = {name: math.prod(shape) * to.itemsize for name, shape in shapes.items()}
    """Size of each tensor in bytes, keyed by tensor name."""
    for name, shape in shapes.items():
      offsets[name], end = end, end + self.sizes[name]
      header[name] = {
        'dtype': _CODES[dtype], 'shape': list(shape), 'data_offsets': [offsets[name], end],
      }  # fmt: skip
    text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
    # safetensors pads its header with spaces so that tensors start at a multiple of 8 bytes.
    text += b' ' * (-len(text) % 8)
    self.header = len(text).to_bytes(8, 'little') + text
    self.offsets = {name: len(self.header) + offset for name, offset in offsets.items()}
    """Offset of each tensor's first byte in the file, keyed by tensor name."""
    self.nbytes, self.size = end, len(self.header) + end
    """Total size of the tensors, and size of the file, in bytes."""


@runtime_checkable
class Sink(Protocol):
  """Takes the bytes of tensors."""

  def put(self, name: str, block: UInt8[np.ndarray, 'bytes'], offset: int) -> None:
    """Takes the next bytes of a tensor, which are valid only during the call. The blocks of one
    tensor come in order. Several threads may pass blocks of different tensors at the same time.

    Args:
      offset: position of the block in the file layout.
    """
    ...


class _FileSink:
  def __init__(self, file: BinaryIO):
    self._file = file

  def put(self, name: str, block: UInt8[np.ndarray, 'bytes'], offset: int) -> None:
    write_at(self._file.fileno(), memoryview(block), offset)


@dataclasses.dataclass
class _Tensor:
  """State of a tensor while it is written."""

  name: str
  sink: Sink
  offset: int
  """Position of the next byte in the file layout."""
  hasher: xxhash.xxh3_128 = dataclasses.field(default_factory=xxhash.xxh3_128)
  rows: int = 0
  """Number of rows (indices of the first axis) that have been added."""
  slices: dict[Slice, xxhash.xxh3_128] = dataclasses.field(default_factory=dict)
  """Running digest of each requested slice."""
  checksum: RunningChecksum | None = None
  """Running checksum of the tensor and the same slices; None if no checksums are computed."""
  is_summed: bool = False
  """Whether `checksum` already contains the whole tensor."""
  written: Future[None] | None = None
  """Completes when all parts of the tensor added so far are written."""

  def digest(self, rows: Shaped[np.ndarray, 'rows *rest'], first: int) -> None:
    """Adds rows of the tensor to the digests. `first` is the index of the first of these rows."""
    if self.checksum is not None and not self.is_summed:
      self.checksum.add(rows, first)
    self.hasher.update(memoryview(rows.reshape(-1).view(np.uint8)))
    for (axis, start, length), hasher in self.slices.items():
      if axis == 0:
        if start >= first + len(rows) or start + length <= first:
          continue
        part = rows[max(start - first, 0) : max(start + length - first, 0)]
      else:
        index = (*[slice(None)] * axis, slice(start, start + length))
        part = np.ascontiguousarray(rows[index])
      hasher.update(memoryview(part.reshape(-1).view(np.uint8)))


class TensorWriter:
  """Writes tensors to files in threads. Use it as a context manager, which ends the threads."""

  def __init__(
    self,
    dtype: str,
    slices: Mapping[str, Collection[Slice]] | None = None,
    *,
    checksums: bool = False,
  ):
    """
    Args:
      dtype: Hugging Face name of the data type of the tensors in the files. Arrays of another data
        type are converted.
      slices: slices to compute digests of, keyed by tensor name; see `slice_digests`.
      checksums: whether to compute checksums of the tensors and slices too; see `checksums`.
    """
    self._dtype, self._slices, self._checksums = dtype_of(dtype), slices or {}, checksums
    self._threads = ThreadPoolExecutor(
      min(_THREADS, os.cpu_count() or 1), thread_name_prefix='tensors'
    )
    self._tensors: dict[str, _Tensor] = {}
    self._waiting: collections.deque[tuple[int, Future[None]]] = collections.deque()
    self._in_flight = 0

  def open(self, file: BinaryIO, layout: FileLayout, maps: MappedFiles | None = None) -> None:
    """Writes the header of a file. The file's tensors can be added afterwards.

    Args:
      file: unbuffered file, which must stay open for writing until `finish` has returned. Its size
        is set to that of the layout.
      maps: maps of files that are overwritten again and again; None if this file is written once.
    """
    write_at(file.fileno(), memoryview(layout.header), 0)
    file.truncate(layout.size)
    mapped = None if maps is None else maps.map(file, layout.size)
    self.pass_to(mapped or _FileSink(file), layout)

  def pass_to(self, sink: Sink, layout: FileLayout) -> None:
    """Passes the bytes of the layout's tensors to a sink. The tensors can be added afterwards."""
    for name, offset in layout.offsets.items():
      hashers = {part: xxhash.xxh3_128() for part in self._slices.get(name, ())}
      checksum = RunningChecksum(self._slices.get(name, ())) if self._checksums else None
      self._tensors[name] = _Tensor(name, sink, offset, slices=hashers, checksum=checksum)

  def add(self, name: str, rows: Shaped[np.ndarray, '...'], *, whole: bool) -> None:
    """Adds a tensor, or its next part along the first axis. The array must not be modified until
    `finish` has returned.

    Args:
      whole: whether `rows` is the whole tensor and not a part.

    Raises:
      OSError: this or an earlier array cannot be written.
    """
    tensor = self._tensors[name]
    nbytes, offset, first = rows.size * self._dtype.itemsize, tensor.offset, tensor.rows
    tensor.offset += nbytes
    tensor.rows += len(rows)
    if whole and nbytes <= _SMALL:
      self._write(tensor, offset, first, rows, None)
      return
    self._await(_IN_FLIGHT - nbytes)
    tensor.written = self._threads.submit(self._write, tensor, offset, first, rows, tensor.written)
    self._waiting.append((nbytes, tensor.written))
    self._in_flight += nbytes

  def use_checksum(self, name: str, checksum: RunningChecksum) -> None:
    """Sets the checksum of a tensor that is added afterwards, so that it is not computed again."""
    self._tensors[name].checksum, self._tensors[name].is_summed = checksum, True

  def running_checksums(self) -> dict[str, RunningChecksum]:
    """Returns the running checksum of each tensor, keyed by tensor name. They are complete after
    `finish`.
    """
    return {
      name: tensor.checksum for name, tensor in self._tensors.items() if tensor.checksum is not None
    }

  def _await(self, most: int) -> None:
    """Waits until at most `most` bytes are in flight. Raises the error of a failed write."""
    while self._waiting and self._in_flight > max(most, 0):
      nbytes, written = self._waiting.popleft()
      written.result()  # Wait 'tensor': bounded by the time for writing the arrays before it.
      self._in_flight -= nbytes

  def _write(
    self,
    tensor: _Tensor,
    offset: int,
    first: int,
    rows: Shaped[np.ndarray, '...'],
    before: Future[None] | None,
  ) -> None:
    if before is not None:
      # Wait 'tensor': bounded: an earlier task of these threads completes the awaited write.
      before.result()
    rows = np.ascontiguousarray(rows)
    step = max(1, _BLOCK // max(1, rows[:1].size * self._dtype.itemsize))
    converts = rows.dtype != self._dtype
    staging = np.empty((min(step, len(rows)), *rows.shape[1:]), self._dtype) if converts else None
    for start in range(0, len(rows), step):
      block = rows[start : start + step]
      if staging is not None:
        np.copyto(staging[: len(block)], block, casting='unsafe')
        block = staging[: len(block)]
      # Hashing and writing both release the GIL, so the threads run in parallel.
      tensor.digest(block, first + start)
      tensor.sink.put(tensor.name, block.reshape(-1).view(np.uint8), offset)
      offset += block.nbytes

  def finish(self) -> dict[str, str]:
    """Waits until everything is written. Returns the xxh3-128 digest of each tensor's bytes, keyed
    by name in the order of the files' layouts. Every tensor must have been added.
    """
    self._await(0)
    return {name: tensor.hasher.hexdigest() for name, tensor in self._tensors.items()}

  def slice_digests(self) -> dict[str, dict[Slice, str]]:
    """Returns the xxh3-128 digest of each slice's bytes in C order, keyed by tensor name and slice.
    Call this method after `finish`.
    """
    return {
      name: {part: hasher.hexdigest() for part, hasher in tensor.slices.items()}
      for name, tensor in self._tensors.items()
      if tensor.slices
    }

  def checksums(self) -> dict[str, dict[Slice | None, str]]:
    """Returns the checksums (`weights.checksums`) as 16 hexadecimal digits, keyed by tensor name
    and slice. The key None stands for the whole tensor. Call this method after `finish`.
    """
    return {
      name: {cut: values[cut] for cut in (None, *self._slices.get(name, ()))}
      for name, running in self.running_checksums().items()
      for values in [running.values()]
    }

  def __enter__(self) -> TensorWriter:
    return self

  def __exit__(self, *_) -> None:
    # Wait 'tensor': bounded by the time for writing the arrays in flight.
    self._threads.shutdown(wait=True, cancel_futures=True)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
  """Writes all of the data to a file at the given offset."""
  while len(data):  # A nearly full disk accepts only part of the data.
    written = os.pwrite(descriptor, data, offset)
    data, offset = data[written:], offset + written
