"""Folder of published versions of which most are deltas: the elements that changed since the
version before. Images of the newest version (`images`) stay in the memory of the trainer's
processes.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.core.disk import TOKEN, mark
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.images import Decision, ShareImage
from jaxrl_llm.rollout.vllm.publication import (
  UNFINISHED,
  UNFINISHED_DELTA,
  Delta,
  Publication,
  PublicationFolder,
  label_of,
  read_published,
)
from jaxrl_llm.rollout.vllm.shares import (
  ImageOrder,
  Proof,
  ShareOrder,
  ShareReport,
  delta_file,
  share_file,
  share_layout,
  weights_file,
)
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.layout import dtype_of
from jaxrl_llm.weights.safetensors_files import writing
from jaxrl_llm.weights.tensor_files import write_at


class DeltaFolder(PublicationFolder):
  """Folder of published versions, whole ones and deltas.

  A version is published in full if there is no previous version, if the last `full_every` - 1
  versions were deltas, if these deltas together have at least as many bytes as whole weights, or if
  the new delta would not be smaller than whole weights. A server that needs the files and all
  deltas therefore reads at most about three times the size of the whole weights.

  A version is written in two stages. First, each process takes its share of the tensors into its
  image, and compares it with the version before. Process 0 then decides for all (`decide`), and
  each writes its share or what has changed of it (`write_decided`).
  """

  def __init__(
    self,
    root: str | Path,
    spec: ModelSpec,
    *,
    dtype: str,
    full_every: int,
    private: bool = True,
    source: FrontConfig | None = None,
  ):
    """
    Args:
      full_every: interval in versions at which whole weights are published.
    """
    super().__init__(root, spec, dtype=dtype, private=private, source=source)
    self._full_every = full_every
    self._image: ShareImage | None = None
    """Image of the share of process 0; None before the first version."""
    self._newest: Publication | None = None
    """Newest version, which the images of all processes contain; None if they may contain none."""
    self._before: Publication | None = None
    """Version before the one that is being written; None if there is none."""
    self._token: str | None = None
    """Token of the order by which `_newest` was written."""

  def write(
    self,
    version: Version,
    leaves: Iterable[tuple[str, np.ndarray]],
    *,
    slices: Mapping[str, Collection[Slice]] | None = None,
    checksums: bool = False,
  ) -> Publication:
    """Publishes a version as a delta or in full. For the arguments and errors, see
    `PublicationFolder.write`.
    """
    with writing(self.root), self._lock:
      order = self._order(slices, checksums)
      reports = [self._take(order, 1, leaves)]
      decision = self._decide(reports)
      return self._complete(version, reports, decision, [self._image.write(decision)])

  def _order(self, slices: Mapping[str, Collection[Slice]] | None, checksums: bool) -> ShareOrder:
    unfinished, newest = self.root / UNFINISHED_DELTA, self._newest
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    return ShareOrder(
      directory=str(unfinished.absolute()),
      token=mark(unfinished),
      dtype=self._dtype,
      slices=self._wanted(slices),
      checksums=checksums,
      image=ImageOrder(
        before=None if newest is None else self._token,
        collect=newest is not None and not self._is_due(newest),
      ),
    )

  def _is_due(self, newest: Publication) -> bool:
    """Returns whether the next version after `newest` is published in full."""
    return (
      len(newest.deltas) + 1 >= self._full_every
      or sum(delta.nbytes for delta in newest.deltas) >= newest.nbytes
    )

  def write_share(
    self, order: ShareOrder, count: int, leaves: Iterable[tuple[str, np.ndarray]]
  ) -> ShareReport:
    """Takes the share of process 0 of `count` processes into its image."""
    with self._lock:
      return self._take(order, count, leaves)

  def _take(
    self, order: ShareOrder, count: int, leaves: Iterable[tuple[str, np.ndarray]]
  ) -> ShareReport:
    if self._image is None or self._image.count != count:
      self._image = ShareImage(self._spec, self._dtype, 0, count)
    # If an error occurs before the version is complete, the images contain no complete version. The
    # next version is then published in full.
    self._before, self._newest, self._token = self._newest, None, order.token
    return self._image.take(order, leaves)

  def decide(self, reports: Sequence[ShareReport]) -> Decision:
    """Decides how the processes write the version that their images contain.

    Args:
      reports: reports of all processes, in the order of their numbers.
    """
    with writing(self.root), self._lock:
      return self._decide(reports)

  def _decide(self, reports: Sequence[ShareReport]) -> Decision:
    sizes = [report.delta_bytes for report in reports]
    is_delta = self._before is not None and None not in sizes and sum(sizes) < self._layout.nbytes
    directory = self.root / (UNFINISHED_DELTA if is_delta else UNFINISHED)
    directory.mkdir(exist_ok=True)
    return Decision(str(directory.absolute()), is_delta)

  def write_decided(self, decision: Decision) -> dict[str, str]:
    """Writes the share of process 0, or its changes; see `ShareImage.write`."""
    return self._image.write(decision)

  def complete_decided(
    self,
    version: Version,
    reports: Sequence[ShareReport],
    decision: Decision,
    digests: Sequence[Mapping[str, str]],
  ) -> Publication:
    """Publishes a version that the processes have written as decided.

    Args:
      reports: reports of all processes, in the order of their numbers.
      digests: results of `ShareImage.write` of all processes.
    """
    with writing(self.root), self._lock:
      return self._complete(version, reports, decision, digests)

  def _complete(
    self,
    version: Version,
    reports: Sequence[ShareReport],
    decision: Decision,
    digests: Sequence[Mapping[str, str]],
  ) -> Publication:
    before, changed = self._before, [report.changed for report in reports]
    fraction = None
    if before is not None and None not in changed:
      fraction = sum(changed) / (self._layout.nbytes // dtype_of(self._dtype).itemsize)
    if decision.is_delta:
      delta = self._reveal_delta(version, before, reports, digests)
      deltas = (*before.deltas, delta)
      newest = dataclasses.replace(before, version=version, deltas=deltas)
    else:
      shutil.rmtree(self.root / UNFINISHED_DELTA)
      newest = self._publish(version, reports)
      newest = dataclasses.replace(newest, files_label=label_of(version, newest.digests))
    self._newest = dataclasses.replace(newest, changed_fraction=fraction)
    return self._newest

  def _reveal_delta(
    self,
    version: Version,
    before: Publication,
    reports: Sequence[ShareReport],
    digests: Sequence[Mapping[str, str]],
  ) -> Delta:
    """Makes the finished files of a delta visible."""
    proof = Proof.of(report.proof for report in reports)
    unfinished = self.root / UNFINISHED_DELTA
    (unfinished / TOKEN).unlink()
    delta = Delta(
      version=version,
      before=before.label,
      directory=self.root / f'delta-{version}',
      files={
        delta_file(number): arrays for number, arrays in enumerate(digests) if arrays or not number
      },
      nbytes=sum(report.delta_bytes for report in reports),
      digests=proof.digests,
      slices=proof.slices,
      checksums=proof.checksums,
    )
    manifest = {'version': str(version), 'before': delta.before, 'files': delta.files}
    self._reveal(unfinished, delta.directory, {**manifest, 'digests': proof.digests})
    return delta

  def write_whole(self, publication: Publication) -> Publication:
    """See `PublicationFolder.write_whole`. If several processes write shares, those of the others
    are restored from their files, whose digests are verified.
    """
    with writing(self.root), self._lock:
      newest = self._newest
      if newest is None or newest.label != publication.label:
        raise ValueError(f'version {publication.version} is no longer the newest')
      if not newest.deltas:
        return newest
      self._newest = None
      directory = self.root / UNFINISHED
      directory.mkdir(exist_ok=True)
      self._image.write(Decision(str(directory), is_delta=False))
      for number in range(1, self._image.count):
        self._restore(newest, number, directory)
      proof = Proof(newest.digests, newest.slice_digests, newest.checksums)
      shares = [newest.files[share_file(number)] for number in range(self._image.count)]
      whole = self._publish(newest.version, [ShareReport(proof.only(names)) for names in shares])
      self._newest = dataclasses.replace(
        whole, files_label=newest.label, changed_fraction=newest.changed_fraction
      )
      return self._newest

  def _restore(self, publication: Publication, number: int, directory: Path) -> None:
    """Writes the share of process `number` of a version that was published as deltas.

    Raises ValueError if its files are damaged.
    """
    layout = share_layout(self._spec, number, self._image.count, self._dtype)
    tensors = read_published(publication, number)
    with weights_file(directory / share_file(number)) as file:
      write_at(file.fileno(), memoryview(layout.header), 0)
      for name, offset in layout.offsets.items():
        write_at(file.fileno(), memoryview(tensors[name].reshape(-1).view(np.uint8)), offset)
      file.truncate(layout.size)
