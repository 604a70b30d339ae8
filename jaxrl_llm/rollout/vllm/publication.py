"""Published weights. Each version is written to one safetensors file, which becomes visible
atomically, and each of its tensors has a digest. The file contains the whole weights, a LoRA
adapter, or a delta: the elements that changed since the version before.

Invariant: a directory gets its final name only after the last byte of its files was written. A
reader gets the expected digests (`Publication.files`) separately from the directory, and checks the
files against them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jaxrl_llm.core.disk import TOKEN, mark, sync
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.pull.bundle import atom_slices
from jaxrl_llm.rollout.vllm.shares import (
  FILE,
  Proof,
  RemoteFile,
  ShareOrder,
  ShareReport,
  delta_file,
  digest,
  share_file,
  weights_file,
  write_share,
  write_tensors,
)
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.deltas import apply
from jaxrl_llm.weights.layout import dtype_of
from jaxrl_llm.weights.mapped_files import MappedFiles
from jaxrl_llm.weights.safetensors_files import writing
from jaxrl_llm.weights.tables import entries
from jaxrl_llm.weights.tensor_files import FileLayout, TensorWriter

UNFINISHED, UNFINISHED_DELTA = 'unfinished', 'unfinished-delta'
"""Names of the directories of files that are still being written."""
MANIFEST = 'manifest.json'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
  """The changes from one version to the next, and the digests of the weights after them."""

  version: Version
  before: str
  """Label of the version to which the changes apply."""
  directory: Path
  files: Mapping[str, Mapping[str, str]]
  """xxh3-128 digest of each array of the delta, keyed by file name and then by the array's name."""
  nbytes: int
  """Total size of the delta's arrays in bytes."""
  digests: Mapping[str, str]
  """xxh3-128 digest of each whole tensor after the changes, keyed by its name."""
  slices: Mapping[str, Mapping[Slice, str]]
  """Digests of slices after the changes; see `Publication.slices`."""
  checksums: Mapping[str, Mapping[Slice | None, str]]
  """Checksums after the changes; see `Publication.file_checksums`."""

  @property
  def label(self) -> str:
    """Label of the version after the changes."""
    return label_of(self.version, self.digests)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publication:
  """One published version: its files and their digests."""

  version: Version
  directory: Path
  files: Mapping[str, Mapping[str, str]]
  """xxh3-128 digest of each tensor's bytes, keyed by file name and then by the tensor's name in the
  file. If there are deltas, the files contain an earlier version, to which the deltas apply. If
  `since` has left the files out, because a server needs only deltas, the mapping is empty.
  """
  nbytes: int
  """Total size of all tensors of the version in bytes."""
  slices: Mapping[str, Mapping[Slice, str]] = dataclasses.field(default_factory=dict)
  """xxh3-128 digests of slices of the tensors in the files, keyed by tensor name and slice. They
  cover the slices that servers hold.
  """
  file_checksums: Mapping[str, Mapping[Slice | None, str]] = dataclasses.field(default_factory=dict)
  """Checksums (`weights.checksums`) of the tensors in the files and of their slices, as 16
  hexadecimal digits, keyed by tensor name and slice. The key None stands for the whole tensor. The
  mapping is empty if no checksums were computed.
  """
  deltas: tuple[Delta, ...] = ()
  """Deltas that lead from the files to this version, in order; empty if the files contain it."""
  files_label: str | None = None
  """Label of the version in the files; None if no deltas are published."""
  changed_fraction: float | None = None
  """Share of elements whose bits differ from the previous version; None if the share is unknown."""
  remote: Mapping[str, RemoteFile] = dataclasses.field(default_factory=dict)
  """Files that are not in `directory`, because other processes of the trainer serve them, keyed by
  file name.
  """
  base: Publication | None = None
  """Publication of the base weights if this publication contains an adapter; None if it contains
  whole weights.
  """

  @property
  def adapter(self) -> str | None:
    """Name of the adapter on servers; None if the publication contains whole weights."""
    return None if self.base is None else f'policy-{self.version.attempt}-{self.version.step}'

  @property
  def label(self) -> str:
    """Label that identifies the version and the bytes of its tensors. Servers attach the label to
    the tokens that they sample under the version.
    """
    return label_of(self.version, self.digests)

  @property
  def digests(self) -> dict[str, str]:
    """xxh3-128 digest of each tensor of the version, keyed by its name."""
    if self.deltas:
      return dict(self.deltas[-1].digests)
    return {name: digest for tensors in self.files.values() for name, digest in tensors.items()}

  @property
  def slice_digests(self) -> Mapping[str, Mapping[Slice, str]]:
    """Digests of the slices of the version; see `slices`."""
    return self.deltas[-1].slices if self.deltas else self.slices

  @property
  def checksums(self) -> Mapping[str, Mapping[Slice | None, str]]:
    """Checksums of the version's tensors and slices; see `file_checksums`."""
    return self.deltas[-1].checksums if self.deltas else self.file_checksums

  @property
  def sent_bytes(self) -> int:
    """Size in bytes of the tensors that were written for this version: the last delta or, if there
    are no deltas, the whole weights. A server that holds the previous version needs nothing else.
    """
    return self.deltas[-1].nbytes if self.deltas else self.nbytes

  @property
  def directories(self) -> set[Path]:
    """Directories of all files that a server may need to load the version."""
    return {self.directory} | {delta.directory for delta in self.deltas}

  def since(self, label: str | None) -> Publication:
    """Returns the part of this publication that a server needs if it holds the version with the
    given label. If one of the deltas applies to that version, the part consists of this delta and
    the later ones. Otherwise, it is the whole publication.
    """
    for i, delta in enumerate(self.deltas):
      if delta.before == label:
        return dataclasses.replace(self, files={}, slices={}, deltas=self.deltas[i:])
    return self


def label_of(version: Version, digests: Mapping[str, str]) -> str:
  """Returns the label of a version; see `Publication.label`."""
  text = json.dumps(dict(digests), sort_keys=True).encode()
  return f'{version}-{xxhash.xxh3_64_hexdigest(text)}'


class PublicationFolder:
  """Folder of published versions. It contains the newest version, and the previous version until it
  is released.

  A new version overwrites the file of a released version, because writing to existing pages of
  shared memory is faster than allocating new ones. The pages of such files stay mapped.
  """

  def __init__(
    self,
    root: str | Path,
    spec: ModelSpec,
    *,
    dtype: str,
    private: bool = True,
    source: FrontConfig | None = None,
  ):
    """
    Args:
      root: path of the folder, which must be the same on the servers. The folder is created, and
        anything that a killed run left at this path is removed.
      spec: spec of the language model.
      dtype: data type of the tensors by its Hugging Face name. It must be the servers' data type,
        so that the digests of the loaded weights match.
      private: whether only this user can read the folder.
      source: address and token with which processes of the trainer serve the weights to hosts that
        fetch them; None if servers read the files. If hosts fetch them, digests are also computed
        of the parts of large tensors that they fetch separately (`pull.bundle.atom_slices`).
    """
    self.root, self._dtype = Path(root), dtype
    self._spec = spec
    self._lock = threading.Lock()
    """Lock that is held while files are written or removed, because several threads call methods of
    this class.
    """
    self._layout = FileLayout({entry.hf: entry.shape for entry in entries(spec)}, dtype)
    itemsize = dtype_of(dtype).itemsize
    self._atoms: dict[str, tuple[Slice, ...]] = {}
    """Slices whose digests are computed in addition to those that servers hold, keyed by tensor
    name.
    """
    self._maps = MappedFiles()
    """Maps of the files of released versions, which later versions overwrite."""
    self._source = source
    self._tokens: dict[Path, str] = {}
    """Token of the order by which each version was written, keyed by directory."""
    if source is not None:
      total = self._layout.nbytes
      self._atoms = {entry.hf: atom_slices(entry.shape, itemsize, total) for entry in entries(spec)}
    with writing(self.root):
      if self.root.exists():
        shutil.rmtree(self.root)
      self.root.mkdir(parents=True, mode=0o700 if private else 0o755)

  def write(
    self,
    version: Version,
    leaves: Iterable[tuple[str, np.ndarray]],
    *,
    slices: Mapping[str, Collection[Slice]] | None = None,
    checksums: bool = False,
  ) -> Publication:
    """Publishes the arrays of a parameter tree, whose layers may be stacked or separate. Arrays are
    hashed and written while the next ones are being fetched, so only a few are in memory at a time.

    Args:
      version: version to publish. An existing directory of this version is replaced.
      leaves: pairs of (name in the tree, array), in any order. A large array may be split into
        consecutive pairs with the same name; see `hf_parts`. An array must not change before this
        method returns.
      slices: slices that servers hold of each tensor, keyed by Hugging Face name. Their digests are
        computed during writing.
      checksums: whether to compute checksums too, for servers that prove the loaded weights on an
        accelerator.

    Raises:
      UserError: the arrays do not match the model.
      RunError: the file cannot be written.
    """
    unfinished, wanted = self.root / UNFINISHED, self._wanted(slices)
    with (
      writing(self.root),
      self._lock,
      TensorWriter(self._dtype, wanted, checksums=checksums) as writer,
    ):
      unfinished.mkdir(exist_ok=True)
      with weights_file(unfinished / FILE) as file:
        writer.open(file, self._layout, self._maps)
        proof = write_tensors(writer, leaves, self._spec)
      return self._publish(version, [ShareReport(proof)])

  def _wanted(self, slices: Mapping[str, Collection[Slice]] | None) -> dict[str, Collection[Slice]]:
    """Returns all slices whose digests are computed: those of servers, and the atoms."""
    return {
      name: sorted({*(slices or {}).get(name, ()), *self._atoms.get(name, ())})
      for name in self._layout.offsets
    }

  def begin_shares(
    self, *, slices: Mapping[str, Collection[Slice]] | None = None, checksums: bool = False
  ) -> ShareOrder | None:
    """Prepares a directory into which all processes of the trainer write a version; see `write` for
    the arguments. Returns the order for them, or None if process 0 must write alone.
    """
    with writing(self.root), self._lock:
      return self._order(slices, checksums)

  def _order(self, slices: Mapping[str, Collection[Slice]] | None, checksums: bool) -> ShareOrder:
    unfinished = self.root / UNFINISHED
    unfinished.mkdir(exist_ok=True)
    self._tokens = {path: known for path, known in self._tokens.items() if path.exists()}
    return ShareOrder(
      directory=str(unfinished.absolute()),
      token=mark(unfinished),
      dtype=self._dtype,
      slices=self._wanted(slices),
      checksums=checksums,
      source=self._source,
      keep=tuple(self._tokens.values()),
    )

  def write_share(
    self, order: ShareOrder, count: int, leaves: Iterable[tuple[str, np.ndarray]]
  ) -> ShareReport:
    """Writes the share of process 0 of `count` processes.

    Raises:
      UserError, RunError: see `write`.
    """
    with self._lock:
      return ShareReport(write_share(self._spec, order, 0, count, leaves, self._maps))

  def complete(self, version: Version, reports: Sequence[ShareReport]) -> Publication:
    """Publishes a version whose shares were written.

    Args:
      reports: reports of all processes, in the order of their numbers.
    """
    with writing(self.root), self._lock:
      token = self.root / UNFINISHED / TOKEN
      written = token.read_text()
      token.unlink()
      publication = self._publish(version, reports)
      self._tokens[publication.directory] = written
      return publication

  def _publish(self, version: Version, reports: Sequence[ShareReport]) -> Publication:
    """Makes finished weights files visible, and returns their publication.

    Args:
      reports: reports of all processes, in the order of their numbers.
    """
    proof = Proof.of(report.proof for report in reports)
    remote = {share_file(number): report.remote for number, report in enumerate(reports)}
    publication = Publication(
      version=version,
      directory=self.root / str(version),
      files={share_file(number): report.proof.digests for number, report in enumerate(reports)},
      nbytes=self._layout.nbytes,
      slices=proof.slices,
      file_checksums=proof.checksums,
      remote={name: file for name, file in remote.items() if file is not None},
    )
    manifest = {
      'version': str(version),
      'dtype': self._dtype,
      'files': publication.files,
      'checksums': {name: values[None] for name, values in proof.checksums.items()},
      'slices': proof.of_slices,
    }
    self._reveal(self.root / UNFINISHED, publication.directory, manifest)
    return publication

  def _reveal(self, unfinished: Path, directory: Path, manifest: Mapping[str, Any]) -> None:
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + '\n')
    if directory.exists():
      self._remove(directory)
    unfinished.rename(directory)
    sync(self.root)

  def write_whole(self, publication: Publication) -> Publication:
    """Returns a publication of the same version without deltas, for a server that could not use
    them.

    Raises:
      ValueError: the version is no longer the newest, or its files are damaged.
      RunError: the files cannot be written.
    """
    return publication

  def keep_only(self, *publications: Publication) -> None:
    """Releases all publications except the given ones and their base weights. One released file is
    kept, so that the next version can overwrite it.
    """
    whole = [publication.base for publication in publications if publication.base is not None]
    directories = (publication.directories for publication in (*publications, *whole))
    kept = {self.root / UNFINISHED, self.root / UNFINISHED_DELTA}.union(*directories)
    with writing(self.root), self._lock:
      for directory in sorted(self.root.iterdir()):
        if directory in kept:
          continue
        if (self.root / UNFINISHED).exists() or not (directory / FILE).exists():
          self._remove(directory)
        else:
          directory.rename(self.root / UNFINISHED)

  def _remove(self, directory: Path) -> None:
    # The directory is renamed first. If the process is killed during the removal, every directory
    # that has the name of a version is still complete.
    discarded = self.root / 'discarded'
    directory.rename(discarded)
    shutil.rmtree(discarded)
    self._maps.prune()

  def close(self) -> None:
    """Removes the folder. Does not wait for a thread that is writing, which then fails."""
    shutil.rmtree(self.root, ignore_errors=True)
    # If a thread is writing, it stores to the maps, which then stay until the process ends.
    if self._lock.acquire(blocking=False):
      try:
        self._maps.prune()
      finally:
        self._lock.release()


def read_published(
  publication: Publication, share: int | None = None
) -> dict[str, Shaped[np.ndarray, '...']]:
  """Reads the tensors of a version, keyed by Hugging Face name, and verifies their digests.

  Args:
    share: number of the process whose share is read; None for all.

  Raises:
    ValueError: a file is missing, or its content differs from the announced digests; see
      `read_checked` and `deltas.apply`.
  """

  def of_share(files: Mapping[str, Mapping[str, str]], name: str) -> Mapping[str, Any]:
    return files if share is None else {name: files[name]} if name in files else {}

  tensors = read_checked(of_share(publication.files, share_file(share or 0)), publication.directory)
  if not publication.deltas:
    return tensors
  tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
  for delta in publication.deltas:
    files = of_share(delta.files, delta_file(share or 0))
    apply(tensors, read_checked(files, delta.directory))
  for name, tensor in tensors.items():
    if (as_read := digest(tensor)) != (announced := publication.digests[name]):
      raise ValueError(f'{name} has digest {as_read} as read, announced was {announced}')
  return tensors


def part(array: Shaped[np.ndarray, '...'], cut: Slice | None) -> Shaped[np.ndarray, '...']:
  """Returns a slice of a tensor, or the whole tensor if `cut` is None."""
  if cut is None:
    return array
  return array.take(range(cut.start, cut.start + cut.length), cut.axis)


def read_checked(
  files: Mapping[str, Mapping[str, str]], directory: str | Path
) -> dict[str, Shaped[np.ndarray, '...']]:
  """Reads all tensors of a publication, keyed by Hugging Face name, and verifies their digests.

  Raises:
    ValueError: a file is missing or truncated, or its tensor names or bytes differ from the
      announced ones.
  """
  tensors: dict[str, Shaped[np.ndarray, '...']] = {}
  for file, wanted in files.items():
    path = Path(directory) / file
    try:
      with safe_open(path, 'np') as opened:
        names = set(opened.keys())
        if names != set(wanted):
          raise ValueError(
            f'{path}: tensors missing {sorted(set(wanted) - names)[:4]}, unknown '
            f'{sorted(names - set(wanted))[:4]}'
          )
        tensors.update({name: opened.get_tensor(name) for name in wanted})
    except (SafetensorError, OSError) as error:
      raise ValueError(f'{path}: cannot be read: {" ".join(str(error).split())}') from None
    for name, announced in wanted.items():
      if (as_read := digest(tensors[name])) != announced:
        raise ValueError(f'{path}: {name} has digest {as_read} as read, announced was {announced}')
  return tensors
