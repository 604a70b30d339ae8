"""Published weights written by several processes of the trainer: each writes a share of the tensors
into a file of its own, and process 0 makes the version visible. A process that does not see process
0's directory keeps its file in its own memory, and serves it to the hosts that fetch weights.

The module `weights.shares` determines the shares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from absl import logging

from jaxrl_llm.core.disk import is_seen, scratch
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.net.connections import is_loopback
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.types import Json
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.pull.bundle import Bundle, BundleFile, describe_file
from jaxrl_llm.rollout.vllm.pull.server import WeightServer
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.layout import hf_parts
from jaxrl_llm.weights.safetensors_files import writing
from jaxrl_llm.weights.shares import parameters_of, share_of
from jaxrl_llm.weights.tables import entries
from jaxrl_llm.weights.tensor_files import FileLayout, TensorWriter

FILE = 'weights.safetensors'
"""Name of the file with all tensors, or with the share of process 0."""


class Proof(NamedTuple):
  """Values by which readers and servers recognise the tensors of a version."""

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


def share_file(number: int) -> str:
  """Returns the name of the file that process `number` writes."""
  return FILE if number == 0 else f'weights-{number}.safetensors'


def share_layout(spec: ModelSpec, number: int, count: int, dtype: str) -> FileLayout:
  """Returns the layout of the file that process `number` of `count` writes."""
  names = share_of(spec, number, count)
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


class ShareOrder(NamedTuple):
  """Order of process 0 to the other processes to write their shares of a version."""

  directory: str
  """Directory of the unfinished version."""
  token: str
  """Token of the directory, by which a process recognises it (`core.disk.is_seen`)."""
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

  def to_json(self) -> Json:
    slices = {name: sorted(map(list, cuts)) for name, cuts in self.slices.items()}
    source = None if self.source is None else dataclasses.asdict(self.source)
    return {**self._asdict(), 'slices': slices, 'source': source, 'keep': list(self.keep)}

  @classmethod
  def from_json(cls, value: Any) -> ShareOrder:
    slices = {name: [Slice(*cut) for cut in cuts] for name, cuts in value['slices'].items()}
    source = None if value['source'] is None else FrontConfig(**value['source'])
    changed = {'slices': slices, 'source': source, 'keep': tuple(value['keep'])}
    return cls(**{**value, **changed})


_MEMORY = '/dev/shm'
"""Directory in memory, in which processes that do not see process 0's directory write."""
_VERSIONS = 3
"""Maximum number of shares in memory: the newest version, the one before, and the next."""
_ANYWHERE = '0.0.0.0'
"""Address of all interfaces of a host."""


class VllmShareWriter:
  """Writes the share of one process of the trainer."""

  def __init__(self, spec: ModelSpec):
    """
    Args:
      spec: spec of the language model.
    """
    self._spec = spec
    self._server: WeightServer | None = None
    """Server of this process's shares; None if process 0's directory is seen."""
    self._opened = contextlib.ExitStack()
    """Holds `_folder`, which is removed when the process exits."""
    self._folder: Path | None = None
    """Folder of this process's shares in memory; None before the first."""

  def can_write(self, order: Json, number: int, count: int) -> bool:
    """Returns whether this process, `number` of `count`, sees the directory into which process 0
    publishes, or can keep and serve its shares.
    """
    asked = ShareOrder.from_json(order)
    if is_seen(Path(asked.directory), asked.token):
      return True
    if asked.source is None:
      return False
    try:
      self._prepare(asked.source, share_layout(self._spec, number, count, asked.dtype), number)
    except (UserError, OSError) as error:
      logging.warning('process 0 writes all weights, since process %d cannot: %s', number, error)
      return False
    return True

  def _prepare(self, source: FrontConfig, layout: FileLayout, number: int) -> None:
    """Creates the folder of this process's shares, and starts their server.

    Raises:
      UserError: the server cannot listen.
      OSError: the folder cannot be created, or has too little space.
    """
    if self._folder is None:
      free, needed = shutil.disk_usage(_MEMORY).free, _VERSIONS * layout.size
      if free < needed:
        raise OSError(f'{_MEMORY} has {free:,} bytes free, {_VERSIONS} shares need {needed:,}')
      self._folder = self._opened.enter_context(scratch('jaxrl-shares-', _MEMORY))
    if self._server is None:
      # The address of process 0 may not be one of this host.
      host = source.host if is_loopback(source.host) else _ANYWHERE
      port = source.port and source.port + number
      self._server = WeightServer(dataclasses.replace(source, host=host, port=port))
    self._server.open()

  def names(self, number: int, count: int) -> Collection[str]:
    """Returns the names in the unrolled tree of the parameters that process `number` writes."""
    return parameters_of(self._spec, number, count)

  def write(
    self, order: Json, number: int, count: int, leaves: Iterable[tuple[str, np.ndarray]]
  ) -> Json:
    """Writes the share of process `number`. Returns the digests for process 0 or, if the share
    cannot be written, the error.

    Args:
      leaves: parameters of the share. All are taken in any case, since the other processes need
        this one to gather theirs.
    """
    asked, leaves = ShareOrder.from_json(order), iter(leaves)
    try:
      if is_seen(Path(asked.directory), asked.token):
        return {'proof': write_share(self._spec, asked, number, count, leaves).to_json()}
      return self._write_here(asked, number, count, leaves)
    except (RunError, UserError) as error:
      for _ in leaves:
        pass
      return {'error': str(error)}

  def _write_here(
    self, order: ShareOrder, number: int, count: int, leaves: Iterator[tuple[str, np.ndarray]]
  ) -> Json:
    """Writes a share into memory of this process's host, and serves it. Removes the shares of
    versions that are no longer published.
    """
    served = dict(self._server.served)
    for key, (directory, _) in list(served.items()):
      if directory.name not in order.keep:
        del served[key]
        shutil.rmtree(directory, ignore_errors=True)
    self._server.served = dict(served)
    directory = self._folder / order.token
    with writing(directory):
      directory.mkdir()
    proof = write_share(self._spec, order._replace(directory=str(directory)), number, count, leaves)
    file = describe_file(directory / share_file(number), proof.digests, proof.slices)
    bundle = Bundle((file,))
    self._server.served = {**served, bundle.id: (directory, bundle)}
    return {
      'proof': proof.to_json(),
      'remote': RemoteFile(self._server.address, file).to_json(),
    }


def write_share(
  spec: ModelSpec,
  order: ShareOrder,
  number: int,
  count: int,
  leaves: Iterable[tuple[str, np.ndarray]],
) -> Proof:
  """Writes the share of process `number` of `count` into its file.

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
    writer.open(file, layout)
    return write_tensors(writer, leaves, spec, layout.offsets.keys())
