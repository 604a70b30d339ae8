"""Published weights written by several processes of the trainer: each writes a share of the tensors
into a file of its own, and process 0 makes the version visible. A process that does not see process
0's directory keeps its file in its own memory, and serves it to the hosts that fetch weights.

The module `weights.shares` determines the shares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from jaxtyping import Shaped

from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.types import Json
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.pull.bundle import Bundle, BundleFile
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.layout import hf_parts
from jaxrl_llm.weights.mapped_files import MappedFiles
from jaxrl_llm.weights.safetensors_files import writing
from jaxrl_llm.weights.shares import share_of
from jaxrl_llm.weights.tables import entries
from jaxrl_llm.weights.tensor_files import FileLayout, TensorWriter

FILE = 'weights.safetensors'
"""Name of the file with all tensors, or with the share of process 0."""


class Proof(NamedTuple):
  """Digests and checksums of the tensors of a version. Readers and servers verify them."""

  digests: Mapping[str, str]
  """xxh3-128 digest of each tensor, keyed by its name."""
  slices: Mapping[str, Mapping[Slice, str]]
  """xxh3-128 digests of slices of the tensors, keyed by tensor name and slice."""
  checksums: Mapping[str, Mapping[Slice | None, str]]
  """Checksums of tensors and slices; see `Publication.file_checksums`."""

  @property
  def of_slices(self) -> dict[str, list[list[Any]]]:
    """Returns [axis, start, length, digest, checksum] of each slice, keyed by tensor name."""
    return {
      name: [[*cut, value, self.checksums.get(name, {}).get(cut)] for cut, value in cuts.items()]
      for name, cuts in self.slices.items()
    }

  def to_json(self) -> Json:
    whole = {name: values[None] for name, values in self.checksums.items()}
    return {'digests': dict(self.digests), 'slices': self.of_slices, 'checksums': whole}

  @classmethod
  def from_json(cls, value: Any) -> Proof:
    slices: dict[str, dict[Slice, str]] = {}
    checksums: dict[str, dict[Slice | None, str]] = {
      name: {None: whole} for name, whole in value['checksums'].items()
    }
    for name, cuts in value['slices'].items():
      for *cut, digest, checksum in cuts:
        slices.setdefault(name, {})[Slice(*cut)] = digest
        if checksum is not None:
          checksums[name][Slice(*cut)] = checksum
    return cls(value['digests'], slices, checksums)

  def only(self, names: Collection[str]) -> Proof:
    """Returns the values of the tensors with the given names."""
    return Proof(*({name: part[name] for name in names if name in part} for part in self))

  @classmethod
  def of(cls, parts: Iterable[Proof]) -> Proof:
    """Returns the proof of several files together."""
    joined = cls({}, {}, {})
    for part in parts:
      joined = cls(
        {**joined.digests, **part.digests},
        {**joined.slices, **part.slices},
        {**joined.checksums, **part.checksums},
      )
    return joined


def digest(array: Shaped[np.ndarray, '...']) -> str:
  """Returns the xxh3-128 digest of an array's bytes in C order."""
  return xxhash.xxh3_128_hexdigest(
    memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
  )


def share_file(number: int) -> str:
  """Returns the name of the file that process `number` writes."""
  return FILE if number == 0 else f'weights-{number}.safetensors'


def delta_file(number: int) -> str:
  """Returns the name of the file with the changes of the share of process `number`."""
  return 'delta.safetensors' if number == 0 else f'delta-{number}.safetensors'


def share_layout(spec: ModelSpec, number: int, count: int, dtype: str) -> FileLayout:
  """Returns the layout of the file that process `number` of `count` writes."""
  names = share_of(spec, number, count)  # All tensors, if there is only one process.
  return FileLayout({entry.hf: entry.shape for entry in entries(spec) if entry.hf in names}, dtype)


def write_tensors(
  writer: TensorWriter,
  leaves: Iterable[tuple[str, np.ndarray]],
  spec: ModelSpec,
  only: Collection[str] | None = None,
) -> Proof:
  """Passes parameters to a writer as Hugging Face tensors. The order of the digests is that of the
  writer's layouts.

  Args:
    only: names of the tensors that `leaves` has; None for all.
  """
  for entry, rows in hf_parts(leaves, spec, only):
    writer.add(entry.hf, rows, whole=rows.shape == entry.shape)
  return Proof(writer.finish(), writer.slice_digests(), writer.checksums())


@contextlib.contextmanager
def weights_file(path: Path) -> Iterator[BinaryIO]:
  """Opens a file of weights, whose earlier content is overwritten. At the end of the `with` block,
  the content is flushed to disk.
  """
  # The file is not opened in mode 'w', which would free its pages: writing to existing pages of
  # shared memory is faster than allocating new ones.
  with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), 'r+b', buffering=0) as file:
    yield file
    os.fsync(file.fileno())


class RemoteFile(NamedTuple):
  """File of a version that another process of the trainer has in its own memory, and serves."""

  address: str
  file: BundleFile

  def to_json(self) -> Json:
    return {'address': self.address, 'file': Bundle((self.file,)).to_json()}

  @classmethod
  def from_json(cls, value: Any) -> RemoteFile:
    return cls(value['address'], Bundle.from_json(value['file']).files[0])


class ImageOrder(NamedTuple):
  """Order to every process to take a version into its image, a copy of its share (`ShareImage`)."""

  before: str | None
  """Token of the version that the images contain, with which the next version is compared. None if
  the next version must be written whole, without a comparison.
  """
  collect: bool
  """Whether to collect the changes for a delta."""


class ShareReport(NamedTuple):
  """Report of a process on its share of a version."""

  proof: Proof
  remote: RemoteFile | None = None
  """The file, if the process serves it itself."""
  changed: int | None = None
  """Number of elements that differ from the version before; None if they were not compared."""
  delta_bytes: int | None = None
  """Size in bytes of the collected changes; None if they were not collected, or are too large."""

  def to_json(self) -> Json:
    remote = None if self.remote is None else self.remote.to_json()
    return {**self._asdict(), 'proof': self.proof.to_json(), 'remote': remote}

  @classmethod
  def from_json(cls, value: Any) -> ShareReport:
    remote = None if value['remote'] is None else RemoteFile.from_json(value['remote'])
    return cls(**{**value, 'proof': Proof.from_json(value['proof']), 'remote': remote})


class ShareOrder(NamedTuple):
  """Order of process 0 to the other processes to write their shares of a version."""

  directory: str
  """Directory of the unfinished version."""
  token: str
  """Token of the directory, with which a process checks whether it sees the same directory
  (`core.disk.is_seen`).
  """
  dtype: str
  """Hugging Face name of the data type of the tensors."""
  slices: Mapping[str, Collection[Slice]]
  """Slices to compute digests of, keyed by tensor name."""
  checksums: bool
  """Whether to compute checksums too."""
  source: FrontConfig | None = None
  """Address and token with which a process that does not see the directory serves its share to the
  hosts that fetch it. None if servers read the files. Process `n` adds `n` to the port, unless the
  port is 0.
  """
  keep: tuple[str, ...] = ()
  """Tokens of the versions that are still published."""
  image: ImageOrder | None = None
  """If not None, each process takes its share into its image, and writes it when process 0 has
  decided how. If None, each process writes its share at once.
  """

  def to_json(self) -> Json:
    slices = {name: sorted(map(list, cuts)) for name, cuts in self.slices.items()}
    source = None if self.source is None else dataclasses.asdict(self.source)
    changed = {'slices': slices, 'source': source, 'keep': list(self.keep)}
    return {**self._asdict(), **changed, 'image': self.image and self.image._asdict()}

  @classmethod
  def from_json(cls, value: Any) -> ShareOrder:
    slices = {name: [Slice(*cut) for cut in cuts] for name, cuts in value['slices'].items()}
    source = None if value['source'] is None else FrontConfig(**value['source'])
    image = None if value['image'] is None else ImageOrder(**value['image'])
    changed = {'slices': slices, 'source': source, 'keep': tuple(value['keep']), 'image': image}
    return cls(**{**value, **changed})


def write_share(
  spec: ModelSpec,
  order: ShareOrder,
  number: int,
  count: int,
  leaves: Iterable[tuple[str, np.ndarray]],
  maps: MappedFiles | None = None,
) -> Proof:
  """Writes the share of process `number` of `count` into its file.

  Args:
    maps: maps of the files that this process overwrites; see `TensorWriter.open`.

  Raises:
    UserError: the parameters do not match the model.
    RunError: the file cannot be written.
  """
  path = Path(order.directory) / share_file(number)
  layout = share_layout(spec, number, count, order.dtype)
  with (
    writing(path.parent),
    TensorWriter(order.dtype, order.slices, checksums=order.checksums) as writer,
    weights_file(path) as file,
  ):
    writer.open(file, layout, maps)
    return write_tensors(writer, leaves, spec, layout.offsets.keys())
