"""Images of the newest version, from which whole weights and deltas are written. Each process of
the trainer keeps the image of its share of the tensors.

Invariant: all processes compare a version with the same earlier version. Process 0 names the
earlier version in its order. A process whose image contains another version reports no delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.core.disk import sync
from jaxrl_llm.core.types import Json
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.shares import (
  ShareOrder,
  ShareReport,
  delta_file,
  digest,
  share_file,
  share_layout,
  weights_file,
  write_tensors,
)
from jaxrl_llm.weights.checksums import RunningChecksum
from jaxrl_llm.weights.deltas import Changes, Image
from jaxrl_llm.weights.layout import dtype_of
from jaxrl_llm.weights.safetensors_files import writing
from jaxrl_llm.weights.tables import entries
from jaxrl_llm.weights.tensor_files import FileLayout, TensorWriter, write_at


class Decision(NamedTuple):
  """Decision of process 0 on how a version is written, after all images contain it."""

  directory: str
  """Directory of the unfinished files."""
  is_delta: bool
  """Whether each process writes the changes of its share. If not, each writes its whole share."""

  def to_json(self) -> Json:
    return self._asdict()

  @classmethod
  def from_json(cls, value: Any) -> Decision:
    return cls(**value)


class ShareImage:
  """Image of the share of one process: a copy of its tensors in host memory."""

  def __init__(self, spec: ModelSpec, dtype: str, number: int, count: int):
    """
    Args:
      dtype: Hugging Face name of the data type of the tensors.
      number: number of the process.
      count: number of processes that write shares.
    """
    self.number, self.count = number, count
    self._spec, self._dtype = spec, dtype
    self._layout = share_layout(spec, number, count, dtype)
    whole = FileLayout({entry.hf: entry.shape for entry in entries(spec)}, dtype)
    self._image = Image(self._layout, dtype_of(dtype).itemsize, limit=whole.nbytes)
    self._by_name = {e.unrolled: e for e in entries(spec) if e.hf in self._layout.offsets}
    """Tensors of the share, keyed by name in the unrolled tree."""
    self._checksums: dict[str, RunningChecksum] = {}
    """Checksums of the version in the image, keyed by tensor name; empty if none were computed."""
    self._holds: str | None = None
    """Token of the order by which the version in the image was taken; None if the image contains no
    complete version.
    """

  def contains(self, token: str | None) -> bool:
    """Returns whether the image contains the version of the order with this token."""
    return token is not None and token == self._holds

  def take(
    self, order: ShareOrder, leaves: Iterable[tuple[str, np.ndarray | Changes]]
  ) -> ShareReport:
    """Takes the next version into the image. Collects the changed elements if `order` says so and
    the image contains the version to compare with.

    Args:
      leaves: parameters of the share, each as an array or as its changes. There may be changes only
        if the image contains the version to compare with.

    Raises:
      UserError: the parameters do not match the model.
    """
    # If an error ends this method, the image contains no complete version.
    compares = self.contains(order.image.before)
    # Checksums of these objects change with the image, so they are lost together.
    self._holds, known, self._checksums = None, self._checksums, {}
    collects = compares and order.image.collect
    self._image.begin(compare=compares, collect=collects)
    with TensorWriter(self._dtype, order.slices, checksums=order.checksums) as writer:
      writer.pass_to(self._image, self._layout)
      patched = self._patched(leaves, order, writer, known if compares else None)
      proof = write_tensors(writer, patched, self._spec, self._layout.offsets.keys())
      self._checksums = writer.running_checksums()
    self._holds = order.token
    return ShareReport(
      proof=proof,
      changed=self._image.changed if compares else None,
      delta_bytes=self._image.nbytes if collects and self._image.is_smaller else None,
    )

  def _patched(
    self,
    leaves: Iterable[tuple[str, np.ndarray | Changes]],
    order: ShareOrder,
    writer: TensorWriter,
    known: Mapping[str, RunningChecksum] | None,
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the parameters as arrays. Parameters that are given as changes are first patched in
    the image. Their checksums are computed from the changes where possible.

    Args:
      known: checksums of the version before, keyed by tensor name; None if the image does not
        contain this version.
    """
    dtype = dtype_of(self._dtype)
    for name, leaf in leaves:
      if not isinstance(leaf, Changes):
        yield name, leaf
        continue
      if known is None:
        raise RuntimeError(f'{name}: changes of a version that is not in the image')
      entry = self._by_name[name]
      running, bits = known.get(entry.hf), self._image.bits(entry.hf)
      sums = running is not None and order.checksums and dtype.itemsize <= 4
      if sums and running.covers(order.slices.get(entry.hf, ())):
        running.replace(entry.shape, leaf.positions, bits[leaf.positions], leaf.bits)
        writer.use_checksum(entry.hf, running)
      self._image.patch(entry.hf, leaf)
      yield name, bits.view(dtype).reshape(entry.shape)

  def write(self, decision: Decision) -> dict[str, str]:
    """Writes the share, or its changes, and releases the memory of the collected changes. Returns
    the digest of each array of the delta, keyed by its name in the file; an empty mapping if the
    whole share is written. A process other than process 0 writes no file if nothing has changed.

    Raises RunError if the file cannot be written.
    """
    directory = Path(decision.directory)
    digests: dict[str, str] = {}
    with writing(directory):
      if not decision.is_delta:
        with weights_file(directory / share_file(self.number)) as file:
          write_at(file.fileno(), memoryview(self._image.bytes), 0)
          file.truncate(self._layout.size)
      elif (arrays := dict(self._image.arrays())) or self.number == 0:
        path = directory / delta_file(self.number)
        save_file(arrays, path)
        sync(path)
        digests = {name: digest(array) for name, array in arrays.items()}
    self._image.release()
    return digests
