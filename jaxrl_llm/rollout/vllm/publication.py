"""Published weights. Each version is written to one safetensors file with a digest per tensor, and
becomes visible atomically.

Invariant: a directory gets its final name only after its last byte was written. A reader gets the
expected digests (`Publication.files`) separately from the directory, and checks the files against
them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jaxrl_llm.core.disk import sync
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import unflatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.lora import is_adapter
from jaxrl_llm.models.spec import LoraConfig, ModelSpec
from jaxrl_llm.weights.layout import dtype_of
from jaxrl_llm.weights.peft import WEIGHTS, export_adapter, to_peft
from jaxrl_llm.weights.safetensors_files import writing
from jaxrl_llm.weights.tables import TensorEntry, entries

FILE = 'weights.safetensors'
MANIFEST = 'manifest.json'
_BLOCK = 1 << 20
"""Number of bytes that are converted, digested and written at a time. A block is small enough to
stay in a core's cache.
"""
_ANOTHER = 'is this another model than at the start?'
_CODES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16', 'float64': 'F64'}
"""Names of data types in the safetensors format, keyed by Hugging Face name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publication:
  """One published version: its files and their digests."""

  version: Version
  directory: Path
  files: Mapping[str, Mapping[str, str]]
  """xxh3-128 digest of each tensor's bytes, keyed by file name and then by the tensor's name in the
  file.
  """
  nbytes: int
  """Total size of all tensors in bytes."""
  base: Publication | None = None
  """Publication of the base weights if this is an adapter; None if this is whole weights."""

  @property
  def adapter(self) -> str | None:
    """Name of the adapter on servers; None if the publication contains whole weights."""
    return None if self.base is None else f'policy-{self.version.attempt}-{self.version.step}'

  @property
  def label(self) -> str:
    """Label that identifies the version and the bytes of its tensors. Servers attach the label to
    the tokens that they sample under the version.
    """
    digests = json.dumps(self.digests, sort_keys=True).encode()
    return f'{self.version}-{xxhash.xxh3_64_hexdigest(digests)}'

  @property
  def digests(self) -> dict[str, str]:
    return {name: digest for tensors in self.files.values() for name, digest in tensors.items()}


class PublicationFolder:
  """Folder of published versions. It contains the newest version, and the previous version until it
  is released.

  A new version overwrites the file of a released version, because writing to existing pages of
  shared memory is faster than allocating new ones.
  """

  def __init__(self, root: str | Path, spec: ModelSpec, *, dtype: str, private: bool = True):
    """
    Args:
      root: path of the folder, which must be the same on the servers. The folder is created, and
        anything that a killed run left at this path is removed.
      spec: spec of the language model.
      dtype: data type of the tensors by its Hugging Face name. It must be the servers' data type,
        so that the digests of the loaded weights match.
      private: whether only this user can read the folder.
    """
    self.root, self._dtype = Path(root), dtype
    self._spec = spec
    self._layout = _Layout(spec, dtype)
    with writing(self.root):
      if self.root.exists():
        shutil.rmtree(self.root)
      self.root.mkdir(parents=True, mode=0o700 if private else 0o755)

  def write(self, version: Version, leaves: Iterable[tuple[str, np.ndarray]]) -> Publication:
    """Publishes the arrays of a parameter tree, whose layers may be stacked or separate. Only one
    array is in memory at a time.

    Args:
      version: version to publish. An existing directory of this version is replaced.
      leaves: pairs of (name in the tree, array), each once and in any order. An array is not used
        after the next pair is requested.

    Raises:
      UserError: the arrays are not those of the model.
      RunError: the file cannot be written.
    """
    directory, unfinished = self.root / str(version), self.root / 'unfinished'
    with writing(self.root):
      unfinished.mkdir(exist_ok=True)
      # The file is not opened in mode 'w', which would free its pages (see the class).
      with os.fdopen(
        os.open(unfinished / FILE, os.O_RDWR | os.O_CREAT, 0o644), 'r+b', buffering=0
      ) as file:
        digests = self._layout.write(file, leaves)
        file.truncate(self._layout.size)
        os.fsync(file.fileno())
      publication = Publication(
        version=version, directory=directory, files={FILE: digests}, nbytes=self._layout.nbytes
      )
      manifest = {'version': str(version), 'dtype': self._dtype, 'files': publication.files}
      (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + '\n')
      if directory.exists():
        self._remove(directory)
      unfinished.rename(directory)
      sync(self.root)
    return publication

  def keep_only(self, *publications: Publication) -> None:
    """Releases all publications except the given ones and their base weights. One released file is
    kept, so that the next version can overwrite it.
    """
    whole = [publication.base for publication in publications if publication.base is not None]
    kept = {publication.directory for publication in (*publications, *whole)} | {
      self.root / 'unfinished'
    }
    with writing(self.root):
      for directory in sorted(self.root.iterdir()):
        if directory in kept:
          continue
        if (self.root / 'unfinished').exists() or not (directory / FILE).exists():
          self._remove(directory)
        else:
          directory.rename(self.root / 'unfinished')

  def _remove(self, directory: Path) -> None:
    # The directory is renamed first. If the process is killed during the removal, every directory
    # that has the name of a version is still complete.
    discarded = self.root / 'discarded'
    directory.rename(discarded)
    shutil.rmtree(discarded)

  def close(self) -> None:
    """Removes the folder."""
    shutil.rmtree(self.root, ignore_errors=True)


class AdapterFolder(PublicationFolder):
  """Folder of published adapter versions in PEFT format. The base weights are published once, with
  the first version.
  """

  def __init__(
    self, root: str | Path, spec: ModelSpec, *, lora: LoraConfig, dtype: str, private: bool = True
  ):
    super().__init__(root, spec, dtype=dtype, private=private)
    self._lora, self._base = lora, None

  def write(self, version: Version, leaves: Iterable[tuple[str, np.ndarray]]) -> Publication:
    """Publishes an adapter version. The first call takes the arrays of the base weights and of the
    adapter, later calls only those of the adapter.
    """
    adapters: dict[str, np.ndarray] = {}

    def base_leaves() -> Iterator[tuple[str, np.ndarray]]:
      for name, leaf in leaves:
        if is_adapter(name):
          adapters[name] = np.array(leaf)  # Copied, because the caller may free the array.
        else:
          yield name, leaf

    if self._base is None:
      self._base = super().write(version, base_leaves())
    elif (other := next(base_leaves(), None)) is not None:
      raise UserError(
        f'{other[0]}: not a parameter of an adapter, and only adapters are published; {_ANOTHER}'
      )
    directory, unfinished = self.root / f'adapter-{version}', self.root / 'unfinished-adapter'
    with writing(self.root):
      export_adapter(unfinished, unflatten(adapters), self._spec, self._lora, base=None)
      for path in unfinished.iterdir():
        sync(path)
      if directory.exists():
        self._remove(directory)
      unfinished.rename(directory)
      sync(self.root)
    arrays = dict(to_peft(unflatten(adapters), self._spec))
    digests = {name: digest(array) for name, array in arrays.items()}
    nbytes = sum(array.nbytes for array in arrays.values())
    return Publication(
      version=version, directory=directory, files={WEIGHTS: digests}, nbytes=nbytes, base=self._base
    )


class _Layout:
  """Byte layout of the weights file, which is the same for all versions of a model."""

  def __init__(self, spec: ModelSpec, dtype: str):
    self._dtype = dtype_of(dtype)
    self._spec = spec
    header, self._places, offset = {'__metadata__': {'format': 'pt'}}, {}, 0
    for entry in entries(spec):
      size = int(np.prod(entry.shape)) * self._dtype.itemsize
      header[entry.hf] = {
        'dtype': _CODES[dtype],
        'shape': list(entry.shape),
        'data_offsets': [offset, offset + size],
      }
      self._places[entry.hf] = offset
      offset += size
    text = json.dumps(header).encode()
    # safetensors pads its header with spaces so that tensors start at a multiple of 8 bytes.
    text += b' ' * (-len(text) % 8)
    self._header = len(text).to_bytes(8, 'little') + text
    self.nbytes, self.size = offset, len(self._header) + offset
    self._by_leaf: dict[str, list[TensorEntry]] = {}
    for entry in entries(spec):
      for name in {entry.path, entry.unrolled}:
        self._by_leaf.setdefault(name, []).append(entry)

  def write(self, file: BinaryIO, leaves: Iterable[tuple[str, np.ndarray]]) -> dict[str, str]:
    """Writes the file and returns the tensors' digests, keyed by Hugging Face name in the order of
    the weights table.
    """
    _write_all(file, memoryview(self._header))
    digests: dict[str, str] = {}
    staging = np.empty(_BLOCK // self._dtype.itemsize, self._dtype)
    # The wait 'digest' is bounded by the computation of the digest.
    with ThreadPoolExecutor(1, thread_name_prefix='digest') as helper:
      for name, leaf in leaves:
        stacked = self._check(name, leaf)
        for entry in self._by_leaf[name]:
          file.seek(len(self._header) + self._places[entry.hf])
          digests[entry.hf] = _write_tensor(
            file, leaf[entry.layer] if stacked else leaf, staging, helper
          )
    missing = [hf for hf in self._places if hf not in digests]
    if missing:
      raise UserError(
        f'weights to publish lack {missing[:4]} ({len(missing)} of {len(self._places)} tensors); '
        f'{_ANOTHER}'
      )
    return {hf: digests[hf] for hf in self._places}

  def _check(self, name: str, leaf: Shaped[np.ndarray, '...']) -> bool:
    """Returns whether an array is a stack of the tensors of all layers. Raises UserError if the
    model has no parameter of this name and shape.
    """
    targets = self._by_leaf.get(name)
    if targets is None:
      raise UserError(
        f'{name}: not a parameter of the published {self._spec.family} model; {_ANOTHER}'
      )
    stacked = targets[0].layer is not None and name == targets[0].path
    wanted = (len(targets), *targets[0].shape) if stacked else targets[0].shape
    if leaf.shape != wanted:
      raise UserError(
        f'{name}: parameters have shape {leaf.shape}, the published model has {wanted}; {_ANOTHER}'
      )
    return stacked


def _write_tensor(
  file: BinaryIO,
  tensor: Shaped[np.ndarray, '...'],
  staging: Shaped[np.ndarray, 'buffer'],
  helper: ThreadPoolExecutor,
) -> str:
  """Writes the tensor in the staging array's data type and returns the digest of its bytes."""
  flat = np.ascontiguousarray(tensor).reshape(-1)
  if flat.dtype == staging.dtype:
    # Digesting and writing both release the GIL, so they overlap.
    hashed = helper.submit(digest, flat)
    _write_all(file, memoryview(flat.view(np.uint8)))
    return hashed.result()  # The wait 'digest' is bounded by the computation of the digest.
  hasher = xxhash.xxh3_128()
  for start in range(0, flat.size, staging.size):
    block = flat[start : start + staging.size]
    converted = staging[: block.size]
    np.copyto(converted, block, casting='unsafe')
    data = memoryview(converted.view(np.uint8))
    hasher.update(data)
    _write_all(file, data)
  return hasher.hexdigest()


def _write_all(file: BinaryIO, data: memoryview) -> None:
  while len(data):  # A nearly full disk accepts only part of the data.
    data = data[file.write(data) :]


def digest(array: Shaped[np.ndarray, '...']) -> str:
  """Returns the xxh3-128 digest of an array's bytes in C order."""
  return xxhash.xxh3_128_hexdigest(
    memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
  )


def part(array: Shaped[np.ndarray, '...'], tensor: Mapping[str, Any]) -> Shaped[np.ndarray, '...']:
  """Returns a worker's slice of a whole tensor, which `tensor` describes as the worker reported
  it.
  """
  if tensor['slice'] is None:
    return array
  axis, start = tensor['slice']
  return array.take(range(start, start + tensor['shape'][axis]), axis)


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
